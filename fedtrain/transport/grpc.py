"""The star over gRPC with mutual TLS. A site opens the only connection, and makes all calls over it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from ..errors import (
    CertificateError,
    CertificateRevoked,
    ConnectError,
    FedtrainError,
    JoinRefused,
    WireError,
)
from ..events import Emit, silent
from ..wire.frames import CHUNK_BYTES, MESSAGE_BYTES
from .port import Caller, Watch, connections, defer
from .streams import UPLOAD, Connection, Denied, Flooding, MessageStream, Serve
from .tls import Tls, explain, first_words, serving

SERVICE = "fedtrain.Star"
END = grpc.aio.EOF
CLOSED = (  # what a call raises that is over, or lost
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)
FINAL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)
CODES: dict[type[FedtrainError], grpc.StatusCode] = {
    Denied: grpc.StatusCode.NOT_FOUND,
    CertificateRevoked: grpc.StatusCode.PERMISSION_DENIED,
    CertificateError: grpc.StatusCode.UNAUTHENTICATED,
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
}

DEFER_S = 5.0  # the kernel keeps a connection of a caller that says nothing
HANDSHAKE_S = 20.0  # a caller has shown its certificate by then; core's client gives up a call after as long
METADATA_BYTES = 8 << 10  # of a call; ours have some hundred
STREAMS = 32  # of one connection at a time: a session, and a few transfers
IDLE_S = 0.1  # without a call a channel ends: less than core waits (0.8 s) before it connects anew

T = TypeVar("T")


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


def server_options(connections: int) -> list[tuple[str, int]]:
    """gRPC core settings of a port that strangers and hostile sites may call, for so many `connections`."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),  # core's own are 120 s
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.http2.max_ping_strikes", 8),  # pings that come too often; sites ping once in a heartbeat
        # without these, core cancels calls above 1,000 at a thundering start
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.so_reuseport", 0),  # a second aggregator on the port is an error, not a coin toss
    ]


class GrpcTransport:
    """Implements streams.Transport."""

    def __init__(self, tls: Tls | Callable[[], Tls], heartbeat_s: float) -> None:
        """A `tls` that is called gives what counts at each new connection."""
        self._tls = tls if callable(tls) else lambda: tls
        self.heartbeat_s = float(heartbeat_s)

    async def listen(self, address: str, calls: Mapping[str, Serve], emit: Emit = silent) -> int:
        most = connections()
        self._server = grpc.aio.server(options=[*channel_options(self.heartbeat_s), *server_options(most)])
        watch = self._watch = Watch(most, emit)
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(_handler(serve, watch, uploads=name == UPLOAD))
            for name, serve in calls.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port: int = self._server.add_secure_port(address, serving(self._tls, watch.arrived))
        except RuntimeError:
            raise ConnectError(f"cannot listen on {address}: {_why_not(address)}") from None
        await self._server.start()
        defer(port, DEFER_S)
        self._watching = asyncio.create_task(watch.run(port))
        return port

    def arriving(self) -> bool:
        return self._watch.arriving

    async def close(self) -> None:
        self._watching.cancel()
        await self._server.stop(grace=None)

    @asynccontextmanager
    async def connect(self, address: str, target: str) -> AsyncIterator[Connection]:
        options: list[tuple[str, Any]] = [
            *channel_options(self.heartbeat_s),
            ("grpc.ssl_target_name_override", target),
            ("grpc.use_local_subchannel_pool", 1),
            # a channel that was closed goes on to connect, as long as an error or a frame holds a call of it
            ("grpc.client_idle_timeout_ms", int(IDLE_S * 1000)),
        ]
        async with grpc.aio.secure_channel(address, self._tls().channel(), options=options) as channel:

            @asynccontextmanager
            async def call(name: str) -> AsyncIterator[MessageStream]:
                try:
                    made = channel.stream_stream(f"/{SERVICE}/{name}")()
                except CLOSED:
                    raise ConnectError(f"{address}: the connection is closed.") from None
                try:
                    yield SiteStream(made, address)
                except BaseException:
                    made.cancel()
                    raise
                with suppress(*CLOSED):
                    await made.done_writing()

            yield call


