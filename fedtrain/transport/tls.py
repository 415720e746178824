"""Mutual TLS for gRPC: always on, TLS 1.2 or newer, both certificates from the federation's own CA."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

import grpc

NO_TLS = "wrong_version_number"  # what gRPC says of an answer in clear
WORDS_S = 2.0


@dataclass(frozen=True)
class Tls:
    """PEM bytes of one end. The key goes to gRPC and nowhere else."""

    key: bytes
    chain: bytes  # own certificate, then the issuing CA's
    root: bytes  # the federation's root: nothing else is trusted
    others: tuple[tuple[bytes, bytes], ...] = ()  # keys and chains to be shown to who asks for their names

    def __repr__(self) -> str:
        return "Tls(...)"  # a key never reaches a log

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
    text = details.lower()
    if proxy := re.search(r"(?:ipv[46]:)?(\S+): http proxy returned response code (\d+)", text):
        return (
            f"{address}: the HTTP proxy {proxy[1]} answered {proxy[2]}. It must allow CONNECT to this "
            f"address; https_proxy may hold a name and a password."
        )
    if "internal error from core" in text:  # of gRPC's client: its write failed before the answer came
        return f"{address}: the aggregator ended the call while this end was still sending."
    if "connection refused" in text:
        return f"{address}: nothing listens there yet (connection refused). Is the aggregator started?"
    if "certificate_verify_failed" in text or "verification check failed" in text:
        if "expired" in text:
            return (
                f"{address}: its certificate has expired, or this machine's clock is wrong. Renew it with "
                f"`fedtrain certs issue aggregator`, or set the clock."
            )
        if "not yet valid" in text:
            return f"{address}: its certificate is not valid yet. Check both clocks."
        if "issuer" in text or "self signed" in text:
            return (
                f"{address}: its certificate is not this federation's aggregator's, but of another CA (of "
                f"another federation, a web server, a proxy). Check network.address, and root.pem in your "
                f"certs folder."
            )
        return (
            f"{address}: its certificate is not this federation's aggregator's. "
            f"Check network.address, and that both ends have certificates of the same CA."
        )
    if NO_TLS in text:
        what = (
            "a web server answers there:"
            if said.startswith(b"HTTP/")
            else "what answers there speaks no TLS:"
        )
        return f"{address}: {what} it is no fedtrain aggregator. Check host and port of network.address."
    if "endpoint closing" in text:
        return (
            f"{address}: something listens there, but never answers. Is that the aggregator's port? Check "
            f"network.address."
        )
    if "handshake read failed" in text:
        return (
            f"{address}: it closed the connection before it showed a certificate. Is that the aggregator's "
            f"port? Check network.address; if it is, the aggregator is stopping, or has too many callers."
        )
    closed = any(words in text for words in ("socket closed", "connection reset", "goaway", "broken pipe"))
    if "alert" in text or "handshake failed" in text or (closed and not joined):
        return (
            f"{address}: it refused our certificate in the TLS handshake (another CA's, expired, or not a "
            f"site's). If it is not just stopping, ask for a new one: `fedtrain certs issue NAME`."
        )
    if "errors resolving" in text or "dns" in text or "name resolution" in text or "address family" in text:
        return f"{address}: the host name cannot be resolved. Check network.address."
    if closed:
        return f"{address}: the aggregator closed the connection."
    if "deadline" in text or "timed out" in text or "timeout" in text:
        return f"{address}: no answer (a firewall between here and there?)."
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
