"""Certificates: a federation's certificate authority, and the identity that each end proves by mutual TLS."""

from .authority import Authority, init, issue, save, sign
from .identity import Credentials, Identity, aggregator_target, dns_name, identity_of
from .revocation import Revoked, revoke, revoke_issuing
from .signing import Signer, Verifier, fingerprint

__all__ = [
    "Authority", "Credentials", "Identity", "Revoked", "Signer", "Verifier", "aggregator_target", "dns_name",
    "fingerprint", "identity_of", "init", "issue", "revoke", "revoke_issuing", "save", "sign",
]  # fmt: skip
