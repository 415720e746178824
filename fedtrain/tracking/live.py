"""A run on a screen, as it happens: a live table on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from .. import events as e
from ..events import Averages, Event, encode
from ..fairness import WORST, averaged
from ..messages import SiteId
from .board import Board, RoundRow, SiteRow, agreement
from .log import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FEW_DOUBTED = 3  # of peers that a robust rule clipped, a line names so many
FEW_SITES = 8  # up to so many in a round, plain text has a line for each update
BETWEEN_PEERS = ("peer", "gossip")  # modes in which a round has bytes of its own to show
DRAWN = 30  # rounds of the line that shows the loss; of earlier ones a screen knows nothing
REFRESHES = 4  # of the live table, a second
SPARKS = "▁▂▃▄▅▆▇█"
WORK = ("training", "masking", "uploading", "evaluating")
# What a person looks for first, when not all sites fit on the screen.
ORDER = ("refused", "lost", "uploading", "masking", "training", "evaluating", "waiting", "connected", "done")
COLORS = {"refused": "red", "lost": "red", "uploading": "cyan", "masking": "cyan", "training": "yellow",
          "evaluating": "magenta", "done": "green"}  # fmt: skip


class Screen(AbstractContextManager["Screen"], Protocol):
    """Shows each event that it is called with; a context manager, so that a terminal is left in order."""

    def __call__(self, event: Event) -> None: ...


for_programs: IO[str] | None = None  # stdout, once it is reserved for JSON


def reserve_stdout() -> None:
    """From now on only JSON goes to stdout. What the task or a library prints goes to stderr, by
    sys.stdout and by file descriptor 1 alike."""
    global for_programs
    for_programs = out = sys.stdout
    if out is sys.__stdout__ and out is not None:
        out.flush()
        for_programs = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    sys.stdout = sys.stderr


def screen(*, json: bool = False, plain: bool = False, out: IO[str] | None = None) -> Screen:
    """What suits where the output goes; `plain` also on a terminal, for a debugger's sake."""
    out = out or (for_programs if json else None) or sys.stdout
    if json:
        return JsonLines(out)
    if plain or not out.isatty() or os.environ.get("TERM") == "dumb":
        return Plain(out)
    return LiveTable(out)


class JsonLines(Screen):
    """Each event as it stands in events.jsonl."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __call__(self, event: Event) -> None:
        print(encode(event).decode(), file=self._out, flush=True)

    def __exit__(self, *_: object) -> None:
        pass


class Plain(Screen):
    """One line an event, for logs and pipes."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._board = out, Board(keep=DRAWN)
        self._refused: dict[SiteId, tuple[int | None, str]] = {}  # round and reason, as they were told last

    def __call__(self, event: Event) -> None:
        self._board.add(event)
        if isinstance(event, e.UpdateRefused):  # each attempt may fail alike
            told, self._refused[event.site] = self._refused.get(event.site), (event.round, event.reason)
            if told == (event.round, event.reason):
                return
        if text := line(event, self._board):
            clock = time.strftime("%H:%M:%S", time.localtime(event.time or None))  # in no log: now
            print(f"{clock}  {printable(text)}", file=self._out, flush=True)

    def __exit__(self, *_: object) -> None:
        pass


