"""How fast, how well connected and how often there each simulated site is: drawn by run.seed, or measured.

A model says when an update arrives that a site is asked for at some moment of the run's own clock, in seconds
from its begin. It depends on run.seed, the settings and the trace alone: not on this machine, nor on other
sites. A site that goes away before its update has left begins the work anew when it is back, as a real one
does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from ...config import Config, numbers_in
from ...digest import seed_of
from ...messages import SiteId
from ...population import EACH
from .traces import Line, Trace, exact, read_trace

DAY_S, HOUR_S = 86_400.0, 3_600.0
STAYS = 10_000  # times that a site comes back for one training before nobody waits for it any more


@dataclass(frozen=True)
class Load:
    """What one training asks of a site."""

    down_bytes: int  # over the wire, headers included
    up_bytes: int
    messages: int = 0  # that follow one another, each after the one before has arrived
    examples: float = 0.0  # that are trained on, once for each epoch

    def of(self, examples: float) -> Load:
        """The same with so many examples."""
        return replace(self, examples=examples)


class Availability(Protocol):
    """When a site is there."""

    def comes(self, at_s: float) -> float:
        """The first moment from `at_s` on at which the site is there; inf: there is none."""

    def leaves(self, at_s: float) -> float:
        """When a site that is there at `at_s` goes away; inf: it stays."""


@dataclass(frozen=True)
class Always:
    def comes(self, at_s: float) -> float:
        return at_s

    def leaves(self, at_s: float) -> float:
        return math.inf


@dataclass(frozen=True)
class Windows:
    """There in [begin, end) of each period. The windows are sorted and apart, in whole 2^-10 s, so that
    sums of them with whole periods are exact."""

    windows: tuple[tuple[float, float], ...]
    period_s: float = DAY_S

    def comes(self, at_s: float) -> float:
        period = at_s // self.period_s * self.period_s
        for begin, end in self.windows:
            if at_s < period + end:
                return max(at_s, period + begin)
        return period + self.period_s + self.windows[0][0]

    def leaves(self, at_s: float) -> float:
        period, first = at_s // self.period_s * self.period_s, self.windows[0]
        if first == (0.0, self.period_s):
            return math.inf
        end = next(end for begin, end in self.windows if period + begin <= at_s < period + end)
        over_midnight = end == self.period_s and first[0] == 0
        return period + end + (first[1] if over_midnight else 0.0)


@dataclass(frozen=True)
class Chance:
    """There in each slot of so many seconds with a probability, drawn slot by slot."""

    part: float
    slot_s: float
    seed: int

    def comes(self, at_s: float) -> float:
        slot = math.floor(at_s / self.slot_s)
        if self._there(slot):
            return at_s
        while not self._there(slot):
            slot += 1
        return slot * self.slot_s

    def leaves(self, at_s: float) -> float:
        slot = math.floor(at_s / self.slot_s)
        while self._there(slot):
            slot += 1
        return slot * self.slot_s

    def _there(self, slot: int) -> bool:
        return seed_of(self.seed, slot) < self.part * 2**63


@dataclass(frozen=True)
class SiteModel:
    """One simulated site."""

    training_s: float = 0.0  # of any training
    example_s: float = 0.0  # and for each example of it
    down_mbit: float = math.inf  # Mbit/s
    up_mbit: float = math.inf
    latency_s: float = 0.0  # of one message
    dropout: float = 0.0  # probability that it is asked in vain
    there: Availability = field(default_factory=Always)

    def seconds(self, load: Load) -> float:
        """From a request to the update, where the site stays."""
        wire_s = 8e-6 * (load.down_bytes / self.down_mbit + load.up_bytes / self.up_mbit)
        return self.training_s + self.example_s * load.examples + load.messages * self.latency_s + wire_s

    def arrives(self, asked_s: float, load: Load, until_s: float = math.inf) -> float:
        """When the update arrives that is asked for at `asked_s`; inf: not until then."""
        seconds, begins = self.seconds(load), self.there.comes(asked_s)
        for _ in range(STAYS):
            if begins + seconds > until_s:
                break
            leaves = self.there.leaves(begins)
            if begins + seconds <= leaves:
                return begins + seconds
            begins = self.there.comes(leaves)
        return math.inf


class SiteModels:
    """The model of each site of a simulation, made when it is first looked at."""

    def __init__(self, config: Config, sites: Sequence[SiteId]) -> None:
        """ConfigError for a trace that can't be read, or that has not all sites."""
        self._config, self._last = config, sites[-1] if sites else ""
        keys = config.simulate
        self._trace: Trace | None = read_trace(config) if keys.trace else None
        if self._trace is not None:
            self._trace.check(sites)
        self._known = lru_cache(EACH)(self._model)  # of a larger population models are made again
        self.by_examples = bool(keys.example_time) or self._measured("seconds_per_example")
        self.always = keys.availability == "always" and not self._measured("available")

    def _measured(self, column: str) -> bool:
        return self._trace is not None and column in self._trace.columns

    def __getitem__(self, site: SiteId) -> SiteModel:
        return self._known(site)

    def drops_out(self, site: SiteId, *asked: object) -> bool:
        """Whether a site is not heard of again after a request, of which `asked` says which it is."""
        part = self[site].dropout
        return part > 0 and seed_of(self._config.run.seed, "dropout", site, *asked) < part * 2**63

    def _model(self, site: SiteId) -> SiteModel:
        keys, seed = self._config.simulate, self._config.run.seed
        factor = slowness(self._config, site, last=site == self._last)
        model = SiteModel(
            training_s=0.0 if keys.example_time else factor,
            example_s=factor * keys.example_time,
            down_mbit=_drawn(keys.down_mbit, seed_of(seed, "down_mbit", site), math.inf),
            up_mbit=_drawn(keys.up_mbit, seed_of(seed, "up_mbit", site), math.inf),
            latency_s=_drawn(keys.latency, seed_of(seed, "latency", site), 0.0),
            dropout=keys.dropout,
            there=_there(keys.availability, seed_of(seed, "availability", site)),
        )
        return model if self._trace is None else measured(self._trace[site], model)


