"""The aggregator's side of secure aggregation: five exchanges, and the sum of the vectors that arrived.

Vectors are added up as they come and none is kept. What a site sends is checked against what it signed; who
sends what cannot be is named, and the session goes on with the others while enough are left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arena import AnyArena
from ..errors import FedtrainError, SecAggError, Unfinished
from ..messages import Failure, Message, Request, SiteId
from . import messages as msg
from .keys import SEALED_BYTES, KeyPair, bytes_of, number_of, pair_mask_key, pair_mask_sign, self_mask_key
from .masking import BLOCK_BYTES, RINGS, Parallel, add_masks, buffers, exhaust, serial
from .roster import (
    Verify,
    check_fresh,
    check_signed,
    check_signer,
    common_names,
    holders_of,
    peers_of,
    rosters,
    unfitting,
)
from .shamir import Weights

FOLDED = 4  # blocks of a vector that one worker adds: fewer take less time than to wake another worker
Reply = TypeVar("Reply", bound=Message)


class Exchanges(Protocol):
    """The part of a Cohort that a session uses."""

    def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Message], None]: ...


class InThread(Protocol):
    """Runs work that takes long: asyncio.to_thread, or `at_once`."""

    def __call__(self, work: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


async def at_once(work: Callable[..., Any], /, *args: Any) -> Any:
    """An InThread without a thread."""
    return work(*args)


@dataclass(frozen=True)
class SecureSum:
    """Σ of the survivors' vectors modulo 2^ring_bits, and who they are. Whether it can be a sum of encoded
    updates is checked by the FixedPoint that decodes it."""

    vector: NDArray[Any]  # uint16, uint32 or uint64 [terms.schema(names).numel]: numel(names), the checksum
    names: tuple[str, ...]  # of the metrics in it
    sites: tuple[SiteId, ...]  # U3, sorted
    dropped: dict[SiteId, str]  # site that was asked and is not in the sum -> at which step, and why
    blamed: dict[SiteId, str]  # site that sent what no honest site sends -> what it was; in the sum or not
    odd: dict[SiteId, set[str]]  # site with metrics that too few have, which are not in the sum -> these


async def masked_sum(
    cohort: Exchanges,
    terms: msg.Terms,
    model: bytes,
    advertise: Mapping[SiteId, Request],
    verify: Verify,
    *,
    deadline_s: float,
    step_deadline_s: float,
    in_thread: InThread = at_once,
    parallel: Parallel = serial,
) -> MaskedSum:
    """Steps 0 to 3 of one session with the sites of terms.cohort: the sum under its masks, and its sites.

    `advertise` is each site's request of step 0 (messages.Advertise), answered when a site has trained,
    within `deadline_s`; each later step has `step_deadline_s`. Unfinished (TooFewSites) below the quorum.
    """
    sid, request_id = terms.sid(model), terms.request_id
    session = SumSession(cohort, terms, sid, step_deadline_s, in_thread, parallel)

    # 0: keys -> U1
    keys: dict[SiteId, msg.Keys] = {}
    used: set[bytes] = set()
    asked: Mapping[SiteId, Request] = advertise
    entries = {site: entry async for site, entry in session.ask("keys", asked, msg.Keys, deadline_s)}

    def check_keys(site: SiteId) -> None:
        check_signed(site, entries[site], terms, sid, verify)

    for site in await in_thread(session.honest, "keys", check_keys, entries):
        with session.checking(site, "keys"):
            check_fresh(site, entries[site], used)
            keys[site] = entries[site]
    for site, why in unfitting({site: entry.names for site, entry in keys.items()}).items():
        session.blame(site, f"keys: {why}")
        del keys[site]
    session.need("keys", keys)
    sites = tuple(sorted(keys))
    offered = {site: keys[site].names for site in sites}
    names = common_names(offered)
    session.odd = {site: rest for site in sites if (rest := set(offered[site]).difference(names))}

    # 1: shares -> U2
    lines = {site: msg.entry_hash(site, keys[site]) for site in sites}
    seed = msg.graph_seed(sid, lines)
    roster = msg.roster_hash(seed, names)
    peers = {site: peers_of(site, sites, terms.degree, seed) for site in sites}
    holders = {site: holders_of(site, sites, terms.degree, seed) for site in sites}
    asked = rosters(request_id("share"), sid, keys, lines, peers, names)
    hands = {site: hand async for site, hand in session.ask("shares", asked, msg.Shares)}

    def check_shares(site: SiteId) -> None:
        check_sealed(site, hands[site], holders[site], terms)
        statement = msg.shares_statement(sid, roster, msg.dealt_hash(hands[site].sealed))
        check_signer(verify, site, keys, statement, hands[site].signature)

    dealt = await in_thread(session.honest, "shares", check_shares, hands)
    shares = {site: hands[site] for site in dealt}
    session.need("shares", shares)
    leave_out_lonely(session, shares, holders, terms.threshold)
    session.need("shares", shares)

    # 2: masked vectors -> U3
    dealers, schema, folded = tuple(sorted(shares)), terms.schema(names), set[SiteId]()
    total = np.zeros(schema.numel, RINGS[terms.ring_bits])
    asked = {
        site: msg.Mask(
            id=request_id("mask"),
            sid=sid,
            sites=dealers,
            sealed={peer: shares[peer].sealed[site] for peer in peers[site] if peer in shares},
        )
        for site in dealers
    }
    async for site, masked in session.ask("masked vectors", asked, msg.Masked):
        with session.checking(site, "masked vectors"):
            if masked.vector.schema != schema:
                raise SecAggError(f"the vector is not {schema.tensors[0]}")
            statement = msg.masked_statement(sid, roster, masked.vector.digest)
            check_signer(verify, site, keys, statement, masked.signature)
            folded.add(site)
        if site in folded:  # not under checking(): a vector that is in the sum by half ends the session
            await in_thread(fold, total, masked.vector, parallel)
    session.need("masked vectors", folded)
    survivors = tuple(sorted(folded))

    # 3: signatures of one list of survivors
    listed = msg.survivors_statement(sid, roster, survivors)
    asked = dict.fromkeys(survivors, msg.Agree(id=request_id("agree"), sid=sid, sites=survivors))
    votes = {site: vote async for site, vote in session.ask("signatures", asked, msg.Agreed)}

    def check_vote(site: SiteId) -> None:
        check_signer(verify, site, keys, listed, votes[site].signature)

    agreeing = await in_thread(session.honest, "signatures", check_vote, votes)
    signatures = {site: votes[site].signature for site in agreeing}
    session.need("signatures", signatures)
    return MaskedSum(session, total, names, survivors, keys, shares, peers, holders, signatures)


@dataclass(frozen=True)
class MaskedSum:
    """Σ of the survivors' masked vectors, to be unmasked once."""

    session: SumSession
    vector: NDArray[Any]  # as SecureSum.vector, but under masks until `unmask` has taken them out
    names: tuple[str, ...]
    sites: tuple[SiteId, ...]  # U3, sorted
    keys: Mapping[SiteId, msg.Keys]
    shares: Mapping[SiteId, msg.Shares]
    peers: Mapping[SiteId, tuple[SiteId, ...]]
    holders: Mapping[SiteId, tuple[SiteId, ...]]
    signatures: Mapping[SiteId, bytes]

    async def unmask(self) -> SecureSum:
        """Step 4: have the shares of the masks sent, rebuild the masks and take them out.

        From the first share on an honest site gives its update into no sum over other sites (Client): a
        caller that may try again keeps `sites` before this, and then plans just these.
        """
        session, terms = self.session, self.session.terms
        session.survivors = self.sites
        wanted = Wanted(self)
        asked = ballots(terms.request_id("unmask"), session.sid, self.signatures, self.holders, terms)
        async with aclosing(session.ask("shares to unmask", asked, msg.Unmasked)) as answers:
            async for site, answer in answers:
                with session.checking(site, "shares to unmask"):
                    wanted.take(site, answer)
                if wanted.enough() and await session.in_thread(wanted.rebuild):
                    break
        if wanted.fewest() < terms.threshold:
            raise session.unfinished("good shares to unmask", wanted.fewest(), terms.threshold)
        await session.in_thread(self._take_out, wanted)
        dropped = {site: why for site, why in session.dropped.items() if site not in self.sites}
        return SecureSum(self.vector, self.names, self.sites, dropped, session.blamed, session.odd)

    def _take_out(self, wanted: Wanted) -> None:
        """Subtract what survivors added: their self masks, and the masks they share with lost sites."""
        sid, alive, masks = self.session.sid, set(self.sites), []
        for site, secret in wanted.secrets.items():
            if wanted.kinds[site] == "seed":
                masks.append((self_mask_key(secret, sid, site), -1))
                continue
            pair = KeyPair(secret)
            for peer in alive.intersection(self.peers[site]):
                shared = pair.agree(self.keys[peer].mask_key)
                masks.append((pair_mask_key(shared, sid, peer, site), -pair_mask_sign(peer, site)))
        add_masks(self.vector, masks, self.session.parallel)


