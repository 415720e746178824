"""Both ends of the star over a network: `RemoteCohort` is the aggregator's, `SiteLink` a site's.

They give transport/star.py, which decides, a clock, streams and files. A site holds one Session open; the
aggregator writes an Ask into it, the site Downloads the model that the Ask names, and Uploads its reply. Each
transfer is chunked, has a digest, and goes on from where it broke. Nothing is ever polled.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast
from weakref import WeakSet

import msgspec

from ..arena import AnyArena, ArenaFile, Patch, patches_to
from ..errors import BadUpdate, Broken, CertificateError, ConnectError, JoinRefused, StoreError, WireError
from ..events import Emit, Notice, SiteRefused, UpdateRefused
from ..messages import Found, Reply, Request, SiteId
from ..wire import frames
from ..wire.codec import arenas, decode, encode, fetch_list
from . import star
from .grpc import GrpcTransport
from .star import AggregatorEnd, Pending, SiteEnd, SiteSession, backoff
from .streams import Connection, Denied, Files, MessageStream, Transport, chunks, opened, receive
from .tls import Tls

TRANSPORTS: dict[str, Callable[[Tls, float], Transport]] = {"grpc": GrpcTransport}
SESSION, DOWNLOAD, UPLOAD = "Session", "Download", "Upload"  # the calls of a site
HELLO_S = 10.0  # a session that has not said Hello by then is closed


# --- the aggregator's end


class RemoteCohort:
    """The sites that have joined over a network. Implements exchange.Cohort."""

    def __init__(
        self,
        transport: Transport,
        *,
        listen: str,
        identify: Callable[[bytes], SiteId],
        welcome: Callable[[SiteId, frames.Hello], None],
        admit: Callable[[SiteId, Request, Reply], None],
        inbox: Callable[[SiteId], Files],
        replies: type | Any = Found,
        frozen: AnyArena | None = None,
        idle_s: float = 30.0,
        emit: Emit,
    ) -> None:
        """`identify` gives a site's name from its certificate, or raises CertificateError; it is asked on
        every call. `welcome` raises JoinRefused when the site does not fit; `admit` raises BadUpdate for a
        reply whose header alone shows that it cannot be used, before one of its bytes is accepted; `replies`
        are the message types that may come; `frozen` are the run's frozen parameters, for sites whose
        model() has others."""
        self._transport, self._listen, self._emit = transport, listen, emit
        self._identify, self._welcome, self._admit = identify, welcome, admit
        self._inbox, self._replies = inbox, replies
        first = frames.Welcome(
            heartbeat_s=transport.heartbeat_s, frozen=frozen.digest if frozen is not None else ""
        )
        self._end = AggregatorEnd(first, float(idle_s), emit, frozen)
        self._transfers: dict[SiteId, WeakSet[asyncio.Task[Any]]] = {}
        self._changed = asyncio.Event()  # set, and replaced, when a session begins or ends
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_in = self.bytes_out = 0
        self.port = 0

    async def start(self) -> None:
        calls = {SESSION: self._session, DOWNLOAD: self._download, UPLOAD: self._upload}
        self.port = await self._transport.listen(self._listen, calls)

    async def stop(self, reason: str | None = None, joined: Iterable[SiteId] = ()) -> None:
        """Close. With a `reason` the run is over, and all that have `joined` it are told first, so that they
        leave; sites that are away have the idle time to come back for it."""
        wait_s = self._end.finish(reason, joined)  # closed in a write, a session would show a traceback
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._until(lambda: self._end.deserted)
        finally:
            if self._timer:
                self._timer.cancel()
            await self._transport.close()

    async def members(self, at_least: int) -> list[SiteId]:
        await self._until(lambda: len(self._end.sessions) >= at_least)
        return sorted(self._end.sessions)

    async def newcomer(self, known: Collection[SiteId]) -> None:
        await self._until(lambda: any(site not in known for site in self._end.sessions))

    def cut(self, site: SiteId, reason: str) -> None:
        """End all that is open with a site, which is told why. The round goes on without it."""
        self._end.cut(site, reason)
        for transfer in self._transfers.pop(site, ()):
            transfer.cancel()

    def tell(self, site: SiteId, line: str) -> None:
        self._end.tell(site, line)

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        exchange = self._end.begin(requests, loop.time() + deadline_s, woken.set)
        asks: dict[int, frames.Ask] = {}  # one request object for many sites is encoded once
        try:
            for site, request in requests.items():
                if id(request) not in asks:
                    asks[id(request)] = frames.Ask(body=await asyncio.to_thread(encode, request))
                self._end.ask(exchange, site, asks[id(request)], loop.time())
            self._set_timer()
            while True:
                while exchange.replies:
                    yield exchange.replies.popleft()
                if exchange.error is not None:
                    raise exchange.error
                if exchange.over:
                    return
                woken.clear()
                await woken.wait()
        finally:
            self._end.end(exchange)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true of the sessions."""
        while not true():
            await self._changed.wait()

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
            return self._identify(certificate)
        except CertificateError as e:
            self._emit(SiteRefused(site="?", reason=str(e)))
            raise

    def _transferring(self, certificate: bytes) -> tuple[SiteId, asyncio.Task[Any]]:
        """Who calls, and the task of the call, which ends when the site is cut off."""
        site, task = self._caller(certificate), cast("asyncio.Task[Any]", asyncio.current_task())
        self._transfers.setdefault(site, WeakSet()).add(task)
        return site, task

    async def _session(self, certificate: bytes, stream: MessageStream) -> None:
        site = self._caller(certificate)
        try:
            async with asyncio.timeout(HELLO_S):
                first = await stream.read()
            if first is None:  # the site left as it came
                return
            hello: frames.Hello = decode(first, frames.Hello)
            self._welcome(site, hello)
        except (TimeoutError, WireError, BadUpdate, JoinRefused) as e:
            reason = str(e) or f"no Hello within {HELLO_S:g} s"
            refused = self._end.refuse(site, reason, final=isinstance(e, JoinRefused))
            await stream.write(encode(refused))
            self._sessions_changed()  # now: stop() may close everything when nobody is left to be told
            return
        outbox: asyncio.Queue[frames.FromAggregator | None] = asyncio.Queue()
        session = self._end.join(site, hello.process, outbox.put_nowait)
        self._sessions_changed()
        reading = asyncio.create_task(self._read(session, stream))
        try:
            while (frame := await outbox.get()) is not None:
                await stream.write(encode(frame))
        finally:
            reading.cancel()
            self._end.lose(session, asyncio.get_running_loop().time())
            self._sessions_changed()

    async def _read(self, session: SiteSession, stream: MessageStream) -> None:
        """What a site says on its own; the end of its stream ends the session."""
        try:
            while (data := await stream.read()) is not None:
                frame: frames.FromSite = decode(data, frames.FromSite)
                self._end.receive(session, frame)
        except (WireError, ConnectError) as e:
            self._emit(Notice(text=f"{session.site}: {str(e)[:200]}"))
        finally:
            session.send(None)

    async def _download(self, certificate: bytes, stream: MessageStream) -> None:
        site, _ = self._transferring(certificate)
        if (first := await stream.read()) is None:
            return
        fetch: frames.Fetch = decode(first, frames.Fetch)
        arena = self._end.named(site, fetch.digest)
        if arena is None or not 0 <= fetch.offset <= arena.schema.nbytes:
            raise Denied("no request that is open for this site names it")
        for chunk in chunks(arena, fetch.offset):
            self.bytes_out += len(chunk)
            await stream.write(chunk)

    async def _upload(self, certificate: bytes, stream: MessageStream) -> None:
        site, task = self._transferring(certificate)
        stop = task.cancel
        if (first := await stream.read()) is None:  # the site dropped the request as it opened this stream
            return
        try:
            offer: frames.Offer = decode(first, frames.Offer)
        except WireError as e:
            await stream.write(encode(self._end.refuse_upload(site, str(e))))
            return
        pending = self._end.offered(site, offer.id, stop)
        if not isinstance(pending, Pending):
            await stream.write(encode(pending))
            return
        try:
            reply: Reply = decode(offer.body, self._replies)
            self._admit(site, pending.request, reply)
            for arena in fetch_list(reply):
                async with opened(self._inbox(site), arena) as transfer:
                    await stream.write(encode(frames.Resume(digest=arena.digest, offset=transfer.offset)))
                    begun = transfer.offset
                    try:
                        arena.path = await receive(stream, transfer)
                    finally:
                        self.bytes_in += transfer.offset - begun
        except Broken as e:
            self._emit(Notice(text=f"{site}: upload broke off, {e}; it may go on from there"))
            return
        except (BadUpdate, WireError) as e:
            answer: frames.UploadAnswer = self._end.unusable(pending, str(e))
        except StoreError as e:
            self._end.fail(pending, e)
            return
        else:
            answer = self._end.uploaded(pending, reply)
        finally:
            self._end.broke_off(pending, stop)
        await stream.write(encode(answer))


