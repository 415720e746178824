"""Who masks with whom: everybody with everybody, or with k others on a ring; and how many of them can unmask.

With k neighbours instead of n − 1 each (Bell et al., Secure single-server aggregation with (poly)logarithmic
overhead, CCS 2020) a site's work and the shares that it makes grow with k, far slower than n. The graph is
Harary's: sites stand on a ring in an order that nobody chose, each joined to those up to k/2 away.

`degree` finds the smallest k, and a threshold t of shares, for which all that must not happen is improbable.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Degree:
    """How many neighbours each site has, and how many shares of theirs open its secret."""

    neighbours: int  # k
    threshold: int  # t


def degree(
    sites: int,
    adversaries: float,
    dropouts: float,
    *,
    semi_malicious: bool = True,
    security: float = 40.0,
    correctness: float = 20.0,
) -> Degree:
    """The least (k, t) for n sites, a fraction of them with the aggregator, another one lost.

    Fails to keep a secret with probability at most 2^-security, to finish with at most 2^-correctness.
    The full graph where no k < n − 1 will do.
    """
    raise NotImplementedError


def neighbours(sites: int, k: int, seed: bytes) -> list[list[int]]:
    """For each of n sites the indices of its k neighbours, sorted; all others where k >= n − 1.

    The order on the ring is drawn from `seed`, the same for all who know it.
    """
    raise NotImplementedError
