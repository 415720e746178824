"""A site's side of secure aggregation, without I/O: requests go in, replies come out.

`take_part` is one session from top to bottom. What a site checks before each reply stands below it, in the
order of the steps; each check is against what this site decided itself or what other sites signed. The
aggregator's word is taken for nothing but who is still there, and for that only while enough sites are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ..errors import FedtrainError, SecAggError
from ..messages import Failure, Request, SiteId
from . import messages as msg
from . import shamir
from .checksum import Checksums
from .keys import (
    SECRET_BYTES,
    KeyPair,
    bytes_of,
    number_of,
    pair_mask_key,
    pair_mask_sign,
    seal,
    self_mask_key,
    unseal,
)
from .masking import Parallel, RingVector, add_masks, exhaust, serial
from .policy import Policy
from .roster import KeyRoster, Verify, check_signer, check_subset

Sign = Callable[[bytes], bytes]
Advertisement = msg.Advertise | msg.AdvertiseEvaluation | msg.AdvertiseTally  # the request of step 0
Step = TypeVar("Step", bound=Request)
# The newest rounds of which shares were given, the last one first, and U3 of each one's sum.
Opened = tuple[tuple[int, tuple[SiteId, ...]], ...]
NEVER: Opened = ()
REMEMBERED = 2  # such rounds: an aggregator whose last model was damaged makes it again from the one before


class Summand(Protocol):
    """What a site gives into a sum."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sized names of its metrics, sorted."""

    def write(self, names: tuple[str, ...], out: RingVector) -> None:
        """Write the vector, with the metrics of all these names, over `out` [terms.numel(names)]. Called
        once, at step 2."""


class Owed(Struct, frozen=True):
    """What a site needs to check the sum of a session that it was in, when it is shown that sum."""

    sid: bytes
    round: int
    seed: bytes  # of the checksums; b"": the sum has none, as not all sites share a key
    cohort: int  # sites that were asked
    sites: tuple[SiteId, ...]  # U3
    names: tuple[str, ...]  # of the metrics in the sum
    version: int = 0  # messages.VERSION: what one version adds up, another reads as something else


class Guards(Protocol):
    """Remembers the sums that were opened, and refuses one more over `sites` with a SecAggError."""

    def check(self, sites: tuple[SiteId, ...], /) -> None: ...
    def opens(self, sites: tuple[SiteId, ...], /) -> None:
        """Before any share leaves: it is on the disk when this returns."""


def ignored(owed: Owed) -> None:
    """Of a site that checks no sums."""


SESSIONS = 1000  # so many sessions' ids a site remembers, so as not to take part twice


