"""What libraries draw for themselves. A signature in DER has 70 to 72 bytes, and bytes decide how a message
is cut up and what a power cut leaves: here each has 71, and a certificate's number always 20."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from cryptography import x509

from fedtrain.errors import CertificateError
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.secagg.client import Client

BYTES = 71


def signed(self: Signer, message: bytes, real: Any = Signer.sign) -> bytes:
    found: bytes = real(self, message)
    while len(found) != BYTES:
        found = real(self, message)
    return found


def certified(*arguments: Any, real: Any = x509.CertificateBuilder.sign, **named: Any) -> x509.Certificate:
    found: x509.Certificate = real(*arguments, **named)
    while len(found.signature) != BYTES:
        found = real(*arguments, **named)
    return found


@contextmanager
def of_one_length() -> Iterator[None]:
    """Certificates that are made here have the same length in each process."""
    with (
        patch.object(x509.CertificateBuilder, "sign", certified),
        patch.object(x509, "random_serial_number", lambda: 1 << 158 | random.getrandbits(158)),
    ):
        yield


def keyed(certificate: bytes, message: bytes) -> bytes:
    """A signature that costs nothing: nobody in a world makes one for another's certificate."""
    found = _begun(certificate).copy()
    found.update(message)
    return found.digest(BYTES)


@cache
def _begun(certificate: bytes) -> Any:
    return hashlib.shake_128(certificate)


def verified(
    self: Verifier, certificate: bytes, message: bytes, signature: bytes, role: str = "site"
) -> tuple[str, bytes]:
    trusted = self.trust(certificate, role)
    if signature != keyed(certificate, message):
        raise CertificateError(f"{trusted.identity}: a signature is not by its key")
    return trusted.identity.name, trusted.fingerprint


@contextmanager
def drawn(draw: random.Random, real: bool) -> Iterator[None]:
    """Signatures have one length, and the secrets of masks are drawn from the seed. `real`: signatures are
    ECDSA's."""
    defaults: Any = Client.__init__.__kwdefaults__
    with ExitStack() as stack:
        if real:
            stack.enter_context(patch.object(Signer, "sign", signed))
        else:
            cheap = lambda self, message: keyed(self.certificate, message)
            stack.enter_context(patch.object(Signer, "sign", cheap))
            stack.enter_context(patch.object(Verifier, "verify", verified))
        stack.enter_context(patch.dict(defaults, random=draw.randbytes))
        yield
