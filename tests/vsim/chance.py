"""What libraries draw for themselves, keys and signatures among it, and what day it is: here all of that
follows from a seed. So certificates, and what is made of their bytes, are the same in every process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import cache
from typing import Any
from unittest.mock import patch

import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from zmq.utils import z85

from fedtrain.errors import CertificateError
from fedtrain.pki import authority, identity, renewal, revocation, signing
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.runtime.sites import approval
from fedtrain.secagg.client import Client

BEGAN = 2e9  # the clock of the wall, when a world begins: its certificates are as old
BYTES = 71  # of a signature that is a hash
SCALAR_BITS = 255  # of a private key: less than the order of P-256
DATED = (authority, identity, renewal, revocation, signing, approval)  # who asks for the day


class Day(datetime):
    """A datetime whose `now` is when a world begins."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.fromtimestamp(BEGAN, tz)


Change = tuple[Any, str, Any]  # where, a name there, what stands there meanwhile


@contextmanager
def standing(*changes: Change) -> Iterator[None]:
    """As patch.object of each, in a tenth of the time: a world has a hundred."""
    before = [(where, name, vars(where).get(name) or getattr(where, name)) for where, name, _ in changes]
    try:
        for where, name, what in changes:
            setattr(where, name, what)
        yield
    finally:
        for where, name, what in reversed(before):
            setattr(where, name, what)


@contextmanager
def certified(draw: random.Random) -> Iterator[None]:
    """Who makes keys and certificates makes those that follow from `draw`."""
    generate = lambda curve: ec.derive_private_key(draw.getrandbits(SCALAR_BITS) or 1, curve)
    with standing(
        (ec, "generate_private_key", generate), (x509.CertificateBuilder, "sign", _signed),
        (x509, "random_serial_number", lambda: 1 << 158 | draw.getrandbits(158)),
        *((module, "datetime", Day) for module in DATED),
    ):  # fmt: skip
        yield


def _signed(*arguments: Any, real: Any = x509.CertificateBuilder.sign) -> x509.Certificate:
    found: x509.Certificate = real(*arguments, ecdsa_deterministic=True)
    return found


def curve_keypair(draw: random.Random) -> tuple[bytes, bytes]:
    """As zmq.curve_keypair."""
    secret = z85.encode(draw.randbytes(32))
    return zmq.curve_public(secret), secret


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
    """The secrets of masks are drawn from the seed. `real`: signatures are ECDSA's, by RFC 6979."""
    cheap = lambda self, message: keyed(self.certificate, message)
    hashed: list[Change] = [(Signer, "sign", cheap), (Verifier, "verify", verified)]
    defaults: Any = Client.__init__.__kwdefaults__
    with (
        standing(
            *([(signing, "ECDSA", REAL)] if real else hashed),
            *((module, "datetime", Day) for module in DATED),
        ),
        patch.dict(defaults, random=draw.randbytes),
    ):
        yield


REAL = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
