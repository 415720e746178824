"""The classes of the user's own that the settings name, "module:Class": which, and where they may run.

Their source is part of the task: of its digest, which both ends compare, and of what a site's people approve.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from os.path import normpath
from pathlib import Path

from .. import aggregation, compression
from ..config import AggregationConfig, Config, SitePolicy, is_own, kind_in
from ..config.project import SourceFile, imports_of, load_only, reached
from ..errors import ConfigError
from ..modes import WITH_COMPRESSOR

# A word of train.command, for the shell; one that the shell writes to has its > in front.
WORD = r"(?:>+\s*)?[^\s'\"`=;|&()<>$,:]+"
SCRIPT = re.compile(r".*\.(py|sh)", re.DOTALL)
STAR, GRAPH = ("strategy", "aggregation", "compression"), ("gossip",)  # sections


def named_in(config: Config, *sections: str) -> dict[str, str]:
    """Key -> "module:Class", without its options, for each key of these sections that names a class of the
    user's own; of several before a rule each is a key: "aggregation.before 2"."""
    found = {key: kind for section in sections for key, kind in KINDS[section](config).items()}
    return {key: kind for key, kind in found.items() if is_own(kind)}


def _of_aggregation(config: Config) -> dict[str, str]:
    before = enumerate(config.aggregation.before, 1)
    return {
        "aggregation.rule": config.aggregation.rule,
        **{f"aggregation.before {i}": kind_in(text, aggregation.BEFORE)[0] for i, text in before},
    }


def _of_compression(config: Config) -> dict[str, str]:
    return {
        "compression.up": compression.own_in(config.compression.up),
        "compression.down": compression.own_in(config.compression.down),
    }


def _may_be_own(text: str) -> bool:
    return is_own(kind_in(text, ())[0])


def _of_gossip(config: Config) -> dict[str, str]:
    given = config.gossip
    encodes = given.algorithm in WITH_COMPRESSOR or is_own(given.algorithm)
    compressor = given.compressor if encodes and not given.masks else ""
    if not any(map(_may_be_own, (given.algorithm, given.topology, given.rule, compressor))):
        return {}  # and a site's supervisor loads no numpy
    from .. import gossip, topology

    return {
        "gossip.algorithm": given.algorithm,
        "gossip.topology": topology.own_in(given.topology),
        "gossip.rule": kind_in(given.rule, {*aggregation.RULES, *gossip.rules.RULES})[0],
        "gossip.compressor": compression.own_in(compressor),
    }


KINDS: dict[str, Callable[[Config], dict[str, str]]] = {
    "strategy": lambda config: {"strategy.kind": config.strategy.kind},
    "aggregation": _of_aggregation,
    "compression": _of_compression,
    "gossip": _of_gossip,
}


def command_files(config: Config) -> list[SourceFile]:
    """The files of the project that train.command names, and those that the Python ones among them import.
    ConfigError for a script that it names in a way that is not understood."""
    root, key, found = config.root.resolve(), "train.command", list[SourceFile]()
    for word in re.findall(WORD, config.train.command):
        file = Path(normpath(root / word))
        if file.is_file() and file.is_relative_to(root):
            found.append(SourceFile.read(file, root))
            names = imports_of(found[-1]) if file.suffix == ".py" else []
            found += reached(names, root, key, file.parent).values()
        elif SCRIPT.fullmatch(word) and not Path(word).is_absolute():
            raise ConfigError(
                f"{key}: {word!r} is no file in {root}. Name a script by its path from there, without "
                f"a space and without `cd`; or, outside of the project, by its whole path."
            )
        found += reached([word], root, key).values()
    return found


def source_digest(config: Config) -> str:
    """The digest of the source that decides what is trained; none of the source is run. What peers exchange
    by is told apart: gossip_setup.agreed."""
    from ..training.task import task_digest

    return task_digest(config.run.task, config.root, named_in(config, *STAR))


def check_beside_key(config: Config, policy: SitePolicy, *, peer: bool) -> None:
    """ConfigError where a class of the user's own would run in the process that holds the key of a site or
    peer, and its policy wants the task's code shut in, away from the key."""
    sections = GRAPH if peer else ("compression",) if config.secagg.enabled else ()
    for key, kind in named_in(config, *sections).items():
        if key != "compression.down" and policy.confine != "off":
            instead = "" if peer else " Or set secagg.enabled = false: then the trainer runs it."
            raise ConfigError(
                f"{key}: {kind} would run in the process that holds this {'peer' if peer else 'site'}'s key, "
                f"where nothing shuts it in (policy.confine). Read its file; if you trust it with the key: "
                f"fedtrain policy set confine=off.{instead}"
            )


def load_only_beside_key(config: Config, approved: dict[str, str]) -> None:
    """Have the process that holds a site's key load only approved files, where a class of the user's own
    runs in it, which encodes under masks."""
    if "compression.up" in named_in(config, "compression"):
        load_only(config.root, approved)


def beside_key(config: Config) -> Config:
    """The settings as a site's supervisor checks them: without classes of the user's own that the aggregator
    or the trainer runs."""
    named = named_in(config, *STAR)
    if any(key.startswith("aggregation.") for key in named):
        config = replace(config, aggregation=AggregationConfig())
    if "compression.down" in named:
        config = replace(config, compression=replace(config.compression, down=""))
    return config
