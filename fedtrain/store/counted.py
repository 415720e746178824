"""The last round of each site whose update is in the model: a round adds a row of its own sites.

The first row there is has all that counted until then, and those after it are added in their order. So a
commit writes as much as the round has sites. When the rows after the first are together as long as all of
them added up, the next row has everything, and makes those before it superfluous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ..messages import SiteId
from .database import Database

TABLE = "CREATE TABLE IF NOT EXISTS counted (round INTEGER PRIMARY KEY, sites BLOB NOT NULL);"
Rounds = dict[SiteId, int]


class CountedSites:
    """The table of a run; only the process that writes it holds it in memory."""

    def __init__(self, db: Database, *, read_only: bool) -> None:
        self._db, self._read_only = db, read_only
        self._held: Rounds | None = None  # all rows added up
        self._since = 0  # entries after the newest row that has everything
        self._whole: list[int] = []  # the rounds of those rows, as far as they are known

    def of(self, sites: Iterable[SiteId] | None = None) -> Rounds:
        """The last round of each of these sites (None: of all sites) that counted."""
        found = self._all()
        return dict(found) if sites is None else {site: found[site] for site in sites if site in found}

    def add(self, number: int, more: Mapping[SiteId, int], back: int) -> None:
        """Add the row of round `number`; in a transaction. The store may later go back by `back` rounds.
        `forget` when the transaction fails."""
        if not more:
            return
        held = self._all()
        held.update(more)
        first = not self._whole
        if first or self._since + len(more) > len(held):
            self._whole.append(number)
            self._since, more = 0, held
        else:
            self._since += len(more)
        self._db.put("counted", number, msgspec.msgpack.encode(more))
        self._whole = [*[r for r in self._whole if r <= number - back][-1:],
                       *[r for r in self._whole if r > number - back]]  # fmt: skip
        self._db.delete("counted", "round < ?", (self._whole[0],))

    def forget(self) -> None:
        """Read the table again when it is asked for next."""
        self._held, self._since, self._whole = None, 0, []

    def _all(self) -> Rounds:
        if self._held is not None:
            return self._held
        found: Rounds = {}
        rows = self._db.all("SELECT round, sites FROM counted ORDER BY round")
        parts = [msgspec.msgpack.decode(sites, type=Rounds) for _, sites in rows]
        for part in parts:
            found.update(part)
        if not self._read_only:
            self._held, self._whole = found, [number for number, _ in rows[:1]]
            self._since = sum(map(len, parts[1:]))
        return found
