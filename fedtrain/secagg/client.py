"""A site's side of secure aggregation, without I/O: requests go in, replies come out.

`take_part` is one session from top to bottom. What a site checks before each reply stands below it, in the
order of the steps; each check is against what this site decided itself or what other sites signed. The
aggregator's word is taken for nothing but who is still there, and for that only while enough sites are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace
from numpy.typing import NDArray

from ..errors import FedtrainError, SecAggError
from ..messages import Failure, Request, SiteId
from . import graph, shamir
from . import messages as msg
from .fixedpoint import FixedPoint
from .keys import KeyPair, bytes_of, number_of, pair_mask_key, pair_mask_sign, seal, self_mask_key, unseal
from .masking import Spread, add_masks, each
from .roster import Verify, check_fresh, check_names, check_signed, check_signer, holders_of, peers_of

Sign = Callable[[bytes], bytes]
Encode = Callable[[tuple[str, ...], NDArray[Any]], None]  # (names of all metrics, out): writes this site's
# vector, uint [terms.numel(names)], into `out`, which may hold anything before
Step = TypeVar("Step", bound=Request)
# The newest rounds of which shares were given, the last one first, and U3 of each one's sum.
Opened = tuple[tuple[int, tuple[SiteId, ...]], ...]
NEVER: Opened = ()
REMEMBERED = 2  # such rounds: an aggregator whose last model was damaged makes it again from the one before


class Offer(Protocol):
    """What step 0 is asked with: messages.Advertise, or a request like it."""

    @property
    def id(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def terms(self) -> msg.Terms: ...


HAD = 1000  # sessions whose ids a site remembers, so as not to take part twice


@dataclass(frozen=True)
class Policy:
    """What this site insists on, from its own configuration; the aggregator's word changes none of it."""

    federation: str
    run: str
    ring_bits: int
    clip: float
    max_weight: float
    length: int  # Terms.length
    value_bits: int = 0  # 0: as many as the cohort leaves room for
    privacy: str = ""
    min_sites: int = 3  # no sum over fewer
    full_graph: int = 100  # up to so many sites everybody masks with everybody
    corrupt: float = 0.2  # in larger cohorts: this part of the sites may be with the aggregator ...
    dropout: float = 0.2  # ... while this part is lost
    one_sum: bool = True  # a round's update goes into sums over one set of sites only (Client)

    def check(self, terms: msg.Terms) -> None:
        """SecAggError, with the numbers, for terms that would protect less than this, or wrap."""
        n = len(terms.cohort)
        if n < self.min_sites:
            raise SecAggError(f"a cohort of {n} sites: this site sums with {self.min_sites} or more")
        fixed = FixedPoint(n, self.ring_bits, self.clip, self.max_weight, self.value_bits)
        quorum, threshold, degree = self.graph(n)
        for what, theirs, mine in (
            ("federation", terms.federation, self.federation),
            ("run", terms.run, self.run),
            ("ring_bits", terms.ring_bits, self.ring_bits),
            ("value_bits", terms.value_bits, fixed.value_bits),
            ("clip", terms.clip, self.clip),
            ("max_weight", terms.max_weight, self.max_weight),
            ("length", terms.length, self.length),
            ("privacy", terms.privacy, self.privacy),
            ("degree", terms.degree, degree),
        ):
            if theirs != mine:
                raise SecAggError(f"{what} = {theirs!r} is asked for, and this site has {mine!r}")
        for what, asked, least in (
            ("quorum", terms.quorum, quorum),
            ("threshold", terms.threshold, threshold),
        ):
            if not least <= asked <= n:
                raise SecAggError(f"{what} = {asked} of {n} sites is asked for: {least} is the least here")
        if len(terms.nonce) != msg.NONCE_BYTES:
            raise SecAggError(f"a nonce of {len(terms.nonce)} bytes: {msg.NONCE_BYTES} are needed")

    def graph(self, sites: int) -> tuple[int, int, int]:
        """The least quorum and threshold, and the degree (0: full graph), for a cohort of so many.

        In the full graph both are over two thirds: of two lists of survivors, or two kinds of shares of one
        site, each would need so many sites, and then a third of all would have to be with the aggregator.
        """
        if sites <= self.full_graph:
            least = 2 * sites // 3 + 1
            return max(least, self.min_sites), least, 0
        found = graph.degree(sites, self.corrupt, self.dropout)
        return max(sites - int(sites * self.dropout), self.min_sites), found.threshold, found.neighbours


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
        spread: Spread = map,
        opened: Opened = NEVER,
        keep: Callable[[Opened], None] = lambda opened: None,
    ) -> None:
        """`certificate` is what others give to `verify`; `random(n)` gives n unforeseeable bytes.

        `opened` is what an earlier process was last given to `keep`, which returns when it is on disk.
        """
        self.site, self.policy, self.certificate = site, policy, certificate
        self.sign, self.verify, self.random, self.spread = sign, verify, random, spread
        self.opened, self._keep = opened, keep
        self._had: deque[bytes] = deque(maxlen=HAD)
        self._session: Generator[msg.Answer, Request, None] | None = None
        self._sid = b""
        # The last reply, by step and id of its request.
        self._last: tuple[str, msg.Answer | Failure] = ("", Failure(reason=""))
        self._arena: msg.RingArena | None = None

    def begin(
        self, request: Offer, model: bytes, names: tuple[str, ...], encode: Encode
    ) -> msg.Keys | Failure:
        """Step 0, when the update is there: a new session, which ends any other.

        `model`: a hash that binds to the weights that this site trained on. `names`: of its metrics, sorted.
        `encode` is called once, at step 2.
        """
        assert names == tuple(sorted(set(names)))
        if (asked := f"begin {request.id}") != self._last[0]:
            self._end()
            self._sid = request.terms.sid(model)
            self._session = take_part(self, request, self._sid, names, encode)
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
        new = sid not in self._had
        self._had.append(sid)
        return new

    def opens(self, round: int, sites: tuple[SiteId, ...]) -> None:
        """From now on this round's update is in a sum over these sites, and in no other."""
        if self.over(round) != sites:
            opened = ((round, sites), *self.opened)[:REMEMBERED]
            self._keep(opened)
            self.opened = opened

    def over(self, round: int) -> tuple[SiteId, ...] | None:
        """Over whom this round's update is in a sum; None where it is in none that is remembered."""
        return dict(self.opened).get(round)

    def arena(self, terms: msg.Terms, names: tuple[str, ...]) -> msg.RingArena:
        """Room for a vector, in that of the last one: fresh memory costs more than the masks in it."""
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
    site: Client, asked: Offer, sid: bytes, names: tuple[str, ...], encode: Encode
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
        names=names,
        signature=b"",
    )
    keys = replace(keys, signature=sign(msg.keys_statement(sid, me, keys)))

    # 1: shares of the two secrets, for the neighbours of one roster
    share = due(msg.Share, (yield keys))
    roster = Roster.of(site, terms, sid, keys, share)
    shared = {peer: seal_pair.agree(roster.keys[peer].seal_key) for peer in roster.peers}
    masks = {
        peer: pair_mask_key(mask_pair.agree(roster.keys[peer].mask_key), sid, me, peer)
        for peer in roster.peers
    }
    seeds, mask_keys = (deal(secret, roster, terms, random) for secret in (seed, mask_pair.secret))
    sealed = {
        holder: seal_shares(roster, shared.get(holder), sid, holder, seeds[holder], mask_keys[holder])
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
        held[me] = (seeds[me], mask_keys[me])
    arena = site.arena(terms, share.names)
    encode(share.names, arena.vector)
    own_mask = self_mask_key(seed, sid, me)
    add_masks(
        arena.vector,
        [(own_mask, 1), *((masks[peer], pair_mask_sign(me, peer)) for peer in mask.sealed)],
        site.spread,
        arena.wrote,
    )
    signature = sign(msg.masked_statement(sid, roster.hash, arena.digest))

    # 3: one list of survivors
    agree = due(msg.Agree, (yield msg.Masked(vector=arena, signature=signature)))
    check_survivors(site, terms, roster, mask, agree)
    survivors = msg.survivors_statement(sid, roster.hash, agree.sites)

    # 4: of each site whose shares are held here, one
    unmask = due(msg.Unmask, (yield msg.Agreed(signature=sign(survivors))))
    check_agreed(site, terms, roster, agree, unmask, survivors)
    site.opens(terms.round, agree.sites)
    alive = set(agree.sites)
    yield msg.Unmasked(
        seeds={peer: seed_share for peer, (seed_share, _) in held.items() if peer in alive},
        keys={peer: key_share for peer, (_, key_share) in held.items() if peer not in alive},
    )


def due(step: type[Step], request: Request) -> Step:
    """The request, which must be of this step: steps are taken in order, each once."""
    if not isinstance(request, step):
        raise SecAggError(f"{type(request).__name__} was asked when {step.__name__} was due")
    return request


# --- 0


def check_terms(site: Client, asked: Offer, sid: bytes) -> None:
    """SecAggError unless this site may take part under these terms."""
    terms = asked.terms
    site.policy.check(terms)
    if terms.round != asked.round:
        raise SecAggError(f"round {asked.round + 1} is asked for, under terms for round {terms.round + 1}")
    proof = msg.statement("own certificate", sid)
    name, fingerprint = site.verify(site.certificate, proof, site.sign(proof))
    if terms.cohort.get(site.site) != fingerprint or name != site.site:
        raise SecAggError("the cohort does not have this site with its present certificate")
    if not site.sid_is_new(sid):
        raise SecAggError("this session was had before")
    last, over = site.opened[0] if site.opened else (-1, ())
    if site.policy.one_sum and terms.round < last and site.over(terms.round) is None:
        raise SecAggError(
            f"round {terms.round + 1} after a sum of round {last + 1} over {len(over)} sites was unmasked "
            f"here. A run that begins again needs another run.name"
        )


# --- 1


@dataclass(frozen=True)
class Roster:
    """U1, as this site was shown it and as it checked it."""

    me: SiteId
    sites: tuple[SiteId, ...]  # sorted; place + 1 is a site's x in Shamir's polynomials
    hash: bytes
    keys: dict[SiteId, msg.Keys]  # of `peers` and this site
    peers: tuple[SiteId, ...]  # whom this site masks with
    holders: tuple[SiteId, ...]  # who holds its shares: in the full graph itself, too

    @classmethod
    def of(cls, site: Client, terms: msg.Terms, sid: bytes, mine: msg.Keys, share: msg.Share) -> Roster:
        """SecAggError unless every key is a different one, and signed for this session by its site."""
        me, keys = site.site, share.roster
        if keys.get(me) != mine:
            raise SecAggError("the roster has another key for this site than it sent")
        lines = {name: msg.entry_hash(name, entry) for name, entry in keys.items()}
        if share.lines:
            if wrong := lines.items() - share.lines.items():
                raise SecAggError(f"the roster has other keys for {len(wrong)} sites than its lines say")
            lines = share.lines
        sites = tuple(sorted(lines))
        check_subset("the roster", sites, terms.cohort, terms.quorum)
        seed = msg.graph_seed(sid, lines)
        peers = peers_of(me, sites, terms.degree, seed)
        if keys.keys() != {me, *peers}:
            raise SecAggError(f"the roster has the keys of {len(keys)} sites, not of this site and its peers")
        each(site.spread, lambda peer: check_signed(peer, keys[peer], terms, sid, site.verify), peers)
        used = {mine.mask_key, mine.seal_key}
        for peer in peers:
            check_fresh(peer, keys[peer], used)
        check_names("the roster", share.names)
        for name, entry in keys.items():
            if missing := set(entry.names).difference(share.names):
                raise SecAggError(f"{len(missing)} of {name}'s metrics have no place in the vector")
        holders = holders_of(me, sites, terms.degree, seed)
        return cls(me, sites, msg.roster_hash(seed, share.names), keys, peers, holders)


def deal(
    secret: bytes, roster: Roster, terms: msg.Terms, random: Callable[[int], bytes]
) -> dict[SiteId, bytes]:
    """Shares of one secret, by holder."""
    place = {name: i + 1 for i, name in enumerate(roster.sites)}
    shares = shamir.share(
        number_of(secret),
        [place[holder] for holder in roster.holders],
        terms.threshold,
        lambda: number_of(random(32)) % shamir.PRIME,  # off by 2^-250 from uniform
    )
    return dict(zip(roster.holders, map(bytes_of, shares), strict=True))


def seal_shares(
    roster: Roster, shared: bytes | None, sid: bytes, holder: SiteId, seed: bytes, key: bytes
) -> msg.Sealed:
    """Two shares for their holder; with no `shared` secret the holder is the site, and only commits."""
    commitments = (
        msg.share_commitment("seed", sid, roster.me, holder, seed),
        msg.share_commitment("key", sid, roster.me, holder, key),
    )
    if shared is None:
        return msg.Sealed(b"", *commitments)
    beside = b"".join((roster.hash, *commitments))
    return msg.Sealed(seal(shared, sid, roster.me, holder, seed + key, beside), *commitments)


# --- 2


def check_dealers(terms: msg.Terms, roster: Roster, mask: msg.Mask) -> None:
    """SecAggError unless enough sites dealt, and all of this site's peers among them dealt to it."""
    dealers = mask.sites
    check_subset("the list of those who dealt shares", dealers, roster.sites, terms.quorum)
    check_present("the list of those who dealt shares", dealers, roster.me)
    check_holders(terms, roster, dealers)
    if mask.sealed.keys() != set(roster.peers).intersection(dealers):
        raise SecAggError("shares came from others than this site's peers who dealt")


def open_shares(
    roster: Roster, shared: bytes, sid: bytes, site: SiteId, sealed: msg.Sealed
) -> tuple[bytes, bytes]:
    """The shares of `site` that this one is to keep.

    SecAggError unless `site` sealed them under this very roster, and they are what it committed to.
    """
    beside = b"".join((roster.hash, sealed.seed, sealed.key))
    text = unseal(shared, sid, site, roster.me, sealed.text, beside)
    seed, key = text[: len(text) // 2], text[len(text) // 2 :]
    if (
        msg.share_commitment("seed", sid, site, roster.me, seed) != sealed.seed
        or msg.share_commitment("key", sid, site, roster.me, key) != sealed.key
    ):
        raise SecAggError(f"{site}'s shares for {roster.me} are not those that it told the aggregator")
    return seed, key


# --- 3


def check_survivors(site: Client, terms: msg.Terms, roster: Roster, mask: msg.Mask, agree: msg.Agree) -> None:
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
            f"under another run.name, with `fedtrain aggregator --from` this run"
        )


# --- 4


def check_agreed(
    site: Client, terms: msg.Terms, roster: Roster, agree: msg.Agree, unmask: msg.Unmask, statement: bytes
) -> None:
    """SecAggError unless so many holders of this site's shares signed its list that no other has as many."""
    voters = set(roster.holders).intersection(agree.sites)
    if not unmask.signatures.keys() <= voters:
        raise SecAggError("signatures came from others than the survivors among this site's peers")
    each(
        site.spread,
        lambda peer: check_signer(site.verify, peer, roster.keys, statement, unmask.signatures[peer]),
        sorted(unmask.signatures.keys() - {site.site}),
    )
    agreed = len(unmask.signatures.keys() | ({site.site} & voters))
    if agreed < terms.threshold:
        raise SecAggError(f"{agreed} sites signed the list of survivors, {terms.threshold} must")


# --- at several steps


def check_subset(
    what: str, sites: tuple[SiteId, ...], of: Collection[SiteId] | Mapping[SiteId, bytes], quorum: int
) -> None:
    """Sorted, nobody twice, nobody new, and enough."""
    if sites != tuple(sorted(set(sites))):
        raise SecAggError(f"{what} is not sorted, or has a site twice")
    if strangers := set(sites).difference(of):
        raise SecAggError(f"{what} has {len(strangers)} sites that were not there before")
    if len(sites) < quorum:
        raise SecAggError(f"{what} has {len(sites)} sites: {quorum} are the least")


def check_present(what: str, sites: Iterable[SiteId], me: SiteId) -> None:
    if me not in sites:
        raise SecAggError(f"{what} is without this site")


def check_holders(terms: msg.Terms, roster: Roster, sites: Iterable[SiteId]) -> None:
    """Fewer could not unmask; and who is left with fewer peers than that is hidden by fewer, too."""
    there = len(set(roster.holders).intersection(sites))
    if there < terms.threshold:
        raise SecAggError(
            f"{there} of the {len(roster.holders)} holders of this site's shares are left: "
            f"{terms.threshold} are needed"
        )
