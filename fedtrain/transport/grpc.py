"""The star seam over gRPC with mutual TLS. The site opens the only connection; nothing is ever polled.

Both ends are in this file: `GrpcCohort` is the aggregator's, `SiteLink` the site's. A site holds one
Session open; the aggregator writes an Ask into it, the site Downloads the model that the Ask names, and
Uploads its reply. Each transfer is chunked, has a digest, and goes on from where it broke. A request stays
open until it is answered or its deadline passes, across lost connections: whoever reconnects is asked again.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakSet

import grpc
import grpc.aio
import msgspec

from ..arena import AnyArena, ArenaFile, Patch, patches_to
from ..errors import BadUpdate, Broken, CertificateError, ConnectError, JoinRefused, StoreError, WireError
from ..messages import Failure, Found, Reply, Request, SiteId
from ..wire.codec import arenas, decode, encode, fetch_list
from ..wire.frames import (
    CHUNK_BYTES,
    MESSAGE_BYTES,
    Ask,
    Cancel,
    Fetch,
    Finished,
    FromAggregator,
    FromSite,
    Hello,
    Leaving,
    Moot,
    Note,
    Offer,
    Refused,
    Resume,
    Status,
    Stored,
    UploadAnswer,
    Welcome,
)
from .tls import Tls, explain, first_words

SERVICE = "fedtrain.Star"
LEAVE_S = 2.0  # for the other end to hear a last word
HELLO_S = 10.0  # a connection that has not said Hello by then is closed
REPLACED = 8  # processes remembered that another one of their name took the place of
MOOT = 4096  # requests remembered that nobody waits for, though their deadline hasn't passed
END = grpc.aio.EOF
CLOSED = (
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)  # a channel or call that is over

Emit = Callable[..., None]


class Arriving(Protocol):
    """One transfer being received; see store.spool."""

    offset: int
    nbytes: int

    @property
    def whole(self) -> bool: ...
    def write(self, chunk: bytes) -> None: ...
    def finish(self) -> Path: ...
    def close(self) -> None: ...


class Inbox(Protocol):
    """Where received bytes are kept by their digest."""

    def has(self, digest: str, nbytes: int) -> bool: ...
    def receive(self, digest: str, nbytes: int) -> Arriving: ...


def channel_options(heartbeat_s: float) -> list[tuple[str, int]]:
    """gRPC core settings of both ends. Names are dotted; core ignores one that it does not know."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.http2.max_frame_size", CHUNK_BYTES),  # 1.4 times faster than the default of 16 KiB
        ("grpc.keepalive_time_ms", int(heartbeat_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(heartbeat_s * 3000)),
        ("grpc.http2.ping_timeout_ms", int(heartbeat_s * 3000)),  # or core waits a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ]


# --- the aggregator's end


@dataclass
class Session:
    """One joined site's open stream. None in the outbox closes it."""

    process: str  # as in Hello
    outbox: asyncio.Queue[FromAggregator | None] = field(default_factory=asyncio.Queue)


@dataclass
class Pending:
    """A request without its reply yet."""

    request: Request
    ask: Ask
    arrivals: asyncio.Queue[tuple[SiteId, Reply | StoreError | None]]
    upload: asyncio.Task[None] | None = None


class GrpcCohort:
    """The sites that have joined over mutual TLS. Implements exchange.Cohort."""

    def __init__(
        self,
        *,
        listen: str,
        tls: Tls,
        identify: Callable[[bytes], SiteId],
        welcome: Callable[[SiteId, Hello], None],
        admit: Callable[[SiteId, Request, Reply], None],
        inbox: Callable[[SiteId], Inbox],
        replies: type | Any = Found,
        frozen: AnyArena | None = None,
        heartbeat_s: float = 5.0,
        idle_s: float = 30.0,
        emit: Emit = lambda kind, **fields: None,
    ) -> None:
        """`identify` gives a site's name from its certificate, or raises CertificateError; it is asked on
        every call. `welcome` raises
        JoinRefused when the site does not fit; `admit` raises BadUpdate for a reply whose header alone
        shows that it cannot be used, before one of its bytes is accepted; `replies` are the message types
        that may come; `frozen` are the run's frozen parameters, for sites whose model() has others."""
        self._replies, self._frozen = replies, frozen
        self._listen, self._tls, self._welcome, self._admit = listen, tls, welcome, admit
        self._identify = identify
        self._inbox, self._emit = inbox, emit
        self._heartbeat_s, self._idle_s = float(heartbeat_s), float(idle_s)
        self._sessions: dict[SiteId, Session] = {}
        self._pending: dict[tuple[SiteId, str], Pending] = {}
        self._moot: deque[tuple[SiteId, str]] = deque(maxlen=MOOT)
        self._transfers: dict[SiteId, WeakSet[asyncio.Task[Any]]] = {}
        self._giving_up: dict[SiteId, asyncio.TimerHandle] = {}  # of each site that is away
        self._replaced: dict[SiteId, deque[str]] = {}  # processes of each
        self._told_of = set[SiteId]()  # that two processes are it
        self._joined = asyncio.Condition()
        self._finished: str | None = None
        self._untold: set[SiteId] = set()  # who has yet to hear that the run is finished
        self._alone = asyncio.Event()  # no session is open, and nobody has yet to hear
        self._alone.set()
        self.bytes_in = self.bytes_out = 0
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                *channel_options(self._heartbeat_s),
                # without these, core cancels calls above 1,000 at a thundering start
                ("grpc.server.max_pending_requests", 20_000),
                ("grpc.server.max_pending_requests_hard_limit", 40_000),
                ("grpc.max_metadata_size", 16 << 10),
                ("grpc.so_reuseport", 0),  # a second aggregator on the port is an error, not a coin toss
            ]
        )
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Download": grpc.unary_stream_rpc_method_handler(self._download),
            "Upload": grpc.stream_stream_rpc_method_handler(self._upload),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = self._server.add_secure_port(self._listen, self._tls.server())
        except RuntimeError:
            raise ConnectError(
                f"cannot listen on {self._listen}: the port is in use or not ours. Change network.listen."
            ) from None
        await self._server.start()

    async def stop(self, reason: str | None = None, joined: Iterable[SiteId] = ()) -> None:
        """Close. With a `reason` the run is over, and all that have `joined` it are told first, so that they
        leave; whoever is away has the idle time to come back and hear it."""
        self._finished, wait_s = reason, LEAVE_S if reason is None else max(LEAVE_S, self._idle_s)
        for session in self._sessions.values():
            session.outbox.put_nowait(None if reason is None else Finished(reason=reason))
        if reason is not None:
            self._untold = {*joined, *self._sessions}
            if away := sorted(self._untold - self._sessions.keys()):
                who = f"{', '.join(away[:5])}{' and others' if away[5:] else ''}"
                text = f"the run is over, and {who} may come back within {wait_s:g} s to hear it"
                self._emit("notice", text=f"{text}; Ctrl-C leaves at once")
        self._look_around()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._alone.wait()  # a session cut off in a write is a traceback in core
        finally:
            await self._server.stop(grace=None)

    def _look_around(self) -> None:
        if self._sessions or self._untold:
            self._alone.clear()
        else:
            self._alone.set()

    async def members(self, at_least: int) -> list[SiteId]:
        async with self._joined:
            await self._joined.wait_for(lambda: len(self._sessions) >= at_least)
        return sorted(self._sessions)

    async def newcomer(self, known: Collection[SiteId]) -> None:
        async with self._joined:
            await self._joined.wait_for(lambda: any(site not in known for site in self._sessions))

    def cut(self, site: SiteId, reason: str) -> None:
        """End all that is open with a site, which is told why. The round goes on without it."""
        for key in [key for key in self._pending if key[0] == site]:
            pending = self._pending.pop(key)
            pending.arrivals.put_nowait((site, Failure(reason=reason)))
        for transfer in self._transfers.pop(site, ()):
            transfer.cancel()
        if session := self._sessions.get(site):
            session.outbox.put_nowait(Refused(reason=reason, final=True))
            session.outbox.put_nowait(None)

    def tell(self, site: SiteId, line: str) -> None:
        if session := self._sessions.get(site):
            session.outbox.put_nowait(Note(line=line))

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        arrivals: asyncio.Queue[tuple[SiteId, Reply | StoreError | None]] = asyncio.Queue()
        late = False
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        asks: dict[int, Ask] = {}  # one request object for many sites is encoded once
        waiting = set(requests)
        for site, request in requests.items():
            if id(request) not in asks:
                asks[id(request)] = Ask(body=await asyncio.to_thread(encode, request))
            self._pending[site, request.id] = pending = Pending(request, asks[id(request)], arrivals)
            if session := self._sessions.get(site):
                session.outbox.put_nowait(pending.ask)
            else:
                self._give_up_later(site)
        try:
            while waiting:
                try:
                    async with asyncio.timeout_at(until):
                        site, reply = await arrivals.get()
                except TimeoutError:
                    late = True
                    return
                if isinstance(reply, StoreError):  # our disk is full, say
                    raise reply
                waiting.discard(site)
                if reply is not None:
                    yield site, reply
        finally:
            for site, request in requests.items():
                left = self._pending.pop((site, request.id), None)
                if left and left.upload:
                    left.upload.cancel()
                if left and not late:
                    self._moot.append((site, request.id))
                if site in waiting and (session := self._sessions.get(site)):
                    session.outbox.put_nowait(Cancel(id=request.id))

    def _give_up_later(self, site: SiteId) -> None:
        """After the idle time, a site that was away throughout is not waited for in this exchange."""

        def give_up() -> None:
            for (name, _), pending in self._pending.items():
                if name == site:
                    pending.arrivals.put_nowait((site, None))

        self._wait_for(site)
        self._giving_up[site] = asyncio.get_running_loop().call_later(self._idle_s, give_up)

    def _wait_for(self, site: SiteId) -> None:
        """Stop the clock of an earlier loss: the site is back, or was lost anew."""
        if timer := self._giving_up.pop(site, None):
            timer.cancel()

    async def _peer(self, context: grpc.aio.ServicerContext) -> SiteId:
        """Who calls: the name in the certificate of this very connection, asked on every call (S5)."""
        pem = context.auth_context().get("x509_pem_cert", [b""])[0]
        try:
            return self._identify(pem)
        except CertificateError as e:
            self._emit("join_refused", site="?", reason=str(e))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(e))
            raise

    async def _transferring(self, context: grpc.aio.ServicerContext) -> SiteId:
        """Who calls; what runs here ends when the site is cut off."""
        site = await self._peer(context)
        self._transfers.setdefault(site, WeakSet()).add(cast("asyncio.Task[Any]", asyncio.current_task()))
        return site

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        site = await self._peer(context)
        try:
            async with asyncio.timeout(HELLO_S):
                first = await context.read()
            if first is END:  # the site left as it came
                return
            hello = decode(first, Hello)
            self._welcome(site, hello)
        except (TimeoutError, WireError, BadUpdate, JoinRefused) as e:
            reason = str(e) or f"no Hello within {HELLO_S:g} s"
            self._emit("join_refused", site=site, reason=reason)
            final = isinstance(e, JoinRefused)
            await context.write(encode(Refused(reason=reason, final=final)))
            if final:
                self._untold.discard(site)
                self._look_around()
            return
        session = Session(hello.process)
        if before := self._sessions.get(site):  # it came back before its loss was noticed; or is another one
            self._replace(site, before, hello.process)
        self._sessions[site] = session
        self._wait_for(site)
        self._look_around()
        frozen = self._frozen.digest if self._frozen is not None else ""
        session.outbox.put_nowait(Welcome(heartbeat_s=self._heartbeat_s, frozen=frozen))
        if self._finished is not None:
            session.outbox.put_nowait(Finished(reason=self._finished))
        for (name, _id), pending in self._pending.items():
            if name == site:
                session.outbox.put_nowait(pending.ask)
        self._emit("site_joined", site=site)
        async with self._joined:
            self._joined.notify_all()
        reading = asyncio.create_task(self._read(site, session, context))
        try:
            while (frame := await session.outbox.get()) is not None:
                await context.write(encode(frame))
        finally:
            reading.cancel()
            if self._sessions.get(site) is session:
                del self._sessions[site]
                self._look_around()
                self._give_up_later(site)
                self._emit("site_lost", site=site, reason="disconnected")

    def _replace(self, site: SiteId, before: Session, process: str) -> None:
        """End a session for a newer one of the same name. People are told once of two processes that do so
        in turns: a restarted one is never there again."""
        if before.process != process:
            mend = f"Stop one; if there is but one at {site}, its key was copied: revoke its certificate"
            line = f"another process has joined as {site}, with the same certificate. {mend}."
            before.outbox.put_nowait(Refused(reason=line))
            replaced = self._replaced.setdefault(site, deque(maxlen=REPLACED))
            if process in replaced and site not in self._told_of:
                self._told_of.add(site)
                text = f"{site}: two processes join with one certificate and take each other's place. {mend}"
                self._emit("notice", text=f"{text} (fedtrain certs revoke {site}).")
            replaced.append(before.process)
        before.outbox.put_nowait(None)

    async def _read(self, site: SiteId, session: Session, context: grpc.aio.ServicerContext) -> None:
        """What a site says on its own; the end of its stream ends the session."""
        try:
            while (data := await context.read()) is not END:
                frame: FromSite = decode(data, FromSite)
                if isinstance(frame, Status):
                    self._emit("site_state", site=site, state=frame.state[:64])
                elif isinstance(frame, Leaving):
                    self._untold.discard(site)
                    return
        except (WireError, grpc.RpcError) as e:
            self._emit("notice", text=f"{site}: {str(e)[:200]}")
        finally:
            session.outbox.put_nowait(None)

    async def _download(self, body: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        site = await self._transferring(context)
        try:
            fetch = decode(body, Fetch)
        except WireError as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
            return
        arena = self._offered(site, fetch.digest)
        if arena is None or not 0 <= fetch.offset <= arena.schema.nbytes:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no request that is open for this site names it")
            return
        for offset in range(fetch.offset, arena.schema.nbytes, CHUNK_BYTES):
            chunk = read_chunk(arena, offset)
            self.bytes_out += len(chunk)
            yield chunk

    def _offered(self, site: SiteId, digest: str) -> AnyArena | None:
        if self._frozen is not None and site in self._sessions and digest == self._frozen.digest:
            return self._frozen
        for (name, _), pending in self._pending.items():
            if name == site:
                for arena in arenas(pending.request):
                    for offered in (arena, *(patch.arena for patch in arena.patches)):
                        if offered.digest == digest:
                            return offered
        return None

    async def _upload(self, _: object, context: grpc.aio.ServicerContext) -> None:
        site = await self._transferring(context)
        first = await context.read()
        if first is END:  # the site was told to drop the request when it had just opened this stream
            return
        try:
            offer = decode(first, Offer)
        except WireError as e:
            self._emit("update_refused", site=site, round=None, reason=str(e))
            await context.write(encode(Refused(reason=str(e))))
            return
        pending = self._pending.get((site, offer.id))
        if pending is None and (site, offer.id) in self._moot:
            await context.write(encode(Moot()))
            return
        if pending is None:
            reason = f"no request {offer.id[:80]} is open for {site}: late, answered already, or another's"
            self._emit("update_refused", site=site, round=None, reason=reason)
            await context.write(encode(Refused(reason=reason)))
            return
        if pending.upload is not None:  # the same site again, over a new connection
            pending.upload.cancel()
        pending.upload = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            reply: Reply = decode(offer.body, self._replies)
            self._admit(site, pending.request, reply)
            for arena in fetch_list(reply):
                await self._receive(self._inbox(site), arena, context)
        except (BadUpdate, WireError) as e:
            if isinstance(e, Broken):
                self._emit("notice", text=f"{site}: upload broke off, {e}; it may go on from there")
                return
            if self._pending.pop((site, offer.id), None):
                pending.arrivals.put_nowait((site, Failure(reason=str(e))))
            await context.write(encode(Refused(reason=str(e))))
            return
        except StoreError as e:
            pending.arrivals.put_nowait((site, e))
            return
        finally:
            if pending.upload is asyncio.current_task():
                pending.upload = None
        if self._pending.pop((site, offer.id), None) is pending:
            pending.arrivals.put_nowait((site, reply))
        await context.write(encode(Stored()))

    async def _receive(self, inbox: Inbox, arena: ArenaFile, context: grpc.aio.ServicerContext) -> None:
        async with opened(inbox, arena) as arriving:
            await context.write(encode(Resume(digest=arena.digest, offset=arriving.offset)))
            while not arriving.whole:
                chunk = await context.read()
                if chunk is END:
                    raise Broken(f"{arriving.offset} of {arriving.nbytes} bytes arrived")
                self.bytes_in += len(chunk)
                arriving.write(chunk)
            arena.path = await asyncio.to_thread(arriving.finish)


@asynccontextmanager
async def opened(inbox: Inbox, arena: ArenaFile) -> AsyncIterator[Arriving]:
    """A transfer, opened in a thread, for its digest may have to be caught up with. It is closed in any
    case, also when we are cancelled before the thread is done."""
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, inbox.receive, arena.digest, arena.schema.nbytes)
    try:
        arriving = await asyncio.shield(opening)
    except asyncio.CancelledError:
        while not opening.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([opening])
        if opening.exception() is None:
            opening.result().close()
        raise
    try:
        yield arriving
    finally:
        arriving.close()


