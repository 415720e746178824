"""What the sites of a round in the open found, gathered as it comes, and what one makes of it."""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from ... import aggregation
from ...aggregation import Known, Rule, WeightedMean, aggregate, weight_of
from ...aggregation.mean import blocks_of, length
from ...arena import AnyArena, Arena, ArenaFile
from ...config import Config
from ...digest import seed_of
from ...errors import SiteMissing, TooFewSites
from ...learning import NO_EXTRAS, Extras
from ...messages import Folded, Metrics, SiteId, Update, add_columns, add_metrics, averages
from ...schema import Schema, Section
from ...store import RoundPlan
from ..journal import Averages
from ..threads import in_thread

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Aggregate:
    """What the sites of a round found, as one."""

    delta: Arena
    metrics: Averages
    sites: Sequence[SiteId]  # whose updates are in it
    sizes: dict[SiteId, float] = field(default_factory=dict)  # of each update, as in errors.Diverged
    norms: dict[SiteId, float] = field(default_factory=dict)  # of each update
    norm: float = 0.0  # the usual one, as in guard.py
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # what the rule keeps until the next round
    weight: float = 1.0  # Σ of the updates' weights
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # as in learning.RoundSums
    scalars: dict[str, float] = field(default_factory=dict)  # Σ of each
    summed: Sequence[Sequence[SiteId]] = ()  # the groups of a round that looks for who spoils sums: good ones
    spoiled: Sequence[Sequence[SiteId]] = ()  # and the others
    patch: AnyArena | None = None  # the sum itself, where sites make the next model of it


class Gathering:
    """The updates of a round's sites, or sums of them, in the order of the plan."""

    def __init__(self, plan: RoundPlan, weights: AnyArena, extras: Extras) -> None:
        self.plan, self._extras = plan, extras
        self.schema = extras.update(weights.schema)  # of an update
        self._places = {site: place for place, site in enumerate(plan.sites)}
        self._sites: list[SiteId] = []  # whose updates are in it
        self._metrics: Metrics = {}
        self._scalars = dict.fromkeys((each.name for each in extras.scalars), 0.0)
        self._mean: WeightedMean | None = None  # of what is folded on arrival
        self._kept: list[Update] = []  # the others
        self.sizes: dict[SiteId, float] = {}  # as in Aggregate
        self.norms: dict[SiteId, float] = {}  # likewise
        self.failed: dict[SiteId, str] = {}  # whose updates were refused, and why

    def add(self, site: SiteId, update: Update, *, linear: bool) -> None:
        """Add a checked update, for a rule that is `linear` or that looks at all updates together."""
        self._sites.append(site)
        add_metrics(self._metrics, update.metrics)
        for name in self._scalars:
            self._scalars[name] += update.scalars[name]
        if isinstance(update.delta, ArenaFile):
            self._kept.append(update)  # folded together later, chunk by chunk, from the disk
        elif not linear:
            self._kept.append(kept(update))
        else:
            self._mean = self._mean or WeightedMean(self.schema)
            self._mean.add(update, self._places[site])  # in shared memory that is needed again: folded now

    def add_folded(self, sites: Sequence[SiteId], folded: Folded) -> None:
        """Add what these sites found, which are all of their blocks that were asked."""
        import torch

        self._mean = self._mean or WeightedMean(self.schema)
        counts, places = folded.counts, list(map(self._places.__getitem__, sites))
        blocks = torch.frombuffer(folded.sums, dtype=torch.float64).view(-1, length(self.schema))
        for block, (number, start, stop) in zip(blocks, blocks_of(places), strict=True):
            self._mean.add_block(number, block, counts[start:stop])
        add_columns(self._metrics, folded.metrics)
        for name, column in folded.scalars.items():
            self._scalars[name] = reduce(operator.add, column, self._scalars[name])
        for place, (site, norm, count) in enumerate(zip(sites, folded.norms, counts, strict=True)):
            if place not in folded.refused:
                self.found(site, norm, count)
                self._sites.append(site)

    def found(self, site: SiteId, norm: float, counts: float) -> None:
        """Note how large a good update is."""
        self.norms[site], self.sizes[site] = norm, norm * counts

    def check(self, config: Config, rule: Rule) -> None:
        """TooFewSites when fewer than the round needs gave a good update; SiteMissing without one that the
        rule must have."""
        what = f"round {self.plan.round + 1}"
        if len(self._sites) < config.strategy.min_sites:
            silent = sorted({*self.plan.sites} - {*self._sites, *self.failed})
            raise TooFewSites(what, len(self._sites), config.strategy.min_sites, self.failed, silent)
        for site in rule.must_have:
            if site not in self._sites:
                raise SiteMissing(what, site, self.failed.get(site, ""))

    async def aggregate(self, config: Config, rule: Rule) -> Aggregate:
        """All that was added, as one."""
        plan, schema, extras = self.plan, self.schema, self._extras
        mean, updates, at = self._mean, self._kept, [self._places[site] for site in self._sites]
        more = extras != msgspec.structs.replace(NO_EXTRAS, scalars=extras.scalars)
        if mean is None and rule.linear and more:
            mean = WeightedMean(schema)
            await asyncio.to_thread(deque, map(mean.add, updates, at), 0)
        sums: dict[str, torch.Tensor] = {}
        if mean is None:
            weight, known = weight_of(updates, at), known_of(config, plan.round, plan.last, self._sites, at)
            delta = await asyncio.to_thread(aggregate, rule, schema, updates, known)
        else:
            weight, own = mean.weight, extras.max_weight is not None
            delta = await in_thread(schema.nbytes, mean.result if weight or not own else mean.nothing)
            sums = named_sums(schema, mean.sums(), extras)
        metrics, state = averages({"": self._metrics}), aggregation.kept(rule, delta)
        return Aggregate(
            delta, metrics, self._sites, self.sizes, self.norms,
            state=state, weight=weight, sums=sums, scalars=self._scalars,
        )  # fmt: skip


def named_sums(
    schema: Schema, sums: Mapping[Section, torch.Tensor], extras: Extras
) -> dict[str, torch.Tensor]:
    """Sums of sections as a strategy sees them: each of `up`, and of an exact one the sum of deltas."""
    import torch

    found = {}
    for each in extras.up:
        section, start, stop = schema.places[each.name]
        found[each.name] = sums[section][start:stop]
    if extras.exact:
        found["delta"] = torch.cat([sums[s][: s.trained] for s in schema.model.sections if s.trained])
    return found


def known_of(
    config: Config, number: int, last: Arena | None, sites: Sequence[SiteId] = (), places: Sequence[int] = ()
) -> Known:
    """What a rule may know of a round; `sites`: whose updates it sees, if they are single ones; `places`:
    where those sites are in the plan."""
    return Known(seed_of(config.run.seed, "aggregation", number), sites, last, places)


def kept(update: Update) -> Update:
    """A copy for rules that look at all updates together: shared memory is needed again before that."""
    return msgspec.structs.replace(update, delta=update.delta.load())
