"""`fedtrain aggregator --stats`: statistics of the data of sites that join, over any cohort.

The sites are asked for their columns first, and those that differ from most are left out. Then come the
questions of a survey (statistics/survey.py). What was answered is on disk before the next question, so that a
process that dies goes on after it; statistics.json appears whole, at the end, and the answers go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from ...config import Config
from ...errors import BadUpdate, ConfigError, Damaged, SecAggError, TooFewSites
from ...events import Emit, Notice, noticed
from ...exchange import Cohort, gather
from ...messages import Evaluation, Failure, Metrics, Reply, Request, SiteId
from ...questions import Column, Describe, Described, Question, Tally
from ...secagg.messages import AdvertiseTally, Terms
from ...statistics.report import Statistics, report, stricter
from ...statistics.sums import read
from ...statistics.survey import ALL, alike, rounds, surveys
from ...store import RoundPlan
from ...store.disk import Kept, write_whole
from ..sites.statistics import hash_of_tally
from .secure_rounds import UnderMasks

FILE, ANSWERS = "statistics.json", "statistics.answers"
UNWILLING = "it gives no statistics (its own stats.allow = false)"
WILLING = "Its people allow it by stats.allow = true in their fedtrain.toml, and start the site again"


class Asked(msgspec.Struct):
    """A survey as far as it is, in ANSWERS."""

    columns: tuple[Column, ...]
    sites: list[SiteId]
    left_out: dict[SiteId, str]
    min_cell: int
    bins: int
    openly: bool
    settled: bool = False  # no other sites are asked: a sum over these may have been opened
    answers: list[dict[SiteId, Metrics]] = []


class Tallying(Protocol):
    """How sites answer one question."""

    openly: bool  # whether each site's own answer is known

    async def ask(
        self, tally: Tally, questions: Mapping[SiteId, Question], asked: Asked, keep: Callable[[], None]
    ) -> dict[SiteId, Metrics]:
        """What each site answered, or the sums over all as ALL. Sites that don't answer leave asked.sites
        unless these are settled: then TooFewSites. `keep` is called when they are."""


async def collect(
    config: Config, cohort: Cohort, tallies: Tallying, folder: Path, emit: Emit,
    allowed: Callable[[Sequence[SiteId]], list[SiteId]],
) -> Statistics:  # fmt: skip
    """The statistics of the sites that `allowed` picks of those that joined.

    TooFewSites when fewer than strategy.min_sites answer, or one that is in the sums does not any more.
    """
    kept = Kept(folder / ANSWERS, Asked, "Use another run.name.", noticed(emit))
    asked = max(kept.read(), key=lambda each: (each.settled, len(each.answers)), default=None)
    if asked is None:
        asked = await _begin(config, cohort, tallies.openly, emit, allowed)
    else:
        _refuse_changes(
            config, asked.min_cell, asked.bins, masks=not asked.openly, masks_now=not tallies.openly
        )
    while True:
        survey = surveys(asked.columns, asked.sites, asked.bins, openly=asked.openly)
        questions = next(survey)
        try:
            for answers in asked.answers:
                questions = survey.send(answers)
        except StopIteration as end:
            found = end.value
            break
        number = len(asked.answers)
        emit(Notice(text=f"statistics: question {number + 1} of {rounds(len(asked.columns))}"))
        tally = Tally(id=f"{config.run.name}/{number}/0/statistics", round=number,
                      question=Question(), min_cell=asked.min_cell)  # fmt: skip
        try:
            answers = await tallies.ask(tally, questions, asked, partial(kept.write, asked))
        except TooFewSites:
            if asked.settled or {*await cohort.members(0)} <= {*asked.sites}:
                raise
            asked = await _begin(
                config, cohort, tallies.openly, emit, allowed
            )  # with those that are here now
            continue
        asked.answers.append({site: answers[site] for site in sorted(answers)})
        kept.write(asked)
    statistics = report(
        config.run.name, found, asked.sites, asked.min_cell, asked.bins,
        masks=not asked.openly, left_out=asked.left_out,
    )  # fmt: skip
    write(folder, statistics)
    kept.remove()
    return statistics


def write(folder: Path, statistics: Statistics) -> None:
    """Into statistics.json of a run directory, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(statistics), indent=2)
    write_whole(folder / FILE, text + b"\n", durable=True)