class LiveTable(Screen):
    """Round, loss, metrics, ETA and each site's state, redrawn in place a few times a second."""

    def __init__(
        self, out: IO[str], console: Console | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._board, self._clock = Board(keep=DRAWN), clock
        self._lock = threading.Lock()  # rich redraws from a thread of its own
        self._console = console or Console(file=out)
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=REFRESHES,
            redirect_stderr=False,
        )

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._board.add(event)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._board.finished and (model := self._board.finished.model):  # whole, to be copied
            self._console.print(f"model in {printable(model)}", soft_wrap=True, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        with self._lock:
            return table(self._board, self._clock(), self._console.width, self._console.height)


# --- one event as a line


def line(event: Event, board: Board) -> str | None:
    """An event for a log, `board` having taken it in; None for what would only repeat another line."""
    match event:
        case e.RunStarted():
            done = [f"{board.noun} {event.resumed_from}"] if event.resumed_from else []
            done += [f"step {event.resumed_step}"] if event.resumed_step else []
            again = f", going on after {', '.join(done)}" if done else ""
            who = f", {_sites(event.sites)}" if event.sites else ""
            config = f", config {event.config_digest[:12]}" if event.config_digest else ""
            noun = "version" if event.buffer else "round"
            return f"run {event.run} ({event.mode}): {event.rounds} {noun}s{who}{config}{again}"
        case e.Waiting():
            return _waiting(board) if board.waiting is not None else None
        case e.SiteJoined(site="aggregator"):
            return "connected to the aggregator"
        case e.SiteLost(site="aggregator"):
            return f"no connection to the aggregator{_because(event.reason)}"
        case e.SiteJoined():
            return f"{event.site} joined" + (f"; {_waiting(board)}" if board.waiting else "")
        case e.SiteLost():
            over = board.finished is not None  # then they leave, and nothing is lost
            return None if over else f"{event.site} lost{_because(event.reason)}"
        case e.SiteRefused():  # at the site itself the command's last line says it
            return None if board.mode == "site" else f"{event.site} may not join{_because(event.reason)}"
        case e.RoundStarted():
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            who = f": {_sites(len(event.sites))}" if event.sites else ""
            near = f", hears {', '.join(event.neighbors)}" if event.neighbors else ""
            return f"{_round(event.round, board)}started{who}{near}{again}"
        case e.SiteState():
            mine = board.mode in ("site", "") and event.state in WORK
            what = f"version {event.round}: " if board.of_version(event) else _round(event.round, board)
            return f"{what}{event.state}" if mine else None
        case e.UpdateReceived():
            if board.asked > FEW_SITES:
                return None
            examples = "" if event.num_examples is None else f"{event.num_examples:g} examples, "
            loss = "" if event.loss is None else f"loss {number(event.loss)}, "
            stale = f", staleness {event.staleness}" if event.staleness else ""
            what = f"{examples}{loss}{size(event.nbytes)}{stale}"
            return f"{_round(event.round, board)}update from {event.site}: {what}"
        case e.UpdateRefused():
            return f"{_round(event.round, board)}update from {event.site} refused{_because(event.reason)}"
        case e.CohortAsked():
            return f"round {event.round}: asked to {event.what} with {', '.join(sorted(event.cohort))}"
        case e.Denied():
            return f"denied: {event.reason}"
        case e.PrivacySpent():
            return f"{_round(event.round, board)}{event.site}: {_spent(event)}"
        case e.RoundFailed():
            return f"{_round(event.round, board)}failed, attempt {event.attempt}{_because(event.reason)}"
        case e.RoundCommitted():
            who = f": {_sites(event.sites)}" if event.sites else ""
            parts = [f"{_round(event.round, board)}done{who}"]
            parts += [averages({"loss": event.loss, **event.metrics})]
            parts += [_bytes(event)] if board.mode in BETWEEN_PEERS else []
            parts += [doubts(event.doubted)] if event.doubted else []
            parts += [skipped(event.skipped)] if event.skipped else []
            parts += [f"staleness {event.staleness:.2g}"] if event.staleness is not None else []
            parts += [duration(event.seconds)] if event.seconds is not None else []
            parts += [_clock(event)]
            eta = board.eta_s(event.time)
            parts += [f"ETA {duration(eta)}"] if eta else []
            return "  ".join(p for p in parts if p)
        case e.Stepped():
            return f"{_round(event.round, board)}{_step(event)}"
        case e.Evaluated():
            return f"{_round(event.round, board)}evaluated: {averages(event.metrics)}"
        case e.PeersAgreed():
            return f"{_round(event.round, board)}{agreement(event)}  {_bytes(event)}".rstrip()
        case e.Best():
            better = f" ({event.better} is better)" if event.better else ""
            best = f"is the best so far: {event.metric} {number(event.value)}{better}"
            return f"{_round(event.round, board)}{best}"
        case e.Notice():
            return event.text
        case e.RunFinished():
            after = "" if event.round is None else f" after {board.noun} {event.round}"
            model = f"; model in {event.model}" if event.model else ""
            own = "; with this peer's own model, as none was agreed on" if event.own_model else ""
            return f"run {board.run or 'is'} finished{after}{_because(event.reason)}{own}{model}"
    return None


def _spent(event: e.PrivacySpent) -> str:
    return f"epsilon {event.epsilon:.3g} at delta {event.delta:g}, after {event.releases} updates"


def _bytes(round: e.RoundCommitted | e.PeersAgreed | RoundRow) -> str:
    """What a round moved: of a peer its own, of a simulation all peers'."""
    return f"in {size(round.bytes_in)}, out {size(round.bytes_out)}"


def _clock(round: e.RoundCommitted | RoundRow) -> str:
    """Where a simulation's own clock stands, and how many sites were not in the round by it."""
    if round.clock_s is None:
        return ""
    missed = {"late": len(round.late), "away": len(round.away)}
    return f"clock {duration(round.clock_s)}" + "".join(f", {n} {how}" for how, n in missed.items() if n)


def _step(event: e.Stepped) -> str:
    """A datacenter's step, as a line of figures."""
    parts = [f"step {event.step}", averages({"loss": event.loss})]
    parts += [f"lr {event.lr:.3g}"] if event.lr is not None else []
    parts += [duration(event.seconds)] if event.seconds is not None else []
    if event.examples_per_s is not None:
        parts.append(f"{event.examples_per_s:,.0f} examples/s")
    if event.items_per_s is not None and event.items_per_s != event.examples_per_s:
        parts.append(f"{event.items_per_s:,.0f} items/s")
    parts += [f"MFU {event.mfu:.1%}"] if event.mfu is not None else []
    parts += [f"comm {event.comm_share:.0%}"] if event.comm_share is not None else []
    parts += [size(event.memory_bytes)] if event.memory_bytes is not None else []
    parts += [skipped(event.skipped)] if event.skipped else []
    return "  ".join(p for p in parts if p)


def skipped(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)} skipped"


