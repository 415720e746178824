"""Pre-aggregations: each makes of a round's updates those that a rule, or the next pre-aggregation, reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from ..config.values import Settings
from .base import Known, Rule, Stack

if TYPE_CHECKING:
    from .base import Reduction, Rows

T = TypeVar("T")
Shares = Sequence[Sequence[float]]  # [m][n]: how much of each of n updates is in each of m mixtures


class PreAggregation(Settings):
    """Makes a stack of a stack. Its fields are its configuration, it has no state.

    A custom one is a frozen dataclass, which aggregation.before = ["module:Class:OPTIONS"] names. It defines
    `over`, and `fewest` if it makes fewer updates than it is given. Like a rule it reads chunk by chunk, and
    its result depends on the rows, their order and `stack.known` alone.
    """

    section: ClassVar[str] = "aggregation.before"

    def fewest(self, needs: int) -> int:
        """The fewest updates that must go in so that `needs` come out."""
        return needs

    def over(self, stack: Stack[T]) -> Stack[T]:
        """The stack that the rule reads in place of this one."""
        raise NotImplementedError("a pre-aggregation says what it makes of the updates")


@dataclass(frozen=True)
class After(Rule):
    """A rule that reads what pre-aggregations make of the updates."""

    before: tuple[PreAggregation, ...]
    rule: Rule

    @property
    def needs(self) -> int:
        needs = self.rule.needs
        for one in reversed(self.before):
            needs = one.fewest(needs)
        return needs

    @property
    def remembers(self) -> bool:
        return self.rule.remembers

    def of(self, stack: Stack[T]) -> T:
        for one in self.before:
            stack = one.over(stack)
        return self.rule.of(stack)


class Mixed(Generic[T]):
    """Stack of mixtures of the updates in another stack. Each is made as it is read, so that a chunk more is
    held, and no update."""

    def __init__(
        self, inner: Stack[T], shares: Shares, weights: Sequence[float] = (), *, rest: bool = True
    ) -> None:
        """
        Args:
            weights: How much each mixture counts in a mean; () for all alike.
            rest: Whether coordinates that are not trained are mixed too. If not, there are as many mixtures
                as updates, and each keeps the coordinates of its own update.
        """
        self._inner, self._shares, self._rest = inner, shares, rest
        self.count, self.weights = len(shares), weights or [1.0] * len(shares)

    @property
    def known(self) -> Known:
        return replace(self._inner.known, sites=())  # a mixture is no site's

    def with_last(self) -> Mixed[T]:
        inner = self._inner.with_last()
        shares = [[*own, 0.0] for own in self._shares] + [[0.0] * (inner.count - 1) + [1.0]]
        return Mixed(inner, shares, [*self.weights, 0.0], rest=self._rest)

    def trained(self) -> Iterator[Rows]:
        for rows in self._inner.trained():
            yield self._mixed(rows)

    def floats(self) -> Iterator[Rows]:
        """Also where the rest is not mixed: as far as the mixtures go, it counts as if it were."""
        for rows in self._inner.floats():
            yield self._mixed(rows)

    def reduce(self, rule: Reduction, rest: Reduction | None = None) -> T:
        other = rest or rule
        return self._inner.reduce(
            lambda rows: rule(self._mixed(rows)),
            rest=lambda rows: other(self._mixed(rows) if self._rest else rows),
        )

    def _mixed(self, rows: Rows) -> Rows:
        """Each product and each sum is rounded once and in order, as in base.weighted_sum. An update of which
        a mixture has nothing is not read for it."""
        import torch

        mixtures, product = rows.new_zeros(self.count, rows.shape[1]), rows.new_empty(rows.shape[1])
        for mixture, shares in zip(mixtures, self._shares, strict=True):
            for row, share in zip(rows, shares, strict=True):
                if share:
                    mixture.add_(torch.mul(row, share, out=product))
        return mixtures