def read_chunk(arena: AnyArena, offset: int) -> bytes:
    """One chunk of an arena from `offset`: 0.1 ms, less than a hop to a thread and back."""
    length = min(CHUNK_BYTES, arena.schema.nbytes - offset)
    if not isinstance(arena, ArenaFile):
        return bytes(arena.payload[offset : offset + length])
    with arena.path.open("rb", buffering=0) as f:
        f.seek(offset)
        chunk = f.read(length)
    if len(chunk) != length:
        raise WireError(f"{arena.path.name} ends at byte {offset + len(chunk)} of {arena.schema.nbytes}")
    return chunk


# --- the site's end

Answer = Callable[[Request], Awaitable[Reply]]


class SiteLink:
    """A site's connection: joins, is asked, answers; and comes back for ever until the run is over."""

    def __init__(
        self,
        *,
        address: str,
        tls: Tls,
        target: str,
        inbox: Inbox,
        requests: type | Any,
        heartbeat_s: float = 5.0,
        emit: Emit = lambda kind, **fields: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`target` is the name that the aggregator's certificate must carry, whatever its address (S4);
        `requests` the message types that this site takes."""
        self._address, self._tls, self._target, self._inbox = address, tls, target, inbox
        self._requests, self._heartbeat_s, self._emit = requests, heartbeat_s, emit
        self._frozen: ArenaFile | None = None  # what is fetched before anything is answered
        self._sleep, self._jitter = sleep, jitter
        self._work: tuple[str, asyncio.Task[None]] | None = None
        self._call: Any = None
        self._joined = self._refused = False
        self._process = secrets.token_hex(8)
        self._broken: BaseException | None = None

    async def serve(
        self,
        hello: Hello,
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
        stormed.
        """
        wait_s, told = 0.2, ""
        self._welcomed, self._patched = welcomed, patched
        try:
            while True:
                self._joined = self._refused = False
                try:
                    return await self._session(hello, answer)
                except ConnectError as e:
                    if self._broken:
                        raise self._broken from None
                    if isinstance(e, JoinRefused):
                        raise
                    if self._joined and not self._refused:  # else another process has our name
                        wait_s, told = 0.2, ""
                    if str(e) != told:
                        self._emit("site_lost", site="aggregator", reason=str(e))
                        told = str(e)
                await self._sleep(wait_s * (0.5 + self._jitter()))
                wait_s = min(wait_s * 1.7, 15.0)
        finally:
            self._drop_work()

    def status(self, state: str) -> None:
        """Tell the aggregator what is going on here; best effort."""
        if self._call is not None:
            self._outbox.put_nowait(Status(state=state))

    async def _session(self, hello: Hello, answer: Answer) -> str:
        options: list[tuple[str, Any]] = [
            *channel_options(self._heartbeat_s),
            ("grpc.ssl_target_name_override", self._target),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.secure_channel(self._address, self._tls.channel(), options=options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Session")()
            self._outbox: asyncio.Queue[FromSite] = asyncio.Queue()
            writing: asyncio.Task[None] | None = None
            try:
                await call.write(encode(msgspec.structs.replace(hello, process=self._process)))
                while (data := await call.read()) is not END:
                    frame: FromAggregator = decode(data, FromAggregator)
                    match frame:
                        case Welcome(frozen=frozen):
                            self._frozen = self._welcomed(frozen)
                            self._joined, self._call = True, call
                            writing = asyncio.create_task(self._write(call))
                            self._emit("site_joined", site="aggregator")
                        case Ask(body=body):
                            self._take(channel, decode(body, self._requests), answer)
                        case Cancel(id=id):
                            if self._work and self._work[0] == id:
                                self._drop_work()
                        case Note(line=line):
                            self._emit("notice", text=line)
                        case Finished(reason=reason):
                            await self._leave(call)
                            return reason
                        case Refused(reason=reason, final=final):
                            self._refused = True
                            raise (JoinRefused if final else ConnectError)(reason)
                raise ConnectError(explain("socket closed", self._address, self._joined))
            except grpc.aio.AioRpcError as e:
                details = e.details() or ""
                said = await first_words(details, self._address)
                raise ConnectError(explain(details, self._address, self._joined, said)) from None
            except asyncio.CancelledError:
                if self._broken:
                    raise ConnectError("stopped by an error here") from None
                raise
            except CLOSED:
                raise ConnectError(f"{self._address}: the aggregator closed the connection.") from None
            except WireError as e:
                raise ConnectError(f"{self._address}: {e}. Do both ends run the same fedtrain?") from None
            finally:
                self._call = None
                self._drop_work()
                if writing:
                    writing.cancel()

    async def _leave(self, call: Any) -> None:
        """Say that we heard, and go when the aggregator knows: it would wait for us otherwise."""
        self._outbox.put_nowait(Leaving())
        with suppress(TimeoutError, grpc.RpcError, *CLOSED):
            async with asyncio.timeout(LEAVE_S):
                while await call.read() is not END:
                    pass

    async def _write(self, call: Any) -> None:
        with suppress(grpc.RpcError, *CLOSED):
            while True:
                await call.write(encode(await self._outbox.get()))

    def _take(self, channel: grpc.aio.Channel, request: Request, answer: Answer) -> None:
        """Start on a request, unless it is under way; one that came before it is moot."""
        if self._work and self._work[0] == request.id and not self._work[1].done():
            return
        self._drop_work()
        task = asyncio.create_task(self._reply(channel, request, answer))
        task.add_done_callback(self._ended)
        self._work = (request.id, task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A bug or a full disk in `answer` must not leave a site that looks alive: serve() raises it."""
        if not task.cancelled() and (error := task.exception()):
            self._broken = error
            if self._call is not None:
                self._call.cancel()

    def _drop_work(self) -> None:
        if self._work:
            self._work[1].cancel()
            self._work = None

    async def _reply(self, channel: grpc.aio.Channel, request: Request, answer: Answer) -> None:
        """Fetch what the request names, do it, bring the reply; what breaks on the way is tried again.

        It ends with its session: whoever reconnects is asked again, and `answer` remembers what it did.
        """
        wait_s = 0.1
        while True:
            try:
                if self._frozen is not None:
                    await self._fetch(channel, self._frozen)
                for arena in fetch_list(request):
                    await self._fetch(channel, arena)
                reply = await answer(request)
                await self._offer(channel, request, reply)
                return
            except grpc.aio.AioRpcError as e:
                if e.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED):
                    self._emit("notice", text=f"{request.id}: {e.details()}")
                    return
            except (*CLOSED, Broken):
                pass
            except WireError as e:  # bytes damaged here or on the way
                self._emit("notice", text=f"{request.id}: {e}")
            await self._sleep(wait_s * (0.5 + self._jitter()))
            wait_s = min(wait_s * 2, 5.0)

    async def _fetch(self, channel: grpc.aio.Channel, arena: ArenaFile) -> None:
        """Bring an arena here: by patches from one that is here already, where those lead to it, or whole."""
        if arena.patches and self._patched and not self._inbox.has(arena.digest, arena.schema.nbytes):
            patches = patches_to(arena, lambda base: self._inbox.has(base, arena.schema.nbytes))
            ends = [*(patch.base for patch in patches[1:]), arena.digest]
            for patch, end in zip(patches, ends, strict=False):
                assert isinstance(patch.arena, ArenaFile), patch
                await self._download(channel, patch.arena)
                if not await self._patched(patch, end):
                    break
        await self._download(channel, arena)

    async def _download(self, channel: grpc.aio.Channel, arena: ArenaFile) -> None:
        async with opened(self._inbox, arena) as arriving:
            if not arriving.whole:
                fetch = encode(Fetch(digest=arena.digest, offset=arriving.offset))
                async for chunk in channel.unary_stream(f"/{SERVICE}/Download")(fetch):
                    arriving.write(chunk)
            arena.path = await asyncio.to_thread(arriving.finish)

    async def _offer(self, channel: grpc.aio.Channel, request: Request, reply: Reply) -> None:
        offered = {arena.digest: arena for arena in arenas(reply)}
        call = channel.stream_stream(f"/{SERVICE}/Upload")()
        await call.write(encode(Offer(id=request.id, body=encode(reply))))
        while True:
            data = await call.read()
            if data is END:
                raise Broken("the upload ended without an answer")
            answer: UploadAnswer = decode(data, UploadAnswer)
            match answer:
                case Resume(digest=digest, offset=offset):
                    arena = offered[digest]
                    for at in range(offset, arena.schema.nbytes, CHUNK_BYTES):
                        await call.write(read_chunk(arena, at))
                case Stored() | Moot():
                    await call.done_writing()
                    return
                case Refused(reason=reason):
                    self._emit("update_refused", site="here", round=None, reason=reason)
                    await call.done_writing()
                    return
