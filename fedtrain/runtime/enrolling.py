"""`fedtrain certs invite` and `fedtrain join`: a site gets its certificate, and its key never leaves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import CertificateError, ConfigError, ConnectError, FedtrainError, JoinRefused
from ..events import Emit, Notice
from ..messages import SiteId
from ..pki import issue
from ..pki.authority import pem
from ..pki.enrolment import (
    VERSION,
    Code,
    Codes,
    commitment,
    keep,
    number_of,
    request,
    settle,
    words,
)
from ..transport.grpc import GrpcTransport
from ..transport.star import backoff
from ..transport.streams import MessageStream
from ..transport.tls import Tls
from ..wire.codec import decode, encode
from ..wire.frames import Frame, Leaving, Refused

ENROL = "Enrol"  # the one call
HEARTBEAT_S = 5.0
LOOK_S = 0.2  # between looks whether a request was signed elsewhere
READ_OUT = (
    "Three words: {}\nTell them on the telephone to the person who sent you the code. That person signs only "
    "if the other screen shows the same words. Waiting for the signature."
)

T = TypeVar("T", bound=Frame)

Approve = Callable[
    [SiteId, str], Awaitable[bool | None]
]  # name, words; None: signed elsewhere, or not at all


class Commit(Frame, frozen=True, kw_only=True, tag=True):
    """The guest's first frame."""

    version: int  # of the enrolment's protocol
    commitment: bytes  # pki.enrolment.commitment


class Number(Frame, frozen=True, kw_only=True, tag=True):
    """The host's number, which the guest could not know when it committed."""

    number: bytes


class Wish(Frame, frozen=True, kw_only=True, tag=True):
    """The guest's request."""

    csr: bytes  # PEM
    number: bytes = b""  # the guest's


class Granted(Frame, frozen=True, kw_only=True, tag=True):
    """The host's answer, once the request was signed."""

    chain: bytes
    root: bytes


class Host:
    """The authority's end: takes requests of those who were invited, and gives them what was signed."""

    def __init__(self, codes: Codes, days: float, approve: Approve, emit: Emit) -> None:
        """`approve` asks a person whether the words are the same at the site; certificates last `days`."""
        self._codes, self._days, self._approve, self._emit = codes, days, approve, emit
        self._asked: dict[str, asyncio.Task[None]] = {}  # by code: a person is asked once for a request
        self._left = {code.id for code in codes.open()}  # those who have no answer yet
        self._over = asyncio.Event()

    async def run(self, listen: str) -> None:
        """Serve until all whose codes are open have their certificates, or were refused."""
        if not (codes := self._codes.open()):
            raise ConfigError("nobody is invited: fedtrain certs invite NAME")
        (key, chain), *others = [code.leaf("aggregator") for code in codes]
        roots = b"".join(pem(code.authority.certificate) for code in codes)
        transport = GrpcTransport(Tls(key, chain, roots, tuple(others)), HEARTBEAT_S)
        port = await transport.listen(listen, {ENROL: self._serve})
        names = ", ".join(code.guest for code in codes)
        self._emit(Notice(text=f"listening on {listen.rpartition(':')[0]}:{port} for {names}"))
        try:
            await self._over.wait()
        finally:
            for task in self._asked.values():
                task.cancel()
            await transport.close()

    async def _serve(self, chain: bytes, stream: MessageStream) -> None:
        """One call of a guest."""
        code = self._codes.caller(chain)
        if (first := await stream.read()) is None:
            return
        hello: Commit | Wish = decode(first, Commit | Wish)  # a guest of version 1 begins with its wish
        try:
            if (theirs := hello.version if isinstance(hello, Commit) else 1) != VERSION:
                raise CertificateError(
                    f"this site enrols by version {theirs}, the authority by version {VERSION}, which makes "
                    f"the words in another way. Install the same fedtrain at both."
                )
            assert isinstance(hello, Commit), "the only frame that has a version"
            await stream.write(encode(Number(number=self._codes.commit(code, hello.commitment))))
            if (second := await stream.read()) is None:
                return
            wish: Wish = decode(second, Wish)
            spoken = self._codes.ask(code, wish.csr, wish.number)
        except CertificateError as e:
            self._emit(Notice(text=f"{code.guest} is refused: {e}"))
            await stream.write(encode(Refused(reason=str(e), final=True)))
            return
        if code.id not in self._asked and self._codes.signed(code, wish.csr) is None:
            self._emit(Notice(text=f"{code.guest} asks for its certificate; its screen shows: {spoken}"))
            self._asked[code.id] = asyncio.create_task(self._sign(code, wish.csr, spoken))
        while (found := self._codes.signed(code, wish.csr)) is None:
            if code not in self._codes.open():
                await stream.write(encode(Refused(reason="whoever invited it says no", final=True)))
                self._answered(code)
                return
            await asyncio.sleep(LOOK_S)
        await stream.write(encode(Granted(chain=found[0], root=found[1])))
        if await stream.read() is not None:  # the guest has kept it
            self._codes.done(code)
            self._emit(Notice(text=f"{code.guest} has its certificate"))
            self._answered(code)

    def _answered(self, code: Code) -> None:
        self._left.discard(code.id)
        if not self._left:
            self._over.set()

    async def _sign(self, code: Code, csr: bytes, spoken: str) -> None:
        answer = await self._approve(code.guest, spoken)
        if answer is None:
            return
        if not answer:
            self._codes.void(code)
            return
        try:
            certs = self._codes.certs
            await asyncio.to_thread(issue, certs, "site", code.guest, days=self._days, csr=csr)
        except FedtrainError as e:
            self._emit(Notice(text=f"{code.guest}: {e}"))


