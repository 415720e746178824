"""A site's end of the star over a network; the aggregator's is endpoints.py, which says how they speak."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from ..arena import ArenaFile, Patch, patches_to
from ..errors import Broken, ConnectError, JoinRefused, WireError
from ..events import Admitted, Emit, Notice, ReplySent, UpdateRefused
from ..messages import Failure, Reply, Request
from ..schema import Schema
from ..wire import frames
from ..wire.codec import arenas, decode, encode, fetch_list, known
from . import star, streams
from .star import SiteEnd, backoff

Answer = Callable[[Request], Awaitable[Reply]]


class Trust(Protocol):
    """Checks that who answers may still be the aggregator: a pki.proof.AggregatorCheck."""

    def nonce(self) -> bytes: ...
    def welcomed(self, proof: bytes, lists: bytes) -> None: ...
    def take(self, lists: bytes) -> None: ...
    def renewed(self, chain: bytes) -> str: ...


def longest(model: Schema) -> int:
    """Bytes of all patches that are fetched for a model: a sum in a ring has 8 for 2 of an fp16 model, and
    some for metrics."""
    return 4 * model.nbytes + (1 << 20)


class SiteLink:
    """A site's connection: joins, is asked, answers; and comes back for ever until the run is over."""

    def __init__(
        self,
        transport: streams.Transport,
        *,
        address: str,
        target: str,
        inbox: streams.Files,
        requests: type | Any,
        trust: Trust,
        emit: Emit,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        session_s: float | None = None,
    ) -> None:
        """`target` is the name that the aggregator's certificate must carry, whatever its address (S4);
        `requests` the message types that this site takes; `trust` checks who answers. `session_s`: how long a
        connection may live before it is made anew, with all that a handshake checks (S39)."""
        self._trust = trust
        self._transport, self._address, self._target = transport, address, target
        self.where = f"{target} at {address}"
        self._inbox, self._emit, self._sleep, self._jitter = inbox, emit, sleep, jitter
        self._session_s, self._end = session_s, SiteEnd(requests, emit)
        self._process = secrets.token_hex(8)
        self._frozen: ArenaFile | None = None  # what is fetched before anything is answered
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()  # frames for the session
        self._working_on: Request | None = None
        self._work: asyncio.Task[None] | None = None
        self._error: BaseException | None = None  # that the work raised
        self._cut: ConnectError | None = None  # why this end ended the session

    async def serve(
        self,
        hello: frames.Hello,
        answer: Answer,
        welcomed: Callable[[str], ArenaFile | None] = lambda frozen: None,
        patched: Callable[[Patch, str], Awaitable[bool]] | None = None,
        schemas: Sequence[Schema] = (),
        witness: Callable[[frames.AuditHead], frames.AuditHead] | None = None,
        *,
        refusal: Callable[[Request], Failure | None] = lambda request: None,
        over: Callable[[], str] = lambda: "",
    ) -> str:
        """Answer requests until the aggregator says that the run is over; returns its reason.

        `welcomed` is told the digest of the run's frozen parameters, and returns them when they have to be
        fetched before anything is answered. `patched` makes the model of that digest, in the inbox, of a
        patch that is here and its base, and says whether it could; without it models are fetched whole.
        `schemas`: those that an aggregator with these settings and this model has too, so that no message
        spells them out. `witness` is told the head of the aggregator's audit log, and answers with the own.
        `refusal`: the reply to a request for which nothing is fetched or done. `over`: why this site answers
        nothing any more; then it leaves after the reply that says so, and JoinRefused is raised here.

        JoinRefused when both ends disagree. Any other trouble is told once and tried again, after 0.2 s
        at first and then ever more slowly up to 15 s, with jitter, so that a restarted aggregator is not
        stormed. An error of `answer` that is no reply, a bug or a full disk, ends it too.
        """
        self._refusal, self._over = refusal, over
        self._answer, self._welcomed, self._patched = answer, welcomed, patched
        self._witness = witness
        self._witnessing: asyncio.Task[None] | None = None  # the newest answer to the aggregator's head
        self._shown = b""  # the certificate that the aggregator was shown in such an answer
        self._end.known, self._end.build = known(schemas), (hello.version, hello.package)
        first = msgspec.structs.replace(hello, process=self._process)
        while True:
            self._session_task = asyncio.create_task(self._session(first))
            try:
                async with asyncio.timeout(self._session_s):
                    return await self._session_task
            except TimeoutError:
                old = ConnectError(
                    f"it lived {self._session_s:g} s (its own policy.session), and is made anew"
                )
                pause_s = self._end.lose(old, self._jitter())
            except (ConnectError, asyncio.CancelledError) as e:
                if self._error is not None:
                    raise self._error from None
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # it is not the session alone that is to end
                e = self._cut or e
                if not isinstance(e, ConnectError) or isinstance(e, JoinRefused):
                    raise
                pause_s = self._end.lose(e, self._jitter())
            await self._sleep(pause_s)

    def status(self, state: str) -> None:
        """Tell the aggregator what is going on here; best effort."""
        if self._end.joined:
            self._outbox.put_nowait(encode(frames.Status(state=state)))

    def cut(self, reason: str) -> None:
        """End the session, and try again later as after a loss."""
        self._cut = ConnectError(reason)
        self._session_task.cancel()

    async def _session(self, hello: frames.Hello) -> str:
        self._outbox, self._cut = asyncio.Queue(), None
        self._outbox.put_nowait(encode(msgspec.structs.replace(hello, nonce=self._trust.nonce())))
        async with (
            self._transport.connect(self._address, self._target) as call,
            call(streams.SESSION) as stream,
        ):
            writing = asyncio.create_task(self._write(stream))
            try:
                while self._end.finished is None:
                    if (data := await stream.read()) is None:
                        raise ConnectError(f"{self._address}: the aggregator closed the connection.")
                    frame: frames.FromAggregator = decode(data, frames.FromAggregator)
                    if isinstance(frame, frames.Revocations):
                        self._trust.take(frame.lists)
                        continue
                    if isinstance(frame, frames.Renewed):
                        if trouble := self._trust.renewed(frame.chain):
                            self._outbox.put_nowait(encode(frames.Status(state="", trouble=trouble)))
                        continue
                    if isinstance(frame, frames.Welcome):
                        self._shown = b""
                        await self._check(frame, stream)
                        self._frozen = self._welcomed(frame.frozen)
                        self._emit(
                            Admitted(
                                site="aggregator",
                                task_digest=hello.task_digest,
                                version=frame.version[:20],
                                package=frame.package[:64],
                            )
                        )
                    if isinstance(frame, frames.AuditHead):
                        self._witnessing = asyncio.create_task(self._state_head(frame))
                        self._witnessing.add_done_callback(self._failed)
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

    async def _check(self, welcome: frames.Welcome, stream: streams.MessageStream) -> None:
        """ConnectError where whoever welcomes us may not be the aggregator any more; we say that we go."""
        try:
            self._trust.welcomed(welcome.proof, welcome.lists)
        except ConnectError:
            with suppress(ConnectError):
                await stream.write(encode(frames.Status(state="refuses the aggregator's certificate")))
            raise

    async def _state_head(self, head: frames.AuditHead) -> None:
        """Answer with the head of the own log, when the disk has the log: a round does not wait for that."""
        if self._witness is not None:
            answer = await asyncio.to_thread(self._witness, head)
            shown = b"" if self._shown == answer.certificate else answer.certificate
            self._shown = answer.certificate
            self._outbox.put_nowait(encode(msgspec.structs.replace(answer, certificate=shown)))

    async def _leave(self, stream: streams.MessageStream) -> None:
        """Say that we know, and go when the aggregator has read it: it would wait for us otherwise."""
        if self._witnessing is not None:
            await self._witnessing
        self._outbox.put_nowait(encode(frames.Leaving()))
        with suppress(TimeoutError, ConnectError):
            async with asyncio.timeout(star.LEAVE_S):
                while await stream.read() is not None:
                    pass

    async def _write(self, stream: streams.MessageStream) -> None:
        with suppress(ConnectError):  # whoever reads learns of it too
            while True:
                await stream.write(await self._outbox.get())

    def _follow(self, call: streams.Connection) -> None:
        """Work on what is asked for now, and on nothing else."""
        request = self._end.request
        if request is self._working_on:
            return
        if self._work:
            self._work.cancel()
        self._work, self._working_on = None, request
        if request is not None:
            self._work = asyncio.create_task(self._reply(call, request, self._end.data))
            self._work.add_done_callback(lambda work: self._ended(work, request))

    def _ended(self, work: asyncio.Task[None], request: Request) -> None:
        """An error of ours must not leave a site that looks alive: serve() raises it."""
        self._end.answered(request)
        self._failed(work)

    def _failed(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()):
            self._error = error
            self._session_task.cancel()

    async def _reply(self, call: streams.Connection, request: Request, data: bytes) -> None:
        """Fetch what the request names, unless its bytes came with it; do it, bring the reply; what breaks on
        the way is tried again.

        It ends with its session: whoever reconnects is asked again, and `answer` remembers what it did.
        """
        for pause_s in backoff(0.1, 2.0, 5.0):
            try:
                if refused := self._refusal(request):
                    return await self._offer(call, request, refused)
                if self._frozen is not None:
                    await self._fetch(call, self._frozen)
                models = fetch_list(request)
                if data:
                    patches = streams.newest_patches(request)
                    await streams.unpack(self._inbox, patches if self._patched else models, data)
                for arena in models if self._patched or not data else ():
                    await self._fetch(call, arena)
                await self._offer(call, request, await self._answer(request))
                if why := self._over():
                    self._error = JoinRefused(why)
                    self._outbox.put_nowait(encode(frames.Leaving()))
                    asyncio.get_running_loop().call_later(star.LEAVE_S, self._session_task.cancel)
                return
            except streams.Denied as e:
                self._emit(Notice(text=f"{request.id}: {e}"))
                return
            except (ConnectError, Broken):
                pass
            except WireError as e:  # bytes damaged here or on the way
                self._emit(Notice(text=f"{request.id}: {e}"))
                data = b""
            await self._sleep(pause_s * (0.5 + self._jitter()))

    async def _fetch(self, call: streams.Connection, arena: ArenaFile) -> None:
        """Bring an arena here: by patches from one that is here already, where those lead to it, or whole."""
        if arena.patches and self._patched and not self._inbox.has(arena.digest, arena.schema.nbytes):
            patches = patches_to(arena, lambda base: self._inbox.has(base, arena.schema.nbytes))
            if sum(patch.arena.schema.nbytes for patch in patches) > longest(arena.schema):
                patches = ()
            ends = [*(patch.base for patch in patches[1:]), arena.digest]
            for patch, end in zip(patches, ends, strict=False):
                assert isinstance(patch.arena, ArenaFile), patch
                await self._download(call, patch.arena)
                if not await self._patched(patch, end):
                    break
        await self._download(call, arena)

    async def _download(self, call: streams.Connection, arena: ArenaFile) -> None:
        async with streams.opened(self._inbox, arena) as transfer:
            if transfer.whole:
                arena.file = await streams.finished(transfer)
                return
            async with call(streams.DOWNLOAD) as stream:
                await stream.write(encode(frames.Fetch(digest=arena.digest, offset=transfer.offset)))
                arena.file = await streams.receive(stream, transfer)

    async def _offer(self, call: streams.Connection, request: Request, reply: Reply) -> None:
        body = encode(reply, self._end.known)
        nbytes = len(body) + sum(arena.schema.nbytes for arena in arenas(reply))
        self._emit(ReplySent(request=request.id, what=type(reply).__name__, nbytes=nbytes))
        if streams.fits(arenas(reply)):
            answer = frames.Answered(id=request.id, body=body, data=streams.inlined(arenas(reply)))
            self._outbox.put_nowait(encode(answer))
            return
        offered = {arena.digest: arena for arena in arenas(reply)}
        async with call(streams.UPLOAD) as stream:
            await stream.write(encode(frames.Offer(id=request.id, body=body)))
            while (data := await stream.read()) is not None:
                match decode(data, frames.UploadAnswer):
                    case frames.Resume(digest=digest, offset=offset):
                        for chunk in streams.chunks(offered[digest], offset):
                            await stream.write(chunk)
                    case frames.Refused(reason=reason):
                        self._emit(UpdateRefused(site="here", round=None, reason=reason))
                        return
                    case _:  # Stored, or Moot
                        return
        raise Broken("the upload ended without an answer")
