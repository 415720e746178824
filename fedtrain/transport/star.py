"""The star seam's protocol without I/O: who has joined, what each site is asked, what becomes of its reply.

`AggregatorEnd` is the aggregator's half of the protocol in wire/frames.py, `SiteEnd` a site's half.
transport/endpoints.py and site_link.py drive them over any transport. What happens is a method call, given
the time where time matters; frames leave through the `send` of a session, and whoever waits for an exchange
is woken by its `wake`.

A request is pending from its Ask to its reply or to the end of its exchange, across lost connections: a site
that joins again is asked again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..arena import AnyArena
from ..errors import ConnectError, JoinRefused, StoreError
from ..events import Emit, Notice, SiteJoined, SiteLost, SiteRefused, SiteState, UpdateRefused
from ..messages import Failure, Reply, Request, SiteId
from ..wire import frames
from ..wire.codec import NOTHING, Known, arenas, decode

LEAVE_S = 2.0  # for the other end to read a last frame
REPLACED = 8  # processes of one site that are remembered after another process took their place
CONTEST_S = 60.0  # a site whose processes took each other's place twice in it keeps the one that is there
STOLEN = "Stop one; if there is but one at {0}, its key was copied: revoke its certificate"
ANOTHER = f"another process has joined as {{0}}, with the same certificate. {STOLEN}."
MOOT = 4096  # requests that are remembered after their exchange ended early, without their replies


# --- the aggregator's end


@dataclass(eq=False)
class SiteSession:
    """The open stream of a site that has joined."""

    site: SiteId
    process: str  # as in the site's Hello
    send: Callable[[frames.FromAggregator | None], None]  # None: close the stream
    owes_head: bool = False  # it was told how the aggregator's audit log stands, and has not answered
    certificate: bytes = b""  # that it was shown with such a head


@dataclass(eq=False)
class Exchange:
    """An exchange under way."""

    requests: Mapping[SiteId, Request]
    until_s: float
    wake: Callable[[], None]  # called when `replies` or `over` has changed
    waiting: set[SiteId]  # sites that may still reply
    replies: deque[tuple[SiteId, Reply]] = field(default_factory=deque)
    late: bool = False  # the deadline has passed

    @property
    def over(self) -> bool:
        return self.late or not self.waiting


@dataclass(eq=False)
class Pending:
    """A request that its site has not answered yet."""

    site: SiteId
    request: Request
    ask: frames.Ask
    exchange: Exchange
    stop: Callable[[], object] | None = None  # ends the upload of the reply that is under way


class AggregatorEnd:
    """Sessions of sites, and the requests that are pending for them."""

    def __init__(
        self,
        welcome: frames.Welcome,
        idle_s: float,
        emit: Emit,
        frozen: AnyArena | None,
        witness: Callable[[SiteId, frames.AuditHead], None] = lambda site, head: None,
    ) -> None:
        """`welcome` is what each site that joins is sent first; a site that is away for `idle_s` is not
        waited for in the exchanges under way; `frozen` are the run's frozen parameters, if it has any;
        `witness` is told the head of a site's audit log, one for each that the site was told."""
        self._witness = witness
        self.sessions: dict[SiteId, SiteSession] = {}
        self.greets = Counter[SiteId]()  # calls of each site whose Hello is being read
        self._welcome, self._idle_s, self._emit, self._frozen = welcome, idle_s, emit, frozen
        self._pending: dict[SiteId, dict[str, Pending]] = {}  # by site, by id
        self._exchanges: dict[Exchange, None] = {}  # under way
        self._moot: deque[tuple[SiteId, str]] = deque(maxlen=MOOT)
        self._away: dict[SiteId, float] = {}  # until when each lost site is waited for, the earliest first
        self._replaced: dict[SiteId, deque[tuple[str, float]]] = {}  # each site's former processes, and when
        self._builds: dict[SiteId, tuple[str, str]] = {}  # other than here, as people were told
        self._reported: set[SiteId] = set()  # sites that people know to be two processes
        self._finished: str | None = None  # why the run is over
        self._uninformed: set[SiteId] = set()  # sites that have not confirmed that the run is over
        self.error: StoreError | OSError | None = None  # of this end's own disk: the run can't go on

    @property
    def deserted(self) -> bool:
        """No session is open or begins, and no site has yet to learn that the run is over."""
        return not (self.sessions or self._uninformed or any(self.greets.values()))

    # --- sessions

    def join(
        self,
        site: SiteId,
        process: str,
        send: Callable[[frames.FromAggregator | None], None],
        proof: bytes = b"",
        lists: bytes = b"",
        now: float = 0.0,
        build: tuple[str, str] = ("", ""),
    ) -> SiteSession:
        """A site that fits begins a session, which takes the place of an earlier one of its name, unless they
        are `contested`. `proof` and `lists`: as in its Welcome. `build`: the version and digest of the
        site's fedtrain."""
        if earlier := self.sessions.get(site):
            self._replace(earlier, process, now)
        session = self.sessions[site] = SiteSession(site, process, send)
        self._away.pop(site, None)
        send(msgspec.structs.replace(self._welcome, proof=proof, lists=lists))
        if self._finished is not None:
            self._uninformed.add(site)  # it may join for the first time
            send(frames.Finished(reason=self._finished))
        for pending in self._pending_of(site):
            send(pending.ask)
        self._emit(SiteJoined(site=site, version=build[0], package=build[1]))
        ours = self._welcome.version, self._welcome.package
        if build != ours and self._builds.get(site) != build:
            self._builds[site] = build
            self._emit(Notice(text=other_build(site, build, ours)))
        return session

    def contested(self, site: SiteId, process: str, now: float) -> str:
        """Why a process may not take the place of another one of the same certificate: they did so twice in a
        short time, so that rounds would go on without either. "" where it may join."""
        earlier, replaced = self.sessions.get(site), self._replaced.get(site, ())
        if earlier is None or earlier.process == process:
            return ""
        if sum(now - at < CONTEST_S for _, at in replaced) < 2:
            return ""
        return ANOTHER.format(site)

    def _replace(self, earlier: SiteSession, process: str, now: float) -> None:
        """End a session for a newer one of the same name. One process that reconnects before its loss was
        noticed is nothing to report; two that replace each other in turns are reported to people, once."""
        site = earlier.site
        if earlier.process != process:
            mend = STOLEN.format(site)
            earlier.send(frames.Refused(reason=ANOTHER.format(site)))
            replaced = self._replaced.setdefault(site, deque(maxlen=REPLACED))
            if any(process == before for before, _ in replaced) and site not in self._reported:
                self._reported.add(site)
                text = f"{site}: two processes join with one certificate and take each other's place. {mend}"
                self._emit(Notice(text=f"{text} (fedtrain certs revoke {site})."))
            replaced.append((earlier.process, now))
        earlier.send(None)

    def refuse(self, site: SiteId, reason: str, *, final: bool) -> frames.Refused:
        """The answer to a site that does not fit."""
        self._emit(SiteRefused(site=site, reason=reason))
        if final:
            self._uninformed.discard(site)
        return frames.Refused(reason=reason, final=final)

    def receive(self, session: SiteSession, frame: frames.FromSite) -> None:
        """A frame after the Hello."""
        if isinstance(frame, frames.Status):
            if frame.trouble:
                self._emit(Notice(text=f"{session.site}: {frame.trouble[:300]}"))
            else:
                self._emit(SiteState(site=session.site, state=frame.state[:64]))
        elif isinstance(frame, frames.AuditHead) and session.owes_head:
            session.owes_head = False
            self._witness(session.site, frame)
        elif isinstance(frame, frames.Leaving):
            self._uninformed.discard(session.site)
            session.send(None)

    def lose(self, session: SiteSession, now: float) -> None:
        """The stream of a session has ended."""
        if self.sessions.get(session.site) is session:
            del self.sessions[session.site]
            self._wait_for(session.site, now)
            self._emit(SiteLost(site=session.site, reason="disconnected"))

    def cut(self, site: SiteId, reason: str, final: bool) -> None:
        """End all that is open with a site, and tell it why. The exchanges under way go on without it."""
        for pending in self._pending_of(site):
            if pending.stop:
                pending.stop()
            self._settle(pending, Failure(reason=reason))
        if session := self.sessions.get(site):
            session.send(frames.Refused(reason=reason, final=final))
            session.send(None)

    def say(self, site: SiteId, frame: frames.FromAggregator) -> None:
        """Send a frame to a site, if it has a session."""
        if session := self.sessions.get(site):
            session.send(frame)

    def say_to_all(self, frame: frames.FromAggregator) -> None:
        """Send a frame to each site that has a session."""
        for session in self.sessions.values():
            session.send(frame)

    def state_head(
        self, head: frames.AuditHead, place_of: Callable[[SiteId], tuple[int, str] | None]
    ) -> None:
        """Tell all sites how the audit log stands; `place_of`: how a site's own one stood."""
        for site, session in self.sessions.items():
            session.owes_head = True
            shown = b"" if session.certificate == head.certificate else head.certificate
            session.certificate = head.certificate
            session.send(msgspec.structs.replace(head, certificate=shown, seen=place_of(site)))

    def finish(self, reason: str | None, joined: Iterable[SiteId]) -> float:
        """End all sessions. With a `reason` the run is over, and all sites that ever `joined` are to learn
        it. Returns the seconds to wait until it is `deserted`."""
        self._finished = reason
        for session in self.sessions.values():
            session.send(None if reason is None else frames.Finished(reason=reason))
        if reason is None:
            return LEAVE_S
        wait_s = max(LEAVE_S, self._idle_s)
        self._uninformed = {*joined, *self.sessions}
        if away := sorted(self._uninformed - self.sessions.keys()):
            who = f"{', '.join(away[:5])}{' and others' if away[5:] else ''}"
            text = f"the run is over, and {who} may come back within {wait_s:g} s to hear it"
            self._emit(Notice(text=f"{text}; Ctrl-C leaves at once"))
        return wait_s

    # --- exchanges

    def begin(self, requests: Mapping[SiteId, Request], until_s: float, wake: Callable[[], None]) -> Exchange:
        """A new exchange, which begins to ask by `ask`."""
        exchange = Exchange(requests, until_s, wake, set(requests))
        self._exchanges[exchange] = None
        return exchange

    def ask(self, exchange: Exchange, site: SiteId, ask: frames.Ask, now: float) -> None:
        """Put the site's request of the exchange, encoded in `ask`."""
        request = exchange.requests[site]
        self._pending.setdefault(site, {})[request.id] = Pending(site, request, ask, exchange)
        if session := self.sessions.get(site):
            session.send(ask)
        else:
            self._wait_for(site, now)

    def end(self, exchange: Exchange) -> None:
        """Its replies are needed no more: uploads that are under way stop, and sites that work on its
        requests are told to stop. A reply that comes after an early end is moot, after a late one refused."""
        self._exchanges.pop(exchange, None)
        for site, request in exchange.requests.items():
            pending = self._pending.get(site, {}).get(request.id)
            if pending is not None and pending.exchange is exchange:
                del self._pending[site][request.id]
                if pending.stop:
                    pending.stop()
                if not exchange.late:
                    self._moot.append((site, request.id))
            if site in exchange.waiting and (session := self.sessions.get(site)):
                session.send(frames.Cancel(id=request.id))

    def tick(self, now: float) -> None:
        """Deadlines of exchanges that have passed, and lost sites whose time is over."""
        for exchange in self._exchanges:
            if now >= exchange.until_s and not exchange.over:
                exchange.late = True
                exchange.wake()
        while self._away and now >= (first := next(iter(self._away.items())))[1]:
            del self._away[first[0]]
            for pending in self._pending_of(first[0]):  # they stay, in case the site comes back after all
                pending.exchange.waiting.discard(first[0])
                pending.exchange.wake()

    def wake_s(self) -> float:
        """When `tick` has something to do next; inf: not at all."""
        deadlines = (exchange.until_s for exchange in self._exchanges if not exchange.over)
        return min(next(iter(self._away.values()), math.inf), min(deadlines, default=math.inf))

    def _wait_for(self, site: SiteId, now: float) -> None:
        self._away.pop(site, None)
        self._away[site] = now + self._idle_s

    # --- transfers

    def named(self, site: SiteId, digest: str) -> AnyArena | None:
        """The arena of this digest, if the site may fetch it: the frozen parameters, or a model or patch of
        a request that is pending for the site."""
        frozen = [self._frozen] if self._frozen is not None and site in self.sessions else []
        models = [arena for pending in self._pending_of(site) for arena in arenas(pending.request)]
        patches = [patch.arena for model in models for patch in model.patches]
        return next((arena for arena in (*frozen, *models, *patches) if arena.digest == digest), None)

    def offered(
        self, site: SiteId, id: str, stop: Callable[[], object]
    ) -> Pending | frames.Moot | frames.Refused:
        """A site begins to upload its reply to the request `id`: what it replies to, or why it is not taken.
        `stop` ends the upload; an earlier one of the same reply, over a connection that broke, is ended."""
        pending = self._pending.get(site, {}).get(id)
        if pending is not None:
            if pending.stop:
                pending.stop()
            pending.stop = stop
            return pending
        if (site, id) in self._moot:
            return frames.Moot()
        return self.refuse_upload(
            site, f"no request {id[:80]} is open for {site}: late, answered already, or another's"
        )

    def refuse_upload(self, site: SiteId, reason: str) -> frames.Refused:
        """An upload that belongs to no pending request."""
        self._emit(UpdateRefused(site=site, round=None, reason=reason))
        return frames.Refused(reason=reason)

    def uploaded(self, pending: Pending, reply: Reply) -> frames.Stored:
        """The reply has been received to its last byte."""
        self._settle(pending, reply)
        return frames.Stored()

    def unusable(self, pending: Pending, reason: str) -> frames.Refused:
        """The reply can't be used."""
        self._settle(pending, Failure(reason=reason))
        return frames.Refused(reason=reason)

    def broke_off(self, pending: Pending, stop: Callable[[], object]) -> None:
        """The upload that `stop` ends is over; unless another one took its place, none is under way."""
        if pending.stop is stop:
            pending.stop = None

    def broken(self, error: StoreError | OSError) -> None:
        """This end's own disk fails while it serves a site, or can't keep a reply, which is not the site's
        trouble: all exchanges end with the error, and so does each that begins later."""
        self.error = error
        for exchange in self._exchanges:
            exchange.wake()

    def _settle(self, pending: Pending, reply: Reply) -> None:
        """Hand a reply to its exchange, unless the request has been answered or the exchange has ended."""
        own = self._pending.get(pending.site, {})
        if own.get(pending.request.id) is pending:
            del own[pending.request.id]
            pending.exchange.waiting.discard(pending.site)
            pending.exchange.replies.append((pending.site, reply))
            pending.exchange.wake()

    def _pending_of(self, site: SiteId) -> list[Pending]:
        return [*self._pending.get(site, {}).values()]


