"""strategy.enough: a round closes when this part of its sites has answered (over-selection).

Whoever wants 100 of 1,000 sites asks 130 and takes the 100 that are first (Bonawitz et al. 2019, "Towards
Federated Learning at Scale", section 2.2), so that neither slow sites nor lost ones hold a round up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing

from ...config import Config
from ...errors import ConfigError
from ...exchange import Cohort, CohortWrapper
from ...messages import Failure, Reply, Request, SiteId, Train
from ...secagg.messages import Advertise
from .answers import rule_of


def check_config(config: Config) -> None:
    """ConfigError where a round can't be closed early."""
    if config.strategy.enough < 1 and config.secagg.enabled and config.secagg.groups > 1:
        raise ConfigError(
            f"strategy.enough: with secagg.groups = {config.secagg.groups} a round has several sums, each of "
            f"which needs its own sites. Set strategy.enough = 1, or secagg.groups = 1."
        )


def needed(config: Config, asked: int, quorum: int = 0) -> int:
    """The answers that close a round of so many sites; under masks no fewer than the sum's quorum."""
    part = round(config.strategy.enough * asked)
    return min(asked, max(config.strategy.min_sites, part, quorum))


def closes(answered: Collection[SiteId], need: int, must_have: Collection[SiteId]) -> bool:
    """Whether a round needs no other site than those that have answered."""
    return len(answered) >= need and all(site in answered for site in must_have)


class ClosesEarly(CohortWrapper):
    """A cohort whose trainings end when enough sites have answered. A failure is no answer."""

    def __init__(self, config: Config, others: Cohort) -> None:
        super().__init__(others)
        self._config, self._must_have = config, rule_of(config).must_have

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        first, answered = next(iter(requests.values()), None), set[SiteId]()
        training = isinstance(first, Train)
        quorum = first.terms.quorum if isinstance(first, Advertise) else 0
        need = needed(self._config, len(requests), quorum)
        async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                yield site, reply
                if not isinstance(reply, Failure):
                    answered.add(site)
                if training and closes(answered, need, self._must_have):
                    return


def closing_early(config: Config, cohort: Cohort) -> Cohort:
    """The cohort, with rounds that close early if they may."""
    if config.asynchronous.enabled:
        return cohort
    check_config(config)
    return ClosesEarly(config, cohort) if config.strategy.enough < 1 else cohort


def waiting_for_all(cohort: Cohort) -> Cohort:
    """The same cohort, for a round that needs each of its sites: nothing closes early."""
    return cohort._inner if isinstance(cohort, ClosesEarly) else cohort