def written(folder: Path) -> Statistics | None:
    """The statistics in a run directory, where there are some."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Statistics)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise Damaged(f"{folder / FILE} is damaged: {e}. Remove it, and use another run.name.") from None


def as_asked_now(config: Config, found: Statistics) -> Statistics:
    """Statistics of a run directory, with less in them where stats.min_cell is larger now; ConfigError where
    other settings than theirs ask for what they don't hold."""
    now = config.stats.min_cell
    _refuse_changes(
        config, max(found.min_cell, now), config.stats.bins if found.bins is None else found.bins,
        masks=found.masks, masks_now=config.secagg.enabled,
    )  # fmt: skip
    return stricter(found, now) if now > found.min_cell else found


def _refuse_changes(config: Config, min_cell: int, bins: int, *, masks: bool, masks_now: bool) -> None:
    """ConfigError where an earlier process began with other settings."""
    for key, was, now in (
        ("stats.min_cell", min_cell, config.stats.min_cell),
        ("stats.bins", bins, config.stats.bins),
        ("secagg.enabled", masks, masks_now),
    ):
        if was != now:
            raise ConfigError(
                f"{key}: the statistics of this run were begun with {str(was).lower()}, and now it is "
                f"{str(now).lower()}. Set it back, or use another run.name."
            )


async def _begin(
    config: Config, cohort: Cohort, openly: bool, emit: Emit,
    allowed: Callable[[Sequence[SiteId]], list[SiteId]],
) -> Asked:  # fmt: skip
    """Who takes part: the sites whose columns are those of most."""
    sites = await _willing(config, cohort, emit, allowed)
    request = Describe(id=f"{config.run.name}/0/0/describe")
    replies = await gather(cohort, dict.fromkeys(sites, request), config.strategy.round_deadline)
    columns = {site: reply.columns for site, reply in replies.items() if isinstance(reply, Described)}
    failed = {site: reply.reason for site, reply in replies.items() if isinstance(reply, Failure)}
    usual, odd = alike(columns)
    left_out = failed | odd
    _tell(cohort, emit, left_out)
    good = sorted(columns.keys() - odd.keys())
    _enough(config, "columns", good, left_out, sites)
    return Asked(usual, good, left_out, config.stats.min_cell, config.stats.bins, openly)


async def _willing(
    config: Config, cohort: Cohort, emit: Emit, allowed: Callable[[Sequence[SiteId]], list[SiteId]]
) -> list[SiteId]:
    """The sites that joined and give statistics: waits for strategy.min_sites, then network.idle for others
    when too few of those do. Who gives none is told at once, here and there."""
    need, told = config.strategy.min_sites, set[SiteId]()

    def tell(members: Sequence[SiteId]) -> None:
        new = sorted({*members} - {*allowed(members)} - told)
        _tell(cohort, emit, dict.fromkeys(new, f"{UNWILLING}. {WILLING}"))
        told.update(new)

    while len(members := await cohort.members(1)) < need:
        tell(members)
        await cohort.newcomer(members)
    tell(members)
    if (few := len(allowed(members))) < need:
        text = f"statistics: {few} of {len(members)} sites here give them, {need} are needed: waiting"
        emit(Notice(text=f"{text} {config.network.idle:g} s for others"))
    with suppress(TimeoutError):
        async with asyncio.timeout(config.network.idle):
            while len(allowed(members)) < need:
                await cohort.newcomer(members)
                tell(members := await cohort.members(0))
    sites = allowed(members)
    refused = dict.fromkeys(set(members) - set(sites), UNWILLING)
    _enough(config, "who gives statistics", sites, refused, members)
    return sites


def _enough(
    config: Config, stage: str, good: Sequence[SiteId], failed: Mapping[SiteId, str], of: Sequence[SiteId]
) -> None:
    if len(good) < config.strategy.min_sites:
        silent = [site for site in of if site not in {*good, *failed}]
        raise TooFewSites(f"statistics, {stage}", len(good), config.strategy.min_sites, failed, silent)


