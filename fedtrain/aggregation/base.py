"""The base class of aggregation rules, which read many updates side by side, in chunks of coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..arena import Arena, narrow_into
from ..config.values import Settings
from ..errors import RoundError
from ..messages import SiteId, Update
from ..schema import Schema, Section

if TYPE_CHECKING:
    import torch

    Rows = torch.Tensor  # float64 [n, some coordinates]: the same coordinates of n updates
    Vector = torch.Tensor  # 1-D
    Reduction = Callable[[Rows], Vector]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

VALUES = 1 << 20  # float64 held at a time, 8 MiB: n rows of VALUES / n coordinates


@dataclass(frozen=True)
class Known:
    """What is known of a round beside its updates; the defaults are those of plain vectors."""

    seed: int = 0  # of all random numbers, so that the same round gives the same bits again
    sites: Sequence[SiteId] = ()  # whose updates the rows are, in their order; () where rows are no one's
    last: Arena | None = None  # the last round's aggregate; None before the first
    places: Sequence[int] = ()  # of the rows' sites in the round's plan; (): they follow one another


NOTHING = Known()


class Stack(Protocol[T_co]):
    """n updates side by side, read by passes. `T_co` is the type of one update: an Arena, or a plain vector.

    The reader may overwrite a chunk of rows. A chunk is valid until the reader asks for the next one.
    """

    @property
    def count(self) -> int:
        """n, at least 1."""

    @property
    def weights(self) -> Sequence[float]:
        """[n]: how much each update counts in a mean: its examples or own weight, or 1 for all."""

    @property
    def known(self) -> Known:
        """What is known of the round."""

    def with_last(self) -> Stack[T_co]:
        """The stack with one more row, the last aggregate; that row is 0 where there is none."""

    def trained(self) -> Iterator[Rows]:
        """One pass over the trained floats, in arena order."""

    def floats(self) -> Iterator[Rows]:
        """One pass over all floats, trained or not, in arena order."""

    def reduce(self, rule: Reduction, rest: Reduction | None = None) -> T_co:
        """One pass over everything that a round can change: `rule` makes one coordinate of n.

        `rest`, if given, replaces `rule` for coordinates that are not trained: BatchNorm's statistics and
        integers. Integers are rounded to the nearest, halves to even.
        """


class Rule(Settings):
    """A way to make one delta of many. The fields of a rule are its configuration; a rule has no state.

    A custom rule is a frozen dataclass, which aggregation.rule = "module:Class" names. It defines `of`, which
    reads the stack as often as it needs to and holds a few chunks, so that memory is O(model). The result
    depends on the rows and their order, never on the order of arrival.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Largest(Rule):
    ...     def of(self, stack):
    ...         return stack.reduce(lambda rows: rows.amax(0))
    >>> import torch
    >>> Largest().of_vectors(torch.tensor([[1.0, 5.0], [2.0, 4.0]]))
    tensor([2., 5.])
    """

    section: ClassVar[str] = "aggregation"
    linear: ClassVar[bool] = False  # whether a weighted sum suffices: folded on arrival, or under masks

    of_rows: ClassVar[bool] = True  # whether rows suffice, as of models of peers: it need not be known whose

    @property
    def needs(self) -> int:
        """The fewest updates for which the rule's promise holds; a run refuses to start with fewer."""
        return 1

    @property
    def remembers(self) -> bool:
        """Whether the rule needs the last aggregate, `known.last`, which is then part of a round's state."""
        return False

    @property
    def must_have(self) -> Sequence[SiteId]:
        """The sites without whose own updates the rule can't decide; a round always asks them."""
        return ()

    def of(self, stack: Stack[T]) -> T:
        """One update made of all updates in the stack."""
        raise NotImplementedError("a rule says how it makes one of many")

    def combine(self, schema: Schema, updates: Sequence[Update], known: Known = NOTHING) -> Arena:
        """The one delta of these updates, which come in site order and may lie in files."""
        return self.of(Updates(schema, updates, known))

    def of_vectors(self, rows: Vector) -> Vector:
        """The vector [d] that the rule makes of rows [n, d] of one float dtype: of a neighbourhood's models,
        say, or of the means of groups."""
        return self.of(Vectors(rows))

    def judged(self, rows: Vector) -> tuple[Vector, Sequence[float]]:
        """(of_vectors(rows), how much of each row counted: from 0 for nothing to 1 for all of it). A rule
        that looks at coordinates, not at rows, gives () for the second."""
        return self.of_vectors(rows), ()


