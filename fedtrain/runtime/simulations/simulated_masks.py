"""Simulated sites that answer under masks: all of secure aggregation's work, without a network."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from ...arena import AnyArena
from ...config import Config
from ...errors import CertificateError
from ...events import Emit
from ...exchange import Cohort, CohortWrapper
from ...learning import NO_EXTRAS, Extras
from ...messages import Evaluate, Evaluation, Failure, Metrics, Reply, Request, SiteId, Train, Update
from ...pki.signing import ECDSA, Signer
from ...secagg.messages import Advertise, AdvertiseEvaluation
from ..sites.gate import no_empty_evaluation
from ..sites.privacy import simulated_sum_key
from ..sites.secure_site import SecureSite
from ..star.answers import NOBODY, Counted
from ..star.gathered import kept
from ..star.secure_rounds import UnderMasks
from ..star.secure_terms import hash_of
from ..threads import all_cores
from .plain_sums import FixedPointSums

HELD_SITES = 10_000  # that took part; of a larger population those of earlier rounds begin anew


class SimulatedMasks(UnderMasks):
    """Simulated sites under masks. One pool of data, which is no site's, is evaluated in the open."""

    def __init__(self, config: Config, cohort: Cohort, emit: Emit, extras: Extras = NO_EXTRAS) -> None:
        keys = SimulatedKeys()
        super().__init__(
            config, MaskedCohort(config, cohort, keys, extras), emit, federation=SimulatedKeys.FEDERATION,
            callers=keys, verifier=keys, parallel=all_cores(), extras=extras,
        )  # fmt: skip
        self._openly = FixedPointSums(config, cohort, emit)

    async def evaluate(
        self, number: int, sites: Sequence[SiteId], weights: AnyArena, counted: Counted = NOBODY
    ) -> tuple[Metrics, dict[SiteId, Metrics]]:
        if len(sites) == 1:
            return await self._openly.evaluate(number, sites, weights)
        return await super().evaluate(number, sites, weights, counted)


class SimulatedKeys:
    """Signing keys of simulated sites; a certificate is a site's name, and this is who vouches for it."""

    FEDERATION = "simulation"

    def __init__(self) -> None:
        self._keys: dict[SiteId, ec.EllipticCurvePrivateKey] = {}

    def key(self, site: SiteId) -> ec.EllipticCurvePrivateKey:
        return self._keys.setdefault(site, ec.generate_private_key(ec.SECP256R1()))

    def forget(self, but: Collection[SiteId]) -> None:
        """Drop the keys of all sites but these."""
        self._keys = {site: key for site, key in self._keys.items() if site in but}

    def signer(self, site: SiteId) -> Signer:
        return Signer(site.encode(), self.key(site))

    def fingerprints(self, sites: Sequence[SiteId]) -> dict[SiteId, bytes]:
        return {site: hashlib.sha256(site.encode()).digest() for site in sites}

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> tuple[SiteId, bytes]:
        site = certificate.decode()
        try:
            self.key(site).public_key().verify(signature, message, ECDSA)
        except InvalidSignature:
            raise CertificateError(f"{site}: a signature is not by its key") from None
        return site, hashlib.sha256(certificate).digest()


class MaskedCohort(CohortWrapper):
    """Simulated sites that answer under masks, doing all that real ones do; the wire alone is left out.

    The updates of a round are held until they are masked, as at so many sites.
    """

    def __init__(
        self, config: Config, others: Cohort, keys: SimulatedKeys, extras: Extras = NO_EXTRAS
    ) -> None:
        super().__init__(others)
        self._config, self._keys, self._extras = config, keys, extras
        self._sites: dict[SiteId, SecureSite] = {}

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        first = next(iter(requests.values()))
        if isinstance(first, Advertise | AdvertiseEvaluation):
            work = Train if isinstance(first, Advertise) else Evaluate
            inner = {
                site: work(id=r.id, round=r.round, weights=r.weights, counted=r.counted)
                for site, r in requests.items()
                if isinstance(r, Advertise | AdvertiseEvaluation)
            }
            if len(self._sites) + len(inner) > HELD_SITES:
                self._sites = {site: own for site, own in self._sites.items() if site in inner}
                self._keys.forget(self._sites)
            model = await asyncio.to_thread(hash_of, first.weights, all_cores())
            async with aclosing(self._inner.exchange(inner, deadline_s)) as replies:
                async for site, reply in replies:
                    if why := no_empty_evaluation(requests[site], reply):
                        yield site, Failure(reason=f"{site} refuses: {why}")
                    elif isinstance(reply, Update | Evaluation):
                        result = kept(reply) if isinstance(reply, Update) else reply
                        yield site, await asyncio.to_thread(self._site(site).offer, first, model, result)
                    else:
                        yield site, reply
            return
        for site, request in requests.items():
            yield site, await asyncio.to_thread(self._site(site).answer, request)  # type: ignore[arg-type]  # not step 0

    def _site(self, site: SiteId) -> SecureSite:
        if site not in self._sites:
            self._sites[site] = SecureSite(
                self._config, site, SimulatedKeys.FEDERATION, self._keys.signer(site), self._keys,
                parallel=all_cores(), extras=self._extras,
                noise_key=lambda round, about: simulated_sum_key(self._config, site, round),
            )  # fmt: skip
        return self._sites[site]