def _round(number: int | None, board: Board) -> str:
    if number is None:
        return ""
    return f"{board.noun} {_of_all(number, board)}: "


def _of_all(number: int, board: Board) -> str:
    return f"{number}/{board.rounds}" if board.rounds else f"{number}"


def _waiting(board: Board) -> str:
    have, need = board.waiting or (0, 0)
    return f"waiting for sites: {have} of {need}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _sites(n: int) -> str:
    return f"{n} site{'' if n == 1 else 's'}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 0.01 and value else f"{value:.4f}"


def averages(metrics: Averages) -> str:
    """The averages over all data, each with that of the worst tenth of sites where it is known. What else is
    worked out over sites, --json has."""
    known = {name: value for name, value in metrics.items() if value is not None}
    worst = {name: known.get(f"{name}/{WORST}") for name in averaged(known)}
    return "  ".join(
        f"{name} {number(known[name])}" + (f" (worst {number(least)})" if least is not None else "")
        for name, least in worst.items()
    )


def counted(share: float) -> str:
    """What a robust rule made of a peer's model, in a word or two."""
    return "left out" if not share else f"clipped to {share:.0%}"


def doubts(doubted: Mapping[SiteId, float]) -> str:
    """The peers that counted least."""
    least = sorted(doubted.items(), key=lambda d: (d[1], d[0]))
    named = ", ".join(f"{site} {counted(share)}" for site, share in least[:FEW_DOUBTED])
    return named + (f" and {len(least) - FEW_DOUBTED} more" if len(least) > FEW_DOUBTED else "")


def size(nbytes: int) -> str:
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d {h}h" if days else f"{hours}h {m:02}m" if hours else f"{m}m {s:02}s"


# --- the whole board as a table


def table(board: Board, now: float, width: int, height: int) -> RenderableType:
    """The board as rich draws it, never taller than `height`."""
    from rich.console import Group
    from rich.text import Text

    def text(line: str, style: str = "") -> Text:
        return Text(printable(line), style, no_wrap=True, overflow="ellipsis")

    parts: list[Any] = [_headline(board, now, width), text(_numbers(board))]
    foot = [text(f"• {notice}", "yellow") for notice in board.notices]
    if board.finished is not None:
        foot.append(text(line(msgspec.structs.replace(board.finished, model=None), board) or "", "green"))
    if board.sites:
        parts.append(_site_table(board, room=max(3, height - len(foot) - 4)))
    return Group(*parts, *foot)


