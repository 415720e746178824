"""What [gossip] in fedtrain.toml describes: an algorithm and a graph, and whether they go together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import aggregation, compression, strategies, topology
from ...aggregation import Rule
from ...compression import ErrorFeedback
from ...compression.bfloat16 import BFloat16
from ...compression.float16 import Float16
from ...compression.quantize import Quantize
from ...config import (
    AggregationConfig,
    CompressionConfig,
    Config,
    SitePolicy,
    Source,
    is_own,
    kind_in,
    options_of,
    own_class,
    policy_from,
)
from ...config.project import load_only
from ...config.values import Settings, require
from ...errors import ConfigError
from ...exchange import PeerId
from ...gossip import ALGORITHMS, Algorithm, Choco, CompressorLike, Ruled, build, rules, tuning
from ...gossip.diloco import DiLoCo
from ...gossip.noloco import NoLoCo
from ...modes import WITH_COMPRESSOR
from ...secagg.peer_sums import LEAST
from ...topology import Topology
from ...training.task import task_digest, user_code
from ..own_code import GRAPH, check_beside_key, named_in
from ..sites import privacy
from ..sites.approval import Approvals
from ..star.combinations import check_plain

AVERAGE_ONLY = ("fedavg", "fedprox")  # strategies without a step of the server's own
_AVERAGE = " or ".join(AVERAGE_ONLY)
LEAST_BITS = 4  # of a coordinate of a whole model
MOST_LOST = 0.2  # of a normal vector's norm, by a compressor of the user's own: as by 4 bits
MANY = 12  # more peers than a round needs twice over, with whom a graph is tried


PEERS_HOLD = ("secure_sums", "pin_members", "signed_members", "min_examples", "rounds", "confine", "noise",
              "epsilon", "delta", "members")  # of a policy  # fmt: skip


def check_policy(config: Config, policy: SitePolicy) -> None:
    """ConfigError where a peer with these settings would not keep to its policy."""
    if policy.secure_sums and not config.gossip.masks:
        raise ConfigError(
            "policy.secure_sums: gossip.masks = false shows this peer's model to its neighbours. Set "
            "gossip.masks = true; or, to show it, run: fedtrain policy set secure_sums=false"
        )
    if config.run.rounds > policy.rounds:
        raise ConfigError(
            f"policy.rounds: {config.run.rounds} rounds are asked for, and this peer trains at most "
            f"{policy.rounds} in a run. Lower run.rounds, or: fedtrain policy set rounds={config.run.rounds}"
        )
    privacy.check_policy(config, policy)
    others = [f.name for f in fields(policy) if f.name not in PEERS_HOLD]
    if kept := [name for name in others if getattr(policy, name) != getattr(SitePolicy(), name)]:
        raise ConfigError(f"policy.{kept[0]}: a peer doesn't hold to it; only `fedtrain site` does.")


def algorithm_of(config: Config) -> tuple[Algorithm, Topology]:
    """The algorithm and the graph of [gossip]; ConfigError where they don't go together."""
    gossip, kind = config.gossip, config.strategy.kind
    if is_own(kind):  # before its code runs, which may be beside a peer's key
        raise ConfigError(
            f"strategy.kind: {kind} steps at a server, and gossip has none. Use {_AVERAGE}, and write what "
            f"peers do as a gossip.algorithm."
        )
    strategy = strategies.build(kind, config.strategy.options, config.root)
    plain = kind in AVERAGE_ONLY
    check_plain(
        config, strategy, "strategy" if plain else "strategy.kind", "peers exchange whole models alone. "
        f"{'Leave that out' if plain else f'Use {_AVERAGE}'}, or use a federation",
    )  # fmt: skip
    if not plain:
        raise ConfigError(
            f"strategy.kind: {config.strategy.kind} steps at the server, and gossip has none. "
            f'Use {_AVERAGE}; gossip.algorithm = "diloco" has momentum.'
        )
    compressor = compressor_of(config)
    rule = rules.parse(
        gossip.rule, _of_rows(config), partial(without_memory, config.root), config.run.rounds, config.root
    )
    algorithm = build(gossip.algorithm, gossip.options, compressor, rule, config.root)
    if is_own(gossip.algorithm):
        check_keys(config, algorithm)
    check_masks(config, algorithm)
    file = gossip.topology.removeprefix("file:")
    spec = gossip.topology if file == gossip.topology else f"file:{config.root / file}"
    graph = topology.parse(spec, gossip.weights, config.root)
    push_sum = (gossip.weights or graph.family.weights) == "push-sum"
    if push_sum and not algorithm.directed:
        raise ConfigError(
            f"gossip.algorithm: {gossip.algorithm} would lose the mean on {graph}, whose weights are "
            f'push-sum\'s. Use "sgp" or "epidemic", or another topology.'
        )
    if algorithm.static and graph.period(8) != 1:
        raise ConfigError(
            f"gossip.topology: {graph} changes from round to round, and {gossip.algorithm} needs neighbours "
            f'that stay. Use another graph, as "regular:4".'
        )
    return algorithm, graph


