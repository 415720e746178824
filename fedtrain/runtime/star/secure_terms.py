"""What both ends of secure aggregation derive from fedtrain.toml: how sites are summed, under which terms."""

from __future__ import annotations

import hashlib
import math

from ...arena import AnyArena
from ...config import Config
from ...digest import seed_of
from ...errors import BadUpdate, ConfigError
from ...messages import SiteId, Update
from ...schema import Schema, chunks_of
from ...secagg.client import Policy
from ...secagg.encoding import Encoding, norm_of, rounding_seed
from ...secagg.fixedpoint import FixedPoint
from ...secagg.masking import BLOCK_BYTES, Parallel, buffers, exhaust, serial
from ...secagg.noise import MIN_STD, DiscreteGaussian
from ..sites import compressed
from .answers import compares, rule_of

SITES = 3  # the least in a sum: in a sum over two each learns the other's update
TAIL = 8.0  # standard deviations of a site's noise for which its values have room
BELOW, ROUNDED = 1 - 2.0**-20, 1 + 2.0**-10  # what a norm and a rounding allow for the arithmetic of floats


def check_config(config: Config) -> None:
    """ConfigError for what secure aggregation cannot give."""
    sites, groups = config.strategy.min_sites, config.secagg.groups
    if sites < SITES * groups:
        where = f" in each of {groups} groups" if groups > 1 else ""
        raise ConfigError(
            f"secagg.enabled: a sum over fewer than {SITES} sites{where} hides nobody, and "
            f"strategy.min_sites is {sites}. Raise it to {SITES * groups}, or set secagg.enabled = false and "
            f"let the aggregator see each site's update."
        )
    rule = rule_of(config)
    if groups == 1 and not rule.linear:
        raise ConfigError(
            f"{compares(config)} compares single updates, which secure "
            f"aggregation hides. Let it compare means of random groups, with secagg.groups = "
            f'{rule.needs} or more; or set aggregation.rule = "mean" without aggregation.before, or '
            f"secagg.enabled = false."
        )
    compressed.check_config(config)
    rule_of(config, groups if groups > 1 else None)
    each = max(sites // groups, 1)
    encoding_of(config, 0, each, None)
    policy(config, "").graph(each)


def fixed_point(config: Config, sites: int) -> FixedPoint:
    """How numbers become integers in a sum over so many sites."""
    s = config.secagg
    clip, max_weight = bounds(config)
    return FixedPoint(sites, s.ring_bits, clip, max_weight, s.value_bits)


def bounds(config: Config) -> tuple[float, float]:
    """The bounds on a coordinate of an update times its weight, and on its weight. With noise in the sums all
    sites count alike, and their values have room for the noise."""
    privacy = config.privacy
    if not privacy.in_sums:
        return config.secagg.clip, config.secagg.max_examples
    return privacy.clip * (1 + TAIL * privacy.noise_multiplier / math.sqrt(SITES)), 1.0


def noise_of(config: Config, schema: Schema, sites: int) -> DiscreteGaussian | None:
    """Each site's part of the noise in a sum over so many, of an update's trained coordinates: as many sites
    as must at least be in the sum bring all of the noise. ConfigError for a ring that is too small for it.

    An update of norm `clip` has integers of norm clip/step + √d at most, because each of d coordinates is
    rounded by less than one. The noise is that much larger, so privacy.noise_multiplier is what it says.
    """
    privacy, point = config.privacy, fixed_point(config, sites)
    if not privacy.in_sums:
        return None
    quorum, _, _ = policy(config, "").graph(sites)
    coordinates = sum(section.trained for section in schema.sections)
    rounded = ROUNDED * math.sqrt(coordinates)
    clip = privacy.clip / point.step
    std = privacy.noise_multiplier * (clip + rounded) / math.sqrt(quorum)
    if std < MIN_STD or rounded > clip:
        raise ConfigError(
            f'privacy.where: "sum" adds noise to integers, and secagg.ring_bits = {point.ring_bits} leaves '
            f"each of {sites} sites {point.value_bits} bits, too few for it. Set secagg.ring_bits = "
            f"{min(64, 2 * point.ring_bits)}, or raise privacy.noise_multiplier."
        )
    return DiscreteGaussian(std, coordinates)


def encoding_of(config: Config, number: int, sites: int, schema: Schema | None) -> Encoding:
    """How an update of a round (without a schema: an evaluation) becomes a vector that so many sites sum."""
    squeeze = compressed.linear(config) if config.compression.up else None
    seed = seed_of(config.run.seed, "compression", number)
    return Encoding(fixed_point(config, sites), schema, squeeze, seed)


def least_sites(config: Config) -> int:
    """The fewest sites of one sum: each group has this part of a round's fewest sites."""
    return max(SITES, config.strategy.min_sites // config.secagg.groups)


def policy(config: Config, federation: str) -> Policy:
    """What this end insists on. `length` is set for each session."""
    s, privacy = config.secagg, config.privacy
    clip, max_weight = bounds(config)
    return Policy(
        federation=federation, run=config.run.name, ring_bits=s.ring_bits, clip=clip,
        max_weight=max_weight, length=0, value_bits=s.value_bits,
        privacy=f"noise {privacy.noise_multiplier:g} of {privacy.clip:g}" if privacy.in_sums else "",
        min_sites=least_sites(config),
        full_graph=s.full_graph, corrupt=s.corrupt, dropout=s.dropout,
    )  # fmt: skip


def round_seed(config: Config, number: int, site: SiteId) -> bytes:
    """The seed of a site's random rounding in a round, 16 bytes."""
    return rounding_seed(config.run.name, config.run.seed, number, site)


def hash_of(weights: AnyArena, parallel: Parallel = serial, frozen: str = "") -> bytes:
    """The hash that binds a session to a model: SHA-256 of the SHA-256 of each part of it, so that all cores
    can work on it, and of its frozen parameters' (Frozen.sha256). digest.Digest would not bind."""
    parts = list(chunks_of(weights.schema, BLOCK_BYTES // 8))  # at 8 bytes a number, each fills a buffer
    leaves = [b""] * len(parts)

    def leaf(i: int) -> None:
        with buffers.one() as buffer:
            leaves[i] = hashlib.sha256(weights.span(*parts[i], buffer.data)).digest()

    with parallel(leaf, range(len(parts))) as mine:
        exhaust(mine)
    return hashlib.sha256(b"".join((*leaves, bytes.fromhex(frozen)))).digest()


def scale_of(config: Config, update: Update) -> float:
    """The factor that shortens a delta to limits.max_norm, as the aggregator can't check a norm that it does
    not see; and to privacy.clip where sums have noise. BadUpdate for NaN."""
    private = config.privacy.clip * BELOW if config.privacy.in_sums else 0.0
    limits = [limit for limit in (config.limits.max_norm, private) if limit]
    if not limits:
        return 1.0
    norm = norm_of(update.delta)
    if not norm < math.inf:
        raise BadUpdate("its update has NaN or infinite values")
    return min(1.0, min(limits) / norm) if norm else 1.0
