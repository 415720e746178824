"""The classes of the user's own that the settings name, "module:Class": which, and where they may run.

Their source is part of the task: of its digest, which both ends compare, and of what a site's people approve.
"""

from __future__ import annotations

from dataclasses import replace

from .. import aggregation, compression, gossip, topology
from ..config import Config, SitePolicy, is_own, kind_in
from ..errors import ConfigError

GRAPH = ("gossip.algorithm", "gossip.topology", "gossip.rule", "gossip.compressor")


def named_in(config: Config) -> dict[str, str]:
    """Key -> "module:Class", without its options, for each key that names a class of the user's own; of
    several before a rule each is a key: "aggregation.before 2"."""
    rules = {*aggregation.RULES, *gossip.rules.RULES}
    given, before = config.gossip, config.aggregation.before
    found = {
        "strategy.kind": config.strategy.kind,
        "aggregation.rule": config.aggregation.rule,
        **{f"aggregation.before {i}": kind_in(t, aggregation.BEFORE)[0] for i, t in enumerate(before, 1)},
        "compression.up": compression.own_in(config.compression.up),
        "compression.down": compression.own_in(config.compression.down),
        "gossip.algorithm": given.algorithm,
        "gossip.topology": topology.own_in(given.topology),
        "gossip.rule": kind_in(given.rule, rules)[0],
        "gossip.compressor": compression.own_in(given.compressor),
    }
    return {key: kind for key, kind in found.items() if is_own(kind)}


def source_digest(config: Config) -> str:
    """The digest of the source that decides what is trained; none of the source is run."""
    from ..training.task import task_digest

    return task_digest(config.run.task, config.root, named_in(config))


def check_beside_key(config: Config, policy: SitePolicy, *, peer: bool) -> None:
    """ConfigError where a class of the user's own would run in the process that holds the key of a site or
    peer, and its policy wants the task's code shut in, away from the key."""
    keys = GRAPH if peer else ("compression.up",) if config.secagg.enabled else ()
    for key, kind in named_in(config).items():
        if key in keys and policy.confine != "off":
            instead = "" if peer else " Or set secagg.enabled = false: then the trainer runs it."
            raise ConfigError(
                f"{key}: {kind} would run in the process that holds this {'peer' if peer else 'site'}'s key, "
                f"where nothing shuts it in (policy.confine). Read its file; if you trust it with the key: "
                f"fedtrain policy set confine=off.{instead}"
            )


def beside_key(config: Config) -> Config:
    """The settings as a site's supervisor checks them: without classes of the user's own that the aggregator
    or the trainer runs."""
    named = named_in(config)
    if any(key.startswith("aggregation.") for key in named):
        config = replace(config, aggregation=type(config.aggregation)())
    if "compression.down" in named:
        config = replace(config, compression=replace(config.compression, down=""))
    return config