def algorithm_beside_key(config: Config, folder: Path) -> tuple[Algorithm, Topology]:
    """As algorithm_of, at a peer whose key lies in `folder`: a class of the user's own would run beside it,
    so the peer's people have approved it, and have nothing against that."""
    if named_in(config, *GRAPH):
        check_beside_key(config, policy_from(folder), peer=True)
        load_only(config.root, Approvals(folder).check(config).files)
    return algorithm_of(config)


def _of_rows(config: Config) -> dict[str, type[Rule]]:
    """The aggregation rules that can make one model of a neighbourhood's; with the user's own, where
    gossip.rule is one and no MixingRule."""
    found = {name: rule for name, rule in aggregation.RULES.items() if rule.of_rows and not rule.linear}
    kind, _ = kind_in(config.gossip.rule, {*found, *rules.RULES})
    if is_own(kind):
        cls = own_class("gossip.rule", kind, Settings, config.root, "a rule")
        if issubclass(cls, Rule):
            require(cls.of_rows, "gossip.rule", f"{kind} says that rows do not suffice for it (of_rows)")
            found[kind] = cls
    return found


def compressor_of(config: Config) -> CompressorLike | None:
    """What the bytes between peers are encoded by; None where whole models travel. ConfigError for one that
    leaves out more of a model than peers bear."""
    gossip, own_algorithm = config.gossip, is_own(config.gossip.algorithm)
    hides = gossip.masks and gossip.algorithm != "choco"  # sums of whole models; choco has none, and says so
    if not (own_algorithm or gossip.algorithm in WITH_COMPRESSOR) or hides or not gossip.compressor:
        return None
    if gossip.compressor.startswith("error_feedback"):
        raise ConfigError(
            f"gossip.compressor: {gossip.algorithm} remembers errors itself. Leave error_feedback out."
        )
    found, lost = compression.parse(gossip.compressor, config.root, "gossip.compressor"), math.inf
    if compression.own_in(gossip.compressor):
        with user_code(config.root, "gossip.compressor"):
            lost = compression.probe(found, "gossip.compressor")
            compression.check_contraction(found, "gossip.compressor")
    if own_algorithm or gossip.algorithm == "choco":
        return found.contraction()
    fine = isinstance(found, Quantize) and found.bits >= LEAST_BITS
    if not fine and not isinstance(found, Float16 | BFloat16) and lost > MOST_LOST:
        raise ConfigError(
            f"gossip.compressor: {gossip.algorithm} sends whole models, and {gossip.compressor} leaves out "
            f'so much of one that peers drift apart. Use "quantize:8", "quantize:4", "float16" or '
            f'"bfloat16"; or "", which sends models as they are.'
        )
    return ErrorFeedback(found)


