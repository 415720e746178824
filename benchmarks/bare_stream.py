"""A bare gRPC stream with mutual TLS: some processes get as many bytes as a model has, and send as many back.

Nothing is done with the bytes. It is what benchmarks/deployed_round.py holds a round against.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from fedtrain.pki import Credentials, aggregator_target
from fedtrain.transport.grpc import channel_options
from fedtrain.transport.tls import Tls, serving
from fedtrain.wire import CHUNK_BYTES


class BareStream:
    """A server and its clients, each a process, which wait until they are told to move the bytes."""

    def __init__(self, certs: Path, sites: Sequence[str], nbytes: int) -> None:
        """`certs`: certificates of an aggregator and of these sites."""
        me = [sys.executable, __file__]
        self._server = subprocess.Popen(
            [*me, "server", str(certs), str(nbytes)], stdout=subprocess.PIPE, text=True
        )
        port = self._said(self._server)
        self._clients = [
            subprocess.Popen(
                [*me, "client", str(certs), name, port, str(nbytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for name in sites
        ]  # fmt: skip
        for client in self._clients:
            self._said(client)
        self.once()

    def once(self) -> float:
        """Seconds for all clients, at once, to get the bytes and to send as many back."""
        began = time.perf_counter()
        for client in self._clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        for client in self._clients:
            self._said(client)
        return time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for process in (*self._clients, self._server):
            process.kill()
            process.communicate()  # closes its pipes too

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, "a process of the bare stream has ended"
        return line


async def server(certs: Path, nbytes: int) -> None:
    payload = memoryview(os.urandom(min(nbytes, 64 << 20)))

    async def down(request: bytes, context: object) -> AsyncIterator[bytes]:
        for at in range(0, nbytes, CHUNK_BYTES):
            start, length = at % max(len(payload) - CHUNK_BYTES, 1), min(CHUNK_BYTES, nbytes - at)
            yield bytes(payload[start : start + length])

    async def up(chunks: AsyncIterator[bytes], context: object) -> bytes:
        return b"%d" % sum([len(chunk) async for chunk in chunks])

    listening = grpc.aio.server(options=channel_options(60))
    handlers = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    listening.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
    port = listening.add_secure_port("127.0.0.1:0", serving(partial(_tls, certs / "aggregator")))
    await listening.start()
    print(port, flush=True)
    await listening.wait_for_termination()


async def client(certs: Path, name: str, port: int, nbytes: int) -> None:
    options = [*channel_options(60), ("grpc.ssl_target_name_override", aggregator_target("fedtrain"))]
    credentials = _tls(certs / "sites" / name).channel()
    payload = memoryview(os.urandom(min(nbytes, 64 << 20) + CHUNK_BYTES))
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, nbytes, CHUNK_BYTES):
                start = at % (len(payload) - CHUNK_BYTES)
                yield bytes(payload[start : start + min(CHUNK_BYTES, nbytes - at)])

        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            async for _chunk in channel.unary_stream("/Bare/Down")(b""):
                pass
            await channel.stream_unary("/Bare/Up")(chunks())
            print("ready", flush=True)


def _tls(folder: Path) -> Tls:
    credentials = Credentials.load(folder)
    return Tls(credentials.key, credentials.chain, credentials.root)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", certs, nbytes]:
            asyncio.run(server(Path(certs), int(nbytes)))
        case ["client", certs, name, port, nbytes]:
            asyncio.run(client(Path(certs), name, int(port), int(nbytes)))
