"""The aggregator's side of secure aggregation: five exchanges, and the sum of the vectors that arrived.

Vectors are added up as they come and none is kept. What a site sends is checked against what it signed; who
sends what cannot be is named, and the session goes on with the others while enough are left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arena import AnyArena
from ..errors import FedtrainError, SecAggError, Unfinished
from ..exchange import Cohort
from ..messages import MAX_SUMS, Failure, Message, Request, SiteId, misfits, numbers_in
from . import messages as msg
from .keys import SEALED_BYTES, KeyPair, bytes_of, number_of, pair_mask_key, pair_mask_sign, self_mask_key
from .masking import BLOCK_BYTES, RINGS, Spread, add_masks, each, rooms
from .roster import Verify, check_fresh, check_signed, check_signer, holders_of, peers_of
from .shamir import Weights

FOLDED = 4  # blocks of a vector that one worker adds: fewer take less time than to wake another worker
Reply = TypeVar("Reply", bound=Message)


class Aside(Protocol):
    """How long work is kept off the event loop: asyncio.to_thread, or `at_once`."""

    def __call__(self, work: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@dataclass(frozen=True)
class SecureSum:
    """Σ of the survivors' vectors modulo 2^ring_bits, and who they are. Whether it can be one of encoded
    updates, the FixedPoint that decodes it says."""

    vector: NDArray[Any]  # uint16, uint32 or uint64 [terms.numel(names)]
    names: tuple[str, ...]  # of the metrics in it
    sites: tuple[SiteId, ...]  # U3, sorted
    dropped: dict[SiteId, str]  # who was asked and is not in the sum -> at which step, and why
    blamed: dict[SiteId, str]  # who sent what cannot be -> what it was; in the sum or not


async def secure_sum(
    cohort: Cohort,
    terms: msg.Terms,
    model: bytes,
    advertise: Request,
    verify: Verify,
    *,
    deadline_s: float,
    step_deadline_s: float,
    agreed: Callable[[Sequence[SiteId]], None] = lambda sites: None,
    aside: Aside = at_once,
    spread: Spread = map,
) -> SecureSum:
    """One session with the sites of terms.cohort. Unfinished (TooFewSites) below the quorum.

    `advertise` is step 0's request (messages.Advertise), answered when a site has trained, within
    `deadline_s`; each later step has `step_deadline_s`. `agreed(U3)` is called before the first share
    is asked for: from then on an honest site gives this update into no sum over other sites (Client), so a
    caller that tries again must plan just these.
    """
    sid, request_id = terms.sid(model), terms.request_id
    session = Session(cohort, terms, spread)

    # 0: keys -> U1
    keys: dict[SiteId, msg.Keys] = {}
    used: set[bytes] = set()
    asked: Mapping[SiteId, Request] = dict.fromkeys(sorted(terms.cohort), advertise)
    entries = {site: entry async for site, entry in session.ask("keys", asked, msg.Keys, deadline_s)}

    def check_keys(site: SiteId) -> None:
        check_signed(site, entries[site], terms, sid, verify)

    for site in await aside(session.honest, "keys", check_keys, entries):
        with session.checking(site, "keys"):
            check_fresh(site, entries[site], used)
            keys[site] = entries[site]
    for site, why in unfitting({site: entry.names for site, entry in keys.items()}).items():
        session.blame(site, f"keys: {why}")
        del keys[site]
    session.need("keys", keys)
    sites = tuple(sorted(keys))
    names = tuple(sorted({name for entry in keys.values() for name in entry.names}))
    if len(names) > msg.MAX_NAMES:
        most = msg.MAX_NAMES
        raise SecAggError(f"the sites have {len(names)} metrics together, at most {most} are allowed")

    # 1: shares -> U2
    lines = {site: msg.entry_hash(site, keys[site]) for site in sites}
    seed = msg.graph_seed(sid, lines)
    roster = msg.roster_hash(seed, names)
    peers = {site: peers_of(site, sites, terms.degree, seed) for site in sites}
    holders = {site: holders_of(site, sites, terms.degree, seed) for site in sites}
    asked = rosters(request_id("share"), sid, keys, lines, peers, names)
    hands = {site: hand async for site, hand in session.ask("shares", asked, msg.Shares, step_deadline_s)}

    def check_shares(site: SiteId) -> None:
        check_sealed(site, hands[site], holders[site])
        statement = msg.shares_statement(sid, roster, msg.dealt_hash(hands[site].sealed))
        check_signer(verify, site, keys, statement, hands[site].signature)

    dealt = await aside(session.honest, "shares", check_shares, hands)
    shares = {site: hands[site] for site in dealt}
    session.need("shares", shares)
    leave_out_lonely(session, shares, holders, terms.threshold)
    session.need("shares", shares)

    # 2: masked vectors -> U3
    dealers, total = tuple(sorted(shares)), np.zeros(terms.numel(names), RINGS[terms.ring_bits])
    schema, folded = terms.schema(names), set[SiteId]()
    asked = {
        site: msg.Mask(
            id=request_id("mask"),
            sid=sid,
            sites=dealers,
            sealed={peer: shares[peer].sealed[site] for peer in peers[site] if peer in shares},
        )
        for site in dealers
    }
    async for site, masked in session.ask("masked vectors", asked, msg.Masked, step_deadline_s):
        with session.checking(site, "masked vectors"):
            if masked.vector.schema != schema:
                raise SecAggError(f"the vector is not {schema.tensors[0]}")
            statement = msg.masked_statement(sid, roster, masked.vector.digest)
            check_signer(verify, site, keys, statement, masked.signature)
            folded.add(site)
        if site in folded:  # outside: a vector that is in the sum by half ends the session
            await aside(fold, total, masked.vector, spread)
    session.need("masked vectors", folded)
    survivors = tuple(sorted(folded))

    # 3: signatures of one list of survivors
    listed = msg.survivors_statement(sid, roster, survivors)
    asked = dict.fromkeys(survivors, msg.Agree(id=request_id("agree"), sid=sid, sites=survivors))
    votes = {site: vote async for site, vote in session.ask("signatures", asked, msg.Agreed, step_deadline_s)}

    def check_vote(site: SiteId) -> None:
        check_signer(verify, site, keys, listed, votes[site].signature)

    agreeing = await aside(session.honest, "signatures", check_vote, votes)
    signatures = {site: votes[site].signature for site in agreeing}
    session.need("signatures", signatures)

    # 4: shares of what is to be taken out
    session.survivors = survivors
    agreed(survivors)
    wanted = Wanted(session, sid, keys, shares, holders, survivors)
    asked = ballots(request_id("unmask"), sid, signatures, holders, terms)
    async with aclosing(session.ask("shares to unmask", asked, msg.Unmasked, step_deadline_s)) as answers:
        async for site, answer in answers:
            with session.checking(site, "shares to unmask"):
                wanted.take(site, answer)
            if wanted.enough() and await aside(wanted.rebuild):
                break
    if wanted.fewest() < terms.threshold:
        raise session.unfinished("good shares to unmask", wanted.fewest(), terms.threshold)

    await aside(take_out, total, wanted, sid, keys, peers, survivors, spread)
    dropped = {site: why for site, why in session.dropped.items() if site not in folded}
    return SecureSum(total, names, survivors, dropped, session.blamed)


class Session:
    """The exchanges of one session, and what became of each site that is no longer in it."""

    def __init__(self, cohort: Cohort, terms: msg.Terms, spread: Spread = map) -> None:
        self.terms, self._cohort, self._spread = terms, cohort, spread
        self.dropped: dict[SiteId, str] = {}
        self.failed: dict[SiteId, str] = {}  # of the dropped, who said why
        self.blamed: dict[SiteId, str] = {}
        self.survivors: tuple[SiteId, ...] = ()  # once a share was asked for

    async def ask(
        self, what: str, requests: Mapping[SiteId, Request], kind: type[Reply], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        """The replies of one step that are of its kind, as they come."""
        silent = set(requests)
        async with aclosing(self._cohort.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                silent.discard(site)
                if isinstance(reply, kind):
                    yield site, reply
                elif isinstance(reply, Failure):
                    self.failed[site] = reply.reason
                    self.dropped[site] = f"{what}: {reply.reason}"
                else:
                    self.blame(site, f"{what}: a {type(reply).__name__} came")
        self.dropped |= dict.fromkeys(silent, f"{what}: no reply")

    @contextmanager
    def checking(self, site: SiteId, what: str) -> Iterator[None]:
        """A site that what is done here fails for is out, and to blame."""
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

        each(self._spread, look, sorted(sites))
        for site in sorted(errors):
            self.blame(site, f"{what}: {errors[site]}")
        return [site for site in sorted(sites) if site not in errors]

    def blame(self, site: SiteId, what: str) -> None:
        self.blamed[site] = self.dropped[site] = what

    def need(self, what: str, there: Collection[SiteId]) -> None:
        """Unfinished when fewer than the quorum are."""
        if len(there) < self.terms.quorum:
            raise self.unfinished(what, len(there), self.terms.quorum)

    def unfinished(self, what: str, have: int, need: int) -> Unfinished:
        return Unfinished(
            what, have, need, dropped=self.dropped, blamed=self.blamed, survivors=self.survivors,
            failed=self.failed,
        )  # fmt: skip


# --- 1


def unfitting(names: Mapping[SiteId, tuple[str, ...]]) -> dict[SiteId, str]:
    """Sites whose metrics have no place beside the others', and why: in another size than most have, or, of
    too many numbers together, those with most."""
    odd = misfits(names)
    rest = {site: each for site, each in names.items() if site not in odd}

    def sums(of: Collection[str]) -> int:
        return numbers_in(of) - len(of)

    while rest and sums(set().union(*rest.values())) > MAX_SUMS:
        most = max(sorted(rest), key=lambda site: sums(rest[site]))
        odd[most] = f"its metrics are {sums(rest.pop(most))} numbers, {MAX_SUMS} are allowed together"
    return odd


def rosters(
    request_id: str,
    sid: bytes,
    keys: Mapping[SiteId, msg.Keys],
    lines: dict[SiteId, bytes],
    peers: Mapping[SiteId, tuple[SiteId, ...]],
    names: tuple[str, ...],
) -> dict[SiteId, msg.Share]:
    """What each site is shown: itself and its peers, of all a hash. One object where all see all."""
    if all(len(found) == len(keys) - 1 for found in peers.values()):
        whole = msg.Share(id=request_id, sid=sid, roster=dict(keys), lines={}, names=names)
        return dict.fromkeys(keys, whole)
    return {
        site: msg.Share(
            id=request_id,
            sid=sid,
            roster={name: keys[name] for name in sorted({site, *peers[site]})},
            lines=lines,
            names=names,
        )
        for site in keys
    }


def check_sealed(site: SiteId, reply: msg.Shares, holders: Collection[SiteId]) -> None:
    """SecAggError unless there is something for each holder, of the size of two shares."""
    if reply.sealed.keys() != set(holders):
        raise SecAggError(f"shares for {len(reply.sealed)} sites came, {len(holders)} hold them")
    own = reply.sealed.get(site)
    sealed = reply.sealed.values()
    texts, seeds, keys = (list(map(len, map(attrgetter(part), sealed))) for part in ("text", "seed", "key"))
    if (
        {*seeds, *keys} != {msg.SHARE_COMMITMENT_BYTES}
        or not set(texts) <= {0, SEALED_BYTES}
        or texts.count(0) != (own is not None and not own.text)
    ):
        raise SecAggError("what came as shares has not their size")


def leave_out_lonely(
    session: Session,
    shares: dict[SiteId, msg.Shares],
    holders: Mapping[SiteId, tuple[SiteId, ...]],
    least: int,
) -> None:
    """Sites with too few holders left to be unmasked are out before anybody masks with them."""
    while lonely := [site for site in shares if sum(map(shares.__contains__, holders[site])) < least]:
        for site in lonely:
            session.dropped[site] = f"shares: fewer than {least} of its {len(holders[site])} holders are left"
            del shares[site]


# --- 2


def fold(total: NDArray[Any], vector: AnyArena, spread: Spread) -> None:
    """total += vector modulo 2^r, in place, block by block."""
    (section,) = vector.schema.sections
    numel = BLOCK_BYTES // total.itemsize

    def add(first: int) -> None:
        with rooms.one() as room:
            for start in range(first, min(first + FOLDED * numel, len(total)), numel):
                part = total[start : start + numel]
                part += np.frombuffer(vector.span(section, start, start + len(part), room.data), total.dtype)

    each(spread, add, range(0, len(total), FOLDED * numel))


# --- 4


def ballots(
    request_id: str,
    sid: bytes,
    signatures: Mapping[SiteId, bytes],
    holders: Mapping[SiteId, tuple[SiteId, ...]],
    terms: msg.Terms,
) -> dict[SiteId, msg.Unmask]:
    """To each site that signed, as many signatures of its holders as it needs; where there are, that is."""
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

    def __init__(
        self,
        session: Session,
        sid: bytes,
        keys: Mapping[SiteId, msg.Keys],
        shares: Mapping[SiteId, msg.Shares],
        holders: Mapping[SiteId, tuple[SiteId, ...]],
        survivors: Collection[SiteId],
    ) -> None:
        self._session, self._sid, self._keys, self._shares = session, sid, keys, shares
        self._threshold, self._answers, self._holders = session.terms.threshold, 0, holders
        self._place = {site: i + 1 for i, site in enumerate(sorted(keys))}
        self._alive, self._gone = set(survivors), shares.keys() - set(survivors)
        self.kinds: dict[SiteId, Kind] = {site: "seed" if site in self._alive else "key" for site in shares}
        self.secrets: dict[SiteId, bytes] = {}  # those rebuilt
        self._had: dict[SiteId, dict[SiteId, bytes]] = {site: {} for site in shares}  # shares by holder

    def take(self, holder: SiteId, reply: msg.Unmasked) -> None:
        """SecAggError unless it brings all that `holder` holds, and nothing else."""
        dealers = set(self._holders[holder])  # who holds for whom goes both ways
        seeds, keys = self._alive & dealers, self._gone & dealers
        if reply.seeds.keys() != seeds or reply.keys.keys() != keys:
            raise SecAggError(
                f"shares of {len(reply.seeds)} seeds and {len(reply.keys)} keys came, "
                f"not of {len(seeds)} and {len(keys)}"
            )
        for site, share in (*reply.seeds.items(), *reply.keys.items()):
            self._had[site][holder] = share  # right or not: rebuild tells
        self._answers += 1

    def enough(self) -> bool:
        return self._answers >= self._threshold and self.fewest() >= self._threshold

    def fewest(self) -> int:
        """Shares of the secret that has the fewest, of those not rebuilt yet; the threshold if all are."""
        left = (len(had) for site, had in self._had.items() if site not in self.secrets)
        return min(left, default=self._threshold)

    def rebuild(self) -> bool:
        """Rebuild what can be; whether that is all. Wrong shares are thrown out, and who sent them is blamed.

        Unfinished when all shares are as they were dealt, and give no secret: then it is their dealer.
        """
        for site, had in self._had.items():
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


def take_out(
    total: NDArray[Any],
    wanted: Wanted,
    sid: bytes,
    keys: Mapping[SiteId, msg.Keys],
    peers: Mapping[SiteId, tuple[SiteId, ...]],
    survivors: Sequence[SiteId],
    spread: Spread,
) -> None:
    """Subtract what survivors added: their self masks, and masks shared with those who are gone."""
    alive, masks = set(survivors), []
    for site, secret in wanted.secrets.items():
        if wanted.kinds[site] == "seed":
            masks.append((self_mask_key(secret, sid, site), -1))
            continue
        pair = KeyPair(secret)
        for peer in alive.intersection(peers[site]):
            shared = pair.agree(keys[peer].mask_key)
            masks.append((pair_mask_key(shared, sid, peer, site), -pair_mask_sign(peer, site)))
    add_masks(total, masks, spread)