def as_begun(
    config: Config, algorithm: Algorithm, graph: Topology, numel: int, meta: Mapping[str, Any]
) -> Algorithm:
    """The algorithm as a run began with it, by the `meta` of its store. A run of diloco or noloco from before
    these encoded anything goes on without. CHOCO gets the γ that suits its compressor; ConfigError for a
    pair that is worse than no communication. The same at all peers: no data decide it, nor who is there."""
    kept: float | None = meta.get("gamma")
    if isinstance(algorithm, DiLoCo | NoLoCo):
        return replace(algorithm, compressor=None) if meta and "feedback" not in meta else algorithm
    if not isinstance(algorithm, Choco):
        return algorithm
    own = graph if graph.kind != "file" else topology.parse("ring")
    graph, _ = own.near(topology.names(tuning.PEERS), config.run.seed)
    near = graph.round(tuning.PEERS, 0, config.run.seed).graph
    if "gamma" in config.gossip.options:
        tuning.check(algorithm, near, numel)
        return algorithm
    return tuning.tuned(algorithm, near, numel) if kept is None else replace(algorithm, gamma=kept)


def begun_with(algorithm: Algorithm) -> dict[str, float]:
    """What a run keeps of its algorithm beside the settings."""
    if isinstance(algorithm, DiLoCo | NoLoCo) and algorithm.compressor is not None:
        return {"feedback": 1.0}
    return {"gamma": algorithm.gamma} if isinstance(algorithm, Choco) else {}


def without_memory(root: Path, kind: str, options: Mapping[str, Any]) -> Rule:
    """An aggregation rule for a neighbourhood; ConfigError for one that starts from the last aggregate."""
    rule = aggregation.build(kind, options, root=root)
    if rule.remembers:
        raise ConfigError(
            f"gossip.rule: {kind} with {options} starts from the last aggregate, which peers don't have. "
            f'Use "{kind}:start=zero", from the own model on.'
        )
    return rule


def agreed(config: Config) -> dict[str, str]:
    """The settings that all peers must have alike: key -> value as text."""
    own = {f"gossip.{f.name}": repr(getattr(config.gossip, f.name))
           for f in fields(config.gossip) if f.name != "roster"}  # fmt: skip
    if config.gossip.agree:  # as in runs from before there was that key
        del own["gossip.agree"]
    if code := named_in(config, *GRAPH):  # the source of classes of the user's own
        own["gossip.code"] = task_digest(config.run.task, config.root, code)
    return config.agreed() | own


def compared(config: Config) -> dict[str, str]:
    """What peers compare beyond `agreed`, which stands in a run's folder: one may go on with other such
    settings, and all then have the same again."""
    keys = ("run.rounds", "strategy.min_sites", "gossip.agree")
    return {key: repr(config.value(key)) for key in keys}


def of_a_peer(config: Config) -> Config:
    """The settings of a peer's trainer: [compression] and [aggregation] are for updates, and peers exchange
    models."""
    return replace(config, compression=CompressionConfig(), aggregation=AggregationConfig())


def check_keys(config: Config, algorithm: Algorithm) -> None:
    """ConfigError for a key that an algorithm of the user's own would ignore; of ours modes.py says which."""
    given = config.given
    vain = {
        "gossip.compressor": "gossip.compressor" in given and "compressor" not in options_of(type(algorithm)),
        "simulate.speeds": given.get("simulate.speeds", Source.FILE) > Source.FILE and algorithm.waits,
        "simulate.engine": config.simulate.engine not in ("auto", "loop") and not algorithm.waits,
    }
    why = {
        "gossip.compressor": "it has no field `compressor`",
        "simulate.speeds": "its peers wait for each other (Algorithm.waits)",
        "simulate.engine": "its peers never wait, so they train one by one (Algorithm.waits)",
    }
    for key in (key for key, ignored in vain.items() if ignored):
        raise ConfigError(f"{key}: {config.gossip.algorithm} does not read it: {why[key]}. Leave it out.")


