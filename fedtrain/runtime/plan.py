"""`fedtrain plan`: what a round of a federation will cost, from the model and this machine's ciphers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace

from ..config import Config
from ..messages import SiteId
from ..pki.signing import ECDSA
from ..privacy import Release, epsilon
from ..schema import Schema
from ..secagg.fixedpoint import FixedPoint, held
from ..secagg.masking import KEY_BYTES, add_masks
from ..strategies import build
from ..training.building import build_model
from ..training.examples import examples_of
from ..training.partition import SimulatedSites
from ..training.task import Task, load_task
from .sites import compressed, privacy
from .star import asynchronous, secure_terms
from .star.agreement import bounds_of
from .threads import all_cores

MASKS, MASKED_BYTES, TRIES = 8, 8 << 20, 5  # of the measurement: some tens of milliseconds
ROUNDED = 1 << 20  # coordinates
SIGNED = 4  # messages of a site in a session


@dataclass(frozen=True)
class MaskPlan:
    """What secure aggregation adds, in seconds of this machine."""

    neighbours: int  # that a site masks with
    may_drop: int  # sites that a sum can do without once it began
    site_s: float
    aggregator_s: float  # when nobody drops out
    aggregator_worst_s: float  # when as many drop out as may


@dataclass(frozen=True)
class PrivacyPlan:
    """What [privacy] costs a site that gives away as many updates as this run may ask of it."""

    unit: str  # what is protected
    where: str  # by which noise
    updates: int
    delta: float
    epsilon: float  # of the site that spends most
    by_site: dict[SiteId, float]  # of each site, where that depends on how many examples a site has; else {}


@dataclass(frozen=True)
class RoundTraffic:
    """Of one round with every site in it, or of one version of an asynchronous run, which is a full buffer.
    Bytes are of models and vectors; headers are small beside them."""

    rounds: int  # of the run, or versions
    sites: int
    updates: int  # in a round: each site's; in a version: as many as fill the buffer, whosever they are
    parameters: int
    frozen: int  # of these are not trained: they are in no round
    down_bytes: int  # to a site for one update
    up_bytes: int  # from a site for one update
    masks: MaskPlan | None
    privacy: PrivacyPlan | None

    @property
    def aggregator_bytes(self) -> int:
        """Through the aggregator, both ways."""
        return self.updates * (self.down_bytes + self.up_bytes)

    @property
    def run_bytes(self) -> int:
        """The same for all of the run."""
        return self.rounds * self.aggregator_bytes


def round_plan(config: Config, sites: int | None = None, data_dir: Path | None = None) -> RoundTraffic:
    """What a round moves and, under masks, computes. ConfigError as the run would have it.

    `sites`: how many; without it those that the task names, else simulate.sites.
    """
    task = load_task(config.run.task, config.root, data_dir)
    model = build_model(task, config.run.seed, torch.device("cpu"))
    schema, frozen = Schema.of(model), Schema.of(model, frozen=True).numel
    parameters = schema.numel + frozen
    sites = sites or len(task.sites() or ()) or config.simulate.sites
    rounds, updates = config.run.rounds, sites
    if config.asynchronous.enabled:
        asynchronous.check_config(config)
        updates = config.asynchronous.buffer
    compressed.check_config(config)
    compressed.check_own(config)
    private = _privacy_plan(config, task, sites)
    up, down = compressed.up_codec(config, schema), compressed.down_codec(config, schema)
    down_bytes = down.coded.nbytes if down else schema.nbytes  # to a site that has the model before
    if not config.secagg.enabled:
        up_bytes = up.coded.nbytes if up else schema.nbytes
        return RoundTraffic(rounds, sites, updates, parameters, frozen, down_bytes, up_bytes, None, private)
    secure_terms.check_config(config)
    each = max(sites // config.secagg.groups, 1)
    encoding = secure_terms.encoding_of(config, 0, each, schema)
    secure_terms.noise_of(config, schema, each)
    up_bytes = encoding.numel(("loss",)) * encoding.point.dtype.itemsize
    quorum, threshold, degree = secure_terms.policy(config, "").graph(each)
    neighbours, drop = degree or each - 1, max(each - quorum, 0)
    mask_s, agreement_s, check_s = _mask_s(up_bytes), _agreement_s(), _check_s()
    alive = neighbours * (each - drop) / max(each - 1, 1)  # of a lost site's neighbours
    folded_s = each * (_add_s(up_bytes) + SIGNED * check_s)
    lost_s = drop * alive * (mask_s + agreement_s)
    masks = MaskPlan(
        neighbours=neighbours,
        may_drop=drop * config.secagg.groups,
        site_s=(neighbours + 1) * mask_s
        + 2 * neighbours * agreement_s
        + (neighbours + threshold) * check_s
        + _rounding_s(encoding.point, encoding.length),
        aggregator_s=config.secagg.groups * (folded_s + each * mask_s),
        aggregator_worst_s=config.secagg.groups * (folded_s + (each - drop) * mask_s + lost_s),
    )
    return RoundTraffic(rounds, sites, updates, parameters, frozen, down_bytes, up_bytes, masks, private)


def _privacy_plan(config: Config, task: Task, sites: int) -> PrivacyPlan | None:
    """None without noise. ConfigError where the noise does not protect, or its price can't be computed."""
    own, rounds = config.privacy, config.run.rounds
    strategy = build(config.strategy.kind, config.strategy.options, config.root)
    if strategy.sigma is not None:
        delta = float(getattr(strategy, "delta", own.delta))
        spent = epsilon([Release("gaussian", strategy.sigma, steps=rounds)], delta)
        return PrivacyPlan("site", "aggregator", rounds, delta, spent, {})
    if not own.noise_multiplier:
        return None
    privacy.check_config(config)
    updates = bounds_of(config).trainings

    @cache
    def price(examples: float) -> float:
        release = privacy.release_of(config, examples)
        return epsilon([replace(release, steps=release.steps * updates)], own.delta)

    if own.unit == "site":
        return PrivacyPlan(own.unit, own.where, updates, own.delta, price(1.0), {})
    simulated = SimulatedSites(task, dataclasses.replace(config.simulate, sites=sites), config.run.seed)
    by_site = {name: price(examples_of(simulated.data(name)).count) for name in simulated.names}
    return PrivacyPlan(own.unit, own.where, updates, own.delta, max(by_site.values()), by_site)