# --- the site's end

Answer = Callable[[Request], Awaitable[Reply]]


class SiteLink:
    """A site's connection: joins, is asked, answers; and comes back for ever until the run is over."""

    def __init__(
        self,
        transport: Transport,
        *,
        address: str,
        target: str,
        inbox: Files,
        requests: type | Any,
        emit: Emit,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`target` is the name that the aggregator's certificate must carry, whatever its address (S4);
        `requests` the message types that this site takes."""
        self._transport, self._address, self._target = transport, address, target
        self._inbox, self._emit, self._sleep, self._jitter = inbox, emit, sleep, jitter
        self._end = SiteEnd(requests, emit)
        self._process = secrets.token_hex(8)
        self._frozen: ArenaFile | None = None  # what is fetched before anything is answered
        self._outbox: asyncio.Queue[frames.FromSite] = asyncio.Queue()
        self._working_on: Request | None = None
        self._work: asyncio.Task[None] | None = None
        self._error: BaseException | None = None  # that the work raised

    async def serve(
        self,
        hello: frames.Hello,
        answer: Answer,
        welcomed: Callable[[str], ArenaFile | None] = lambda frozen: None,
        patched: Callable[[Patch, str], Awaitable[bool]] | None = None,
    ) -> str:
        """Answer requests until the aggregator says that the run is over; returns its reason.

        `welcomed` is told the digest of the run's frozen parameters, and returns them when they have to be
        fetched before anything is answered. `patched` makes the model of that digest, in the inbox, of a
        patch that is here and its base, and says whether it could; without it models are fetched whole.

        JoinRefused when both ends disagree. Any other trouble is told once and tried again, after 0.2 s
        at first and then ever more slowly up to 15 s, with jitter, so that a restarted aggregator is not
        stormed. An error of `answer` that is no reply, a bug or a full disk, ends it too.
        """
        self._answer, self._welcomed, self._patched = answer, welcomed, patched
        first = msgspec.structs.replace(hello, process=self._process)
        while True:
            self._session_task = asyncio.create_task(self._session(first))
            try:
                return await self._session_task
            except (ConnectError, asyncio.CancelledError) as e:
                if self._error is not None:
                    raise self._error from None
                if not isinstance(e, ConnectError) or isinstance(e, JoinRefused):
                    raise
                pause_s = self._end.lose(e, self._jitter())
            await self._sleep(pause_s)

    def status(self, state: str) -> None:
        """Tell the aggregator what is going on here; best effort."""
        if self._end.joined:
            self._outbox.put_nowait(frames.Status(state=state))

    async def _session(self, hello: frames.Hello) -> str:
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(hello)
        async with self._transport.connect(self._address, self._target) as call, call(SESSION) as stream:
            writing = asyncio.create_task(self._write(stream))
            try:
                while self._end.finished is None:
                    if (data := await stream.read()) is None:
                        raise ConnectError(f"{self._address}: the aggregator closed the connection.")
                    frame: frames.FromAggregator = decode(data, frames.FromAggregator)
                    if isinstance(frame, frames.Welcome):
                        self._frozen = self._welcomed(frame.frozen)
                    self._end.receive(frame)
                    self._follow(call)
                await self._leave(stream)
                return self._end.finished
            except WireError as e:
                raise ConnectError(f"{self._address}: {e}. Do both ends run the same fedtrain?") from None
            finally:
                writing.cancel()
                if self._work:
                    self._work.cancel()
                self._work = self._working_on = None

    async def _leave(self, stream: MessageStream) -> None:
        """Say that we know, and go when the aggregator has read it: it would wait for us otherwise."""
        self._outbox.put_nowait(frames.Leaving())
        with suppress(TimeoutError, ConnectError):
            async with asyncio.timeout(star.LEAVE_S):
                while await stream.read() is not None:
                    pass

    async def _write(self, stream: MessageStream) -> None:
        with suppress(ConnectError):  # whoever reads learns of it too
            while True:
                await stream.write(encode(await self._outbox.get()))

    def _follow(self, call: Connection) -> None:
        """Work on what is asked for now, and on nothing else."""
        request = self._end.request
        if request is self._working_on:
            return
        if self._work:
            self._work.cancel()
        self._work, self._working_on = None, request
        if request is not None:
            self._work = asyncio.create_task(self._reply(call, request))
            self._work.add_done_callback(lambda work: self._ended(work, request))

    def _ended(self, work: asyncio.Task[None], request: Request) -> None:
        """An error of ours must not leave a site that looks alive: serve() raises it."""
        self._end.answered(request)
        if not work.cancelled() and (error := work.exception()):
            self._error = error
            self._session_task.cancel()

    async def _reply(self, call: Connection, request: Request) -> None:
        """Fetch what the request names, do it, bring the reply; what breaks on the way is tried again.

        It ends with its session: whoever reconnects is asked again, and `answer` remembers what it did.
        """
        for pause_s in backoff(0.1, 2.0, 5.0):
            try:
                if self._frozen is not None:
                    await self._fetch(call, self._frozen)
                for arena in fetch_list(request):
                    await self._fetch(call, arena)
                await self._offer(call, request, await self._answer(request))
                return
            except Denied as e:
                self._emit(Notice(text=f"{request.id}: {e}"))
                return
            except (ConnectError, Broken):
                pass
            except WireError as e:  # bytes damaged here or on the way
                self._emit(Notice(text=f"{request.id}: {e}"))
            await self._sleep(pause_s * (0.5 + self._jitter()))

    async def _fetch(self, call: Connection, arena: ArenaFile) -> None:
        """Bring an arena here: by patches from one that is here already, where those lead to it, or whole."""
        if arena.patches and self._patched and not self._inbox.has(arena.digest, arena.schema.nbytes):
            patches = patches_to(arena, lambda base: self._inbox.has(base, arena.schema.nbytes))
            ends = [*(patch.base for patch in patches[1:]), arena.digest]
            for patch, end in zip(patches, ends, strict=False):
                assert isinstance(patch.arena, ArenaFile), patch
                await self._download(call, patch.arena)
                if not await self._patched(patch, end):
                    break
        await self._download(call, arena)

    async def _download(self, call: Connection, arena: ArenaFile) -> None:
        async with opened(self._inbox, arena) as transfer:
            if transfer.whole:
                arena.path = await asyncio.to_thread(transfer.finish)
                return
            async with call(DOWNLOAD) as stream:
                await stream.write(encode(frames.Fetch(digest=arena.digest, offset=transfer.offset)))
                arena.path = await receive(stream, transfer)

    async def _offer(self, call: Connection, request: Request, reply: Reply) -> None:
        offered = {arena.digest: arena for arena in arenas(reply)}
        async with call(UPLOAD) as stream:
            await stream.write(encode(frames.Offer(id=request.id, body=encode(reply))))
            while (data := await stream.read()) is not None:
                match decode(data, frames.UploadAnswer):
                    case frames.Resume(digest=digest, offset=offset):
                        for chunk in chunks(offered[digest], offset):
                            await stream.write(chunk)
                    case frames.Refused(reason=reason):
                        self._emit(UpdateRefused(site="here", round=None, reason=reason))
                        return
                    case _:  # Stored, or Moot
                        return
        raise Broken("the upload ended without an answer")
