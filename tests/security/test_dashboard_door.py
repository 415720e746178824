"""Who is let in at the dashboard: whoever has the token and names this machine, to read."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

import pytest

from tests.limits import WAIT_S
from tests.logs import federation, write

pytest.importorskip("starlette")

from fedtrain.contrib.dashboard import server

TOKEN = "a token of some length"
OURS = "127.0.0.1:8500"


@pytest.fixture
def ask(tmp_path):
    """Asks the page, without a socket: (status, headers, body)."""
    write(tmp_path / "clinic", federation())
    reader = server.LogReader(lambda: [])
    reader.runs["clinic"] = server.Followed(tmp_path / "clinic")
    reader.runs["clinic"].read()
    made = server.app(reader, TOKEN, server.own_names("127.0.0.1"))

    def ask(path="/", *, method="GET", host=OURS, **headers):
        return asyncio.run(_ask(made, path, method, {"host": host} | headers))

    return ask


async def _ask(app, path, method, headers):
    sent = []
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "scheme": "http",
        "query_string": query.encode(), "http_version": "1.1", "root_path": "", "server": ("127.0.0.1", 8500),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(each.get("body", b"") for each in sent[1:])


def test_who_has_the_token_reads_the_page(ask):
    status, head, body = ask(cookie=f"fedtrain={TOKEN}".replace(" ", "%20"))
    assert status == 401, "a cookie that is another"
    status, head, body = ask(authorization=f"Bearer {TOKEN}")
    assert (status, b"page.js" in body) == (200, True)
    assert "default-src 'none'" in head["content-security-policy"]
    assert "frame-ancestors 'none'" in head["content-security-policy"]
    assert (head["x-content-type-options"], head["cache-control"]) == ("nosniff", "no-store")


def test_the_printed_address_becomes_a_cookie_that_scripts_and_other_pages_do_not_have(ask):
    status, head, _ = ask(f"/?token={TOKEN.replace(' ', '%20')}")
    assert (status, head["location"]) == (303, "/")
    cookie = head["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/events?run=clinic", "/log?run=clinic&at=0&count=9", "/metrics"]
)
def test_nothing_is_told_without_the_token(ask, path):
    for headers in ({}, {"cookie": "fedtrain="}, {"cookie": "fedtrain=guess"}, {"authorization": "Bearer "}):
        status, head, body = ask(path, **headers)
        assert (status, b"clinic" in body, b"north" in body) == (401, False, False)
        assert "content-security-policy" in head


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8500", "", "127.0.0.1.evil.example", "[evil]:1"]
)
def test_a_name_that_leads_here_from_elsewhere_is_refused_before_the_token_is_looked_at(ask, host):
    status, _, body = ask(f"/?token={TOKEN.replace(' ', '%20')}", host=host)
    assert (status, b"Not a name of this machine" in body) == (421, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8500", "[::1]:8500", "192.0.2.7:1"])
def test_this_machine_may_be_named_by_its_addresses(ask, host):
    assert ask(host=host, authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(ask, method):
    assert ask(method=method, authorization=f"Bearer {TOKEN}")[0] == 405


@pytest.mark.parametrize(
    "query", ["", "run=../../etc&at=0&count=1", "run=clinic&at=-1&count=1", "run=clinic&at=1e9&count=1"]
)
def test_a_log_that_is_asked_for_wrongly_is_not_there(ask, query):
    assert ask(f"/log?{query}", authorization=f"Bearer {TOKEN}")[0] == 404


def test_the_address_that_is_told_takes_connections_already(tmp_path):
    taken = []

    def ready(address):
        with socket.create_connection(("127.0.0.1", urlsplit(address).port), WAIT_S) as one:
            taken.append(one.getpeername())

    server.serve(
        lambda: [tmp_path], "127.0.0.1", 0, "t" * 22, None, ready,
        lambda begun: setattr(begun, "should_exit", True),
    )  # fmt: skip
    assert taken