def _mask_s(nbytes: int) -> float:
    """Seconds to add one mask of so many bytes, with all cores."""
    vector, keys = np.zeros(MASKED_BYTES // 4, np.uint32), [(bytes([i]) * KEY_BYTES, 1) for i in range(MASKS)]
    return _best_s(lambda: add_masks(vector, keys, all_cores())) / MASKS * nbytes / MASKED_BYTES


def _add_s(nbytes: int) -> float:
    """To add a vector to a sum."""
    total, vector = np.zeros(MASKED_BYTES // 4, np.uint32), np.ones(MASKED_BYTES // 4, np.uint32)
    return _best_s(lambda: np.add(total, vector, out=total)) * nbytes / MASKED_BYTES


def _rounding_s(point: FixedPoint, coordinates: int) -> float:
    read, out = held(np.zeros(ROUNDED, np.float32)), np.empty(ROUNDED, point.dtype)
    weight = point.max_weight
    return _best_s(lambda: point.encode_into(read, weight, bytes(KEY_BYTES), out)) * coordinates / ROUNDED


def _check_s() -> float:
    """To check one signature."""
    key, message = ec.generate_private_key(ec.SECP256R1()), b"a statement of usual length" * 8
    signature, public = key.sign(message, ECDSA), key.public_key()
    return _best_s(lambda: public.verify(signature, message, ECDSA))


def _agreement_s() -> float:
    mine, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    return _best_s(lambda: mine.exchange(theirs))


def _best_s(work: Callable[[], object]) -> float:
    found = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
