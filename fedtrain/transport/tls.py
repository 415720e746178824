"""Mutual TLS for gRPC: always on, TLS 1.2 or newer, both ends with certificates of the federation's own CA."""

from __future__ import annotations

from dataclasses import dataclass

import grpc


@dataclass(frozen=True)
class Tls:
    """PEM bytes of one end. The key goes to gRPC and nowhere else."""

    key: bytes
    chain: bytes  # own certificate, then the issuing CA's
    root: bytes  # the federation's root: nothing else is trusted

    def __repr__(self) -> str:
        return "Tls(...)"  # a key never reaches a log

    def server(self) -> grpc.ServerCredentials:
        """Requires and verifies a client certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.chain)], root_certificates=self.root, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root, self.key, self.chain)


def explain(details: str, address: str) -> str:
    """What gRPC says about a failed connection, in one line that a person can act on."""
    text = details.lower()
    if "connection refused" in text:
        return f"{address}: nothing listens there yet (connection refused). Is the aggregator started?"
    if "certificate_verify_failed" in text or "peer name" in text or "certificate verify failed" in text:
        if "expired" in text:
            return f"{address}: its certificate has expired. Renew it with `fedtrain certs issue aggregator`."
        if "not yet valid" in text:
            return f"{address}: its certificate is not valid yet. Check both clocks."
        return (
            f"{address}: its certificate is not this federation's aggregator's. "
            f"Check network.address, and that both ends have certificates of the same CA."
        )
    if "alert" in text or "handshake failed" in text or "ssl_error" in text:
        return (
            f"{address}: it refused our certificate in the TLS handshake (another CA's, expired, or not a "
            f"site's). Ask for a new one: `fedtrain certs issue NAME`."
        )
    if "dns" in text or "name resolution" in text or "address family" in text:
        return f"{address}: the host name cannot be resolved. Check network.address."
    if "socket closed" in text or "connection reset" in text or "goaway" in text:
        return f"{address}: the aggregator closed the connection."
    if "deadline" in text or "timed out" in text or "timeout" in text:
        return f"{address}: no answer (a firewall between here and there?)."
    return f"{address}: {details.splitlines()[0][:200] if details else 'the connection broke'}"
