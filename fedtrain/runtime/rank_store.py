"""The store in which ranks find each other: a table at rank 0, over TLS, for those who hold the secret.

torch's TCPStore listens on all interfaces and believes whoever calls. Here both ends show a certificate made
of the ranks' secret and take no other one, so not a byte of a stranger's is decoded. The table listens on
one address.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Literal

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

from ..errors import ConnectError, WireError

FRAME_BYTES = 1 << 20  # of a question or an answer
HANDSHAKE_S = 10.0  # in which a caller must have shown that it holds the secret
CALLERS = 64  # that may be at their handshakes at once
TOLD = 5  # refused callers that are told of one by one
RETRY_S = 0.05
NAME = "ranks"
WHY = "who does not hold the ranks' secret"
REMEDY = "give all ranks of a run the same FEDTRAIN_RANKS_SECRET."


class StoreCall(msgspec.Struct, array_like=True):
    """A question about the table. `seconds`: to wait for the keys."""

    what: Literal["set", "get", "add", "check", "wait"]
    keys: list[str] = []
    value: bytes = b""
    number: int = 0
    seconds: float = 0.0


class StoreAnswer(msgspec.Struct, array_like=True):
    value: bytes = b""
    number: int = 0
    late: bool = False  # the keys did not come in time


class StoreTable:
    """What ranks have said, by key."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def answer(self, call: StoreCall) -> StoreAnswer:
        kept, key = self._kept, call.keys[0] if call.keys else ""
        with self._changed:
            match call.what:
                case "get" | "wait":
                    there = self._changed.wait_for(
                        lambda: kept.keys() >= {*call.keys}, min(call.seconds, 1e8)
                    )
                    return StoreAnswer(kept[key] if there and call.what == "get" else b"", late=not there)
                case "check":
                    return StoreAnswer(number=int(kept.keys() >= {*call.keys}))
                case "set":
                    kept[key], total = call.value, 0
                case "add":
                    total = int(kept.get(key, b"0")) + call.number
                    kept[key] = str(total).encode()
            self._changed.notify_all()
            return StoreAnswer(number=total)