def _why_not(address: str) -> str:
    """Why nobody can listen there, which gRPC does not say."""
    host, _, port = address.rpartition(":")
    try:
        family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(where)
            one.listen()
        return "just now. Start the same command again."
    except OSError as e:
        mend = "Raise ulimit -n." if e.errno == errno.EMFILE else "Change network.listen."
        return f"{(e.strerror or str(e)).lower()}. {mend}"


def _handler(
    serve: Serve, watch: Watch, *, uploads: bool
) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
    """A call's handler for gRPC. Who calls is read from the certificates of this very connection (S5)."""

    async def handle(_: Any, context: grpc.aio.ServicerContext) -> None:
        caller = watch.called(context.peer())
        try:
            said = context.auth_context()
            caller.name = said.get("x509_subject_alternative_name", [b"?"])[0].decode().partition(".")[0]
            caller.transfers = caller.transfers or uploads
            _check_metadata(context)
            chain = said.get("x509_pem_cert", [b""])[0] + said.get("x509_pem_cert_chain", [b""])[0]
            await serve(chain, AggregatorStream(context, caller))
        except tuple(CODES) as e:
            code = next(code for kind, code in CODES.items() if isinstance(e, kind))
            await context.abort(code, str(e))
        except Flooding as e:
            watch.end(context.peer(), str(e))
        except ConnectError:
            return  # the site is gone: nobody is left to tell
        except Exception:  # gRPC would tell the caller its text, which may hold a path
            logging.getLogger(__name__).exception("a call of %s failed", caller.name or "?")
            await context.abort(grpc.StatusCode.INTERNAL, "an error at the aggregator; its log has it")

    return handle


def _check_metadata(context: grpc.aio.ServicerContext) -> None:
    """Flooding where a call brings far more than ours do. Core's own limits hold only who has acknowledged
    them: until then a call may bring 16 MiB, of which Python makes an object for each value."""
    size = sum(len(name) + len(value) for name, value in context.invocation_metadata() or ())
    if size > METADATA_BYTES:
        raise Flooding(f"makes a call with {size:,} bytes of metadata")


class AggregatorStream:
    """A call as its server sees it. Implements streams.MessageStream."""

    def __init__(self, context: grpc.aio.ServicerContext, caller: Caller) -> None:
        self._context, self._caller = context, caller

    async def read(self) -> bytes | None:
        try:
            data: Any = await self._context.read()
        except CLOSED as e:
            raise ConnectError(str(e)) from None
        if data is END:
            return None
        self._caller.heard += len(data)
        return cast(bytes, data)

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except CLOSED as e:
            raise ConnectError(str(e)) from None


class SiteStream:
    """A call as its caller sees it. Implements streams.MessageStream."""

    def __init__(self, call: Any, address: str) -> None:
        self._call, self._address = call, address
        self._answered = False  # the other end has accepted our certificate

    async def read(self) -> bytes | None:
        data: Any = await self._explained(self._call.read())
        self._answered = True
        return None if data is END else data

    async def write(self, message: bytes) -> None:
        await self._explained(self._call.write(message))

    async def _explained(self, step: Awaitable[T]) -> T:
        try:
            return await step
        except CLOSED as e:
            if (task := asyncio.current_task()) and task.cancelling():  # gRPC forgets it while a call begins
                raise asyncio.CancelledError from None
            if not isinstance(e, grpc.aio.AioRpcError):
                raise ConnectError(f"{self._address}: the aggregator closed the connection.") from None
            details = e.details() or ""
            said = await first_words(details, self._address)
            reason = explain(details, self._address, self._answered, said)
            if e.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise JoinRefused(reason) from None
            raise (Denied if e.code() in FINAL else ConnectError)(reason) from None
