"""U1: whose keys are in a session, and who masks with whom. Both ends check and derive it alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Protocol

from ..errors import SecAggError
from ..messages import MAX_SUMS, SiteId, misfits, numbers_in
from . import graph
from .keys import SECRET_BYTES, check_public
from .masking import Parallel, exhaust
from .messages import (
    MAX_NAME,
    MAX_NAMES,
    Keys,
    Share,
    Terms,
    entry_hash,
    graph_seed,
    keys_statement,
    roster_hash,
)

FEWEST = 3  # sites that give a metric which is summed: in a sum over two either one is the other's secret
# (certificate, message, signature) -> (the site's name, its key's fingerprint)
Verify = Callable[[bytes, bytes, bytes], tuple[SiteId, bytes]]


class Verifies(Protocol):
    """Checks who signed a message: a pki.Verifier."""

    def verify(self, certificate: bytes, message: bytes, signature: bytes, /) -> tuple[SiteId, bytes]:
        """The name of the site, and its key's fingerprint. FedtrainError unless the certificate is
        one of the federation, valid and not revoked, and the signature is by its key over the message."""


def check_signed(site: SiteId, entry: Keys, terms: Terms, sid: bytes, verify: Verify) -> None:
    """SecAggError, or the verifier's own error, unless `site` signed these keys for this session."""
    statement = keys_statement(sid, site, entry)
    name, fingerprint = verify(entry.certificate, statement, entry.signature)
    if name != site or fingerprint != terms.cohort[site]:
        raise SecAggError(f"{site}'s keys are signed by {name}, or with another key than agreed")


def check_fresh(site: SiteId, entry: Keys, used: set[bytes]) -> None:
    """SecAggError unless these signed keys are good ones, and of nobody else.

    `used`: the public keys of other entries; this one's are added.
    """
    check_public(site, entry.mask_key, entry.seal_key)
    check_names(site, entry.names)
    publics = {entry.mask_key, entry.seal_key}
    if len(entry.commitment) != SECRET_BYTES or len(publics) < 2 or publics & used:
        raise SecAggError(f"{site} offers a key for two purposes, or one that another site has, too")
    used |= publics


def check_names(site: SiteId, names: tuple[str, ...]) -> None:
    if names != tuple(sorted(set(names))) or len(names) > MAX_NAMES or any(len(n) > MAX_NAME for n in names):
        raise SecAggError(
            f"{site} has {len(names)} names of metrics: they must be sorted, different, at most {MAX_NAMES}, "
            f"and none longer than {MAX_NAME} characters"
        )
    if (numbers := numbers_in(names) - len(names)) > MAX_SUMS:
        raise SecAggError(f"{site} has metrics of {numbers} numbers, at most {MAX_SUMS} are allowed")


