"""`fedtrain sweep`: simulations over settings, as processes that share this machine's cores.

A trial is `fedtrain simulate` under a run name of its own, which follows from its settings. So the same
sweep, started again, finds the trials that are done, and the others go on from their last committed round.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ... import modes, strategies
from ...config import Config
from ...errors import ConfigError
from ...fairness import decided
from ...tracking.log import events_file
from ...tracking.runs import Summary, summary_of

LOOK_S = 0.1  # between two looks at processes
TOLD = 300  # characters of what a failed trial said last
Settings = Mapping[str, str]


class Trial(msgspec.Struct, frozen=True):
    """One point of a sweep."""

    run: str  # the run's name
    settings: dict[str, str]


class Tried(msgspec.Struct, frozen=True):
    """What became of a trial; with --json as it stands here."""

    run: str
    settings: dict[str, str]
    state: str  # finished, failed, or how far it is
    value: float | None  # of evaluate.metric, in its best round; the training loss where nothing is evaluated
    round: int
    said: str = ""  # by a trial that failed


def grid(ranges: Sequence[str]) -> Iterator[Settings]:
    """Every combination of KEY=VALUE,VALUE…"""
    split = [_pair("--grid", text) for text in ranges]
    for values in itertools.product(*(text.split(",") for _, text in split)):
        yield dict(zip((key for key, _ in split), values, strict=True))


def drawn(ranges: Sequence[str], count: int, seed: int) -> Iterator[Settings]:
    """`count` draws of KEY=LOW:HIGH (even), KEY=LOW:HIGH:log (even in the logarithm) and KEY=VALUE,VALUE…;
    whole numbers where both ends are."""
    split, draw = [_pair("--random", text) for text in ranges], random.Random(seed)
    for _ in range(count):
        yield {key: _draw(key, text, draw) for key, text in split}


def _draw(key: str, text: str, draw: random.Random) -> str:
    low, *rest = text.split(":")
    if not rest:
        return draw.choice(text.split(","))
    try:
        ends = float(low), float(rest[0])
    except ValueError:
        raise ConfigError(f"--random {key}={text}: write LOW:HIGH, LOW:HIGH:log or VALUE,VALUE.") from None
    log = rest[1:] == ["log"]
    if not ends[0] < ends[1] or (rest[1:] and not log) or (log and ends[0] <= 0):
        raise ConfigError(f"--random {key}={text}: LOW must be below HIGH, and above 0 with :log.")
    value = math.exp(draw.uniform(*map(math.log, ends))) if log else draw.uniform(*ends)
    whole = all(end.lstrip("-").isdecimal() for end in (low, rest[0]))
    return str(round(value)) if whole else f"{value:.4g}"


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"{option} {text}: write KEY=VALUE,VALUE, as in train.lr=0.01,0.1.")
    return key, values


def trials(file: Path, sets: Sequence[str], points: Sequence[Settings]) -> list[Trial]:
    """The trials of these points, each once. ConfigError for a setting that `fedtrain simulate` would refuse,
    before any of them runs."""
    found: dict[str, Trial] = {}
    for point in points:
        given = [f"{key}={value}" for key, value in point.items()]
        config = Config.load(file, (*sets, *given))
        modes.check(config, "simulate")
        strategies.build(config.strategy.kind, config.strategy.options, config.root)
        digest = hashlib.sha256("\n".join(sorted([*sets, *given])).encode()).hexdigest()[:8]
        name = f"{config.run.name[:50]}.{digest}"
        found.setdefault(name, Trial(name, dict(point)))
    return [*found.values()]


def sweep(
    config: Config,
    file: Path,
    sets: Sequence[str],
    wanted: Sequence[Trial],
    jobs: int,
    say: Callable[[Tried], None],
) -> list[Tried]:
    """Run what is not done, `jobs` at a time, and tell of each as it ends; the best first."""
    waiting, running, ended = list(wanted), list[tuple[Trial, subprocess.Popen[bytes]]](), list[Tried]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop(0)
                if (found := outcome(config, trial)).state == "finished":
                    ended.append(found)
                    say(found)
                else:
                    running.append((trial, _start(config, file, sets, trial, jobs)))
            for trial, process in [each for each in running if each[1].poll() is not None]:
                running.remove((trial, process))
                ended.append(outcome(config, trial, process.returncode))
                say(ended[-1])
            if running:
                time.sleep(LOOK_S)
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
    return ranked(config, ended)


def ranked(config: Config, ended: Sequence[Tried]) -> list[Tried]:
    """By evaluate.metric, the best first; those without a value last."""
    sign = 1 if decided(metric := config.evaluate.metric, config.evaluate.lower(metric)) else -1
    return sorted(ended, key=lambda done: (done.value is None, sign * (done.value or 0.0), done.run))


def outcome(config: Config, trial: Trial, code: int = 0) -> Tried:
    """How far a trial is; `code`: its process's, which has ended."""
    folder = folder_of(config, trial)
    if code:
        said = _errors(config, trial).read_text(errors="replace").strip()[-TOLD:]
        return Tried(trial.run, trial.settings, "failed", None, 0, said)
    if not events_file(folder).exists():
        return Tried(trial.run, trial.settings, "waiting", None, 0)
    _errors(config, trial).unlink(missing_ok=True)
    found: Summary = summary_of(folder)
    value = found.best_value if found.best_value is not None else found.loss
    return Tried(trial.run, trial.settings, found.state, value, found.best_round or found.round)


def folder_of(config: Config, trial: Trial) -> Path:
    """The trial's run directory."""
    return config.root / config.run.dir / f"{trial.run}+simulate"


def _errors(config: Config, trial: Trial) -> Path:
    return config.root / config.run.dir / f"{trial.run}.stderr"


def _start(
    config: Config, file: Path, sets: Sequence[str], trial: Trial, jobs: int
) -> subprocess.Popen[bytes]:
    """A trial's process. Beside others it trains its sites itself, on one core."""
    keys = {text.partition("=")[0] for text in sets} | trial.settings.keys()
    alone = [] if jobs == 1 or "simulate.workers" in keys else ["simulate.workers=0"]
    given = [
        *sets,
        *alone,
        *(f"{key}={value}" for key, value in trial.settings.items()),
        f"run.name={trial.run}",
    ]
    command = [sys.executable, "-m", "fedtrain", "simulate", "--json", "--config", str(file)]
    errors = _errors(config, trial)
    errors.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("wb") as said:
        return subprocess.Popen(
            [*command, *(word for text in given for word in ("--set", text))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            env=os.environ | {"NO_COLOR": "1"},
        )  # fmt: skip
