"""What sites and a coordinator say to each other, and the metrics in it, which sum exactly over sites.

An arena in a message travels as bytes with a digest, after the message's header.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import msgspec

from .arena import AnyArena
from .errors import TaskError

SiteId = str
Sum = float | list[float]  # a number, or several of one kind, such as counts by class
Metrics = dict[str, tuple[Sum, float]]  # name -> (sum, count), so that sums over sites are exact
MAX_SUMS = 65_536  # numbers in one evaluation, counts aside


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what is exchanged. On the wire a message is its header; its arenas follow as bytes."""


class Request(Message, frozen=True, kw_only=True, tag=True):
    """From the coordinator. `id` = run/round/attempt/kind: a retry, a replay, a duplicate counts once."""

    id: str


class Train(Request, frozen=True, kw_only=True, tag=True):
    round: int
    weights: AnyArena
    counted: int = -1  # the last round in which an update of this site is in the model; -1: none is


class Evaluate(Request, frozen=True, kw_only=True, tag=True):
    round: int
    weights: AnyArena
    counted: int = -1  # as in Train


class Recall(Request, frozen=True, kw_only=True, tag=True):
    """Which model of this run, of so many rounds or more, the site was asked about last."""

    round: int
    whole: bool = False  # with the model's bytes


class NewestModel(Message, frozen=True, kw_only=True, tag=True):
    """The newest global model that a site holds, and over whom its results of late were summed."""

    round: int = -1  # rounds done; -1: it holds none of so many
    model: str = ""  # its SHA-256, see runtime.star.secure_terms.hash_of
    sums: dict[str, tuple[tuple[int, tuple[SiteId, ...]], ...]] = {}  # store.ledger.Ledger.sums()
    weights: AnyArena | None = None


class Update(Message, frozen=True, kw_only=True, tag=True):
    """One site's contribution: how far its weights moved, and how much it counts."""

    delta: AnyArena  # local weights - global weights; integers too
    num_examples: float  # examples (or tokens) trained on
    metrics: Metrics = {}
    weight: float | None = None  # in the mean, where the strategy has one of its own; None: num_examples
    scalars: dict[str, float] = {}  # numbers of the strategy's, which are summed
    clipped: int = 0  # coordinates that the site clipped to the strategy's bounds

    @property
    def counts(self) -> float:
        """The weight in the mean."""
        return self.num_examples if self.weight is None else self.weight


class Evaluation(Message, frozen=True, kw_only=True, tag=True):
    metrics: Metrics

    @property
    def of_nothing(self) -> bool:
        """Whether no example is behind it: it gives nothing away, and adds nothing to a sum."""
        totals = (total if isinstance(total, list) else [total] for total, _ in self.metrics.values())
        counts = [count for _, count in self.metrics.values()]
        return bool(counts) and not any(counts) and not any(map(any, totals))