class SumSession:
    """The exchanges of one session, and why each site that is no longer in it left."""

    def __init__(
        self,
        cohort: Exchanges,
        terms: msg.Terms,
        sid: bytes = b"",
        step_deadline_s: float = 0.0,
        in_thread: InThread = at_once,
        parallel: Parallel = serial,
    ) -> None:
        self.terms, self.sid, self.in_thread, self.parallel = terms, sid, in_thread, parallel
        self._cohort, self._step_deadline_s = cohort, step_deadline_s
        self.dropped: dict[SiteId, str] = {}
        self.failed: dict[SiteId, str] = {}  # of the dropped sites, those that said why
        self.blamed: dict[SiteId, str] = {}
        self.odd: dict[SiteId, set[str]] = {}
        self.survivors: tuple[SiteId, ...] = ()  # U3, once a share was asked for

    async def ask(
        self,
        what: str,
        requests: Mapping[SiteId, Request],
        kind: type[Reply],
        deadline_s: float | None = None,
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """The replies of one step that are of its kind, as they come."""
        silent, limit_s = set(requests), self._step_deadline_s if deadline_s is None else deadline_s
        async with aclosing(self._cohort.exchange(requests, limit_s)) as replies:
            async for site, reply in replies:
                silent.discard(site)
                if isinstance(reply, kind):
                    yield site, reply
                elif isinstance(reply, Failure):
                    self.failed[site] = self.dropped[site] = reply.reason
                else:
                    self.blame(site, f"{what}: a {type(reply).__name__} came")
        self.dropped |= dict.fromkeys(silent, f"{what}: no reply")

    @contextmanager
    def checking(self, site: SiteId, what: str) -> Iterator[None]:
        """A site for which the with block raises is out of the session, and to blame."""
        try:
            yield
        except FedtrainError as e:
            self.blame(site, f"{what}: {e}")

    def honest(self, what: str, check: Callable[[SiteId], None], sites: Collection[SiteId]) -> list[SiteId]:
        """The sites, sorted, that `check` passes; the others are to blame."""
        errors: dict[SiteId, FedtrainError] = {}

        def look(site: SiteId) -> None:
            try:
                check(site)
            except FedtrainError as e:
                errors[site] = e

        with self.parallel(look, sorted(sites)) as mine:
            exhaust(mine)
        for site in sorted(errors):
            self.blame(site, f"{what}: {errors[site]}")
        return [site for site in sorted(sites) if site not in errors]

    def blame(self, site: SiteId, what: str) -> None:
        self.blamed[site] = self.dropped[site] = what

    def need(self, what: str, there: Collection[SiteId]) -> None:
        """Unfinished unless so many are there as the quorum."""
        if len(there) < self.terms.quorum:
            raise self.unfinished(what, len(there), self.terms.quorum)

    def unfinished(self, what: str, have: int, need: int) -> Unfinished:
        return Unfinished(
            what, have, need, dropped=self.dropped, blamed=self.blamed, survivors=self.survivors,
            failed=self.failed,
        )  # fmt: skip


# --- 1


def check_sealed(site: SiteId, reply: msg.Shares, holders: Collection[SiteId], terms: msg.Terms) -> None:
    """SecAggError unless each holder is dealt something of the size of what is sealed."""
    if reply.sealed.keys() != set(holders):
        raise SecAggError(f"shares for {len(reply.sealed)} sites came, {len(holders)} hold them")
    own = reply.sealed.get(site)
    sealed = reply.sealed.values()
    texts, seeds, keys = (list(map(len, map(attrgetter(part), sealed))) for part in ("text", "seed", "key"))
    if (
        {*seeds, *keys} != {msg.SHARE_COMMITMENT_BYTES}
        or not set(texts) <= {0, SEALED_BYTES[terms.verify]}
        or texts.count(0) != (own is not None and not own.text)
    ):
        raise SecAggError("what came as shares has not their size")


def leave_out_lonely(
    session: SumSession,
    shares: dict[SiteId, msg.Shares],
    holders: Mapping[SiteId, tuple[SiteId, ...]],
    least: int,
) -> None:
    """Sites with too few holders left to be unmasked are left out before another site masks with them."""
    while lonely := [site for site in shares if sum(map(shares.__contains__, holders[site])) < least]:
        for site in lonely:
            session.dropped[site] = f"shares: fewer than {least} of its {len(holders[site])} holders are left"
            del shares[site]


# --- 2


def fold(total: NDArray[Any], vector: AnyArena, parallel: Parallel) -> None:
    """total += vector modulo 2^r, in place, block by block."""
    (section,) = vector.schema.sections
    numel = BLOCK_BYTES // total.itemsize

    def add(first: int) -> None:
        with buffers.one() as buffer:
            for start in range(first, min(first + FOLDED * numel, len(total)), numel):
                part = total[start : start + numel]
                span = vector.span(section, start, start + len(part), buffer.data)
                part += np.frombuffer(span, total.dtype)

    with parallel(add, range(0, len(total), FOLDED * numel)) as mine:
        exhaust(mine)


# --- 4


def ballots(
    request_id: str,
    sid: bytes,
    signatures: Mapping[SiteId, bytes],
    holders: Mapping[SiteId, tuple[SiteId, ...]],
    terms: msg.Terms,
) -> dict[SiteId, msg.Unmask]:
    """For each site that signed, the signatures of as many of its holders as it needs. A site with too few
    holders that signed is left out."""
    signers = sorted(signatures)[: terms.threshold]
    if terms.degree == 0:
        chosen = {site: signatures[site] for site in signers}
        return dict.fromkeys(signatures, msg.Unmask(id=request_id, sid=sid, signatures=chosen))
    found = {}
    for site in signatures:
        voters = [holder for holder in holders[site] if holder in signatures][: terms.threshold]
        if len(voters) == terms.threshold:
            found[site] = msg.Unmask(id=request_id, sid=sid, signatures={v: signatures[v] for v in voters})
    return found


Kind = Literal["seed", "key"]


class Wanted:
    """The secrets to rebuild: a survivor's seed of its self mask, another dealer's mask key."""

    def __init__(self, masked: MaskedSum) -> None:
        self._session, self._sid = masked.session, masked.session.sid
        self._keys, self._shares, self._holders = masked.keys, masked.shares, masked.holders
        self._threshold, self._answers = self._session.terms.threshold, 0
        self._place = {site: i + 1 for i, site in enumerate(sorted(self._keys))}
        self._alive = set(masked.sites)
        self._lost = self._shares.keys() - self._alive
        self.kinds: dict[SiteId, Kind] = {s: "seed" if s in self._alive else "key" for s in self._shares}
        self.secrets: dict[SiteId, bytes] = {}  # those rebuilt
        self._received: dict[SiteId, dict[SiteId, bytes]] = {s: {} for s in self._shares}  # shares by holder

    def take(self, holder: SiteId, reply: msg.Unmasked) -> None:
        """SecAggError unless it brings all that `holder` holds, and nothing else."""
        dealers = set(self._holders[holder])  # who holds for whom goes both ways
        seeds, keys = self._alive & dealers, self._lost & dealers
        if reply.seeds.keys() != seeds or reply.keys.keys() != keys:
            raise SecAggError(
                f"shares of {len(reply.seeds)} seeds and {len(reply.keys)} keys came, "
                f"not of {len(seeds)} and {len(keys)}"
            )
        for site, share in (*reply.seeds.items(), *reply.keys.items()):
            self._received[site][holder] = share  # right or wrong: rebuild finds out
        self._answers += 1

    def enough(self) -> bool:
        return self._answers >= self._threshold and self.fewest() >= self._threshold

    def fewest(self) -> int:
        """Shares of the secret that has the fewest, of those not rebuilt yet; the threshold if all are."""
        left = (len(had) for site, had in self._received.items() if site not in self.secrets)
        return min(left, default=self._threshold)

    def rebuild(self) -> bool:
        """Rebuild the secrets that have enough shares; whether all are rebuilt now. Wrong shares are thrown
        out, and the sites that sent them blamed.

        Unfinished when all shares of a secret are as they were dealt, and give another: its dealer lied.
        """
        for site, had in self._received.items():
            while site not in self.secrets and len(had) >= self._threshold:
                chosen = sorted(had)[: self._threshold]  # alike for many secrets, so that weights are kept
                weights = Weights.at_zero(list(map(self._place.__getitem__, chosen)))
                secret = bytes_of(weights.combine(list(map(number_of, map(had.__getitem__, chosen)))))
                if self._right(site, secret):
                    self.secrets[site] = secret
                else:
                    self._throw_out(site, had)
        return len(self.secrets) == len(self.kinds)

    def _right(self, site: SiteId, secret: bytes) -> bool:
        if self.kinds[site] == "seed":
            return msg.seed_commitment(self._sid, site, secret) == self._keys[site].commitment
        return KeyPair(secret).public == self._keys[site].mask_key

    def _throw_out(self, site: SiteId, had: dict[SiteId, bytes]) -> None:
        kind, dealt = self.kinds[site], self._shares[site].sealed
        wrong = [
            holder
            for holder, share in had.items()
            if msg.share_commitment(kind, self._sid, site, holder, share) != getattr(dealt[holder], kind)
        ]
        for holder in wrong:
            del had[holder]
            self._session.blame(holder, f"shares to unmask: not the share that {site} dealt to it")
        if not wrong:
            self._session.blame(site, "shares: they don't give the secret that it committed to")
            raise self._session.unfinished(f"good shares of {site}", 0, self._threshold)
