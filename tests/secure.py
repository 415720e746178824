"""Sites, an aggregator and what is between them, for tests of secure aggregation, in one process."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from fedtrain.digest import seed_of
from fedtrain.errors import CertificateError
from fedtrain.messages import Failure, Request
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.client import Client, Owed
from fedtrain.secagg.messages import Advertise, RingArena, Terms
from fedtrain.secagg.policy import Policy
from fedtrain.secagg.server import SecureSum, masked_sum
from fedtrain.transport.memory import LocalCohort

MODEL = hashlib.sha256(b"the global model").digest()
NO_WEIGHTS = RingArena(Schema((TensorSpec("none", (1,), "int16", False),)))  # these sites train on nothing
STEPS = ("Advertise", "Share", "Mask", "Agree", "Unmask")


class Authority:
    """Signatures that only their site can make; certificates and ECDSA are tested in test_pki_signing."""

    def issue(self, site: str) -> tuple[bytes, Callable[[bytes], bytes]]:
        """(certificate, sign)"""
        return f"certificate of {site}".encode(), lambda message: self._sign(site, message)

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> tuple[str, bytes]:
        site = certificate.decode(errors="replace").removeprefix("certificate of ").split(",")[0]
        if not hmac.compare_digest(signature, self._sign(site, message)):
            raise CertificateError(f"{site}: a signature is not by its key, or over something else")
        return site, hashlib.sha256(certificate).digest()

    def _sign(self, site: str, message: bytes) -> bytes:
        return hmac.digest(b"the key of " + site.encode(), message, "sha256")


def stream(*seed: object) -> Callable[[int], bytes]:
    """Seeded randomness, so that a whole session can be had twice."""
    start, count = hashlib.shake_256(repr(seed).encode()), iter(range(1 << 30))

    def random(n: int) -> bytes:
        here = start.copy()
        here.update(next(count).to_bytes(4, "big"))
        return here.digest(n)

    return random


class Member:
    """A site: what it sums, and all that it answered; honest unless it has a `lie`."""

    def __init__(
        self, site: str, federation: Federation, values: np.ndarray[Any, Any], *seed: object
    ) -> None:
        self.site, self.values, self.model, self.names = site, values, MODEL, ("loss",)
        self.certificate, self.sign = federation.authority.issue(site)
        self.lie: Callable[[Any], Any] = lambda reply: reply  # what is sent in place of an honest reply
        self._federation = federation
        self.checked: bool | None = None  # what it says of the model
        self.owed: list[Owed] = []  # what it has to check
        self.start(*seed)

    def start(self, *seed: object) -> None:
        """The site's process, again perhaps: then it remembers nothing."""
        self.said: list[object] = []
        self.client = Client(
            self.site,
            self._federation.policy,
            certificate=self.certificate,
            sign=self.sign,
            verify=self._federation.authority.verify,
            random=stream(self.site, *seed),
            owe=self.owed.append,
        )

    def __call__(self, request: Request) -> Any:
        if isinstance(request, Advertise):
            reply = self.client.begin(request, self.model, self, self.checked)
        else:
            reply = self.client.answer(request)  # type: ignore[arg-type]
        self.said.append(reply)
        return self.lie(reply)

    def write(self, names: tuple[str, ...], out: np.ndarray[Any, Any]) -> None:
        """The values, then ones for the metrics."""
        out[: len(self.values)] = self.values.astype(out.dtype)
        out[len(self.values) :] = 1
        out += out.dtype.type(self._federation.terms.fixed_point.zero)

    def answers(self, kind: type) -> list[Any]:
        return [reply for reply in self.said if isinstance(reply, kind)]

    @property
    def refused(self) -> str:
        """Its first refusal, or nothing."""
        return next((reply.reason for reply in self.answers(Failure)), "")


