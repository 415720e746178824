"""The state of a run, folded from its events: what `live`, `watch` and `runs` look at. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

from .. import events as e
from ..errors import some
from ..events import Averages, Event
from ..messages import SiteId

RECENT = 10  # rounds that the ETA is drawn from
OUTLIER = 3  # times the middle one, as which a longer one counts: the first, or one that waited for somebody


def agreement(event: e.PeersAgreed) -> str:
    """That peers have one model, in words."""
    made = f"of {event.models} peers" if event.models else "of all"
    names = f" ({some(event.of)})" if event.of else ""
    return (
        f"one model {made}{names}, at {some(event.peers)}, as far as is known here. Its model.safetensors "
        f"has sha256 {event.digest}"
    )


# stopped: the same command goes on. rejected: the same command does so after people have acted.
State = Literal["running", "finished", "stopped", "rejected"]


@dataclass
class SiteRow:
    """One site, as last heard of."""

    state: str = "waiting"  # waiting | connected | done | lost | refused, or as in SiteState
    round: int | None = None
    num_examples: float | None = None
    loss: float | None = None
    staleness: int | None = None  # of its last update, in an asynchronous run
    reason: str = ""  # why it is lost or refused
    counted: float = 1.0  # of its last model, by a robust rule between peers


@dataclass(frozen=True)
class RoundRow:
    """One committed round."""

    round: int
    loss: float | None  # in training
    metrics: Averages  # its evaluation's; empty when it had none
    seconds: float | None
    sites: int
    bytes_in: int
    bytes_out: int
    clock_s: float | None = None  # of a simulation with a clock of its own
    late: Sequence[SiteId] = ()
    away: Sequence[SiteId] = ()


@dataclass
class Board:
    """A run at a glance."""

    keep: int = 0  # so many of the newest rounds are in `history`; 0: all
    run: str = ""
    mode: str = ""
    rounds: int = 0  # planned; 0: nobody here knows how many
    noun: str = "round"  # or what an asynchronous run counts: "version", and "turn" at one of its sites
    config_digest: str = ""
    started: float | None = None  # when its last process began
    updated: float | None = None  # the last event's time
    round: int = 0  # committed; at a site, which commits none, the last that it worked on
    under_way: int | None = None  # the round being tried
    attempt: int = 1
    asked: int = 0  # sites in that round
    need: int | None = None  # sites that the next round waits for
    sites: dict[SiteId, SiteRow] = field(default_factory=dict)
    history: dict[int, RoundRow] = field(default_factory=dict)
    trained: Averages = field(default_factory=dict)  # the last round's, beside its loss: "moved", say
    step: e.Stepped | None = None  # a datacenter's last
    spent: e.PrivacySpent | None = None  # the last one
    best: e.Best | None = None
    finished: e.RunFinished | None = None
    rejected: bool = False  # a site's process ended because it may not take part until people act
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # commit to commit
    _evaluated: Averages = field(default_factory=dict)  # of the last round with metrics that is not kept
    _mark: float | None = None  # when the time of the next round began to count

    @classmethod
    def of(cls, events: Iterable[Event]) -> Board:
        board = cls()
        for event in events:
            board.add(event)
        return board

    def state(self, alive: bool) -> State:
        """How the run is; `alive`: whether its process was there before its events were read."""
        if self.finished:
            return "finished"
        return "running" if alive else "rejected" if self.rejected else "stopped"

    @property
    def last(self) -> RoundRow | None:
        return self.history.get(self.round)

    @property
    def metrics(self) -> Averages:
        """The newest evaluation's averages."""
        newest = (row.metrics for row in reversed(self.history.values()) if row.metrics)
        return next(newest, self._evaluated)

    @property
    def waiting(self) -> tuple[int, int] | None:
        """(have, need) while too few sites are here; in the middle of a run, as a rule, none is missing."""
        have = sum(row.state not in ("lost", "refused") for row in self.sites.values())
        have += self.mode == "peer"  # which is here, and is no row before its first round
        return (have, self.need) if self.need is not None and have < self.need else None

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last round at the pace of the recent ones; None before there is a pace."""
        if not self._paces or self.finished is not None:
            return None
        most = OUTLIER * median_low(self._paces)
        pace = sum(min(each, most) for each in self._paces) / len(self._paces)
        since = 0.0 if self._mark is None else max(0.0, now - self._mark)
        return max(0.0, pace * (self.rounds - self.round) - min(since, pace))

    def of_version(self, event: e.SiteState) -> bool:
        """Whether a site that counts its turns works on a version: it evaluates one."""
        return self.noun == "turn" and event.state == "evaluating"

    def add(self, event: Event) -> None:
        """Take one event in, in the order in which they were written."""
        self.updated = event.time
        match event:
            case e.RunStarted():
                self._start(event)
            case e.Waiting():
                self.need = event.need if self.mode != "simulate" else None
                if self.waiting is not None:
                    self._mark = None
            case e.SiteJoined():
                self._site(event.site, "connected" if event.site == "aggregator" else "waiting")
            case e.SiteLost() if self.finished is None:
                self._site(event.site, "lost").reason = event.reason
            case e.SiteRefused():
                self._site(event.site, "refused").reason = event.reason
                self.rejected = self.mode == "site"
            case e.RoundStarted():
                self.need, self.under_way, self.attempt = None, event.round, event.attempt
                self.asked = len(event.sites)
                if self._mark is None:
                    self._mark = event.time
                asked = event.neighbors or event.sites
                for site in event.sites:
                    self._site(site, "training" if site in asked else "waiting", event.round)
            case e.SiteState():
                self._site(event.site, event.state, event.round)
                if self.mode == "site" and not self.of_version(event):
                    self.round = max(self.round, event.round or 0)
            case e.UpdateReceived():
                site_row = self._site(event.site, "done", event.round)
                site_row.num_examples, site_row.loss = event.num_examples, event.loss
                site_row.staleness = event.staleness
            case e.UpdateRefused():
                self._site(event.site, "refused", event.round).reason = event.reason
            case e.RoundFailed():
                self.under_way = None
                self.notices.append(f"round {event.round}, attempt {event.attempt} failed: {event.reason}")
            case e.RoundCommitted():
                self._commit(event)
            case e.Stepped():
                self.step = event
            case e.Evaluated():
                self._add(event)
                self._end("evaluating")
            case e.PeersAgreed():
                self._add(event)
                self.notices.append(agreement(event))
            case e.PrivacySpent():
                self.spent = event
            case e.Best():
                self.best = event
            case e.Denied():
                self.notices.append(f"denied: {event.reason}")
            case e.Notice():
                self.notices.append(event.text)
            case e.RunFinished():
                self.finished, self.under_way, self.need = event, None, None
                self._end("connected", "waiting", "training", "masking", "uploading", "evaluating")

    def _start(self, event: e.RunStarted) -> None:
        self.run, self.mode, self.rounds = event.run, event.mode, event.rounds
        self.rejected = False
        self.noun = "round" if not event.buffer else "turn" if self.mode == "site" else "version"
        if self.noun == "turn":  # it is asked as often as it is free, whatever run.rounds says
            self.rounds = 0
        self.config_digest, self.started = event.config_digest, event.time
        self.round, self.under_way = event.resumed_from or 0, None
        self.need = self.finished = self.step = self.spent = None
        self.history = {n: row for n, row in self.history.items() if n <= self.round}
        if self.best is not None and self.best.round > self.round:
            self.best = None
        self.sites.clear()
        self.notices.clear()
        self._paces.clear()
        self._mark = None

    def _commit(self, event: e.RoundCommitted) -> None:
        self.round, self.under_way = event.round, None
        self.history[event.round] = RoundRow(
            event.round, event.loss, {}, event.seconds, event.sites, event.bytes_in, event.bytes_out,
            event.clock_s, event.late, event.away,
        )  # fmt: skip
        if 0 < self.keep < len(self.history):
            oldest = self.history.pop(next(iter(self.history)))
            self._evaluated = oldest.metrics or self._evaluated
        for site, site_row in self.sites.items():
            site_row.counted = event.doubted.get(site, 1.0)
        self.trained = {name: value for name, value in event.metrics.items() if name != "loss"}
        if self._mark is not None:
            self._paces.append(event.time - self._mark)
        self._mark = event.time

    def _add(self, event: e.Evaluated | e.PeersAgreed) -> None:
        """Add what followed a round: its metrics, and the bytes, which are part of what the round cost."""
        if row := self.history.get(event.round):
            metrics = event.metrics if isinstance(event, e.Evaluated) else row.metrics
            moved_in, moved_out = row.bytes_in + event.bytes_in, row.bytes_out + event.bytes_out
            added = replace(row, metrics=metrics, bytes_in=moved_in, bytes_out=moved_out)
            self.history[event.round] = added

    def _end(self, *states: str) -> None:
        for row in self.sites.values():
            if row.state in states:
                row.state = "done"

    def _site(self, site: SiteId, state: str, round: int | None = None) -> SiteRow:
        row = self.sites.setdefault(site, SiteRow())
        row.state, row.reason = state, ""
        if round is not None:
            row.round = round
        return row
