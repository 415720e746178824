"""A run as the page draws it, folded from its events: a head, and rows that only grow at their end.

Rows are plain lists and dicts, as they go to the page. A reader of the page remembers the `tick` up to which
it has them, and `since(tick)` gives what came later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ... import events as e
from ...events import Averages, Event
from ...messages import SiteId
from ...tracking.board import Board
from ...tracking.live import line

MOST_LINES = 400_000  # of the log, held in memory; older ones make way
MOST_SITES = 500  # whose rounds are drawn; others are counted
PHASES = ("fetch", "training", "masking", "uploading", "done", "refused", "lost")  # by their places in a row
Row = dict[str, Any]


class ToldRows:
    """ToldRows of which the last may still change; the first `len` of them are as they were told."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._ticks: list[int] = []

    def put(self, row: Row, tick: int) -> None:
        self.rows.append(row)
        self._ticks.append(tick)

    def touched(self, at: int, tick: int) -> None:
        """A row has changed: it is told again, and what follows it."""
        self._ticks[at:] = [tick] * (len(self._ticks) - at)

    def keep(self, count: int) -> None:
        del self.rows[count:], self._ticks[count:]

    def first_since(self, tick: int) -> int:
        """The place of the first row that is newer than `tick`."""
        at = len(self._ticks)
        while at and self._ticks[at - 1] > tick:
            at -= 1
        return at