def common_names(names: Mapping[SiteId, Collection[str]]) -> tuple[str, ...]:
    """The metrics that a session sums, sorted: those that more than half of its sites give, and FEWEST at
    least. No site can make the vector longer by names of its own, or have a sum over itself. SecAggError for
    more than MAX_NAMES."""
    given, least = Counter(chain.from_iterable(names.values())), max(FEWEST, len(names) // 2 + 1)
    found = tuple(sorted(name for name, sites in given.items() if sites >= least))
    if len(found) > MAX_NAMES:
        raise SecAggError(f"most sites have {len(found)} metrics, at most {MAX_NAMES} are allowed")
    return found


def check_summed(
    summed: Collection[str], names: Mapping[SiteId, Collection[str]], mine: Collection[str]
) -> None:
    """SecAggError when a metric of all these sites is not summed, or one of this site is that few of them
    have. `names`: of the sites whose keys this one sees, which are `common_names` of more."""
    given = Counter(chain.from_iterable(names.values()))
    if missing := [name for name, sites in given.items() if sites == len(names) and name not in summed]:
        raise SecAggError(f"{len(missing)} metrics of all sites have no place in the vector")
    if few := [name for name in mine if name in summed and given[name] < FEWEST]:
        raise SecAggError(
            f"the metric {few[0]!r} would be summed over {given[few[0]]} sites: {FEWEST} are the least"
        )


def check_signer(
    verify: Verify, site: SiteId, keys: Mapping[SiteId, Keys], statement: bytes, signature: bytes
) -> None:
    """The verifier's error, unless `site` signed, with the certificate of its checked entry."""
    verify(keys[site].certificate, statement, signature)


def peers_of(site: SiteId, sites: tuple[SiteId, ...], degree: int, seed: bytes) -> tuple[SiteId, ...]:
    """Whom a site masks with, sorted: its neighbours in a graph drawn from `seed`, messages.graph_seed.

    Degree 0 is the full graph: all others.
    """
    place = sites.index(site)
    if degree == 0:
        return sites[:place] + sites[place + 1 :]
    return tuple(sites[i] for i in _neighbours(len(sites), degree, seed)[place])


def holders_of(site: SiteId, sites: tuple[SiteId, ...], degree: int, seed: bytes) -> tuple[SiteId, ...]:
    """Who holds a site's shares: in the full graph all, it too (CCS 2017), else its peers (CCS 2020)."""
    return sites if degree == 0 else peers_of(site, sites, degree, seed)


@lru_cache(maxsize=2)
def _neighbours(sites: int, degree: int, seed: bytes) -> list[list[int]]:
    return graph.neighbours(sites, degree, seed)


def check_subset(
    what: str, sites: tuple[SiteId, ...], of: Collection[SiteId] | Mapping[SiteId, bytes], quorum: int
) -> None:
    """SecAggError unless the list is sorted, has each site once, only sites of the list before it (`of`), and
    as many as the quorum."""
    if sites != tuple(sorted(set(sites))):
        raise SecAggError(f"{what} is not sorted, or has a site twice")
    if strangers := set(sites).difference(of):
        raise SecAggError(f"{what} has {len(strangers)} sites that were not there before")
    if len(sites) < quorum:
        raise SecAggError(f"{what} has {len(sites)} sites: {quorum} are the least")


@dataclass(frozen=True)
class KeyRoster:
    """U1 as one site was shown it, and as the site checked it."""

    me: SiteId
    sites: tuple[SiteId, ...]  # sorted; a site's place + 1 is its x in Shamir's polynomials
    hash: bytes
    keys: dict[SiteId, Keys]  # of `peers` and this site
    peers: tuple[SiteId, ...]  # whom this site masks with
    holders: tuple[SiteId, ...]  # who holds its shares: in the full graph itself, too

    @classmethod
    def of(
        cls,
        terms: Terms,
        sid: bytes,
        mine: Keys,
        share: Share,
        me: SiteId,
        verify: Verify,
        parallel: Parallel,
    ) -> KeyRoster:
        """SecAggError unless every key is a different one, and signed for this session by its site."""
        keys = share.roster
        if keys.get(me) != mine:
            raise SecAggError("the roster has another key for this site than it sent")
        lines = {name: entry_hash(name, entry) for name, entry in keys.items()}
        if share.lines:
            if wrong := lines.items() - share.lines.items():
                raise SecAggError(f"the roster has other keys for {len(wrong)} sites than its lines say")
            lines = share.lines
        sites = tuple(sorted(lines))
        check_subset("the roster", sites, terms.cohort, terms.quorum)
        seed = graph_seed(sid, lines)
        peers = peers_of(me, sites, terms.degree, seed)
        if keys.keys() != {me, *peers}:
            raise SecAggError(f"the roster has the keys of {len(keys)} sites, not of this site and its peers")

        def check(peer: SiteId) -> None:
            check_signed(peer, keys[peer], terms, sid, verify)

        with parallel(check, peers) as checks:
            exhaust(checks)
        used = {mine.mask_key, mine.seal_key}
        for peer in peers:
            check_fresh(peer, keys[peer], used)
        check_names("the roster", share.names)
        check_summed(share.names, {name: entry.names for name, entry in keys.items()}, mine.names)
        holders = holders_of(me, sites, terms.degree, seed)
        return cls(me, sites, roster_hash(seed, share.names), keys, peers, holders)


# --- the aggregator's end


def unfitting(names: Mapping[SiteId, tuple[str, ...]]) -> dict[SiteId, str]:
    """Sites whose metrics can't be summed with the others', and why: a metric has another size than at most
    sites, or all metrics together are too many numbers, and these sites have the most."""
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
    keys: Mapping[SiteId, Keys],
    lines: dict[SiteId, bytes],
    peers: Mapping[SiteId, tuple[SiteId, ...]],
    names: tuple[str, ...],
) -> dict[SiteId, Share]:
    """What each site is shown: its own keys and its peers', and a hash of every site's. In the full graph all
    sites are shown one object."""
    if all(len(found) == len(keys) - 1 for found in peers.values()):
        whole = Share(id=request_id, sid=sid, roster=dict(keys), lines={}, names=names)
        return dict.fromkeys(keys, whole)
    return {
        site: Share(
            id=request_id,
            sid=sid,
            roster={name: keys[name] for name in sorted({site, *peers[site]})},
            lines=lines,
            names=names,
        )
        for site in keys
    }