async def join(certs_dir: Path, address: str, code: Code, tell: Callable[[str], None]) -> Path:
    """Ask the host at `address` for the certificate of the code's site, until the host has signed; returns
    the site's folder. JoinRefused says why the host gives none. `tell` shows the words to a person."""
    folder = certs_dir / "sites" / code.guest
    csr, public = request(folder)
    own = number_of(folder, code)
    key, chain = code.leaf("site")
    transport = GrpcTransport(Tls(key, chain, pem(code.authority.certificate)), HEARTBEAT_S)
    told = spoken = ""
    for pause_s in backoff(0.2, 1.7, 15.0):
        try:
            async with transport.connect(address, code.target) as call, call(ENROL) as stream:
                await stream.write(encode(Commit(version=VERSION, commitment=commitment(own, public))))
                host = (await _answer(stream, address, code, Number)).number
                settle(folder, code, host)
                if spoken != (spoken := words(code.root, code.guest, public, own + host)):
                    tell(READ_OUT.format(spoken))
                await stream.write(encode(Wish(csr=csr, number=own)))
                answer = await _answer(stream, address, code, Granted)
                keep(folder, code, answer.chain, answer.root)
                with suppress(ConnectError):
                    await stream.write(encode(Leaving()))
                    await stream.read()  # the host ends the call: else it may not see the frame
            return folder
        except JoinRefused:
            raise
        except ConnectError as e:
            if "not a valid frame" in str(e):  # as an authority of version 1 says of a Commit
                raise JoinRefused(
                    f"the authority has an older fedtrain, which can't read what this one says ({e}). "
                    f"Install the same fedtrain at both, and run there: fedtrain certs invite {code.guest}"
                ) from e
            if str(e) != told:
                tell(f"waiting: {e}")
                told = str(e)
        await asyncio.sleep(pause_s)
    raise AssertionError("backoff never ends")


async def _answer(stream: MessageStream, address: str, code: Code, kind: type[T]) -> T:
    """The host's next frame; JoinRefused where it refuses the guest."""
    if (data := await stream.read()) is None:
        raise ConnectError(f"{address}: the other end closed the connection.")
    answer: T | Refused = decode(data, kind | Refused)
    if isinstance(answer, Refused):
        raise JoinRefused(f"{address} refuses {code.guest}: {answer.reason}")
    return answer
