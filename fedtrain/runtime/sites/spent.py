"""The privacy that a site has spent: a ledger of all that it gave away of its data, which is never lowered.

  runs/@cleveland/releases.jsonl   of one site, over all its runs: a line a release
  runs/heart@cleveland/released    how many releases there were with the last one of this run

Each release is in the ledger, with the parameters of its noise, before it leaves: a site that is killed and
trains a round again pays for both. Later settings change the price of later releases only. A ledger that is
not there any more, or shorter than what others know of this site, stops the site. Simulated sites, and an
aggregator with noise of its own, keep a ledger in their run's folder.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...config import Config, SitePolicy
from ...errors import ConfigError, Damaged
from ...events import Denied, Emit, PrivacySpent, noticed
from ...exchange import Cohort, CohortWrapper
from ...keystream import KEY_BYTES
from ...messages import Reply, Request, SiteId, Train, Update
from ...privacy import Release, epsilon
from ...store.chain import Chain
from ...store.disk import COPY, Kept, sealed, write_whole
from ...store.memory import NEVER
from .privacy import release_of
from .records import check_length

FILE = "releases.jsonl"
MARK = "released"  # in the folder of a run whose releases are in the site's ledger
COUNT = "releases"  # what was kept before releases had parameters: how many there were
KEYS = "noise.json"  # of the newest sums
REMEMBERED = 4  # of them: what is older is summed no more (secagg.client), and its noise is nobody's concern
REMEDY = "What was given away must not be forgotten: restore it from a copy."


class Given(msgspec.Struct, frozen=True, gc=False):
    """A line of the ledger: what was given away for a round."""

    round: int
    unit: Literal["site", "example"]
    release: Release
    delta: float  # at which its cost was told
    name: str = ""  # of what can be given again without telling more: a vector in a sum
    run: str = ""  # the name of the run's folder, in the ledger of a site


@dataclass(frozen=True)
class Budget:
    """The most that all releases of a site's data may cost together."""

    epsilon: float
    delta: float

    @classmethod
    def of(cls, policy: SitePolicy) -> Budget | None:
        """None: there is no bound."""
        return cls(policy.epsilon, policy.delta) if policy.epsilon else None