class Client:
    """One site, through any number of sessions, one at a time. Nothing of a session is kept after its end.

    Two sums of one update over different sites differ by single sites' updates, so with Policy.one_sum a
    round's update is unmasked in one set of survivors only, in however many attempts, and none of an earlier
    round than those that are remembered. This alone must outlive the process, or whoever makes it end learns
    the difference.
    """

    def __init__(
        self,
        site: SiteId,
        policy: Policy,
        *,
        certificate: bytes,
        sign: Sign,
        verify: Verify,
        random: Callable[[int], bytes] = os.urandom,
        parallel: Parallel = serial,
        opened: Opened = NEVER,
        keep: Callable[[Opened], None] | None = None,
        owe: Callable[[Owed], None] = ignored,
    ) -> None:
        """
        Args:
            certificate: What other sites give to `verify`.
            random: random(n) gives n unforeseeable bytes.
            opened: What an earlier process of this site last gave to `keep`.
            keep: Writes it to disk, and returns when it is there; None: it is forgotten.
            owe: Remembers what a sum has to be checked with, before it can be opened.
        """
        self.site, self.policy, self.certificate = site, policy, certificate
        self.sign, self.verify, self.random, self.parallel = sign, verify, random, parallel
        self.opened, self._keep, self.owe = opened, keep, owe
        self.guard: Guards | None = None  # of the session that begins next
        self._sids: deque[bytes] = deque(maxlen=SESSIONS)
        self._session: Generator[msg.Answer, Request, None] | None = None
        self._sid = b""
        # The last reply, by step and id of its request.
        self._last: tuple[str, msg.Answer | Failure] = ("", Failure(reason=""))
        self._arena: msg.RingArena | None = None

    def begin(
        self, request: Advertisement, model: bytes, own: Summand, checked: bool | None = None
    ) -> msg.Keys | Failure:
        """Step 0, when the update is there: a new session, which ends any other.

        `model`: a hash that binds to the weights that this site trained on. `checked`: whether the site
        checked the sum that the weights were made of; None: it doesn't matter.
        """
        assert own.names == tuple(sorted(set(own.names)))
        if (asked := f"begin {request.id}") != self._last[0]:
            self._end()
            self._sid = request.terms.sid(model)
            self._session = take_part(self, request, self._sid, own, checked)
            self._advance(asked, None)
        reply = self._last[1]
        assert isinstance(reply, msg.Keys | Failure), reply
        return reply

    def answer(self, request: msg.Share | msg.Mask | msg.Agree | msg.Unmask) -> msg.Answer | Failure:
        """Steps 1 to 4. The last request again gets the last reply again; a Failure ends the session."""
        if (asked := f"{type(request).__name__} {request.id}") == self._last[0]:
            return self._last[1]
        if self._session is None or request.sid != self._sid:
            return Failure(
                reason=f"{self.site} is in no such session: it has ended, or this site was restarted"
            )
        self._advance(asked, request)
        return self._last[1]

    def sid_is_new(self, sid: bytes) -> bool:
        """Whether this site never took part in it; from now on it did."""
        new = sid not in self._sids
        self._sids.append(sid)
        return new

    def opens(self, round: int, sites: tuple[SiteId, ...]) -> None:
        """From now on this round's update is in a sum over these sites, and in no other."""
        if self.guard is not None:
            self.guard.opens(sites)
        if self.over(round) != sites:
            opened = ((round, sites), *self.opened)[:REMEMBERED]
            if self._keep is not None:
                self._keep(opened)
            self.opened = opened

    def over(self, round: int) -> tuple[SiteId, ...] | None:
        """Over whom this round's update is in a sum; None where it is in none that is remembered."""
        return dict(self.opened).get(round)

    def arena(self, terms: msg.Terms, names: tuple[str, ...]) -> msg.RingArena:
        """An arena for the vector, in the memory of the last one: new memory costs more than its masks."""
        schema, old = terms.schema(names), self._arena
        self._arena = msg.RingArena(schema, old.give_up() if old and old.schema == schema else None)
        return self._arena

    def _advance(self, asked: str, request: Request | None) -> None:
        assert self._session is not None
        reply: msg.Answer | Failure
        try:
            reply = self._session.send(request)  # type: ignore[arg-type]  # None starts a generator
        except FedtrainError as e:
            reply = Failure(reason=f"{self.site} refuses: {e}")
        if isinstance(reply, Failure | msg.Unmasked):
            self._end()
        self._last = (asked, reply)

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()  # its secrets go with its frame
        self._session, self._sid = None, b""