class Bent(LocalCohort):
    """An aggregator that sends something else than it should, or a wire that loses things."""

    def __init__(
        self,
        members: Mapping[str, Callable[[Request], Any]],
        bend: Callable[[str, Any], Request | None],
    ) -> None:
        """`bend(site, request)`: what is sent in its place; None: nothing."""
        super().__init__(members)
        self._bend = bend

    async def exchange(self, requests, deadline_s):  # type: ignore[no-untyped-def]
        bent = {site: self._bend(site, request) for site, request in requests.items()}
        sent = {site: request for site, request in bent.items() if request is not None}
        async for found in super().exchange(sent, deadline_s):
            yield found


class Federation:
    """n honest members a, b, .. (more than 26: s000, ..), terms that they accept, and the aggregator."""

    def __init__(
        self,
        n: int,
        *,
        length: int = 5,
        ring_bits: int = 32,
        value_bits: int = 16,
        seed: object = 0,
        **policy: Any,
    ) -> None:
        self.authority = Authority()
        self.policy = Policy(
            federation="ward", run="heart", ring_bits=ring_bits, value_bits=value_bits, clip=1.0,
            max_weight=100.0, length=length, **policy,
        )  # fmt: skip
        names = [chr(ord("a") + i) for i in range(n)] if n <= 26 else [f"s{i:03}" for i in range(n)]
        draw, limit = np.random.default_rng(seed_of(seed)), (1 << (value_bits - 1)) - 1
        self.members = {
            name: Member(name, self, draw.integers(-limit, limit + 1, length), seed) for name in names
        }
        quorum, threshold, degree = self.policy.graph(n)
        prints = {name: hashlib.sha256(member.certificate).digest() for name, member in self.members.items()}
        self.terms = Terms(
            federation="ward", run="heart", round=3, attempt=0, nonce=stream("nonce", seed)(16),
            cohort=prints, quorum=quorum, threshold=threshold, degree=degree, ring_bits=ring_bits,
            value_bits=value_bits, clip=1.0, max_weight=100.0, length=length,
            verify=self.policy.verify,
        )  # fmt: skip

    def again(self, **changes: Any) -> None:
        """The terms of another attempt."""
        fresh = {"attempt": self.terms.attempt + 1, "nonce": stream("next", self.terms.nonce)(16)}
        self.terms = replace(self.terms, **fresh | changes)

    def sum(
        self,
        bend: Callable[[str, Any], Request | None] = lambda site, request: request,
        agreed: Callable[[tuple[str, ...]], None] = lambda sites: None,
        **options: Any,
    ) -> SecureSum:
        """One session, through a cohort that `bend`s what is sent; `agreed(U3)` before it is unmasked."""
        request_id = self.terms.request_id("advertise")
        advertise = Advertise(id=request_id, round=self.terms.round, weights=NO_WEIGHTS, terms=self.terms)

        async def session() -> SecureSum:
            cohort, verify = Bent(self.members, bend), self.authority.verify
            masked = await masked_sum(
                cohort,
                self.terms,
                MODEL,
                dict.fromkeys(sorted(self.terms.cohort), advertise),
                verify,
                deadline_s=60,
                step_deadline_s=60,
                **options,
            )
            agreed(masked.sites)
            return await masked.unmask()

        return asyncio.run(session())

    def plain(self, sites: Iterable[str], names: tuple[str, ...] = ("loss",)) -> np.ndarray[Any, Any]:
        """The sum of what these sites send, modulo the ring."""
        total = np.zeros(self.terms.numel(names), f"u{self.policy.ring_bits // 8}")
        for site in sites:
            vector = np.zeros_like(total)
            self.members[site].write(names, vector)
            total += vector
        return total


def losing(drops: Mapping[str, str]) -> Callable[[str, Any], Request | None]:
    """Sites that are gone from a step on: {"c": "Mask"}."""

    def bend(site: str, request: Request) -> Request | None:
        step = STEPS.index(type(request).__name__)
        return None if site in drops and step >= STEPS.index(drops[site]) else request

    return bend