class Spent:
    """The ledger of what was given away: of one run, or of one site's data in all its runs."""

    def __init__(
        self, config: Config, folder: Path, emit: Emit, run: Path | None = None, most: Budget | None = None
    ) -> None:
        """`folder` keeps the ledger; `run`: the folder of the site's run, where that is another one.

        Damaged for a ledger that can't be read, or that lacks releases; ConfigError for one whose releases do
        not protect what [privacy] says now.
        """
        self._config, self._emit, self._run, self._most = config, emit, run, most
        self._path = folder / FILE
        self._known: dict[Release, Release] = {}  # most releases are alike: each is in memory once
        self._chain = Chain(self._path, Given, REMEDY, noticed(emit), self._shared)
        self._refused: Release | None = None  # what was too dear for the budget
        self._take_over(run or folder)
        if run is not None:
            check_length(self._path, self.releases, run, MARK, REMEDY, noticed(emit))
        unprotected = [each for each in self._own() if each.unit == "example"]
        if config.privacy.noise_multiplier and config.privacy.unit == "site" and unprotected:
            raise ConfigError(
                f'privacy.unit: "site", but {len(unprotected)} releases of this run protect single examples '
                f'only ({folder / FILE}). Set it to "example", or use another run.name.'
            )

    @classmethod
    def of_site(
        cls, config: Config, run: Path, emit: Emit, policy: SitePolicy = SitePolicy(),
        records: Path | None = None,
    ) -> Spent:  # fmt: skip
        """That of a site's or peer's data, as the run in this folder adds to it. `records`: the folder of
        the ledger; None: beside the run."""
        folder = records or run.parent / f"@{run.name.rpartition('@')[2]}"
        return cls(config, folder, emit, run, Budget.of(policy))

    def _shared(self, given: Given) -> Given:
        release = self._known.setdefault(given.release, given.release)
        return msgspec.structs.replace(given, release=release, run=sys.intern(given.run))

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
        """Up to which the ledger goes: the last round of a release of this run, counted from 1."""
        return 1 + max((each.round for each in self._own()), default=NEVER)

    @property
    def epsilon(self) -> float:
        return self._price(self.delta)

    def trained(self, site: SiteId, round: int, examples: float) -> None:
        """Count the noised update of a site with so many examples, before it leaves. Without noise there is
        nothing to count; noise that protects sums is counted by SumKeys."""
        privacy = self._config.privacy
        if privacy.noise_multiplier and not privacy.in_sums:
            self.give(site, round, release_of(self._config, examples))

    def give(self, who: SiteId, round: int, release: Release, name: str = "", delta: float = 0.0) -> None:
        """Count a release, before it leaves, unless one of this name was counted: a name stands for the very
        same values. `delta`: at which its cost is told; 0: that of [privacy]. ConfigError when it costs more
        than may be spent: then it is not counted, and must not leave."""
        privacy, run = self._config.privacy, self._run
        with self._chain.alone():
            if name and any(each.name == name for each in self._chain.values):
                return self._chain.settle()
            self._afford(release)
            told = min([delta or privacy.delta, *([self.delta] if self.releases else [])])
            given = Given(round, privacy.unit, release, told, name, "" if run is None else run.name)
            self._chain.append(given)
            if run is not None:
                write_whole(run / MARK, sealed(self.releases), durable=False)
            spent = PrivacySpent(
                site=who, round=round + 1, releases=self.releases, epsilon=self._price(told), delta=told,
                unit="example" if any(each.unit == "example" for each in self._chain.values) else "site",
            )  # fmt: skip
        self._emit(spent)

    def check(self, counted: int) -> None:
        """Damaged unless the ledger knows of a release of round `counted` or later, which others say is in
        the model (NEVER: none is)."""
        a_count = any(each.round == NEVER for each in self._own())
        if self._config.privacy.noise_multiplier and counted >= self.rounds and not a_count:
            last = f"ends at round {self.rounds}" if self._own() else "is empty"
            raise Damaged(
                f"{FILE} {last}, and an update of this site for round {counted + 1} is in the model: the "
                f"ledger is not whole, or that update had no noise. {REMEDY}"
            )

    def check_next(self, counted: int) -> None:
        """As `check`, before work on an update. ConfigError when the update would cost more than is allowed,
        as far as its cost is known: of one that protects examples it is not, before one was refused."""
        self.check(counted)
        release = self._refused
        if self._config.privacy.unit == "site":
            release = release_of(self._config, 1.0)
        if release is not None:
            self._afford(release)

    def _own(self) -> list[Given]:
        """The releases of this run."""
        name = "" if self._run is None else self._run.name
        return [each for each in self._chain.values if each.run == name]

    def _price(self, delta: float, *more: Release) -> float:
        return epsilon([*(each.release for each in self._chain.values), *more], delta)

    def _afford(self, release: Release) -> None:
        if self._most is None or (cost := self._price(self._most.delta, release)) <= self._most.epsilon:
            return
        self._refused = release
        why = (
            f"policy.epsilon: with one more release this site's data would have cost epsilon = {cost:.4g} at "
            f"delta = {self._most.delta:g}, over all its runs, and {self._most.epsilon:g} is the most. Add "
            f"more noise (privacy.noise_multiplier), or let the site's people raise policy.epsilon."
        )
        self._emit(Denied(rule="policy.epsilon", what="train", reason=why))
        raise ConfigError(why)

    def _take_over(self, run: Path) -> None:
        """Begin with what was counted before a site had one ledger for all its runs, and before releases had
        parameters: as far as anybody knows, those of today."""
        privacy, ledger = self._config.privacy, self._chain
        site = run.name.rpartition("@")[2]
        for path in sorted(run.parent.glob(f"*@{site}/{FILE}")) if self._run is not None else ():
            if (whose := path.parent.name) == f"@{site}" and path.samefile(self._path):
                continue
            with ledger.alone():
                own = whose != f"@{site}"  # else the ledger of a run.dir by itself, of any runs
                have = sum(each.run == whose for each in ledger.values) if own else 0
                for each in Chain(path, Given, REMEDY).values[have:]:
                    ledger.append(msgspec.structs.replace(each, run=whose) if own else each)
            forget(path)
        if not privacy.noise_multiplier or not (counts := Kept(run / COUNT, int, REMEDY).read()):
            return
        with ledger.alone():
            release, name = Release("gaussian", privacy.noise_multiplier / 2), run.name if self._run else ""
            for _ in range(len(self._own()), max(counts)):
                ledger.append(Given(NEVER, "site", release, privacy.delta, run=name))
        forget(run / COUNT)


def forget(path: Path) -> None:
    """Remove a file and its copy: what they said is in the ledger."""
    for each in (path, path.with_name(path.name + COPY)):
        each.unlink(missing_ok=True)


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
        self._gave: dict[SiteId, tuple[int, int]] = {}  # for how many rounds since, and the last of them

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
        rounds, last = self._gave.get(site, (0, NEVER))
        rounds += request.round != last  # tried again, it is the same update
        self._gave[site] = rounds, request.round
        if self._begun_with + rounds > self._spent.releases:
            self._spent.give(site, request.round, release_of(self._config, examples))
