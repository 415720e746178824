"""A site under secure aggregation: it gives its results into sums, and into nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ...arena import ArenaFile
from ...config import Config, SitePolicy
from ...errors import BadUpdate, FedtrainError, SecAggError
from ...learning import NO_EXTRAS, Extras, check_bounds
from ...messages import Evaluate, Evaluation, Failure, Reply, Request, SiteId, Train, Update
from ...pki import Revoked, Signer
from ...pki.identity import Current
from ...pki.proof import AggregatorCheck
from ...questions import Describe
from ...secagg import messages as msg
from ...secagg.client import NEVER, Advertisement, Client, Summand, ignored
from ...secagg.encoding import Encoded
from ...secagg.masking import Parallel, RingVector, serial
from ...secagg.noise import DiscreteGaussian
from ...secagg.roster import Verifies
from ...store import Ledger
from ...store.memory import NEVER as NO_ROUND
from ..own_code import beside_key
from ..star.blame import Nudged
from ..star.secure_terms import (
    bounds,
    check_config,
    encoding_of,
    hash_of,
    noise_of,
    policy,
    round_seed,
    scale_of,
)
from ..threads import all_cores
from .cohorts import RULES, Cohorts, Opened
from .models import CheckedSums
from .privacy import clip_before_noise
from .spent import Spent, SumKeys

NoiseKey = Callable[[int, str], bytes]  # (round, what the noise is for) -> 16 bytes, the same for the same
Step = msg.Share | msg.Mask | msg.Agree | msg.Unmask  # 1 to 4 of a sum
SECURE_REQUESTS = msg.Advertise | msg.AdvertiseEvaluation | msg.AdvertiseTally | Describe | Step


class SecureSite:
    """One site's part in all sums. Its methods are for threads, and one of them works at a time: a request
    that nobody waits for any more may be under way when the next one comes."""

    def __init__(
        self,
        config: Config,
        site: SiteId,
        federation: str,
        signer: Signer,
        verifier: Verifies,
        *,
        revoked: Revoked | None = None,
        chain: Callable[[], bytes] | None = None,
        parallel: Parallel = serial,
        sums: Ledger | None = None,
        noise_key: NoiseKey | None = None,
        extras: Extras = NO_EXTRAS,
        rules: SitePolicy = RULES,
        checked: CheckedSums | None = None,
    ) -> None:
        """
        Args:
            noise_key: Gives keys of the noise in sums, which only a site with noise in its sums needs.
            chain: This site's certificates as they are now; None: as the signer's.
            revoked: The list of revoked certificates; it is read again before each session.
            rules: The site's policy: the fewest sites in a sum, where that is more than settings say; what
                two sums may differ by.
            checked: Which models the site checked; None: it checks none.
            sums: Remembers, on disk, the sums that this site's updates are in, and beside it those of all its
                runs are remembered; None: they are forgotten.
        """
        self._config, self._site, self._revoked, self._parallel = config, site, revoked, parallel
        self._chain = chain
        terms = policy(config, federation, extras)
        self._policy = replace(terms, min_sites=max(terms.min_sites, rules.min_cohort))
        self._extras = extras
        self._noise_key, self._checked = noise_key, checked
        self._has_checked: bool | None = None  # the model that it is asked about
        self._cohorts, self._clip = None, clip_before_noise(config)
        if sums is not None:
            records = sums.records or sums.folder.parent / f"@{site}"
            self._cohorts = Cohorts(records, rules, sums.warn, sums.folder)
        opened = {} if sums is None else sums.sums()
        self._clients = {
            kind: Client(
                site, self._policy, certificate=signer.certificate, sign=signer.sign,
                verify=verifier.verify, parallel=parallel, opened=opened.get(kind.__name__, NEVER),
                keep=None if sums is None else partial(sums.keep_sum, kind.__name__),
                owe=ignored if checked is None else checked.owe,
            )
            for kind in (msg.Advertise, msg.AdvertiseEvaluation, msg.AdvertiseTally)
        }  # each keeps to one sum a round  # fmt: skip
        self._client = self._clients[msg.Advertise]
        self._at_work = threading.Lock()

    def asked_about(self, request: Train | Evaluate, model: bytes, frozen: str = "") -> None:
        """Before the work on `model` (hash_of): find out whether this site checked what it was made of."""
        if self._checked is not None:
            weights, number = request.weights, request.round
            assert isinstance(weights, ArenaFile)
            self._has_checked = self._checked.has_checked(
                number, model, lambda: hash_of(Nudged(weights, number - 1), frozen=frozen)
            )

    def offer(self, request: Advertisement, model: bytes, result: Update | Evaluation) -> msg.Keys | Failure:
        """Step 0, with the result of work on `model` (hash_of) at hand: keys for a session under these terms,
        or why not."""
        with self._at_work:
            return self._offer(request, model, result)

    def answer(self, request: Step) -> Reply:
        """Steps 1 to 4."""
        with self._at_work:
            if why := self._refusal(request):
                return Failure(reason=f"{self._site} refuses: {why}")
            return self._client.answer(request)

    def tells_too_much(self, request: Request) -> str:
        """Why the site's guard has a sum over these survivors not opened; "" where it has nothing against
        it."""
        guard = self._client.guard
        if not isinstance(request, msg.Agree) or guard is None:
            return ""
        try:
            guard.check(request.sites)
        except SecAggError as e:
            return f"{self._refusal(request) or e} (its own policy.cohort_change)"
        return ""

    def answered(self, model: str) -> bool:
        """Whether a sum with this site's answer about this model (hash_of, as hex digits) was opened."""
        return self._cohorts is not None and self._cohorts.answered(bytes.fromhex(model))

    def _refusal(self, request: Step) -> str:
        """Why not to go on with a sum: statistics over other sites than before would tell what differs."""
        statistics = self._clients[msg.AdvertiseTally]
        if self._client is statistics and isinstance(request, msg.Agree) and statistics.opened:
            over = statistics.opened[0][1]
            if request.sites != over:
                return f"statistics over {len(over)} sites were unmasked here, and others are asked for now"
        return ""

    def _offer(self, request: Advertisement, model: bytes, result: Update | Evaluation) -> msg.Keys | Failure:
        try:
            if self._revoked is not None:
                self._revoked.reload()
            schema, sites = None, len(request.terms.cohort)
            if isinstance(request, Train):
                schema = request.weights.schema.model
            encoding = encoding_of(self._config, request.round, sites, schema, self._extras)
            scale, noise = 1.0, None
            if isinstance(result, Update) and schema is not None:
                check_examples(self._config, result)
                check_bounds(result.scalars, result.weight, self._extras)
                scale = scale_of(self._config, result)
                noise = noise_of(self._config, schema, sites)
        except FedtrainError as e:
            return Failure(reason=f"{self._site} refuses: {e}")

        self._client = self._clients[type(request)]
        if self._chain is not None:
            self._client.certificate = self._chain()
        verify = self._policy.verify and isinstance(request, msg.Advertise)
        self._client.policy = replace(self._policy, length=encoding.length, verify=verify)
        seed = round_seed(self._config, request.round, self._site)
        own: Summand = Encoded(encoding, result, seed, scale, self._parallel)
        if noise is not None and isinstance(result, Update):
            assert self._noise_key is not None, "noise in sums, and nobody has a key"
            # another model, update or noise is another release
            about = f"{model.hex()}/{result.delta.digest}/{noise.std!r}/{encoding.point}"
            own = Noised(own, noise, partial(self._noise_key, request.round, about), self._parallel)
        if self._cohorts is not None:
            kind = type(request).__name__
            asked = Opened(kind, self._policy.run, request.round, model, clip=self._clip)
            weights = None if isinstance(request, msg.AdvertiseTally) else request.weights
            update = result.delta if isinstance(result, Update) else None
            self._client.guard = self._cohorts.session(asked, weights, update)
        checked = self._has_checked if isinstance(request, Train | Evaluate) else None
        return self._client.begin(request, model, own, checked)


