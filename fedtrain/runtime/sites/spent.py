"""The privacy that a site has spent: a ledger of all that it gave away, which is never lowered.

Each release is in the ledger, with the parameters of its noise, before it leaves: a site that is killed and
trains a round again pays for both. Later settings change the price of later releases only. A ledger that is
not there any more, or shorter than what others know of this site, stops the site.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import msgspec

from ...config import Config
from ...errors import ConfigError, Damaged
from ...events import Emit, PrivacySpent, noticed
from ...exchange import Cohort, CohortWrapper
from ...keystream import KEY_BYTES
from ...messages import Reply, Request, SiteId, Train, Update
from ...privacy import Release, epsilon
from ...store.chain import Chain
from ...store.disk import COPY, Kept
from ...store.memory import NEVER
from .privacy import release_of

FILE = "releases.jsonl"
COUNT = "releases"  # what was kept before releases had parameters: how many there were
KEYS = "noise.json"  # of the newest sums
REMEMBERED = 4  # of them: what is older is summed no more (secagg.client), and its noise is nobody's concern
REMEDY = "What was given away must not be forgotten: restore it, or add up the epsilons of two run.names."


class Given(msgspec.Struct, frozen=True):
    """A line of the ledger: what was given away for a round."""

    round: int
    unit: Literal["site", "example"]
    release: Release
    delta: float  # at which its cost was told
    name: str = ""  # of what can be given again without telling more: a vector in a sum


class Spent:
    """The ledger of what one site has given away in a run."""

    def __init__(self, config: Config, folder: Path, emit: Emit) -> None:
        """Damaged for a ledger that can't be read; ConfigError for one whose releases do not protect what
        [privacy] says now."""
        self._config, self._emit = config, emit
        self._chain = Chain(folder / FILE, Given, REMEDY, noticed(emit))
        self._take_over(folder / COUNT)
        given: list[Given] = self._chain.values
        self._names = {each.name for each in given if each.name}
        unprotected = [each for each in given if each.unit == "example"]
        if config.privacy.noise_multiplier and config.privacy.unit == "site" and unprotected:
            raise ConfigError(
                f'privacy.unit: "site", but {len(unprotected)} releases of this run protect single examples '
                f'only ({folder / FILE}). Set it to "example", or use another run.name.'
            )

    @property
    def releases(self) -> int:
        return len(self._chain.values)

    @property
    def delta(self) -> float:
        """The least at which a cost was told: at a larger one it would look lower."""
        told: list[float] = [each.delta for each in self._chain.values]
        return min(told, default=self._config.privacy.delta)

    @property
    def rounds(self) -> int:
        """Up to which the ledger goes: the last round of a release, counted from 1."""
        return 1 + max((each.round for each in self._chain.values), default=NEVER)

    @property
    def epsilon(self) -> float:
        return epsilon([each.release for each in self._chain.values], self.delta)

    def trained(self, site: SiteId, round: int, examples: float) -> None:
        """Count the noised update of a site with so many examples, before it leaves. Without noise there is
        nothing to count; noise that protects sums is counted by SumKeys."""
        privacy = self._config.privacy
        if privacy.noise_multiplier and not privacy.in_sums:
            self.give(site, round, release_of(self._config, examples))

    def give(self, who: SiteId, round: int, release: Release, name: str = "", delta: float = 0.0) -> None:
        """Count a release, before it leaves, unless one of this name was counted: a name stands for the very
        same values. `delta`: at which its cost is told; 0: that of [privacy]."""
        if name and name in self._names:
            return
        privacy = self._config.privacy
        told = min([delta or privacy.delta, *([self.delta] if self.releases else [])])
        self._chain.append(Given(round, privacy.unit, release, told, name))
        self._names.add(name)
        self._emit(PrivacySpent(
    site=who, round=round + 1, releases=self.releases, epsilon=self.epsilon, delta=self.delta,
))  # fmt: skip

    def check(self, counted: int) -> None:
        """Damaged unless the ledger knows of a release of round `counted` or later, which others say is in
        the model (NEVER: none is)."""
        a_count = any(each.round == NEVER for each in self._chain.values)
        if self._config.privacy.noise_multiplier and counted >= self.rounds and not a_count:
            last = f"ends at round {self.rounds}" if self.releases else "is empty"
            raise Damaged(
                f"{FILE} {last}, and an update of this site for round {counted + 1} is in the model: the "
                f"ledger is not whole, or that update had no noise. {REMEDY}"
            )

    def _take_over(self, count: Path) -> None:
        """Begin with what was counted before releases had parameters: as far as anybody knows, those of
        today."""
        privacy = self._config.privacy
        if not privacy.noise_multiplier:
            return
        sigma = privacy.noise_multiplier / 2
        for _ in range(self.releases, max(Kept(count, int, REMEDY).read(), default=0)):
            self._chain.append(Given(NEVER, "site", Release("gaussian", sigma), privacy.delta))
        for path in (count, count.with_name(count.name + COPY)):
            path.unlink(missing_ok=True)


class SumKeys:
    """The keys of one site's noise in sums. What is summed again has the same noise again: from two sums of
    one update with different noises, some of it could be taken out."""

    def __init__(self, config: Config, site: SiteId, folder: Path, spent: Spent) -> None:
        self._release, self._site, self._spent = release_of(config, 1.0), site, spent
        remedy = "The site may remove both: what it gives into a sum again then counts as a new release."
        self._kept = Kept(folder / KEYS, dict[str, str], remedy)

    def key(self, round: int, about: str) -> bytes:
        """The key for a round's update, and for what else makes a vector another one. A vector is counted
        before the first that has this key may leave."""
        known: dict[str, str] = {}
        for kept in self._kept.read():
            known |= kept
        name = f"{round}/{about}"
        if name not in known:
            known = dict([*known.items()][1 - REMEMBERED :]) | {name: secrets.token_hex(KEY_BYTES)}
            self._kept.write(known)
        key = bytes.fromhex(known[name])
        self._spent.give(self._site, round, self._release, hashlib.sha256(key).hexdigest())
        return key


class Spending(CohortWrapper):
    """Simulated sites. In each round the dearest release is counted, for the site that has given away most:
    no site has spent more."""

    def __init__(self, config: Config, others: Cohort, folder: Path, emit: Emit) -> None:
        """`folder` keeps the ledger. A resumed run takes it for that of every site."""
        super().__init__(others)
        self._config, self._spent = config, Spent(config, folder, emit)
        self._begun_with = self._spent.releases
        self._rounds: dict[SiteId, set[int]] = {}  # for which each has given an update away since

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        gave: dict[SiteId, float] = {}  # examples of each
        try:
            async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
                async for site, reply in replies:
                    if isinstance(reply, Update):
                        gave[site] = reply.num_examples
                    yield site, reply
        finally:
            for site in sorted(gave, key=gave.__getitem__):
                self._count(site, requests[site], min(gave.values()))  # the fewer examples, the dearer

    def _count(self, site: SiteId, request: Request, examples: float) -> None:
        assert isinstance(request, Train), request
        rounds = self._rounds.setdefault(site, set())
        rounds.add(request.round)  # tried again, it is the same update
        if self._begun_with + len(rounds) > self._spent.releases:
            self._spent.give(site, request.round, release_of(self._config, examples))
