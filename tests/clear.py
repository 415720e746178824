"""A second transport of the star, for tests: framed messages over TCP, in clear. A caller shows a certificate
and proves nothing, so it is for tests alone.

A call is a connection of its own: the call's name, the caller's certificate, then messages each way. A frame
is its kind, its length and its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Mapping

from fedtrain.errors import CertificateError, ConnectError, WireError
from fedtrain.events import Emit, silent
from fedtrain.transport.streams import Connection, Denied, MessageStream, Serve
from fedtrain.transport.tls import Tls
from fedtrain.wire.frames import MESSAGE_BYTES

HEAD = struct.Struct("<BI")
MESSAGE, END, DENIED = range(3)


class FramedStream:
    """Implements streams.MessageStream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def read(self) -> bytes | None:
        try:
            kind, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if length > MESSAGE_BYTES:
                raise ConnectError(f"a message of {length} bytes")
            data = await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            raise ConnectError("the connection broke") from None
        if kind == DENIED:
            raise Denied(data.decode())
        return data if kind == MESSAGE else None

    async def write(self, message: bytes, kind: int = MESSAGE) -> None:
        try:
            self.writer.write(HEAD.pack(kind, len(message)) + message)
            await self.writer.drain()
        except OSError:
            raise ConnectError("the connection broke") from None


class ClearTransport:
    """Implements streams.Transport."""

    def __init__(self, tls: Tls, heartbeat_s: float) -> None:
        self._certificate, self.heartbeat_s = tls.chain, heartbeat_s
        self._serving = set[asyncio.Task[None]]()

    async def listen(self, address: str, calls: Mapping[str, Serve], emit: Emit = silent) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._serving.add(asyncio.current_task())
            stream = FramedStream(reader, writer)
            with contextlib.suppress(ConnectError, asyncio.CancelledError):
                try:
                    name, certificate = await stream.read(), await stream.read()
                    await calls[name.decode()](certificate, stream)
                    await stream.write(b"", END)
                except (CertificateError, Denied, WireError) as e:
                    await stream.write(str(e).encode(), DENIED)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()  # nobody reads what is left
            self._serving.discard(asyncio.current_task())

        host, port = address.rsplit(":", 1)
        try:
            self._server = await asyncio.start_server(serve, host, int(port))
        except OSError as e:
            raise ConnectError(f"cannot listen on {address}: {e}. Change network.listen.") from None
        return self._server.sockets[0].getsockname()[1]

    def arriving(self) -> bool:
        return False

    async def close(self) -> None:
        self._server.close()
        await asyncio.sleep(0)  # calls that were just accepted begin, so that they end in order
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving)

    @contextlib.asynccontextmanager
    async def connect(self, address: str, target: str) -> AsyncIterator[Connection]:
        @contextlib.asynccontextmanager
        async def call(name: str) -> AsyncIterator[MessageStream]:
            try:
                stream = FramedStream(*await asyncio.open_connection(*address.rsplit(":", 1)))
            except OSError as e:
                raise ConnectError(f"{address}: {e}") from None
            try:
                await stream.write(name.encode())
                await stream.write(self._certificate)
                yield stream
                with contextlib.suppress(ConnectError):
                    await stream.write(b"", END)
            except BaseException:
                stream.writer.transport.abort()
                raise
            stream.writer.close()

        yield call