def secure_site_of(
    config: Config,
    name: SiteId,
    current: Current,
    ledger: Ledger,
    check: AggregatorCheck,
    extras: Extras = NO_EXTRAS,
    spent: Spent | None = None,
    rules: SitePolicy = RULES,
    checked: CheckedSums | None = None,
) -> SecureSite:
    """The site's half of secure sums, with the key of its certificate. Damaged when the ledger
    `spent` is shorter than the sums that this site was in. `rules`: the site's policy."""
    check_config(beside_key(config))
    federation = current().identity.federation
    noise_key = None
    if config.privacy.in_sums and spent is not None:
        spent.check(
            max((round for round, _ in ledger.sums().get(msg.Advertise.__name__, ())), default=NO_ROUND)
        )
        noise_key = SumKeys(config, name, ledger.folder, spent).key
    return SecureSite(
        config, name, federation, Signer.of(current()), check.verifier,
        chain=lambda: Signer.of(current()).certificate, revoked=check.revoked,
        parallel=all_cores(), sums=ledger, noise_key=noise_key, extras=extras, rules=rules,
        checked=checked,
    )  # fmt: skip


@dataclass(frozen=True)
class Noised:
    """A contribution with this site's part of the noise of a sum."""

    own: Summand
    noise: DiscreteGaussian
    key: Callable[[], bytes]
    parallel: Parallel

    @property
    def names(self) -> tuple[str, ...]:
        return self.own.names

    def write(self, names: tuple[str, ...], out: RingVector) -> None:
        self.own.write(names, out)
        self.noise.add_to(out, self.key(), self.parallel)


def check_examples(config: Config, update: Update) -> None:
    """BadUpdate for more examples than were agreed on. It says no number, which is the site's secret."""
    for key, most in (
        ("secagg.max_examples", bounds(config)[1]),
        ("limits.max_examples", config.limits.max_examples),
    ):
        if update.num_examples > most:
            raise BadUpdate(
                f"it trained on more examples than {key} = {most:g}. Raise it at the aggregator and all "
                f"sites, to what the largest site has"
            )
