"""What a run was trained with, for whoever measures or writes out its model later."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import COMMANDS, MACHINE, Config, Source
from ..config.load import parsed
from ..config.project import sources
from ..errors import ConfigError
from ..tracking.runs import meta_of
from .own_code import STAR, named_in

SECTIONS = (
    "train", "strategy", "aggregation", "asynchronous", "secagg", "compression", "limits", "privacy",
)  # fmt: skip
KEYS = (
    *("run.name", "run.seed", "run.task"),
    *("simulate.sites", "simulate.partition", "simulate.examples", "simulate.min_examples"),
)
UNLESS_KEPT = {"privacy.where": "'site'", "simulate.min_examples": "2"}  # kept only where it is another
KINDS = {"strategy": "kind", "aggregation": "rule"}  # section -> whose own keys the rest of it are


def as_trained(config: Config, run: Path) -> Config:
    """The settings with those that decide a run's numbers as its folder keeps them.

    What is given for this command (--set, the environment, settings) is stronger. What the folder doesn't
    keep is the file's: of a site's folder and of an export all, of an older run a key that is newer."""
    kept: dict[str, str] = meta_of(run).get("agreed", {})
    if not kept:
        return config
    given = {key: source for key, source in config.given.items() if source > Source.FILE}
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, text in (UNLESS_KEPT | kept).items():
        section, _, name = key.partition(".")
        if (section in SECTIONS or key in KEYS) and key not in (*MACHINE, *COMMANDS):
            found[section][name] = _value(text)
    table = config.table()
    for section, its in found.items():
        now = table[section]
        now |= {k: v for k, v in its.items() if k in now and f"{section}.{k}" not in given}
        if (kind := KINDS.get(section)) in its and now[kind] == its[kind]:
            own = {k: v for k, v in its.items() if k not in now}
            now["options"] = own | {k: v for k, v in now["options"].items() if f"{section}.{k}" in given}
    trained = replace(Config.of(table, config.root), given=given)
    for key, spec in {"run.task": trained.run.task, **named_in(trained, *STAR)}.items():
        _refuse_a_runs_own_code(key, spec, config, run)
    return trained


def _refuse_a_runs_own_code(key: str, spec: str, config: Config, run: Path) -> None:
    """ConfigError where a run names code that lies among the runs, where others' files come to lie: it may
    choose among the project's own."""
    if ":" not in spec or spec in (config.run.task, named_in(config, *STAR).get(key)):
        return
    file = sources(spec, config.root, key)[spec.partition(":")[0]].path.resolve()
    if any(file.is_relative_to(folder.resolve()) for folder in (config.root / config.run.dir, run)):
        raise ConfigError(
            f"{key}: {run.name} was trained with {spec!r}, whose code lies among the runs: {file}. Where you "
            f"trust it, name it yourself: --set '{key}={spec}'."
        )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # infinity
        return parsed(text)
