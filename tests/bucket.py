"""A real S3 server (moto's) on loopback, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.ports import free_port


class Wire:
    """A TCP proxy: while it is cut, connections are refused, and those that were open are gone. It may lose
    all of an answer but its head."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to_lose, self._asked, self._lost = "", 0, list[str]()
        self.to, self.open = to, set[socket.socket]()
        self.port = free_port()  # mended, it listens there again
        self._listen(self.port)

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for s in list(self.open):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._listen(self.port)

    @contextlib.contextmanager
    def losing(self, method: str, which: int) -> Iterator[list[str]]:
        """The which-th answer, from 0, to a request of this method; yields the requests so lost."""
        self._to_lose, self._asked, self._lost = f"{method} ", which, []
        yield self._lost
        self._to_lose = ""

    def _loses(self, request: bytes) -> bool:
        asked = bool(self._to_lose) and request.startswith(self._to_lose.encode())
        self._asked -= asked
        if asked and self._asked == -1:
            self._lost.append(request.partition(b"\r\n")[0].decode())
        return asked and self._asked == -1

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        """One connection, until either end closes it or the wire is cut."""
        with near, contextlib.suppress(OSError), socket.create_connection(self.to) as far:
            self.open |= {near, far}
            losing = False
            try:
                while True:
                    for source in select.select([near, far], [], [])[0]:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        losing = losing or (source is near and self._loses(data))
                        if losing and source is far:
                            near.sendall(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                            return
                        (far if source is near else near).sendall(data)
            finally:
                self.open -= {near, far}


@contextlib.contextmanager
def bucket(monkeypatch: Any, name: str = "runs") -> Iterator[tuple[str, Wire]]:
    """("s3://NAME", the wire to it); the environment has its endpoint and keys meanwhile."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wire = Wire(("127.0.0.1", port))
    endpoint = f"http://127.0.0.1:{wire.port}"
    for key, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(key, value)
    try:
        _make(f"{endpoint}/{name}", time.monotonic() + 120)
        yield f"s3://{name}", wire
    finally:
        wire.cut()
        server.kill()
        server.wait(30)


def _make(url: str, until: float) -> None:
    """PUT an empty bucket, as soon as the server is up."""
    while True:
        try:
            request = urllib.request.Request(url, method="PUT")
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=10
            ) as reply:
                assert reply.status == 200
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
