"""U1: whose keys are in a session, and who masks with whom. Both ends check and derive it alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from ..errors import SecAggError
from ..messages import MAX_SUMS, SiteId, numbers_in
from . import graph
from .keys import SECRET_BYTES, check_public
from .messages import MAX_NAME, MAX_NAMES, Keys, Terms, keys_statement

Verify = Callable[[bytes, bytes, bytes], tuple[SiteId, bytes]]  # (certificate, message, signature) ->
# (the site's name, its certificate's fingerprint); raises FedtrainError unless all is as it must be.


def check_signed(site: SiteId, entry: Keys, terms: Terms, sid: bytes, verify: Verify) -> None:
    """SecAggError, or the verifier's own error, unless `site` signed these keys for this session."""
    statement = keys_statement(sid, site, entry)
    name, fingerprint = verify(entry.certificate, statement, entry.signature)
    if name != site or fingerprint != terms.cohort[site]:
        raise SecAggError(f"{site}'s keys are signed by {name}, or with another certificate than agreed")


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
