"""What a site insists on before it takes part in a secure sum."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SecAggError
from . import graph
from . import messages as msg
from .fixedpoint import FixedPoint


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
    verify: bool = False  # it checks the sums that it is in
    insists: bool = True  # also in a cohort in which not all sites share a key; else it checks no sum there
    min_sites: int = 3  # no sum over fewer
    full_graph: int = 100  # in a cohort of up to so many sites each masks with all others
    corrupt: float = 0.2  # of a larger cohort, the part of the sites that may conspire with the aggregator
    dropout: float = 0.2  # of a larger cohort, the part of the sites that may be lost in a session
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
            ("privacy", terms.privacy, self.privacy),
            ("verify", terms.verify, self.checks(n)),
            ("ring_bits", terms.ring_bits, self.ring_bits),
            ("value_bits", terms.value_bits, fixed.value_bits),
            ("clip", terms.clip, self.clip),
            ("max_weight", terms.max_weight, self.max_weight),
            ("length", terms.length, self.length),
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
        if terms.verify and degree:
            raise SecAggError(
                f"a sum over {n} sites can't be checked: only up to secagg.full_graph = {self.full_graph} do "
                f"all sites share a key. Raise it at both ends, or set secagg.verify = false"
            )
        if len(terms.nonce) != msg.NONCE_BYTES:
            raise SecAggError(f"a nonce of {len(terms.nonce)} bytes: {msg.NONCE_BYTES} are needed")

    def checks(self, sites: int) -> bool:
        """Whether a sum of a round over so many sites has checksums."""
        return self.verify and (self.insists or not self.graph(sites)[2])

    def graph(self, sites: int) -> tuple[int, int, int]:
        """The least quorum and threshold, and the degree (0: full graph), for a cohort of so many.

        In the full graph both are over two thirds: of two lists of survivors, or two kinds of shares of one
        site, each would need so many sites, and then a third of all would have to be with the aggregator.
        """
        if sites <= self.full_graph:
            least = 2 * sites // 3 + 1
            return max(least, self.min_sites), least, 0
        found = graph.degree(sites, self.corrupt, self.dropout, security=graph.SECURITY, chosen_loss=True)
        return max(sites - int(sites * self.dropout), self.min_sites), found.threshold, found.neighbours
