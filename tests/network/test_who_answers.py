"""A site that is given a wrong address is told, in one line, what is there instead of its aggregator."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import ssl
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import zmq

from fedtrain import pki
from tests.federation import certificates, hello, link, random_arena
from tests.limits import WAIT_S
from tests.ports import free_port, serving

SCHEMA = random_arena(3, 1).schema


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("certs"), "a")


def told(certs: Path, folder: Path, address: str) -> str:
    """The reason of a link to this address."""

    async def main() -> str:
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        site = link(certs, "a", 0, folder, address=address, emit=lambda event: first.set_result(event.reason))
        work = asyncio.create_task(site.serve(hello(SCHEMA), None))
        try:
            return await asyncio.wait_for(first, WAIT_S)
        finally:
            work.cancel()

    return asyncio.run(main())


def service(handle: Callable[[socketserver.BaseRequestHandler], None]) -> socketserver.TCPServer:
    kind = type("Handler", (socketserver.BaseRequestHandler,), {"handle": handle})
    return socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind)


def banner(handler: socketserver.BaseRequestHandler) -> None:
    handler.request.sendall(b"SSH-2.0-OpenSSH_9.7\r\n")
    handler.request.recv(1000)


def test_a_web_server_is_called_one(certs, tmp_path):
    with serving(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as address:
        assert told(certs, tmp_path, address) == (
            f"{address}: a web server answers there: it is no fedtrain aggregator. "
            f"Check host and port of network.address."
        )


def test_another_service_is_told_from_an_aggregator(certs, tmp_path):
    with serving(service(banner)) as address:
        assert "speaks no TLS: it is no fedtrain aggregator" in told(certs, tmp_path, address)


def test_the_port_of_a_peer_is_told_from_an_aggregators(certs, tmp_path):
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert "speaks no TLS: it is no fedtrain aggregator" in told(certs, tmp_path, f"127.0.0.1:{port}")


def test_what_closes_at_once_is_not_taken_for_a_refused_certificate(certs, tmp_path):
    with serving(service(lambda handler: None)) as address:
        reason = told(certs, tmp_path, address)
    assert "closed the connection before it showed a certificate" in reason
    assert "Check network.address" in reason


def test_tls_of_another_ca_is_told_from_our_aggregator(certs, tmp_path):
    other = pki.issue(pki.init(tmp_path / "other").parent, "aggregator")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other / "cert.pem", other / "key.pem")

    def handle(handler: socketserver.BaseRequestHandler) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(handler.request, server_side=True) as secure:
            secure.recv(1000)

    with serving(service(handle)) as address:
        assert "its certificate is not this federation's aggregator's, but of another CA (of" in told(
            certs, tmp_path, address
        )


def test_a_host_without_an_address_and_a_port_without_a_listener_are_told_in_plain_words(certs, tmp_path):
    reason = told(certs, tmp_path, "no.such.host.invalid:7600")
    assert reason == "no.such.host.invalid:7600: the host name cannot be resolved. Check network.address."
    assert "nothing listens there yet" in told(certs, tmp_path, f"127.0.0.1:{free_port()}")