class Failure(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A site could not do what it was asked; `reason` is one line without data values (S35)."""

    reason: str
    final: bool = False  # by a rule of the site's own, which refuses the same request again
    strangers: tuple[SiteId, ...] = ()  # the sites of a sum that this site has not pinned


class Folded(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What many sites found, their updates summed where they were trained.

    A column has one number for each site that was asked, in their order: 0 for a site whose update is not in
    the sums, and for one that has no such metric.
    """

    updates: int  # that the sites gave, those among them that were refused
    refused: dict[int, str] = {}  # the place of a site among those asked -> why its update is not in the sums
    num_examples: list[float]
    weights: list[float] = []  # in the mean, where the strategy has weights of its own; []: num_examples
    norms: list[float] = []  # of the deltas; [] where nobody looked
    metrics: dict[str, tuple[list[float], list[float]]] = {}  # name -> (sums, counts)
    scalars: dict[str, list[float]] = {}  # numbers of the strategy's, by name
    clipped: dict[int, int] = {}  # the place of a site -> how many values it clipped, where it clipped any
    stories: dict[int, str] = {}  # the place of a site -> the traceback, where the task failed there
    # In the open float64 [blocks, numbers of a block], see aggregation.BlockSum; else a vector in the ring.
    sums: memoryview = memoryview(b"")

    @property
    def counts(self) -> list[float]:
        """The weights in the mean."""
        return self.weights or self.num_examples

    def metrics_at(self, place: int) -> Metrics:
        """Those of one site."""
        return {name: (values[place], counts[place]) for name, (values, counts) in self.metrics.items()}

    @classmethod
    def of(
        cls, updates: Sequence[Update | None], given: int, refused: dict[int, str], norms: list[float],
        sums: memoryview, stories: dict[int, str],
    ) -> Folded:  # fmt: skip
        """Of these sites' updates, of so many `given`; None: one that is refused, or was not given."""
        good = [update for update in updates if update is not None]
        own = any(update.weight is not None for update in good)

        def column(number: Callable[[Update], Any]) -> list[float]:
            return [0.0 if update is None else number(update) for update in updates]

        def metric(name: str, part: int) -> list[float]:
            return column(lambda update: update.metrics.get(name, (0.0, 0.0))[part])

        def scalar(name: str) -> list[float]:
            return column(lambda update: update.scalars[name])

        names = dict.fromkeys(name for update in good for name in update.metrics)
        return cls(
            updates=given, refused=refused, num_examples=column(lambda update: update.num_examples),
            weights=column(lambda update: update.counts) if own else [], norms=norms,
            metrics={name: (metric(name, 0), metric(name, 1)) for name in names},
            scalars={name: scalar(name) for name in (good[0].scalars if good else ())},
            clipped={i: u.clipped for i, u in enumerate(updates) if u is not None and u.clipped}, sums=sums,
            stories=stories,
        )  # fmt: skip


Reply = Message  # whatever answers a request
Found = Update | Evaluation | Failure  # what training and evaluation are answered with


def add_metrics(total: Metrics, more: Metrics) -> None:
    """Into `total`, number by number. TaskError unless both have equally many of each name."""
    for name, (value, count) in more.items():
        if name not in total:
            total[name] = value, count
            continue
        have, before = total[name]
        if isinstance(have, list) and isinstance(value, list) and len(have) == len(value):
            total[name] = [a + b for a, b in zip(have, value, strict=True)], before + count
        elif isinstance(have, list) or isinstance(value, list):
            raise TaskError(
                f"evaluate() gives {name} in different sizes: {_size(have)}, then {_size(value)}. Let it be "
                f"the same for each batch and site."
            )
        else:
            total[name] = have + value, before + count


def add_columns(total: Metrics, columns: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """As add_metrics for one site after the other, of metrics as Folded has them."""
    for name, (values, counts) in columns.items():
        have, before = total.get(name, (0.0, 0.0))
        assert not isinstance(have, list), "several numbers are not folded"
        total[name] = reduce(operator.add, values, have), reduce(operator.add, counts, before)


def _size(value: Sum) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else "one number"


def summed(metrics: Mapping[SiteId, Metrics]) -> Metrics:
    """Σ over sites, each name over those that report it, in site order."""
    total: Metrics = {}
    for site in sorted(metrics):
        add_metrics(total, metrics[site])
    return total


def averages(metrics: Mapping[SiteId, Metrics]) -> dict[str, float]:
    """Exact averages over sites, Σ sum / Σ count, of metrics that are one number."""
    total: dict[str, tuple[float, float]] = {}
    for site in sorted(metrics):
        for name, (value, count) in metrics[site].items():
            if not isinstance(value, list):
                have = total.get(name, (0.0, 0.0))
                total[name] = (have[0] + value, have[1] + count)
    return {name: value / count for name, (value, count) in total.items() if count}


# A metric's name with its size: "loss" is one number, "confusion[9]" are nine.
SIZED = re.compile(r"(.*)\[([1-9]\d{0,6})\]", re.S)


def sized_names(metrics: Metrics) -> tuple[str, ...]:
    """Sorted."""
    return tuple(
        sorted(f"{name}[{len(v)}]" if isinstance(v, list) else name for name, (v, _) in metrics.items())
    )


def name_and_size(sized: str) -> tuple[str, int | None]:
    """None: it is one number."""
    found = SIZED.fullmatch(sized)
    return (found[1], int(found[2])) if found else (sized, None)


def numbers_in(names: Iterable[str]) -> int:
    """How many numbers the metrics of these sized names are: the sum or sums of each, and its count."""
    return sum((name_and_size(sized)[1] or 1) + 1 for sized in names)


def misfits(names: Mapping[SiteId, Iterable[str]]) -> dict[SiteId, str]:
    """Sites that give a metric in another size than most sites do, and what they do; `names` are sized."""
    votes: dict[str, Counter[str]] = {}
    for site in sorted(names):
        for sized in names[site]:
            votes.setdefault(name_and_size(sized)[0], Counter())[sized] += 1
    usual = {name: found.most_common(1)[0][0] for name, found in votes.items()}
    return {
        site: f"it evaluates {sized[:80]}, most sites {usual[name_and_size(sized)[0]][:80]}"
        for site in sorted(names)
        for sized in names[site]
        if sized != usual[name_and_size(sized)[0]]
    }
