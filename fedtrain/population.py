"""Names of very many sites, made when they are asked for: a million of them take no memory and no time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from .errors import ConfigError
from .messages import SiteId


class Names(Sequence[SiteId]):
    """A sorted sequence of names that holds none of them. Subclasses say how many there are, and which."""

    def name(self, at: int) -> SiteId:
        """The name at a position from 0 to len(self) - 1."""
        raise NotImplementedError

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