def _tell(cohort: Cohort, emit: Emit, left_out: Mapping[SiteId, str]) -> None:
    for site, why in sorted(left_out.items()):
        emit(Notice(text=f"statistics: {site} is left out: {why}"))
        cohort.tell(site, f"statistics: this site is left out: {why}")


class OpenTallies:
    """Each site's answer comes as it is."""

    openly = True

    def __init__(self, config: Config, cohort: Cohort, emit: Emit) -> None:
        self._config, self._cohort, self._emit = config, cohort, emit

    async def ask(
        self, tally: Tally, questions: Mapping[SiteId, Question], asked: Asked, keep: Callable[[], None]
    ) -> dict[SiteId, Metrics]:
        """See Tallying."""
        config = self._config
        found: dict[SiteId, Metrics] = {}
        failed: dict[SiteId, str] = {}
        for attempt in range(config.strategy.attempts):
            name = f"{config.run.name}/{tally.round}/{attempt}/statistics"
            requests = {
                site: msgspec.structs.replace(tally, id=name, question=questions[site])
                for site in asked.sites
                if site not in found
            }
            failed = {}
            async for site, reply in self._cohort.exchange(requests, config.strategy.round_deadline):
                try:
                    found[site] = answered(requests[site], reply)
                except BadUpdate as e:
                    failed[site] = str(e)
            if len(found) == len(asked.sites):
                break
        _tell(self._cohort, self._emit, failed)
        if asked.settled and len(found) < len(asked.sites):
            raise TooFewSites("statistics", len(found), len(asked.sites), failed)
        _enough(config, f"question {tally.round + 1}", sorted(found), failed, asked.sites)
        asked.left_out |= failed
        asked.sites, asked.settled = sorted(found), True
        return found


class MaskedTallies:
    """Sums over all sites are learnt, and nothing else."""

    openly = False

    def __init__(self, config: Config, sums: UnderMasks, emit: Emit) -> None:
        self._config, self._sums, self._emit = config, sums, emit

    async def ask(
        self, tally: Tally, questions: Mapping[SiteId, Question], asked: Asked, keep: Callable[[], None]
    ) -> dict[SiteId, Metrics]:
        """See Tallying. A sum over other sites than before would tell what differs, so none drops out once
        the first sum may have been opened."""
        tally = msgspec.structs.replace(tally, question=questions[ALL])

        def requests(terms: Terms) -> Mapping[SiteId, Request]:
            request = AdvertiseTally(
                id=terms.request_id("statistics"), round=tally.round, question=tally.question,
                min_cell=tally.min_cell, terms=terms,
            )  # fmt: skip
            return dict.fromkeys(sorted(terms.cohort), request)

        def settle(plan: RoundPlan, sites: Sequence[SiteId]) -> None:
            lost = sorted(set(asked.sites) - set(sites))
            asked.left_out |= dict.fromkeys(lost, "it was lost before the first sum, or refused it")
            asked.sites, asked.settled = list(sites), True
            keep()

        for attempt in range(self._config.strategy.attempts):
            plan = RoundPlan(tally.round, attempt, asked.sites)
            try:
                total, _ = await self._sums.session(
                    plan, asked.sites, None, hash_of_tally(tally), requests, settle, whole=asked.settled
                )
            except (TooFewSites, SecAggError) as e:
                why: TooFewSites | SecAggError = e
                self._emit(Notice(text=f"statistics, question {tally.round + 1}, attempt {attempt + 1}: {e}"))
                continue
            read(tally.question, total.metrics)
            return {ALL: total.metrics}
        raise why


def admit(request: Describe | Tally, reply: Reply) -> None:
    """BadUpdate unless the reply answers what a site was asked, in the open."""
    if isinstance(reply, Failure):
        return
    if not isinstance(reply, Described if isinstance(request, Describe) else Evaluation):
        raise BadUpdate(f"{type(reply).__name__} does not answer {type(request).__name__}")
    if isinstance(reply, Evaluation) and isinstance(request, Tally):
        read(request.question, reply.metrics)


def answered(request: Tally, reply: Reply) -> Metrics:
    """A site's answer; BadUpdate when it is none."""
    if isinstance(reply, Failure):
        raise BadUpdate(reply.reason)
    admit(request, reply)
    assert isinstance(reply, Evaluation), reply
    return reply.metrics