def other_build(other: str, theirs: tuple[str, str], ours: tuple[str, str]) -> str:
    """That the other end runs another fedtrain: (version, SHA-256 of the package) of both."""
    there, here = (f"{version} (SHA-256 {package[:12] or 'not told'})" for version, package in (theirs, ours))
    return f"{other} runs fedtrain {there}, this end {here}. Install the same fedtrain at both."


# --- the site's end


def backoff(first_s: float, factor: float, longest_s: float) -> Iterator[float]:
    """Seconds to pause between tries: ever more, up to the longest."""
    while True:
        yield first_s
        first_s = min(first_s * factor, longest_s)


class SiteEnd:
    """What a site is to work on, by what the aggregator has said."""

    PAUSES = 0.2, 1.7, 15.0  # between sessions: see backoff

    def __init__(self, requests: type | Any, emit: Emit) -> None:
        """`requests` are the message types that the site takes."""
        self.known: Known = NOTHING  # schemas that the aggregator has too
        self.request: Request | None = None  # to work on now; the same object for as long as that is so
        self.data = b""  # the bytes of its arenas, where they came with it
        self.finished: str | None = None  # why the run is over
        self.joined = False
        self.build: tuple[str, str] | None = None  # of the own fedtrain; None: people know that they differ
        self._requests, self._emit = requests, emit
        self._refused, self._reported = False, ""
        self._pauses = backoff(*self.PAUSES)

    def receive(self, frame: frames.FromAggregator) -> None:
        """ConnectError when the frame ends the session, JoinRefused when no later one would do better."""
        match frame:
            case frames.Welcome():
                self.joined, theirs = True, (frame.version[:20], frame.package[:64])
                self._emit(SiteJoined(site="aggregator", version=theirs[0], package=theirs[1]))
                if self.build is not None and self.build != theirs:
                    self._emit(Notice(text=other_build("the aggregator", theirs, self.build)))
                    self.build = None
            case frames.Ask(body=body, data=data):
                request: Request = decode(body, self._requests, self.known)
                if self.request is None or self.request.id != request.id:
                    self.request, self.data = request, data
            case frames.Cancel(id=id):
                if self.request is not None and self.request.id == id:
                    self.request = None
            case frames.Rejected(reason=reason):
                self._emit(UpdateRefused(site="here", round=None, reason=reason))
            case frames.Note(line=line):
                self._emit(Notice(text=line))
            case frames.Finished(reason=reason):
                self.finished, self.request = reason, None
            case frames.Refused(reason=reason, final=final):
                self._refused = True
                raise (JoinRefused if final else ConnectError)(reason)

    def answered(self, request: Request) -> None:
        """The work on a request is over; asked the same again, the site begins anew."""
        if self.request is request:
            self.request = None

    def lose(self, error: ConnectError, draw: float) -> float:
        """The session has ended, or did not come about. Returns the seconds until the next try: few again
        after a session that went well, unless another process of this site's name ended it; times 0.5 to 1.5
        by a `draw` from [0, 1), so that sites don't all come back at once. A trouble is reported once."""
        if self.joined and not self._refused:
            self._pauses, self._reported = backoff(*self.PAUSES), ""
        self.joined, self._refused, self.request = False, False, None
        if str(error) != self._reported:
            self._emit(SiteLost(site="aggregator", reason=str(error)))
            self._reported = str(error)
        return next(self._pauses) * (0.5 + draw)
