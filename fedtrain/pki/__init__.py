"""Who is who: a federation's certificate authority, and the identity that each end proves by mutual TLS."""

from .authority import Authority, init, issue, save, sign
from .identity import Credentials, Identity, aggregator_target, dns_name, identity_of

__all__ = [
    "Authority", "Credentials", "Identity", "aggregator_target", "dns_name", "identity_of",
    "init", "issue", "save", "sign",
]  # fmt: skip
