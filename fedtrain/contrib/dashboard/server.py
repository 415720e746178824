"""`fedtrain dashboard`: the page over HTTP, read only, with what is new in the runs' event logs as they grow.

One thread reads the logs; each browser gets what it lacks as server-sent events. Whoever asks shows the
token (a cookie, once the printed address was opened), under a name of this machine: a page elsewhere can
neither read the answers nor have a name of its own lead here (DNS rebinding). Nothing can be changed here.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...events import AnyEvent
from ...tracking import log
from .about import Machine, about
from .history import History
from .page import POLICY, asset, served, state_of
from .prometheus import Prometheus, exposition

COOKIE = "fedtrain"
LOOK_S = 0.5  # between two looks at the logs, and two messages
SPAN = 5_000  # events of one run that are read before others have a turn
PAGE_LINES = 500  # of the log, in one answer
HEADERS = {
    "Content-Security-Policy": POLICY.format(script="'self'", style="'self'", connect="'self'")
    + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Followed:
    """One run directory and what was read of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.history, self.state = folder, History(folder.name), "running"
        self.about, self.numbers = dict[str, Any](), Prometheus(folder.name)
        self._events: Iterator[AnyEvent | None] = log.follow(folder, sleep=lambda _: None)
        self._about_of: Any = None

    def read(self) -> bool:
        """Take in what is new, up to a span; True when there may be more."""
        alive = log.running(self.folder)  # asked first: a run that finishes meanwhile is finished
        for _ in range(SPAN):
            if (event := next(self._events)) is None:
                break
            self.history.add(event)
            self.numbers(event)
        else:
            return True
        self.state = state_of(self.history, alive)
        self.numbers.running(self.state == "running")
        board = self.history.board
        if self._about_of != (of := (board.started, board.round // 10, self.state, self.history.members)):
            self.about, self._about_of = about(self.folder, self.history), of
        return False


class LogReader(threading.Thread):
    """Reads the logs of all runs, those too that begin later. Its lock is held while a history changes."""

    def __init__(self, folders: Callable[[], Sequence[Path]]) -> None:
        super().__init__(name="fedtrain dashboard", daemon=True)
        self.lock, self.runs, self.machine = threading.Lock(), dict[str, Followed](), dict[str, Any]()
        self._folders, self._over = folders, threading.Event()

    def run(self) -> None:
        machine = Machine()
        while not self._over.is_set():
            for folder in self._folders():
                if folder.name not in self.runs:
                    self.runs[folder.name] = Followed(folder)
            more = False
            for run in list(self.runs.values()):
                with self.lock, suppress(OSError):  # a directory that is being made anew
                    more |= run.read()
            self.machine = machine.now()
            if not more:
                self._over.wait(LOOK_S)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def news(self, name: str, tick: int) -> tuple[int, list[bytes]]:
        """What a browser lacks of a run that it has up to `tick`, and up to where it has it then."""
        with self.lock:
            run = self.runs[name]
            machine = self.machine if run.state == "running" else {}  # else it tells of other work
            head = run.history.head(time.time(), run.state) | {"machine": machine}
            found = [{"head": head}, *run.history.since(tick), {"about": run.about | {"run": name}}]
            return run.history.tick, [msgspec.json.encode(message) for message in found]


def app(
    reader: LogReader, token: str, names: Sequence[str], ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The page of what the reader reads. `names`: under which this machine may be asked. `ending`: whether
    the server is told to stop."""

    async def page(_: Request) -> Response:
        return Response(served(), media_type="text/html")

    def file(name: str, kind: str) -> Route:
        async def send(_: Request) -> Response:
            return Response(asset(name), media_type=kind)

        return Route(f"/{name}", send)

    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(reader, request, ending), media_type="text/event-stream")

    async def lines(request: Request) -> Response:
        asked = request.query_params
        run = reader.runs.get(asked.get("run", ""))
        at, count = (asked.get(key, "") for key in ("at", "count"))
        if run is None or not (at.isdecimal() and count.isdecimal()) or len(at) > 9:
            return PlainTextResponse("which run, at, count?", 404)
        query = tuple(asked.get(key, "")[:200] for key in ("kind", "site", "words"))
        with reader.lock:
            found = run.history.log.page(int(at), min(int(count), PAGE_LINES), *query)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def metrics(_: Request) -> Response:
        with reader.lock:
            text = exposition(run.numbers for run in reader.runs.values())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @asynccontextmanager
    async def reading(_: Starlette) -> AsyncIterator[None]:
        reader.start()
        yield
        await asyncio.to_thread(reader.stop)

    routes = [
        Route("/", page), file("page.css", "text/css"), file("page.js", "text/javascript"),
        Route("/events", events), Route("/log", lines), Route("/metrics", metrics),
    ]  # fmt: skip
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] = reading
    made = Starlette(routes=routes, lifespan=lifespan)
    made.add_middleware(Guard, token=token, names=names)
    return made


class Guard:
    """Lets nobody in who doesn't name this machine and show the token; puts the headers in."""

    def __init__(self, inner: ASGIApp, token: str, names: Sequence[str]) -> None:
        self._inner, self._token, self._names = inner, token, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        answer = self._answer(Request(scope))

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        await (answer or self._inner)(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        """What is said to whoever may not pass, and to whoever brings the token in the address."""
        if not self._ours(request.headers.get("host", "")):
            return PlainTextResponse("Not a name of this machine: use the address that was printed.", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This page can only be read.", 405)
        if self._is_token(request.query_params.get("token", "")):
            entered = RedirectResponse("/", 303)
            secure = request.url.scheme == "https"
            entered.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", secure=secure)
            return entered
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not (self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer)):
            return PlainTextResponse(
                "Open the address that `fedtrain dashboard` printed: it has a token.", 401
            )
        return None

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._token.encode())

    def _ours(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        if name in self._names:
            return True
        try:
            return ipaddress.ip_address(name) is not None  # whoever names an address, asked no name server
        except ValueError:
            return False


async def _stream(reader: LogReader, request: Request, ending: Callable[[], bool]) -> AsyncIterator[bytes]:
    """All runs' heads, and of those that are asked for everything; then what is new, until somebody ends."""
    asked = [name for name in request.query_params.get("run", "").split("/") if name]
    ticks, told = dict.fromkeys(asked, 0), b""
    while not ending() and not await request.is_disconnected():
        with reader.lock:
            runs = [_brief(name, run) for name, run in reader.runs.items()]
        if (brief := msgspec.json.encode({"runs": runs})) != told:
            yield _message(brief)
            told = brief
        for name in asked:
            if name in reader.runs:
                ticks[name], found = await asyncio.to_thread(reader.news, name, ticks[name])
                for message in found:
                    yield _message(message)
        await asyncio.sleep(LOOK_S)


def _brief(name: str, run: Followed) -> dict[str, Any]:
    board = run.history.board
    loss = board.last.loss if board.last else None
    return {
        "name": name, "mode": board.mode, "state": run.state, "round": board.round, "rounds": board.rounds,
        "loss": loss, "updated": board.updated,
    }  # fmt: skip


def _message(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def own_names(host: str) -> list[str]:
    """The names under which a server that listens on `host` may be asked."""
    return ["localhost", host, socket.gethostname(), socket.getfqdn()]


def serve(
    folders: Callable[[], Sequence[Path]], host: str, port: int, token: str, tls: tuple[Path, Path] | None,
    ready: Callable[[str], None], begins: Callable[[uvicorn.Server], object] = lambda server: None,
) -> None:  # fmt: skip
    """Serve until the process is told to stop; `ready` is called with the address, once it listens, and
    `begins` with the server, whose `should_exit` ends it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()  # before anybody is told: a browser that opens the page at once is not refused
        port = listening.getsockname()[1]
        made = app(LogReader(folders), token, own_names(host), lambda: server.should_exit)
        certificate, key = tls or (None, None)
        config = uvicorn.Config(
            made, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1,
            ssl_certfile=certificate, ssl_keyfile=key,
        )  # fmt: skip
        name = f"[{host}]" if ":" in host else host
        ready(f"http{'s' if tls else ''}://{name}:{port}/?token={token}")
        server = uvicorn.Server(config)
        begins(server)
        server.run([listening])