class RankStore(Store):
    """The table as torch asks it, also from threads of its own. Each has its own connection, for a question
    may wait long."""

    def __init__(self, ask: Callable[[StoreCall], StoreAnswer], timeout_s: float, port: int = 0) -> None:
        """By `hosted` or `joined`."""
        super().__init__()
        self._ask, self._timeout_s, self.port = ask, float(timeout_s), port

    @classmethod
    def hosted(cls, secret: str, address: str, port: int, timeout_s: float) -> RankStore:
        """At rank 0: listen on one address for the others. `port` 0: one that is free. ConnectError where
        the address is not of this machine, or the port taken."""
        table, context = StoreTable(), context_of(secret, server=True)
        try:
            listener = socket.create_server((address, port), backlog=512)
        except OSError as e:
            mend = "MASTER_ADDR and MASTER_PORT are an address and a free port of rank 0's machine"
            raise ConnectError(f"rank 0 can't listen on {address}:{port}: {e.strerror}. {mend}.") from None
        threading.Thread(target=_serve, args=(listener, context, table), daemon=True).start()
        return cls(table.answer, timeout_s, int(listener.getsockname()[1]))

    @classmethod
    def joined(cls, secret: str, where: Callable[[], tuple[str, int]], timeout_s: float) -> RankStore:
        """At another rank. `where`: rank 0's address and port, asked again at each try. ConnectError where
        rank 0 does not listen within `timeout_s`, or holds another secret."""
        line = StoreLine(secret, where, timeout_s)
        line.ask(StoreCall("check"))
        return cls(line.ask, timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(StoreCall("set", [key], value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        return self._in_time(StoreCall("get", [key], seconds=self._timeout_s)).value

    def add(self, key: str, number: int) -> int:
        return self._ask(StoreCall("add", [key], number=number)).number

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(StoreCall("check", [*keys])).number)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._in_time(StoreCall("wait", [*keys], seconds=seconds))

    def _in_time(self, call: StoreCall) -> StoreAnswer:
        if (answer := self._ask(call)).late:
            raise RuntimeError(f"rank 0 has not got {', '.join(call.keys)} after {call.seconds:g} s")
        return answer


class StoreLine:
    """The way to the table from another rank: a connection for each thread, closed with the thread."""

    def __init__(self, secret: str, where: Callable[[], tuple[str, int]], timeout_s: float) -> None:
        self._context, self._where, self._timeout_s = context_of(secret, server=False), where, timeout_s
        self._here = threading.local()

    def ask(self, call: StoreCall) -> StoreAnswer:
        """RuntimeError, as of torch's own store, when rank 0 is gone."""
        try:
            if not hasattr(self._here, "held"):
                self._here.held = ClosedAtEnd(self._connect())
            channel: ssl.SSLSocket = self._here.held.channel
            _send(channel, msgspec.msgpack.encode(call))
            return msgspec.msgpack.decode(_receive(channel), type=StoreAnswer)
        except (OSError, msgspec.MsgspecError) as e:
            del self._here.held
            raise RuntimeError(f"the store of rank 0 is gone: {e}") from None

    def _connect(self) -> ssl.SSLSocket:
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            with suppress(OSError, EOFError):
                return self._shake_hands(self._where())
            time.sleep(RETRY_S)
        late = f"rank 0 did not answer within {self._timeout_s:g} s"
        raise ConnectError(f"{late} at MASTER_ADDR, MASTER_PORT. Start all ranks within parallel.timeout.")

    def _shake_hands(self, where: tuple[str, int]) -> ssl.SSLSocket:
        with ExitStack() as stack:
            plain = stack.enter_context(socket.create_connection(where, HANDSHAKE_S))
            try:
                channel = stack.enter_context(self._context.wrap_socket(plain, server_hostname=NAME))
                if channel.recv(1) != b"+":  # in TLS 1.3 the server judges the caller after the caller did it
                    raise ConnectionError
            except ssl.SSLEOFError as e:  # rank 0 ended, and may come again
                raise ConnectionError from e
            except ssl.SSLError:
                wrong = f"what listens at {where[0]}:{where[1]} refuses this rank's secret, or lacks it"
                raise ConnectError(f"{wrong}: {REMEDY}") from None
            channel.settimeout(None)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stack.pop_all()
            return channel


class ClosedAtEnd:
    def __init__(self, channel: ssl.SSLSocket) -> None:
        self.channel = channel

    def __del__(self) -> None:
        self.channel.close()


def _serve(listener: socket.socket, context: ssl.SSLContext, table: StoreTable) -> None:
    """Answer all who hold the secret, each in a thread, until the process ends."""
    shaking, refused = threading.Semaphore(CALLERS), 0

    def attend(plain: socket.socket, caller: str) -> None:
        nonlocal refused
        with ExitStack() as stack:
            try:
                stack.enter_context(plain).settimeout(HANDSHAKE_S)
                channel = stack.enter_context(context.wrap_socket(plain, server_side=True))
                channel.sendall(b"+")
            except (OSError, EOFError):
                refused += 1
                if refused <= TOLD:
                    os.write(2, f"fedtrain: rank 0 refused {caller}, {WHY}: {REMEDY}\n".encode())
                return
            finally:
                shaking.release()
            channel.settimeout(None)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError, msgspec.MsgspecError, WireError, ValueError):
                while True:
                    call = msgspec.msgpack.decode(_receive(channel), type=StoreCall)
                    _send(channel, msgspec.msgpack.encode(table.answer(call)))

    while True:
        plain, caller = listener.accept()
        shaking.acquire()
        threading.Thread(target=attend, args=(plain, str(caller[0])), daemon=True).start()


def _send(channel: ssl.SSLSocket, body: bytes) -> None:
    channel.sendall(_allowed(len(body)).to_bytes(4, "big") + body)


def _receive(channel: ssl.SSLSocket) -> bytes:
    return _exactly(channel, _allowed(int.from_bytes(_exactly(channel, 4), "big")))


def _allowed(length: int) -> int:
    if length > FRAME_BYTES:
        raise WireError(f"{length:,} bytes for the ranks' store; {FRAME_BYTES:,} are allowed")
    return length


def _exactly(channel: ssl.SSLSocket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        if not (block := channel.recv(length - len(found))):
            raise ConnectionError("the connection ended")
        found += block
    return found


@cache
def context_of(secret: str, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 with the one certificate that the secret gives, which is also the only one that is taken."""
    seed = HKDF(hashes.SHA256(), 32, None, b"fedtrain ranks").derive(secret.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    certificate = (  # the same bytes at all ranks, for Ed25519 draws nothing
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2120, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
        .public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    descriptor = os.memfd_create("ranks")  # a file that only this process has, for ssl takes keys by file
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context
