"""Sites and an aggregator for tests of secure aggregation: real keys and signatures, in one process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtrain.errors import CertificateError
from fedtrain.secagg.client import Client, Policy
from fedtrain.secagg.messages import Advertise, RingArena, Terms
from fedtrain.secagg.server import SecureSum, secure_sum
from fedtrain.transport.memory import LocalCohort
from fedtrain.update import Failure, Request

ECDSA = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
MODEL = hashlib.sha256(b"the global model").digest()
NO_WEIGHTS = RingArena(Terms.schema(  # the sites of these tests train on nothing
    Terms(federation="", run="", round=0, attempt=0, nonce=b"", cohort={"a": b""}, quorum=1, threshold=1,
          value_bits=4, clip=1.0, max_weight=1.0, length=1), ()))  # fmt: skip


class Authority:
    """Signs for sites: a "certificate" is a public key with its site's name. The real ones: test_pki_signing."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, ec.EllipticCurvePublicKey]] = {}

    def issue(self, site: str) -> tuple[bytes, Callable[[bytes], bytes]]:
        """(certificate, sign)"""
        seed = int.from_bytes(hashlib.sha256(site.encode()).digest(), "big") >> 8
        key = ec.derive_private_key(seed, ec.SECP256R1())
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        certificate = site.encode() + b"\0" + key.public_key().public_bytes(*form)
        self._known[certificate] = (site, key.public_key())
        return certificate, lambda message: key.sign(message, ECDSA)

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> tuple[str, bytes]:
        if certificate not in self._known:
            raise CertificateError("not a site of this federation")
        site, key = self._known[certificate]
        try:
            key.verify(signature, message, ECDSA)
        except InvalidSignature:
            raise CertificateError(f"{site}: a signature is not by its key, or over something else") from None
        return site, hashlib.sha256(certificate).digest()


def stream(seed: object) -> Callable[[int], bytes]:
    """Seeded randomness, so that a whole session can be had twice."""
    state, count = str(seed).encode(), iter(range(1 << 30))

    def random(n: int) -> bytes:
        return hashlib.shake_256(state + next(count).to_bytes(4, "big")).digest(n)

    return random


class Member:
    """An honest site: what it sums, and all it was asked and answered."""

    def __init__(
        self, site: str, policy: Policy, authority: Authority, values: np.ndarray, seed: object
    ) -> None:
        certificate, sign = authority.issue(site)
        self.client = Client(
            site,
            policy,
            certificate=certificate,
            sign=sign,
            verify=authority.verify,
            random=stream((seed, site)),
        )
        self.values, self.model, self.names, self.sign = values, MODEL, ("loss",), sign
        self.fingerprint = hashlib.sha256(certificate).digest()
        self.said: list[object] = []

    def __call__(self, request: Request) -> object:
        if isinstance(request, Advertise):
            reply = self.client.begin(request, self.model, self.names, self.encode)
        else:
            reply = self.client.answer(request)
        self.said.append(reply)
        return reply

    def encode(self, names: tuple[str, ...], out: np.ndarray) -> None:
        """The ring vector: the values, then ones for the metrics."""
        out[: len(self.values)] = self.values.astype(out.dtype)
        out[len(self.values) :] = 1

    @property
    def refused(self) -> str | None:
        return next((r.reason for r in self.said if isinstance(r, Failure)), None)


class Federation:
    """n honest members a, b, .. (or s000, ..) with terms that they accept, and a cohort of them."""

    def __init__(
        self,
        n: int,
        *,
        length: int = 5,
        ring_bits: int = 32,
        value_bits: int = 16,
        seed: object = 0,
        **policy: object,
    ) -> None:
        self.authority = Authority()
        self.policy = Policy(
            federation="ward", run="heart", ring_bits=ring_bits, value_bits=value_bits, clip=1.0,
            max_weight=100.0, length=length, **policy,
        )  # fmt: skip
        names = [chr(ord("a") + i) for i in range(n)] if n <= 26 else [f"s{i:03}" for i in range(n)]
        q_max = (1 << (value_bits - 1)) - 1
        draw = np.random.default_rng(abs(hash(str(seed))))
        self.members = {
            name: Member(name, self.policy, self.authority, draw.integers(-q_max, q_max + 1, length), seed)
            for name in names
        }
        quorum, threshold, degree = self.policy.graph(n)
        self.terms = Terms(
            federation="ward", run="heart", round=3, attempt=0, nonce=stream(seed)(16),
            cohort={name: member.fingerprint for name, member in self.members.items()},
            quorum=quorum, threshold=threshold, degree=degree, ring_bits=ring_bits, value_bits=value_bits,
            clip=1.0, max_weight=100.0, length=length,
        )  # fmt: skip

    def again(self, **changes: object) -> Terms:
        """Terms of another attempt."""
        from msgspec.structs import replace as changed

        self.terms = changed(
            self.terms,
            attempt=self.terms.attempt + 1,
            nonce=stream((self.terms.nonce, "next"))(16),
            **changes,
        )
        return self.terms

    def advertise(self, terms: Terms | None = None) -> Advertise:
        terms = terms or self.terms
        return Advertise(id=terms.request_id("advertise"), round=terms.round, weights=NO_WEIGHTS, terms=terms)

    def sum(
        self, loses: Callable[[str, Request], bool] = lambda site, request: False, cohort=None, **more
    ) -> SecureSum:
        cohort = cohort or LocalCohort(self.members, loses)
        return asyncio.run(
            secure_sum(
                cohort, self.terms, MODEL, self.advertise(), self.authority.verify,
                deadline_s=60, step_deadline_s=60, **more,
            )
        )  # fmt: skip

    def plain(self, sites: Iterable[str]) -> np.ndarray:
        """The sum of what these sites send, in plain integers."""
        members = [self.members[site] for site in sites]
        dtype = f"u{self.policy.ring_bits // 8}"
        total = np.zeros(self.terms.numel(("loss",)), dtype)
        for member in members:
            vector = np.zeros_like(total)
            member.encode(("loss",), vector)
            total += vector
        return total