class Updates:
    """Stack of updates in memory or in files."""

    def __init__(self, schema: Schema, updates: Sequence[Update], known: Known = NOTHING) -> None:
        if not updates:
            raise RoundError("there are no updates to aggregate")
        self._schema, self._updates, self.known = schema, updates, known
        self.count, self.weights = len(updates), [update.counts for update in updates]

    def with_last(self) -> Updates:
        last = Arena.zeros(self._schema) if self.known.last is None else self.known.last
        return Updates(self._schema, [*self._updates, Update(delta=last, num_examples=0.0)], self.known)

    def trained(self) -> Iterator[Rows]:
        for section in self._schema.sections:
            for _, _, rows in self._chunks(section, 0, section.trained):
                yield rows

    def floats(self) -> Iterator[Rows]:
        for section in self._schema.sections:
            for _, _, rows in self._chunks(section, 0, section.numel if section.floating else 0):
                yield rows

    def reduce(self, rule: Reduction, rest: Reduction | None = None) -> Arena:
        result = Arena.zeros(self._schema.model)
        for section in self._schema.moving:
            edge = section.trained
            for first, end, make in (0, edge, rule), (edge, section.numel, rest or rule):
                for start, stop, rows in self._chunks(section, first, end):
                    narrow_into(result.chunk(section, start, stop), make(rows))
        return result

    def _chunks(self, section: Section, first: int, end: int) -> Iterator[tuple[int, int, Rows]]:
        import torch

        size = max(1, VALUES // self.count)
        buffer = torch.empty(self.count * min(size, end - first), dtype=torch.float64)
        for start in range(first, end, size):
            stop = min(start + size, end)
            rows = buffer[: self.count * (stop - start)].view(self.count, -1)
            for row, update in zip(rows, self._updates, strict=True):
                row.copy_(update.delta.chunk(section, start, stop))
            yield start, stop, rows


class Vectors:
    """Stack of plain vectors, rows [n, d]; all coordinates count as trained."""

    def __init__(self, rows: Vector) -> None:
        if rows.ndim != 2 or not len(rows):
            raise RoundError(f"a rule wants vectors as rows [n, d] with n >= 1, not {list(rows.shape)}")
        self._rows, self.count, self.weights, self.known = rows, len(rows), [1.0] * len(rows), NOTHING

    def with_last(self) -> Vectors:
        import torch

        return Vectors(torch.cat([self._rows, self._rows.new_zeros(1, self._rows.shape[1])]))

    def trained(self) -> Iterator[Rows]:
        for _, rows in self._chunks():
            yield rows

    def floats(self) -> Iterator[Rows]:
        return self.trained()

    def reduce(self, rule: Reduction, rest: Reduction | None = None) -> Vector:
        result = self._rows.new_empty(self._rows.shape[1])
        for start, rows in self._chunks():
            narrow_into(result[start : start + rows.shape[1]], rule(rows))
        return result

    def _chunks(self) -> Iterator[tuple[int, Rows]]:
        import torch

        size = max(1, VALUES // self.count)
        for start in range(0, self._rows.shape[1], size):
            yield start, self._rows[:, start : start + size].to(torch.float64, copy=True)


def weighted_sum(rows: Rows, weights: Iterable[float]) -> Vector:
    """Σ wᵢ·rowᵢ, each product and each sum rounded once and in order, so that no bit depends on where a
    chunk ends. A row of weight 0 is not read, so it may hold NaN. `rows` are overwritten."""
    total = rows.new_zeros(rows.shape[1])
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            total.add_(row.mul_(weight))
    return total


def distances(stack: Stack[Any], centre: Reduction) -> Vector:
    """‖rowᵢ − centre‖₂ over the trained floats, [n] float64; one pass. `centre` gets a copy of the rows."""
    import torch

    squares = torch.zeros(stack.count, dtype=torch.float64)
    for rows in stack.trained():
        squares += torch.linalg.vector_norm(rows - centre(rows.clone()), dim=1).square()
    return squares.sqrt()


def nearest(stack: Stack[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's squared distances over the trained floats, the smallest first, and whose they are: two
    [n, n]. The first in each row is the row itself, with -1; of equal ones the first in site order comes
    first. One pass, n(n − 1)/2 distances in float64."""
    import torch

    n = stack.count
    pairs = torch.zeros(n * (n - 1) // 2, dtype=torch.float64)
    for rows in stack.trained():
        pairs += torch.pdist(rows).square()  # by differences, so that one huge row spoils no other's distance
    squares = torch.zeros(n, n, dtype=torch.float64)
    above = torch.triu_indices(n, n, offset=1)
    squares[above[0], above[1]] = pairs
    squares += squares.T.clone()
    squares.fill_diagonal_(-1.0)
    ordered = squares.sort(dim=1, stable=True)
    return ordered.values, ordered.indices
