"""Ports for processes that have to be told theirs before they are started, and other services on them."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from itertools import count

FIRST, COUNT = 12_000, 20_000  # all below those that a system gives to whoever asks for any


def _begin() -> None:
    """Processes that test at the same time begin far from each other, those that fork too."""
    global _turn
    _turn = count(os.getpid() * 389)


_begin()
os.register_at_fork(after_in_child=_begin)


def free_port() -> int:
    """A port of loopback that nothing listens on, and that no other connection gets until it is used."""
    for _ in range(COUNT):
        port = FIRST + next(_turn) % COUNT
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("all ports are in use")


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[str]:
    """Its address, while it answers."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
