"""S11: a site behind an HTTP proxy reaches its aggregator by CONNECT, and what passes is ciphertext."""

import asyncio
import contextlib

import grpc
import pytest

from fedtrain.exchange import gather
from fedtrain.messages import Train
from tests.federation import aggregator, certificates, echo_plus, link, random_arena, sites, tls
from tests.limits import bounded

ADDRESS = "aggregator.invalid:8440"  # a name that only the proxy can make something of
RECORDS = {20, 21, 22, 23}  # of TLS: change of cipher, alert, handshake, application data
WEIGHTS, SEED = random_arena(300_000, 99), 1


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), "a")


class Proxy:
    """Connects whoever says CONNECT to a port of loopback, and keeps all that passes."""

    def __init__(self, to_port, answer=b"HTTP/1.1 200 Connection established\r\n\r\n"):
        self._to_port, self._answer = to_port, answer
        self.asked, self.streams, self._serving = [], [], set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._serving.add(asyncio.current_task())
        async with closed(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.split(b"\r\n")[0].decode())
            writer.write(self._answer)
            if b" 200 " in self._answer:
                from_there, to_there = await asyncio.open_connection("127.0.0.1", self._to_port)
                async with closed(to_there):
                    await asyncio.gather(self._carry(reader, to_there), self._carry(from_there, writer))

    async def _carry(self, reader, writer):
        self.streams.append(stream := bytearray())
        async with closed(writer):
            while data := await reader.read(1 << 16):
                stream += data
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def closed(writer):
    """A connection that is closed behind us, whoever breaks it."""
    with contextlib.suppress(ConnectionError):
        try:
            yield
        finally:
            writer.close()
            await writer.wait_closed()


def records(stream):
    """The types of the TLS records that a stream is made of; AssertionError when it is anything else."""
    at, found = 0, set()
    while at + 5 <= len(stream):
        kind, version, length = stream[at], stream[at + 1], int.from_bytes(stream[at + 3 : at + 5])
        assert kind in RECORDS, (at, kind)
        assert version == 3, (at, version)
        found.add(kind)
        at += 5 + length
    return found


@pytest.fixture
def behind(certs, tmp_path, monkeypatch):
    """Makes a link of a site whose environment names a proxy."""
    for name in ("grpc_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    def make(proxy, **options):
        monkeypatch.setenv("https_proxy", proxy.url)
        return link(certs, "a", 0, tmp_path, address=ADDRESS, **options)

    return make


async def one_try(behind, proxy):
    """Why a link through the proxy does not come about."""
    told, tried = [], asyncio.Event()

    async def stop(_):
        tried.set()
        await asyncio.Event().wait()

    site = behind(proxy, sleep=stop, emit=lambda event: told.append((event.kind, event.reason)))
    async with sites({"a": site}, WEIGHTS.schema, lambda _: echo_plus(SEED)):
        await tried.wait()
    return told


def test_s11_a_site_trains_through_a_connect_proxy_that_sees_only_ciphertext(certs, tmp_path, behind):
    async def main():
        async with aggregator(certs, tmp_path, WEIGHTS.schema) as agg, Proxy(agg.cohort.port) as proxy:
            async with sites({"a": behind(proxy)}, WEIGHTS.schema, lambda _: echo_plus(SEED)):
                await agg.cohort.members(1)
                request = Train(id="r/0/0/train", round=0, weights=WEIGHTS)
                replies = await gather(agg.cohort, {"a": request}, 30)
            return replies["a"].delta.digest, proxy

    digest, proxy = bounded(main())
    delta = random_arena(300_000, SEED)
    assert digest == delta.digest
    assert proxy.asked == [f"CONNECT {ADDRESS} HTTP/1.1"]  # one connection, and no name looked up here
    assert min(map(len, proxy.streams)) > WEIGHTS.schema.nbytes  # the model down, the update up
    secrets = [b"fedtrain.Star", b"r/0/0/train", b"a.site.fedtrain"]
    secrets += [bytes(arena.payload[at : at + 32]) for arena in (WEIGHTS, delta) for at in (0, 600_000)]
    for stream in proxy.streams:
        assert 23 in records(stream)
        assert [secret for secret in secrets if secret in stream] == []


def test_s11_a_proxy_that_answers_with_its_own_certificate_is_refused_before_a_word_is_said(
    certs, tmp_path, behind
):
    """As one that opens TLS to look inside: its authority may be known to the machine, not to the site."""
    own = certificates(tmp_path / "own", "a")
    heard = []

    async def main():
        shown = tls(own / "aggregator")  # to whomever: no certificate is asked of him
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(shown.key, shown.chain)]))
        server.add_generic_rpc_handlers((Received(heard),))
        await server.start()
        async with Proxy(port) as proxy:
            told = await one_try(behind, proxy)
        await server.stop(None)
        return told, proxy

    told, proxy = bounded(main())
    assert proxy.asked == [f"CONNECT {ADDRESS} HTTP/1.1"]
    assert [kind for kind, _ in told] == ["site_lost"]
    assert "its certificate is not this federation's aggregator's" in told[0][1]
    assert heard == []


class Received(grpc.GenericRpcHandler):
    """Whatever is called here is noted."""

    def __init__(self, calls):
        self._calls = calls

    def service(self, call):
        self._calls.append(call.method)


@pytest.mark.parametrize("answer", ["403 Forbidden", "407 Proxy Authentication Required"])
def test_s11_a_proxy_that_refuses_is_named(behind, answer):
    async def main():
        async with Proxy(0, f"HTTP/1.1 {answer}\r\n\r\n".encode()) as proxy:
            return await one_try(behind, proxy), proxy.url

    told, url = bounded(main())
    assert told == [
        (
            "site_lost",
            f"{ADDRESS}: the HTTP proxy {url.removeprefix('http://')} answered {answer[:3]}. It must allow "
            f"CONNECT to this address; https_proxy may hold a name and a password.",
        )
    ]
