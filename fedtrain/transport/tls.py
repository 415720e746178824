"""Mutual TLS for gRPC: always on, TLS 1.2 or newer, both certificates from the federation's own CA."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

import grpc

NO_TLS = "wrong_version_number"  # what gRPC says of an answer in clear
WORDS_S = 2.0
UNVERIFIED = "certificate_verify_failed|verification check failed"
CLOSED = "socket closed|connection reset|goaway|broken pipe"
REFUSES_US = (
    "it refused our certificate in the TLS handshake (another CA's, expired, or not a site's). If it is not "
    "just stopping, ask for a new one: `fedtrain certs issue NAME`."
)
# Patterns that gRPC's details match all, whether this end has joined, and what answered without TLS; and what
# that means. The first row that matches counts.
MEANINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (NO_TLS, "a web page"),
        "a web server answers there: it is no fedtrain aggregator. Check host and port of network.address.",
    ),
    (
        (NO_TLS,),
        "what answers there speaks no TLS: it is no fedtrain aggregator. Check host and port of "
        "network.address.",
    ),
    # of gRPC's client: its write failed before the answer came
    (("internal error from core",), "the aggregator ended the call while this end was still sending."),
    (("connection refused",), "nothing listens there yet (connection refused). Is the aggregator started?"),
    (
        (UNVERIFIED, "expired"),
        "its certificate has expired, or this machine's clock is wrong. Renew it with `fedtrain certs issue "
        "aggregator`, or set the clock.",
    ),
    ((UNVERIFIED, "not yet valid"), "its certificate is not valid yet. Check both clocks."),
    (
        (UNVERIFIED, "issuer|self signed"),
        "its certificate is not this federation's aggregator's, but of another CA (of another federation, a "
        "web server, a proxy). Check network.address, and root.pem in your certs folder.",
    ),
    (
        (UNVERIFIED,),
        "its certificate is not this federation's aggregator's. Check network.address, and that both ends "
        "have certificates of the same CA.",
    ),
    (
        ("endpoint closing",),
        "something listens there, but never answers. Is that the aggregator's port? Check network.address.",
    ),
    (
        ("handshake read failed",),
        "it closed the connection before it showed a certificate. Is that the aggregator's port? Check "
        "network.address; if it is, the aggregator is stopping, or has too many callers.",
    ),
    (("alert|handshake failed",), REFUSES_US),
    ((CLOSED, "\nnot joined"), REFUSES_US),
    (
        ("errors resolving|dns|name resolution|address family",),
        "the host name cannot be resolved. Check network.address.",
    ),
    ((CLOSED,), "the aggregator closed the connection."),
    (("deadline|timed out|timeout",), "no answer (a firewall between here and there?)."),
)


@dataclass(frozen=True, repr=False)  # a key never reaches a log
class Tls:
    """PEM bytes of one end. The key goes to gRPC and nowhere else."""

    key: bytes
    chain: bytes  # own certificate, then the issuing CA's
    root: bytes  # the federation's root: nothing else is trusted
    others: tuple[tuple[bytes, bytes], ...] = ()  # keys and chains to be shown to who asks for their names

    def server(self) -> grpc.ServerCertificateConfiguration:
        """What a server shows, and whom it believes."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain), *self.others], self.root)

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root, self.key, self.chain)


def serving(now: Callable[[], Tls], arrived: Callable[[], object] = bool) -> grpc.ServerCredentials:
    """Requires and verifies a client certificate; asks at each handshake what counts `now`, and says that a
    caller has `arrived`."""
    last = [now()]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        arrived()
        if (tls := now()) == last[0]:
            return None
        last[0] = tls
        return tls.server()

    return grpc.dynamic_ssl_server_credentials(last[0].server(), fetch, require_client_authentication=True)


def explain(details: str, address: str, joined: bool = False, said: bytes = b"") -> str:
    """What gRPC says about a failed connection, in one line that a person can act on.

    With TLS 1.3 a server that refuses our certificate just closes, right after our side of the handshake:
    one that closes before it is no server of TLS, or has no time for us. `said`: what who speaks no TLS said.
    """
    web = "a web page" if said.startswith(b"HTTP/") else ""
    text = "\n".join((details.lower(), "joined" if joined else "not joined", web))
    if proxy := re.search(r"(?:ipv[46]:)?(\S+): http proxy returned response code (\d+)", text):
        return (
            f"{address}: the HTTP proxy {proxy[1]} answered {proxy[2]}. It must allow CONNECT to this "
            f"address; https_proxy may hold a name and a password."
        )
    for patterns, meaning in MEANINGS:
        if all(re.search(pattern, text) for pattern in patterns):
            return f"{address}: {meaning}"
    return f"{address}: {details.splitlines()[0][:200] if details else 'the connection broke'}"


async def first_words(details: str, address: str) -> bytes:
    """What is answered to a request for a web page where no TLS is spoken, as gRPC's `details` say."""
    host, _, port = address.rpartition(":")
    if NO_TLS not in details.lower():
        return b""
    try:
        async with asyncio.timeout(WORDS_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                return await reader.read(64)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