class Log:
    """The events as lines: time, kind, site and words."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str, str]] = []
        self.kinds: Counter[str] = Counter()
        self._found: tuple[tuple[str, str, str], int, list[int]] = (("", "", ""), 0, [])

    def add(self, event: Event, words: str) -> None:
        if len(self.lines) >= MOST_LINES:
            del self.lines[: MOST_LINES // 8]
            self._found = (("", "", ""), 0, [])
        self.lines.append((event.time, event.kind, str(getattr(event, "site", "")), words))
        self.kinds[event.kind] += 1

    def page(self, at: int, count: int, kind: str = "", site: str = "", words: str = "") -> Row:
        """`count` lines from place `at` on, of those of this kind and site that have these words in them."""
        query = kind, site, words.casefold()
        if not any(query):
            return {"total": len(self.lines), "at": at, "lines": self.lines[at : at + count]}
        asked, seen, places = self._found
        if asked != query:
            seen, places = 0, []
        for place in range(seen, len(self.lines)):
            _, its_kind, its_site, text = self.lines[place]
            if kind in ("", its_kind) and site in ("", its_site) and query[2] in text.casefold():
                places.append(place)
        self._found = query, len(self.lines), places
        return {"total": len(places), "at": at, "lines": [self.lines[p] for p in places[at : at + count]]}


class History:
    """All that the page shows of one run but what its folder says (`about.py`)."""

    def __init__(self, name: str) -> None:
        self.name, self.tick = name, 0
        self.board, self.log = Board(), Log()
        self.rounds, self.steps = ToldRows(), ToldRows()
        self.sites: dict[SiteId, int] = {}  # name -> place, in the order of their first word
        self.health: dict[SiteId, Counter[str]] = {}
        self.epsilon: dict[SiteId, Row] = {}
        self.members: tuple[SiteId, ...] = ()  # of the newest round
        self.mesh = ""

    def add(self, event: Event) -> None:
        """Take one event in, in the order in which they were written."""
        self.tick += 1
        self.board.add(event)
        self.log.add(event, line(event, self.board) or _fields(event))
        match event:
            case e.RunStarted():
                self._begin(event.resumed_from or 0)
            case e.RoundStarted():
                self._round_started(event)
            case e.SiteState():
                self._mark(event.site, event.state, event)
            case e.UpdateReceived():
                row = self._mark(event.site, "done", event)
                if row is not None:
                    row[:2] = short(event.loss), event.nbytes
            case e.UpdateRefused():
                self._mark(event.site, "refused", event)
                self._count(event.site, "refused")
            case e.SiteLost() if self.board.finished is None:
                self._mark(event.site, "lost", event)
                self._count(event.site, "lost")
            case e.SiteRefused():
                self._count(event.site, "refused")
            case e.RoundFailed():
                self._change(failed=event.reason)
            case e.RoundCommitted():
                self._commit(event)
            case e.Evaluated():
                over = self._after(event)
                over["metrics"] = _short(event.metrics)
                if by_site := {self._place(site): _short(own) for site, own in event.by_site.items()}:
                    over["own"] = {place: own for place, own in by_site.items() if place < MOST_SITES}
            case e.PeersAgreed():
                self._after(event)
            case e.Stepped():
                self.steps.put({k: short(v) for k, v in event.fields().items() if v is not None}, self.tick)
            case e.PrivacySpent():
                self.epsilon[event.site] = {k: short(v) for k, v in event.fields().items() if k != "site"}
                self._change(epsilon=max(short(row["epsilon"]) for row in self.epsilon.values()))
            case e.Notice() if event.text.startswith("ranks "):
                self.mesh = event.text

    def since(self, tick: int, most: int = 200) -> Iterator[Row]:
        """What is newer than `tick`, in messages of at most `most` rows; each replaces the rows from a place
        on."""
        for name, rows in (("rounds", self.rounds), ("steps", self.steps)):
            first = rows.first_since(tick)
            for at in range(first, len(rows.rows), most):
                yield {"run": self.name, "rows": name, "from": at, "new": rows.rows[at : at + most]}

    def head(self, now: float, state: str) -> Row:
        """The run as it is now; `state`: running, stopped or finished."""
        board = self.board
        sites = [
            {
                "name": site, "state": row.state, "round": row.round, "examples": row.num_examples,
                "loss": short(row.loss), "staleness": row.staleness, "reason": row.reason,
                "counted": row.counted, **self.health.get(site, {}),
            }
            for site, row in list(board.sites.items())[:MOST_SITES]
        ]  # fmt: skip
        best, over = board.best, board.finished
        return {
            "name": self.name, "run": board.run, "mode": board.mode, "noun": board.noun, "state": state,
            "round": board.round, "rounds": board.rounds, "underWay": board.under_way,
            "attempt": board.attempt, "started": board.started, "updated": board.updated,
            "eta": short(board.eta_s(now)), "waiting": board.waiting, "digest": board.config_digest,
            "best": None if best is None else [best.metric, short(best.value), best.round],
            "finished": None if over is None else {"reason": over.reason, "model": _end_of(over.model or "")},
            "names": list(self.sites)[:MOST_SITES], "sites": sites,
            "moreSites": max(0, len(board.sites) - MOST_SITES),
            "phases": PHASES, "epsilon": self.epsilon, "mesh": self.mesh, "notices": list(board.notices),
            "lines": len(self.log.lines), "kinds": sorted(self.log.kinds),
        }  # fmt: skip

    # --- events into rows

    def _begin(self, done: int) -> None:
        rows = self.rounds.rows
        self.rounds.keep(next((i for i, row in enumerate(rows) if row["n"] > done), len(rows)))
        self.steps.keep(sum(step.get("round", 0) <= done for step in self.steps.rows))
        self.health.clear()

    def _round_started(self, event: e.RoundStarted) -> None:
        self.members = tuple(event.sites)
        last = self.rounds.rows[-1] if self.rounds.rows else None
        if last is not None and last["n"] == event.round:  # another attempt
            self._change(attempt=event.attempt, by={}, t=round(event.time, 3))
        else:
            self.rounds.put({"n": event.round, "t": round(event.time, 3), "by": {}}, self.tick)

    def _mark(self, site: SiteId, state: str, event: Event) -> list[Any] | None:
        """Note when a site came to a state in the round that is under way: [loss, bytes, state, time, …] with
        times in seconds since the round began."""
        if state not in PHASES or not self.rounds.rows or "end" in self.rounds.rows[-1]:
            if self.board.mode != "site" or state not in PHASES:
                return None
            self._round_of_site(event)
        row = self.rounds.rows[-1]
        place = self._place(site)
        if place >= MOST_SITES:
            return None
        found: list[Any] = row["by"].setdefault(place, [None, 0])
        found += [PHASES.index(state), round(event.time - row["t"], 3)]
        self.rounds.touched(len(self.rounds.rows) - 1, self.tick)
        return found

    def _round_of_site(self, event: Event) -> None:
        """At a site, whose log has no rounds of its own, a round begins with the site's first state in it."""
        number = getattr(event, "round", None) or self.board.round
        rows = self.rounds.rows
        if not rows or rows[-1]["n"] != number:
            self.rounds.put({"n": number, "t": round(event.time, 3), "by": {}}, self.tick)

    def _commit(self, event: e.RoundCommitted) -> None:
        if not self.rounds.rows or self.rounds.rows[-1]["n"] != event.round:
            self.rounds.put({"n": event.round, "t": round(event.time, 3), "by": {}}, self.tick)
        trained = {name: short(value) for name, value in event.metrics.items() if name != "loss"}
        told = {
            "loss": short(event.loss), "seconds": short(event.seconds), "sites": event.sites,
            "in": event.bytes_in, "out": event.bytes_out, "staleness": short(event.staleness),
            "norm": short(event.norm), "clock": short(event.clock_s), "commit": short(event.commit_s),
            "trained": trained,
        }  # fmt: skip
        for how, sites in (("late", event.late), ("away", event.away), ("doubted", event.doubted)):
            for site in sites:
                self._count(site, how)
            if sites:
                told[how] = [self._place(site) for site in sites]
        self._change(end=round(event.time, 3), **{k: v for k, v in told.items() if v or v == 0})

    def _after(self, event: e.Evaluated | e.PeersAgreed) -> Row:
        """The row of a round that is over, with the bytes that were moved after it."""
        at = next((i for i in range(len(self.rounds.rows) - 1, -1, -1)
                   if self.rounds.rows[i]["n"] == event.round), None)  # fmt: skip
        if at is None:
            self.rounds.put({"n": event.round, "t": round(event.time, 3), "by": {}}, self.tick)
            at = len(self.rounds.rows) - 1
        row = self.rounds.rows[at]
        row["in"] = row.get("in", 0) + event.bytes_in
        row["out"] = row.get("out", 0) + event.bytes_out
        self.rounds.touched(at, self.tick)
        return row

    def _change(self, **told: Any) -> None:
        if self.rounds.rows:
            self.rounds.rows[-1] |= told
            self.rounds.touched(len(self.rounds.rows) - 1, self.tick)

    def _place(self, site: SiteId) -> int:
        return self.sites.setdefault(site, len(self.sites))

    def _count(self, site: SiteId, what: str) -> None:
        self.health.setdefault(site, Counter())[what] += 1


def short(value: Any) -> Any:
    """A number with as many digits as a page shows; None for one that JSON has not."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _short(metrics: Averages) -> Row:
    return {name: short(value) for name, value in metrics.items()}


def _end_of(path: str) -> str:
    """A path without what it says of the machine: a report is sent to others."""
    return "/".join(path.split("/")[-3:])


def _fields(event: Event) -> str:
    """An event that has no line of its own, in words."""
    told: Mapping[str, Any] = event.fields()
    return "  ".join(
        f"{name} {_word(value)}" for name, value in told.items() if value not in (None, "", [], {})
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
