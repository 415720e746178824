"""Names of very many sites, made when they are asked for: a million of them take no memory and no time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import overload

from .errors import ConfigError
from .messages import SiteId

EACH = 100_000  # sites, of which a simulation still looks at each one


class Names(Sequence[SiteId]):
    """A sorted sequence of names that holds none of them. Subclasses say how many there are, and which."""

    def name(self, at: int) -> SiteId:
        """The name at a position from 0 to len(self) - 1."""
        raise NotImplementedError

    def draw(self, rng: Random, count: int) -> list[SiteId]:
        """So many of the names, in any order."""
        return rng.sample(self, count)

    def without(self, left_out: Collection[SiteId]) -> Names:
        """The names but for a few."""
        return Without(self, left_out)

    @overload
    def __getitem__(self, at: int) -> SiteId: ...
    @overload
    def __getitem__(self, at: slice) -> list[SiteId]: ...
    def __getitem__(self, at: int | slice) -> SiteId | list[SiteId]:
        places = range(len(self))[at]
        return self.name(places) if isinstance(places, int) else [self.name(place) for place in places]

    def __iter__(self) -> Iterator[SiteId]:
        return map(self.name, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))


@dataclass(frozen=True, eq=False)
class Population(Names):
    """The names of `size` sites, numbered from 1 and padded with zeros, so that they sort like numbers.

    A task may return one from sites():

    >>> Population(1_000_000, "user-")[41]
    'user-0000042'
    """

    size: int
    prefix: str = "site-"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"Population({self.size}): there must be a site at least.")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Population) and other.prefix == self.prefix:
            return self.size == other.size
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none

    def __len__(self) -> int:
        return self.size

    def name(self, at: int) -> SiteId:
        """The name at a position from 0 to size - 1."""
        return f"{self.prefix}{at + 1:0{len(str(self.size))}d}"

    def __contains__(self, name: object) -> bool:
        return self._position(name) is not None

    def index(self, name: SiteId, start: int = 0, stop: int | None = None) -> int:
        """The position of a name; ValueError where there is no such site between `start` and `stop`."""
        at = self._position(name)
        if at is None or at not in range(len(self))[start:stop]:
            raise ValueError(f"{name!r} is none of {self}")
        return at

    def _position(self, name: object) -> int | None:
        if not isinstance(name, str) or not name.startswith(self.prefix):
            return None
        digits = name[len(self.prefix) :]
        if len(digits) != len(str(self.size)) or not (digits.isascii() and digits.isdecimal()):
            return None
        return at if (at := int(digits) - 1) in range(self.size) else None


class Without(Names):
    """A sequence of names without a few of them."""

    def __init__(self, names: Sequence[SiteId], left_out: Collection[SiteId]) -> None:
        self._names, self._left_out = names, {*left_out}
        places = sorted(names.index(site) for site in self._left_out if site in names)
        self._before = [place - i for i, place in enumerate(places)]  # names that stay before each

    def __len__(self) -> int:
        return len(self._names) - len(self._before)

    def name(self, at: int) -> SiteId:
        """The name at a position among those that stay."""
        return self._names[at + bisect_right(self._before, at)]

    def __contains__(self, name: object) -> bool:
        return name in self._names and name not in self._left_out


class Present(Names):
    """Those of very many names that are there. Who is there is looked at when somebody is drawn, so that no
    name has a position: these names can be counted, drawn and gone over."""

    def __init__(
        self, names: Sequence[SiteId], count: int, there: Callable[[SiteId], bool],
        left_out: Collection[SiteId] = (),
    ) -> None:  # fmt: skip
        """`count`: how many are there, about; `there`: whether one is; `left_out`: who is not meant."""
        self._names, self._count, self._there, self._left_out = names, count, there, {*left_out}

    def __len__(self) -> int:
        return max(0, self._count - len(self._left_out))

    def __iter__(self) -> Iterator[SiteId]:
        return filter(self.__contains__, self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names and name not in self._left_out and self._there(str(name))

    def draw(self, rng: Random, count: int) -> list[SiteId]:
        """So many of the names, or all of them where there are fewer."""
        drawn, looked = list[SiteId](), set[int]()
        while len(drawn) < count and len(looked) < len(self._names):
            at = rng.randrange(len(self._names))
            if at not in looked and self._names[at] in self:
                drawn.append(self._names[at])
            looked.add(at)
        return drawn

    def without(self, left_out: Collection[SiteId]) -> Present:
        return Present(self._names, self._count, self._there, self._left_out | {*left_out})