def take_part(
    site: Client, asked: Advertisement, sid: bytes, own: Summand, checked: bool | None
) -> Generator[msg.Answer, Request, None]:
    """One session. SecAggError where this site will not go on; then nothing of it can be opened any more."""
    me, sign, random, terms = site.site, site.sign, site.random, asked.terms

    # 0: fresh keys
    check_terms(site, asked, sid)
    mask_pair, seal_pair = KeyPair(random(32)), KeyPair(random(32))
    seed = bytes_of(number_of(random(32)) % shamir.PRIME)
    keys = msg.Keys(
        certificate=site.certificate,
        mask_key=mask_pair.public,
        seal_key=seal_pair.public,
        commitment=msg.seed_commitment(sid, me, seed),
        names=own.names,
        checked=bool(checked),
        signature=b"",
    )
    keys = replace(keys, signature=sign(msg.keys_statement(sid, me, keys)))

    # 1: shares of the two secrets, for the neighbours of one roster
    share = due(msg.Share, (yield keys))
    roster = KeyRoster.of(terms, sid, keys, share, me, site.verify, site.parallel)
    if checked is not None:
        check_checked(roster)
    shared = {peer: seal_pair.agree(roster.keys[peer].seal_key) for peer in roster.peers}
    masks = {
        peer: pair_mask_key(mask_pair.agree(roster.keys[peer].mask_key), sid, me, peer)
        for peer in roster.peers
    }
    seeds, mask_keys = (deal(secret, roster, terms, random) for secret in (seed, mask_pair.secret))
    part = random(SECRET_BYTES) if terms.verify else b""  # of the seed of this session's checksums
    sealed = {
        holder: seal_shares(roster, shared.get(holder), sid, holder, seeds[holder], mask_keys[holder], part)
        for holder in roster.holders
    }
    dealt = msg.dealt_hash(sealed)

    # 2: the vector under its masks, for those who dealt
    signature = sign(msg.shares_statement(sid, roster.hash, dealt))
    mask = due(msg.Mask, (yield msg.Shares(sealed=sealed, signature=signature)))
    check_dealers(terms, roster, mask)
    held = {
        peer: open_shares(roster, shared[peer], sid, peer, sealed) for peer, sealed in mask.sealed.items()
    }
    if me in roster.holders:
        held[me] = (seeds[me], mask_keys[me], part)
    arena, numel = site.arena(terms, share.names), terms.numel(share.names)
    own.write(share.names, arena.vector[:numel])
    check_seed = msg.check_seed(sid, roster.hash, {peer: part for peer, (_, _, part) in held.items()})
    added = [(masks[peer], pair_mask_sign(me, peer)) for peer in mask.sealed]
    added.insert(0, (self_mask_key(seed, sid, me), 1))
    if terms.verify:
        checksums = Checksums(check_seed, terms.fixed_point, site.parallel)
        checksums.mask(arena.vector, numel, me, added, arena.wrote)
    else:
        add_masks(arena.vector, added, site.parallel, arena.wrote)
    signature = sign(msg.masked_statement(sid, roster.hash, arena.digest))

    # 3: one list of survivors
    agree = due(msg.Agree, (yield msg.Masked(vector=arena, signature=signature)))
    check_survivors(site, terms, roster, mask, agree)
    survivors = msg.survivors_statement(sid, roster.hash, agree.sites)
    if isinstance(asked, msg.Advertise):  # now, for who has enough shares waits for no others
        known = check_seed if terms.verify else b""
        site.owe(Owed(sid, terms.round, known, len(terms.cohort), agree.sites, share.names, msg.VERSION))

    # 4: of each site whose shares are held here, one
    unmask = due(msg.Unmask, (yield msg.Agreed(signature=sign(survivors))))
    check_agreed(site, terms, roster, agree, unmask, survivors)
    site.opens(terms.round, agree.sites)
    alive = set(agree.sites)
    yield msg.Unmasked(
        seeds={peer: seed_share for peer, (seed_share, _, _) in held.items() if peer in alive},
        keys={peer: key_share for peer, (_, key_share, _) in held.items() if peer not in alive},
    )


def due(step: type[Step], request: Request) -> Step:
    """The request, which must be of this step: steps are taken in order, each once."""
    if not isinstance(request, step):
        raise SecAggError(f"{type(request).__name__} was asked when {step.__name__} was due")
    return request


# --- 0


def check_terms(site: Client, asked: Advertisement, sid: bytes) -> None:
    """SecAggError unless this site may take part under these terms."""
    terms = asked.terms
    site.policy.check(terms)
    if terms.round != asked.round:
        raise SecAggError(f"round {asked.round + 1} is asked for, under terms for round {terms.round + 1}")
    proof = msg.statement("own certificate", sid)
    name, fingerprint = site.verify(site.certificate, proof, site.sign(proof))
    if terms.cohort.get(site.site) != fingerprint or name != site.site:
        raise SecAggError("the cohort does not have this site with its present key")
    if not site.sid_is_new(sid):
        raise SecAggError("this session was had before")
    last, over = site.opened[0] if site.opened else (-1, ())
    if site.policy.one_sum and terms.round < last and site.over(terms.round) is None:
        raise SecAggError(
            f"round {terms.round + 1} after a sum of round {last + 1} over {len(over)} sites was unmasked "
            f"here. A run that begins again needs another run.name"
        )


# --- 1