def _headline(board: Board, now: float, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    where = f"  {board.mode}  {board.noun} {_of_all(board.round, board)}" if board.run else "starting"
    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(
        Text.assemble((printable(board.run), "bold"), where),
        ProgressBar(total=max(1, board.rounds), completed=board.round, width=max(5, min(40, width - 60))),
        _doing(board, now),
    )
    return grid


def _doing(board: Board, now: float) -> str:
    if board.finished is not None:
        return f"in {duration(board.finished.time - (board.started or board.finished.time))}"
    if board.waiting is not None:
        return _waiting(board)
    again = f", attempt {board.attempt}" if board.attempt > 1 else ""
    doing = f"training round {board.under_way}{again}" if board.under_way is not None else ""
    eta = board.eta_s(now)
    return "  ".join(part for part in (doing, f"ETA {duration(eta)}" if eta else "") if part)


def _numbers(board: Board) -> str:
    parts = []
    if (row := board.last) is not None:
        parts += [averages({"loss": row.loss, **board.trained})]
        parts += [_bytes(row)] if board.mode in BETWEEN_PEERS else []
        parts += [_clock(row)]
    if board.metrics:
        parts += ["evaluated: " + averages(board.metrics)]
    if board.best is not None:
        parts += [f"best {board.best.metric} {number(board.best.value)} in {board.noun} {board.best.round}"]
    if board.spent is not None:
        parts += [_spent(board.spent)]
    if board.step is not None and board.finished is None:
        parts += [_step(board.step)]
    parts += [sparkline([r.loss for r in list(board.history.values())[-DRAWN:]])]
    return "   ".join(p for p in parts if p)


def sparkline(values: list[float | None]) -> str:
    """A row of bars, the lowest value the shortest; nothing for fewer than two values."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if len(known) < 2:
        return ""
    low, span = min(known), max(known) - min(known) or 1.0
    return "".join(SPARKS[round((v - low) / span * (len(SPARKS) - 1))] for v in known)


def _site_table(board: Board, room: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    found, rows = Table(box=None, padding=(0, 2, 0, 0), header_style="dim"), board.sites.values()
    known: dict[
        str, Callable[[SiteRow], object]
    ] = {  # a column that no site has a value for is left out: under masks nobody knows a site's loss
        board.noun: lambda row: row.round,
        "staleness": lambda row: row.staleness,
        "examples": lambda row: None if row.num_examples is None else f"{row.num_examples:g}",
        "loss": lambda row: None if row.loss is None else number(row.loss),
    }
    columns = {name: value for name, value in known.items() if any(value(row) is not None for row in rows)}
    for name in ("site", "state", *columns, ""):
        justify: Literal["right", "left"] = "right" if name in columns else "left"
        found.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    shown, more = choose(board.sites, room)
    for site, row in shown:
        cells = ["" if (cell := value(row)) is None else str(cell) for value in columns.values()]
        state = Text(row.state, COLORS.get(row.state, ""))
        why = row.reason or (counted(row.counted) if row.counted < 1 else "")
        found.add_row(printable(site), state, *cells, printable(why))
    if more:
        found.add_row(Text(more, "dim"))
    return found


def choose(sites: dict[str, SiteRow], room: int) -> tuple[list[tuple[str, SiteRow]], str]:
    """The rows that fit, those that need a person first, and a line that counts the others."""
    if len(sites) <= room:
        return sorted(sites.items()), ""
    rank = {state: i for i, state in enumerate(ORDER)}
    by_need = sorted(sites.items(), key=lambda s: (rank.get(s[1].state, len(rank)), s[0]))
    shown, rest = by_need[: room - 1], by_need[room - 1 :]
    counts = Counter(row.state for _, row in rest)
    return shown, f"and {len(rest)} more: " + ", ".join(f"{n} {state}" for state, n in counts.items())
