"""What a transport of the star gives to both ends: streams of messages, on which models travel in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

from ..arena import AnyArena, ArenaFile, no_link
from ..errors import Broken, ConnectError, WireError
from ..events import Emit, silent
from ..messages import Message
from ..wire.codec import arenas
from ..wire.frames import CHUNK_BYTES, INLINE_BYTES

CALLS = SESSION, DOWNLOAD, UPLOAD = "Session", "Download", "Upload"  # of a site
SMALL_BYTES = 1 << 20  # a file of so many is read and digested in less time than a hop to a thread takes


class Denied(ConnectError):
    """The other end does not serve this call; the same call again changes nothing."""


class Flooding(ConnectError):
    """What a caller does for which its connection is ended: the predicate of a line about it."""


class MessageStream(Protocol):
    """One call of a site: messages of at most 4 MiB each way, in order. ConnectError when it breaks."""

    async def read(self) -> bytes | None:
        """The next message; None when the other end has said all."""

    async def write(self, message: bytes) -> None:
        """Returns when the transport has room for more."""


Serve = Callable[[bytes, MessageStream], Awaitable[None]]  # given the caller's certificate chain in PEM
Connection = Callable[[str], AbstractAsyncContextManager[MessageStream]]  # opens a call by its name


class Transport(Protocol):
    """A way to connect sites with an aggregator; each end must know the other one for who it is."""

    heartbeat_s: float  # a connection that is silent for three of these is lost

    async def listen(self, address: str, calls: Mapping[str, Serve], emit: Emit = silent) -> int:
        """The aggregator's end: take connections at host:port, and serve the calls of these names; the port.
        A CertificateError, Denied or WireError of a call is told to its caller, Flooding ends its connection.
        `emit` is told of callers that make no call. ConnectError when the port is in use."""

    def arriving(self) -> bool:
        """Whether a caller has connected that has made no call yet."""

    async def close(self) -> None:
        """Stop to listen, and cancel the calls under way."""

    def connect(self, address: str, target: str) -> AbstractAsyncContextManager[Connection]:
        """A site's end: connect to the aggregator whose certificate carries the name `target`."""


class Transfer(Protocol):
    """One model, or update, being received; see store.spool."""

    offset: int  # bytes that are here
    nbytes: int

    @property
    def whole(self) -> bool: ...
    def write(self, chunk: bytes | memoryview) -> None: ...
    def finish(self) -> str: ...
    def close(self) -> None: ...


class Files(Protocol):
    """Where received bytes are kept by their digest; see store.spool."""

    def has(self, digest: str, nbytes: int) -> bool: ...
    def receive(self, digest: str, nbytes: int) -> Transfer: ...


@asynccontextmanager
async def opened(files: Files, arena: ArenaFile) -> AsyncIterator[Transfer]:
    """A transfer; a large one is opened in a thread, because the digest of what is here already takes a
    while. It is closed in any case, also when this is cancelled before the thread is done."""
    if arena.schema.nbytes <= SMALL_BYTES:
        transfer = files.receive(arena.digest, arena.schema.nbytes)
    else:
        transfer = await _opened_in_thread(files, arena)
    try:
        yield transfer
    finally:
        transfer.close()


async def _opened_in_thread(files: Files, arena: ArenaFile) -> Transfer:
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, files.receive, arena.digest, arena.schema.nbytes)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        while not opening.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([opening])
        if opening.exception() is None:
            opening.result().close()
        raise


async def receive(stream: MessageStream, transfer: Transfer) -> str:
    """The rest of a transfer, from the stream to its file."""
    while not transfer.whole:
        chunk = await stream.read()
        if chunk is None:
            raise Broken(f"{transfer.offset} of {transfer.nbytes} bytes arrived")
        transfer.write(chunk)
    return await finished(transfer)


async def finished(transfer: Transfer) -> str:
    """The file of a transfer that is whole."""
    if transfer.nbytes <= SMALL_BYTES:
        return transfer.finish()
    return await asyncio.to_thread(transfer.finish)


# --- arenas in the frame that names them


def fits(named: Sequence[AnyArena]) -> bool:
    """Whether the bytes of these arenas may travel in the frame of the message that names them."""
    return sum(arena.schema.nbytes for arena in named) <= INLINE_BYTES


def inlined(named: Sequence[AnyArena]) -> bytes:
    """The bytes of arenas that `fits` accepts, one after the other; otherwise b""."""
    return b"".join(chunk for arena in named for chunk in chunks(arena, 0)) if fits(named) else b""


def newest_patches(message: Message) -> list[AnyArena]:
    """The newest patch of each model that a message names."""
    return [arena.patches[-1].arena for arena in arenas(message) if arena.patches]


async def unpack(files: Files, named: Sequence[AnyArena], data: bytes) -> None:
    """Put the bytes that came with a message off the wire into the files of these arenas, which it names.
    WireError when these are not all of their bytes."""
    rest = memoryview(data)
    if len(data) != (due := sum(arena.schema.nbytes for arena in named)):
        raise WireError(f"{len(data)} bytes came with a header that names {due}")
    for arena in named:
        assert isinstance(arena, ArenaFile), arena
        async with opened(files, arena) as transfer:
            if not transfer.whole:
                transfer.write(rest[transfer.offset : arena.schema.nbytes])
            arena.file = await finished(transfer)
        rest = rest[arena.schema.nbytes :]


def chunks(arena: AnyArena, offset: int) -> Iterator[bytes]:
    """An arena from byte `offset` on."""
    return (read_chunk(arena, at) for at in range(offset, arena.schema.nbytes, CHUNK_BYTES))


def read_chunk(arena: AnyArena, offset: int) -> bytes:
    """One chunk of an arena from `offset`: 0.1 ms, less than a hop to a thread and back."""
    length = min(CHUNK_BYTES, arena.schema.nbytes - offset)
    if not isinstance(arena, ArenaFile):
        return bytes(arena.payload[offset : offset + length])
    with open(arena.file, "rb", buffering=0, opener=no_link) as f:
        f.seek(offset)
        chunk = f.read(length)
    if len(chunk) != length:
        raise WireError(f"{arena.path.name} ends at byte {offset + len(chunk)} of {arena.schema.nbytes}")
    return chunk
