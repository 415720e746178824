"""The aggregator's end of the star over a network; a site's is site_link.py.

Both give transport/star.py, which decides, a clock, streams and files. A site holds one Session open; the
aggregator writes an Ask into it, the site Downloads the model that the Ask names, and Uploads its reply. Each
transfer is chunked, has a digest, and goes on from where it broke. What is small comes with the Ask, or goes
with the Answer, in the session. Nothing is ever polled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import msgspec

from .. import __version__
from ..arena import AnyArena
from ..digest import package_digest
from ..errors import BadUpdate, Broken, CertificateError, ConnectError, JoinRefused, StoreError, WireError
from ..events import Emit, Event, Notice, SiteRefused
from ..messages import Found, Reply, Request, SiteId
from ..schema import Schema
from ..wire import frames
from ..wire.codec import arenas, decode, encode, fetch_list, known
from . import streams
from .grpc import GrpcTransport
from .port import Rate, Sparing
from .star import LEAVE_S, AggregatorEnd, Pending, SiteSession
from .tls import Tls

TRANSPORTS: dict[str, Callable[[Callable[[], Tls], float], streams.Transport]] = {"grpc": GrpcTransport}
JOINS, JOIN_S = 30, 0.5  # of a site: so many at once, and then one in so many seconds
GREETS = 2  # Hellos of a site that are read at once: each may have megabytes
CALLS, CALL_S = 1000, 0.004  # of a site likewise, transfers among them: a round has one or two
HELLO_BYTES = 256 << 10  # of a Hello, beside twice what describes the models
HELLO_S = 10.0  # a session that has not said Hello by then is closed


class RemoteCohort:
    """The sites that have joined over a network. Implements exchange.Cohort."""

    def __init__(
        self,
        transport: streams.Transport,
        *,
        listen: str,
        identify: Callable[[bytes], SiteId],
        welcome: Callable[[SiteId, frames.Hello], None],
        admit: Callable[[SiteId, Request, Reply], None],
        inbox: Callable[[SiteId], streams.Files],
        prove: Callable[[SiteId, bytes], tuple[bytes, bytes]],
        replies: type | Any = Found,
        frozen: AnyArena | None = None,
        schemas: Sequence[Schema] = (),
        inline: bool = True,
        idle_s: float = 30.0,
        emit: Emit,
        witness: Callable[[SiteId, frames.AuditHead], None] = lambda site, head: None,
    ) -> None:
        """`identify` gives a site's name from its certificate, or raises CertificateError; it is asked on
        every call. `welcome` raises JoinRefused when the site does not fit; `admit` raises BadUpdate for a
        reply whose header alone shows that it cannot be used, before one of its bytes is accepted; `replies`
        are the message types that may come; `prove` gives the proof for a site's nonce and the lists of
        revoked certificates, see pki.proof; `frozen` are the run's frozen parameters, for sites whose
        model() has others; `schemas`: those that every site that fits has too, see SiteLink.serve. With
        `inline` small models are sent with the requests that name them; without it, to sites that make models
        of patches, their newest patches where these are small. `witness`: as in AggregatorEnd."""
        emit = Sparing(partial(self._tell, emit))
        self._transport, self._listen, self._emit = transport, listen, emit
        self._joins, self._calls = Rate(JOINS, JOIN_S), Rate(CALLS, CALL_S)
        self._identify, self._welcome, self._admit = identify, welcome, admit
        self._inbox, self._replies, self._known = inbox, replies, known(schemas)
        described = sum(len(msgspec.msgpack.encode(schema)) for schema in schemas)
        self._hello_bytes = 2 * described + HELLO_BYTES if schemas else frames.MESSAGE_BYTES
        self._prove = prove
        self._inline = inline
        first = frames.Welcome(
            heartbeat_s=transport.heartbeat_s,
            frozen=frozen.digest if frozen is not None else "",
            version=__version__,
            package=package_digest(),
        )
        self._end = AggregatorEnd(first, float(idle_s), emit, frozen, witness)
        self._transfers: dict[SiteId, WeakSet[asyncio.Task[Any]]] = {}
        self._changed = asyncio.Event()  # set, and replaced, when a session begins or ends
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_in = self.bytes_out = 0
        self.port = 0
        # Which of the sites with a session are members.
        self.accepted: Callable[[Collection[SiteId]], Collection[SiteId]] = lambda sites: sites

    def _tell(self, emit: Emit, event: Event) -> None:
        try:
            emit(event)
        except (OSError, StoreError) as e:
            self._broken(e)

    def _broken(self, error: OSError | StoreError) -> None:
        """This end's own disk fails: whoever waits for sites or replies raises it. Raised in a site's call it
        would end that call alone, and be told to the site."""
        self._end.broken(error)
        self._sessions_changed()

    def _served(self, serve: streams.Serve) -> streams.Serve:
        async def call(certificate: bytes, stream: streams.MessageStream) -> None:
            try:
                await serve(certificate, stream)
            except (OSError, StoreError) as e:
                self._broken(e)

        return call

    async def start(self) -> None:
        calls = map(self._served, (self._session, self._download, self._upload))
        served = dict(zip(streams.CALLS, calls, strict=True))
        self.port = await self._transport.listen(self._listen, served, self._emit)

    async def stop(self, reason: str | None = None, joined: Iterable[SiteId] = ()) -> None:
        """Close. With a `reason` the run is over, and all that have `joined` it are told first, so that they
        leave; sites that are away have the idle time to come back for it."""
        wait_s = self._end.finish(reason, joined)  # closed in a write, a session would show a traceback
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not await self._deserted():
                        await self._changed.wait()
        finally:
            if self._timer:
                self._timer.cancel()
            await self._transport.close()
            self._emit.close()

    async def _deserted(self) -> bool:
        """Whether no site has yet to learn that the run is over. A site that connects just now has LEAVE_S to
        join."""
        if self._end.deserted and self._transport.arriving():
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._changed.wait()
        return self._end.deserted

    async def members(self, at_least: int) -> list[SiteId]:
        await self._until(lambda: len(self.accepted(self._end.sessions)) >= at_least)
        return sorted(self.accepted(self._end.sessions))

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await self._until(lambda: not {*known}.issuperset(self.accepted(self._end.sessions)))

    def cut(self, site: SiteId, reason: str, final: bool = True) -> None:
        """End all that is open with a site, which is told why. The round goes on without it. `final`: the
        site need not call again."""
        self._end.cut(site, reason, final)
        for transfer in self._transfers.pop(site, ()):
            transfer.cancel()

    def pass_on(self, lists: bytes) -> None:
        """Give new lists of revoked certificates to all sites."""
        self._end.say_to_all(frames.Revocations(lists=lists))

    def renew(self, site: SiteId, chain: bytes) -> None:
        """Give a site its new certificate."""
        self._end.say(site, frames.Renewed(chain=chain))

    def tell(self, site: SiteId, line: str) -> None:
        self._end.say(site, frames.Note(line=line))

    def state_head(
        self, head: frames.AuditHead, place_of: Callable[[SiteId], tuple[int, str] | None]
    ) -> None:
        self._end.state_head(head, place_of)

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        exchange = self._end.begin(requests, loop.time() + deadline_s, woken.set)
        asks: dict[int, frames.Ask] = {}  # one request object for many sites is encoded once
        try:
            for site, request in requests.items():
                if id(request) not in asks:
                    body = encode(request, self._known)
                    named = arenas(request) if self._inline else streams.newest_patches(request)
                    data = streams.inlined(named)
                    asks[id(request)] = frames.Ask(body=body, data=data)
                self._end.ask(exchange, site, asks[id(request)], loop.time())
            self._set_timer()
            while True:
                while exchange.replies:
                    yield exchange.replies.popleft()
                if self._end.error is not None:
                    raise self._end.error
                if exchange.over:
                    return
                woken.clear()
                await woken.wait()
        finally:
            self._end.end(exchange)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true of the sessions. An error of this end's own disk is raised."""
        while self._end.error is None and not true():
            await self._changed.wait()
        if self._end.error is not None:
            raise self._end.error

    def _sessions_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._set_timer()

    def _set_timer(self) -> None:
        """Call `tick` when something is due."""
        if self._timer:
            self._timer.cancel()
        if (due_s := self._end.wake_s()) < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        self._end.tick(due_s)
        self._set_timer()

    def _caller(self, certificate: bytes) -> SiteId:
        """Who calls: the name in the certificate of this very connection, asked on every call (S5)."""
        try:
            site = self._identify(certificate)
        except CertificateError as e:
            self._emit(SiteRefused(site="?", reason=str(e)))
            raise
        if self._calls.wait_s(site, asyncio.get_running_loop().time()):
            raise streams.Flooding(f"makes over {CALLS:,} calls at once, and {1 / CALL_S:g} a second")
        return site

    def _transferring(self, certificate: bytes) -> tuple[SiteId, asyncio.Task[Any]]:
        """Who calls, and the task of the call, which ends when the site is cut off."""
        site, task = self._caller(certificate), cast("asyncio.Task[Any]", asyncio.current_task())
        self._transfers.setdefault(site, WeakSet()).add(task)
        return site, task

    async def _session(self, certificate: bytes, stream: streams.MessageStream) -> None:
        site = self._caller(certificate)
        self._end.greets[site] += 1  # until its Hello is answered: stop() waits for that
        try:
            self._check_joins(site)
            first = await in_time(asyncio.ensure_future(stream.read()))
            if first is None:  # the site left as it came
                return
            self._check_size(site, len(first))
            hello: frames.Hello = decode(first, frames.Hello)
            now = asyncio.get_running_loop().time()
            if contested := self._end.contested(site, hello.process, now):
                raise BadUpdate(contested)
            self._welcome(site, hello)
        except (TimeoutError, WireError, BadUpdate, JoinRefused) as e:
            reason = str(e) or f"no Hello within {HELLO_S:g} s"
            refused = self._end.refuse(site, reason, final=isinstance(e, JoinRefused))
            await stream.write(encode(refused))
            return
        finally:
            self._end.greets[site] -= 1
            self._sessions_changed()
        outbox: asyncio.Queue[frames.FromAggregator | None] = asyncio.Queue()
        session = self._end.join(
            site, hello.process, outbox.put_nowait, *self._prove(site, hello.nonce), now=now,
            build=(hello.version[:20], hello.package[:64]),
        )  # fmt: skip
        self._sessions_changed()
        reading = asyncio.create_task(self._read(session, stream))
        given = b""  # what came with the last Ask that brought something
        try:
            while (frame := await outbox.get()) is not None:
                if isinstance(frame, frames.Ask) and frame.data:
                    if frame.data == given:  # it is in the site's inbox, or else is fetched
                        frame = frames.Ask(body=frame.body)
                    given = frame.data or given
                    self.bytes_out += len(frame.data)
                await stream.write(encode(frame))
        finally:
            reading.cancel()
            self._end.lose(session, asyncio.get_running_loop().time())
            self._sessions_changed()

    def _check_joins(self, site: SiteId) -> None:
        """BadUpdate, before a byte of its Hello is read, where a site joins too often."""
        if self._joins.wait_s(site, asyncio.get_running_loop().time()) or self._end.greets[site] > GREETS:
            raise BadUpdate(
                f"it joins too often: at most {JOINS} times at once, then every {JOIN_S:g} s. Stop its other "
                f"processes; if there are none, its key was copied: revoke its certificate"
            )

    def _check_size(self, site: SiteId, nbytes: int) -> None:
        """JoinRefused for a site whose Hello has `nbytes` of another model."""
        if nbytes > self._hello_bytes:
            raise JoinRefused(
                f"{site} sent a Hello of {nbytes:,} bytes, and one of this run's model has "
                f"{self._hello_bytes:,} at most. Make model() the same at both."
            )

    async def _read(self, session: SiteSession, stream: streams.MessageStream) -> None:
        """What a site says on its own; the end of its stream ends the session."""
        try:
            while (data := await stream.read()) is not None:
                frame: frames.FromSite = decode(data, frames.FromSite)
                if isinstance(frame, frames.Answered):
                    await self._answered(session, frame)
                else:
                    self._end.receive(session, frame)
        except (WireError, ConnectError) as e:
            self._emit(Notice(text=f"{session.site}: {str(e)[:200]}"))
        except (OSError, StoreError) as e:
            self._broken(e)
        finally:
            session.send(None)

    async def _download(self, certificate: bytes, stream: streams.MessageStream) -> None:
        site, _ = self._transferring(certificate)
        if (first := await stream.read()) is None:
            return
        fetch: frames.Fetch = decode(first, frames.Fetch)
        arena = self._end.named(site, fetch.digest)
        if arena is None or not 0 <= fetch.offset <= arena.schema.nbytes:
            raise streams.Denied("no request that is open for this site names it")
        try:
            for chunk in streams.chunks(arena, fetch.offset):
                self.bytes_out += len(chunk)
                await stream.write(chunk)
        except FileNotFoundError:
            if self._end.named(site, fetch.digest):
                raise
            raise streams.Denied("the request that names it is over") from None

    async def _upload(self, certificate: bytes, stream: streams.MessageStream) -> None:
        site, task = self._transferring(certificate)
        stop = task.cancel
        if (first := await stream.read()) is None:  # the site dropped the request as it opened this stream
            return
        try:
            offer: frames.Offer = decode(first, frames.Offer)
        except WireError as e:
            await stream.write(encode(self._end.refuse_upload(site, str(e))))
            return

        async def bring(reply: Reply) -> None:
            for arena in fetch_list(reply):
                async with streams.opened(self._inbox(site), arena) as transfer:
                    await stream.write(encode(frames.Resume(digest=arena.digest, offset=transfer.offset)))
                    begun = transfer.offset
                    try:
                        arena.file = await streams.receive(stream, transfer)
                    finally:
                        self.bytes_in += transfer.offset - begun

        if answer := await self._take(site, offer, stop, bring):
            await stream.write(encode(answer))

    async def _answered(self, session: SiteSession, answer: frames.Answered) -> None:
        async def bring(reply: Reply) -> None:
            await streams.unpack(self._inbox(session.site), fetch_list(reply), answer.data)
            self.bytes_in += len(answer.data)

        taken = await self._take(session.site, answer, lambda: None, bring)
        if isinstance(taken, frames.Refused):
            session.send(frames.Rejected(id=answer.id, reason=taken.reason))

    async def _take(
        self,
        site: SiteId,
        offer: frames.Offer | frames.Answered,
        stop: Callable[[], object],
        bring: Callable[[Reply], Awaitable[None]],
    ) -> frames.UploadAnswer | None:
        """What a site is told of its reply, whose bytes `bring` puts into files; None where it broke off.
        StoreError where it can't be kept. `stop`: as in AggregatorEnd.offered."""
        pending = self._end.offered(site, offer.id, stop)
        if not isinstance(pending, Pending):
            return pending
        try:
            reply: Reply = decode(offer.body, self._replies, self._known)
            self._admit(site, pending.request, reply)
            await bring(reply)
        except Broken as e:
            self._emit(Notice(text=f"{site}: upload broke off, {e}; it may go on from there"))
            return None
        except (BadUpdate, WireError) as e:
            return self._end.unusable(pending, str(e))
        finally:
            self._end.broke_off(pending, stop)
        return self._end.uploaded(pending, reply)


async def in_time(hello: asyncio.Future[bytes | None]) -> bytes | None:
    """A Hello; TimeoutError where none is there after HELLO_S, or when thousands let this end look, later."""
    try:
        if not (await asyncio.wait({hello}, timeout=HELLO_S))[0]:
            raise TimeoutError
        return hello.result()
    finally:
        hello.cancel()