def measured(line: Line, model: SiteModel) -> SiteModel:
    """The model of a site, with what was measured of it in place of what was drawn."""
    found: dict[str, Any] = {
        "down_mbit": line.down_mbit, "up_mbit": line.up_mbit, "latency_s": line.latency_s,
        "dropout": line.dropout, "example_s": line.seconds_per_example,
    }  # fmt: skip
    if line.seconds_per_example is not None:
        found["training_s"] = 0.0
    if line.available is not None:
        found["there"] = Windows(tuple(line.available), line.period_s)
    return replace(model, **{name: value for name, value in found.items() if value is not None})


def slowness(config: Config, site: SiteId, *, last: bool) -> float:
    """How many times as long as usual a site's training takes, as simulate.speeds says; `last`: of all sites
    by name."""
    kind, _, value = config.simulate.speeds.partition(":")
    if kind == "lognormal":
        draw = random.Random(seed_of(config.run.seed, "speed", site))
        return draw.lognormvariate(0.0, float(value))
    return float(value) if kind == "straggler" and last else 1.0


def _drawn(text: str, seed: int, nothing: float) -> float:
    """A number as one of simulate's keys says; `nothing` for an empty text."""
    kind, first, second = numbers_in(text)
    draw = random.Random(seed)
    match kind:
        case "lognormal":
            return first * draw.lognormvariate(0.0, second)
        case "uniform":
            return draw.uniform(first, second)
        case "fixed":
            return first
    return nothing


def _there(text: str, seed: int) -> Availability:
    """As simulate.availability says. "daily:0.3,3": each day for 0.3 of it around midnight, give or take a
    normal draw of 3 hours at each site; without the spread around any time of the day."""
    kind, part, second = numbers_in(text)
    draw = random.Random(seed)
    match kind:
        case "daily":
            spread = "," in text
            middle_s = draw.gauss(0.0, second * HOUR_S) if spread else draw.uniform(0.0, DAY_S)
            length_s = part * DAY_S
            return daily(middle_s - length_s / 2, length_s)
        case "part":
            return Chance(part, second * HOUR_S, seed)
    return Always()


def daily(begin_s: float, length_s: float) -> Windows:
    """There each day from `begin_s` on for `length_s`."""
    begin, length = exact(begin_s) % DAY_S, exact(length_s)
    if begin + length <= DAY_S:
        return Windows(((begin, begin + length),))
    return Windows(((0.0, begin + length - DAY_S), (begin, DAY_S)))