def check_checked(roster: KeyRoster) -> None:
    """SecAggError unless a third of the sites checked the sum that the session's model was made of: so one
    that is honest did, where fewer than a third lie. All signed what they say, and the hash of that model."""
    checked, least = sum(keys.checked for keys in roster.keys.values()), -(-len(roster.sites) // 3)
    if checked < least:
        raise SecAggError(
            f"{checked} of {len(roster.sites)} sites checked the sum that this model was made of: {least} "
            f"must. If the others are gone for good, go on under another run.name, with `fedtrain aggregator "
            f"--from` this run"
        )


def deal(
    secret: bytes, roster: KeyRoster, terms: msg.Terms, random: Callable[[int], bytes]
) -> dict[SiteId, bytes]:
    """Shares of one secret, by holder."""
    place = {name: i + 1 for i, name in enumerate(roster.sites)}
    shares = shamir.share(
        number_of(secret), [place[holder] for holder in roster.holders], terms.threshold, random
    )
    return dict(zip(roster.holders, map(bytes_of, shares), strict=True))


def seal_shares(
    roster: KeyRoster, shared: bytes | None, sid: bytes, holder: SiteId, seed: bytes, key: bytes, part: bytes
) -> msg.SealedShares:
    """Two shares for their holder, and a `part` of the checksums' seed; with no `shared` secret the holder is
    the site, and only commits."""
    commitments = (
        msg.share_commitment("seed", sid, roster.me, holder, seed),
        msg.share_commitment("key", sid, roster.me, holder, key),
    )
    if shared is None:
        return msg.SealedShares(b"", *commitments)
    beside = b"".join((roster.hash, *commitments))
    return msg.SealedShares(seal(shared, sid, roster.me, holder, seed + key + part, beside), *commitments)


# --- 2


def check_dealers(terms: msg.Terms, roster: KeyRoster, mask: msg.Mask) -> None:
    """SecAggError unless enough sites dealt, and all of this site's peers among them dealt to it."""
    dealers = mask.sites
    check_subset("the list of those who dealt shares", dealers, roster.sites, terms.quorum)
    check_present("the list of those who dealt shares", dealers, roster.me)
    check_holders(terms, roster, dealers)
    if mask.sealed.keys() != set(roster.peers).intersection(dealers):
        raise SecAggError("shares came from others than this site's peers who dealt")


def open_shares(
    roster: KeyRoster, shared: bytes, sid: bytes, site: SiteId, sealed: msg.SealedShares
) -> tuple[bytes, bytes, bytes]:
    """The shares of `site` that this one is to keep, and its part of the checksums' seed.

    SecAggError unless `site` sealed them under this very roster, and they are what it committed to.
    """
    beside = b"".join((roster.hash, sealed.seed, sealed.key))
    text = unseal(shared, sid, site, roster.me, sealed.text, beside)
    seed, key, part = text[:SECRET_BYTES], text[SECRET_BYTES : 2 * SECRET_BYTES], text[2 * SECRET_BYTES :]
    if (
        msg.share_commitment("seed", sid, site, roster.me, seed) != sealed.seed
        or msg.share_commitment("key", sid, site, roster.me, key) != sealed.key
    ):
        raise SecAggError(f"{site}'s shares for {roster.me} are not those that it told the aggregator")
    return seed, key, part


# --- 3


def check_survivors(
    site: Client, terms: msg.Terms, roster: KeyRoster, mask: msg.Mask, agree: msg.Agree
) -> None:
    """SecAggError unless a sum over these sites may be opened."""
    sites = agree.sites
    check_subset("the list of survivors", sites, mask.sites, terms.quorum)
    check_present("the list of survivors", sites, site.site)
    check_holders(terms, roster, sites)
    over = site.over(terms.round)
    if site.policy.one_sum and over is not None and sites != over:
        raise SecAggError(
            f"round {terms.round + 1} was unmasked here in a sum over {len(over)} sites, and one over others "
            f"would give away what differs. Ask for these {len(over)} again; if one is gone for good, go on "
            f"under another run.name, from a model that is trained further"
        )
    if site.guard is not None:
        site.guard.check(sites)


# --- 4


def check_agreed(
    site: Client, terms: msg.Terms, roster: KeyRoster, agree: msg.Agree, unmask: msg.Unmask, statement: bytes
) -> None:
    """SecAggError unless so many holders of this site's shares signed its list that no other has as many."""
    voters = set(roster.holders).intersection(agree.sites)
    if not unmask.signatures.keys() <= voters:
        raise SecAggError("signatures came from others than the survivors among this site's peers")

    def check(peer: SiteId) -> None:
        check_signer(site.verify, peer, roster.keys, statement, unmask.signatures[peer])

    with site.parallel(check, sorted(unmask.signatures.keys() - {site.site})) as mine:
        exhaust(mine)
    agreed = len(unmask.signatures.keys() | ({site.site} & voters))
    if agreed < terms.threshold:
        raise SecAggError(f"{agreed} sites signed the list of survivors, {terms.threshold} must")


# --- at several steps


def check_present(what: str, sites: Iterable[SiteId], me: SiteId) -> None:
    """SecAggError unless this site is among them."""
    if me not in sites:
        raise SecAggError(f"{what} is without this site")


def check_holders(terms: msg.Terms, roster: KeyRoster, sites: Iterable[SiteId]) -> None:
    """SecAggError when fewer holders of this site's shares are left than it takes to unmask it: then fewer
    peers hide it, too."""
    there = len(set(roster.holders).intersection(sites))
    if there < terms.threshold:
        raise SecAggError(
            f"{there} of the {len(roster.holders)} holders of this site's shares are left: "
            f"{terms.threshold} are needed"
        )