def check_masks(config: Config, algorithm: Algorithm) -> None:
    """ConfigError under gossip.masks for an algorithm that needs more than sums of models."""
    if not config.gossip.masks:
        return
    if isinstance(algorithm, Ruled) and not isinstance(algorithm.rule, rules.GraphMean):
        raise ConfigError(
            f"gossip.masks: {config.gossip.rule} compares single models, which masks hide. Set gossip.rule = "
            f'"mean", or gossip.masks = false.'
        )
    if not algorithm.sums:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.sums)
        raise ConfigError(
            f"gossip.masks: {config.gossip.algorithm} wants more of its neighbours than the sum of their "
            f"models. These are content with it: {able}."
        )


def fewest(algorithm: Algorithm, masks: bool) -> int:
    """Peers that a neighbourhood needs, one's own self included."""
    return max(algorithm.rule.needs if isinstance(algorithm, Ruled) else 1, 1 + LEAST if masks else 1)


def needed(config: Config, algorithm: Algorithm) -> tuple[int, str]:
    """Peers without whom no round begins; and why they are more than strategy.min_sites, "" where not."""
    asked, least = config.strategy.min_sites, fewest(algorithm, config.gossip.masks)
    if asked >= max(2, least):
        return asked, ""
    because = "a peer averages with another one at least"
    if least > 2 and config.gossip.masks:
        because = f"under gossip.masks a model hides among those of {LEAST} others"
    elif least > 2:
        because = f"gossip.rule = {config.gossip.rule!r} needs so many models"
    return max(2, least), f"{because}; strategy.min_sites = {asked} is less"


def check_graph(algorithm: Algorithm, graph: Topology, seed: int, masks: bool) -> None:
    """ConfigError for a graph on which, with whatever number of peers, one hears too few of them."""
    if graph.kind == "file" or (least := fewest(algorithm, masks)) < 2:
        return
    for n in range(least, 2 * least + MANY):
        members = topology.names(n)
        try:
            check_hearing(algorithm, graph.near(members, seed)[0], members, seed, masks)
            return
        except ConfigError:
            continue
    what = "gossip.masks" if masks else "gossip.rule"
    raise ConfigError(
        f"{what}: each peer must hear {least - 1} others in every round, and on {graph} one hears fewer, "
        f'however many peers there are. Set gossip.topology = "complete", or "regular:{max(4, least - 1)}".'
    )


def check_hearing(
    algorithm: Algorithm, graph: Topology, members: Sequence[PeerId], seed: int, masks: bool = False
) -> None:
    """ConfigError unless each of these members hears as many peers as its rule and its masks need."""
    for t in range(graph.period(len(members)) or 8):
        if algorithm.everyone(t):
            continue
        for near in graph.round(members, t, seed).graph.values():
            if masks and len(near.incoming) < LEAST:
                raise ConfigError(
                    f"gossip.masks: {near.peer} hears {len(near.incoming)} peers in round {t + 1} on "
                    f"{graph} of {len(members)} peers, and a sum of fewer than {LEAST} hides nobody. Set "
                    f'gossip.topology = "complete", where only all others together learn a model; or, of '
                    f'many peers, a graph such as "regular:4", of which `fedtrain topology` tells who can.'
                )
            if isinstance(algorithm, Ruled) and 1 + len(near.incoming) < algorithm.rule.needs:
                raise ConfigError(
                    f"gossip.rule: {algorithm.rule} needs {algorithm.rule.needs} models, one's own included, "
                    f"and {near.peer} has {1 + len(near.incoming)} in round {t + 1} on {graph} of "
                    f"{len(members)} peers. Use a denser graph, as gossip.topology = "
                    f'"regular:{algorithm.rule.needs - 1}".'
                )
