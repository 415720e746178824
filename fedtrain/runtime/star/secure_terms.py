"""What both ends of secure aggregation derive from fedtrain.toml: how sites are summed, under which terms."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

from ...arena import AnyArena
from ...config import Config, is_own
from ...digest import seed_of
from ...errors import BadUpdate, ConfigError
from ...fairness import split
from ...learning import NO_EXTRAS, Extras, Summed, Vector, clipped_to
from ...messages import MAX_SUMS, SiteId, Update
from ...schema import Schema, chunks_of
from ...secagg import messages as msg
from ...secagg.encoding import Encoding, norm_of, rounding_seed
from ...secagg.fixedpoint import MAX_VALUE_BITS, FixedPoint
from ...secagg.masking import BLOCK_BYTES, Parallel, buffers, exhaust, serial
from ...secagg.noise import MIN_STD, DiscreteGaussian
from ...secagg.policy import Policy
from ...strategies import STRATEGIES, Strategy
from ..sites import compressed
from .answers import compares, rule_of

FINEST = 2.0**-40  # of which values are multiples where sums in the open have to be exact
EXACT_SITES = 1024  # in a sum under masks that has to be exact, at most, unless secagg.value_bits says
SITES = 3  # the least in a sum: in a sum over two each learns the other's update
NOISY = "dp_fedavg"  # the strategy.kind that adds noise at the aggregator
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
    if config.secagg.verify is True and (why := uncheckable(config)):
        raise ConfigError(f"secagg.verify: {why}. Change that, or set secagg.verify = false.")
    compressed.check_config(config)
    rule_of(config, groups if groups > 1 else None)
    each = max(sites // groups, 1)
    encoding_of(config, 0, each, None)
    policy(config, "").graph(each)


def verifies(config: Config) -> bool:
    """Whether sites check the sums of this run, and make each model of them, as far as settings say it."""
    if not config.secagg.enabled:
        return False
    return not uncheckable(config) if config.secagg.verify == "auto" else config.secagg.verify


def unverified(config: Config) -> str:
    """A line for people where secagg.verify = "auto" is off in a run under masks; "" else."""
    if not config.secagg.enabled or config.secagg.verify != "auto" or not (why := uncheckable(config)):
        return ""
    return f"sites do not check the sums of this run (secagg.verify): {why}"


def uncheckable(config: Config) -> str:
    """What keeps sites from making the next model of a sum that they check: the setting and why; "" if
    nothing does."""
    kind, asked = config.strategy.kind, config.secagg.verify
    if is_own(kind) and asked == "auto":
        return f"strategy.kind = {kind}, a class of your own: if it has no init(), set secagg.verify = true"
    if not is_own(kind) and STRATEGIES[kind].init is not Strategy.init:
        return f"strategy.kind = {kind} moves the model by more than a sum, by what the aggregator alone has"
    for key, value, only, why in (
        ("secagg.groups", config.secagg.groups, 1, "a site can check the sum of its own group alone"),
        ("compression.down", config.compression.down, "", "the model moves by less than the sum then"),
        ("strategy.fraction", config.strategy.fraction, 1.0, "who was not in the last sum can't check it"),
    ):
        if value != only:
            return f"{key} = {value!r}, and {why}; it would have to be {only!r}"
    return ""


def fixed_point(config: Config, sites: int, extras: Extras = NO_EXTRAS) -> FixedPoint:
    """How numbers become integers in a sum over so many sites."""
    s = config.secagg
    clip, max_weight = bounds(config, extras)
    return FixedPoint(sites, s.ring_bits, clip, max_weight, value_bits_of(config, extras))


def bounds(config: Config, extras: Extras = NO_EXTRAS) -> tuple[float, float]:
    """The bounds on a coordinate of an update times its weight, and on its weight. With noise in the sums all
    sites count alike, and their values have room for the noise."""
    privacy = config.privacy
    if not privacy.in_sums:
        # Of exact sums one unit of the ring is a power of two.
        clip = rounded_up(config, config.secagg.clip) if extras.exact else config.secagg.clip
        return clip, config.secagg.max_examples if extras.max_weight is None else extras.max_weight
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


def rounded_up(config: Config, bound: float) -> float:
    """The bound, or a little more, of which a unit of the ring is a power of two."""
    point = FixedPoint(1, config.secagg.ring_bits, 1.0, 1.0, exact_bits(config))
    return unit_of(config, bound) * point.q_max


def encoding_of(
    config: Config, number: int, sites: int, schema: Schema | None, extras: Extras = NO_EXTRAS
) -> Encoding:
    """How an update of a round (without a schema: an evaluation) becomes a vector that so many sites sum.
    `schema`: of the model."""
    squeeze = compressed.linear(config) if config.compression.up else None
    seed = seed_of(config.run.seed, "compression", number)
    point = fixed_point(config, sites, extras)
    if schema is None:
        return Encoding(point, None)
    point = replace(point, unsigned=verifies(config))
    points = tuple(
        replace(point, clip=rounded_up(config, each.bound) if extras.exact else each.bound, max_weight=1.0)
        for each in extras.up
    )
    return Encoding(point, extras.update(schema), squeeze, seed, extras, points)


def least_sites(config: Config) -> int:
    """The fewest sites of one sum: each group has this part of a round's fewest sites."""
    return max(SITES, config.strategy.min_sites // config.secagg.groups)


def policy(config: Config, federation: str, extras: Extras = NO_EXTRAS) -> Policy:
    """What this end insists on. `length` is set for each session."""
    s = config.secagg
    clip, max_weight = bounds(config, extras)
    return Policy(
        federation=federation, run=config.run.name, ring_bits=s.ring_bits, clip=clip,
        max_weight=max_weight, length=0, value_bits=value_bits_of(config, extras),
        privacy=agreed_privacy(config),
        min_sites=least_sites(config),
        verify=verifies(config), insists=s.verify is True,
        full_graph=s.full_graph, corrupt=s.corrupt, dropout=s.dropout,
    )  # fmt: skip


def agreed_privacy(config: Config) -> str:
    """The noise that all ends of a secure sum agree on, in every digit: in the sum, or at the aggregator. The
    noise of one site's own update protects that site whatever the others do, so it is no part of it."""
    own, strategy = config.privacy, config.strategy
    terms = [f"noise {own.noise_multiplier!r} of {own.clip!r}"] if own.in_sums else []
    if strategy.kind == NOISY:
        terms.append(" ".join([NOISY, *(f"{k}={v!r}" for k, v in sorted(strategy.options.items()))]))
    return ", ".join(terms)


def grid_of(config: Config, extras: Extras, seed: int) -> Summed | None:
    """How a site's strategy gets vectors as sums will hold them; None where no site remembers them.

    Values are rounded at random, right in expectation, to multiples of a power of two, of which float64 adds
    as many as there may be sites without rounding: under masks of what one unit of the ring stands for.
    """
    if not extras.exact:
        return None
    bounds = {each.name: each.bound for each in extras.up}
    if config.secagg.enabled:
        bounds["delta"] = config.secagg.clip

    def summed(name: str, vector: Vector) -> tuple[Vector, int]:
        import torch

        bound = bounds.get(name, math.inf)
        within, clipped = clipped_to(vector.double(), bound)
        unit = unit_of(config, bound) if config.secagg.enabled else FINEST
        draw = torch.Generator().manual_seed(seed_of(seed, name))
        random = torch.rand(len(vector), dtype=torch.float64, generator=draw).to(vector.device)
        whole = torch.floor(within / unit + random)
        most = math.floor(bound / unit) if bound < math.inf else math.inf
        return (whole.clamp(-most, most) * unit).to(vector.dtype), clipped

    return summed


def unit_of(config: Config, bound: float) -> float:
    """The power of two that one unit of the ring stands for where sums are exact, for values up to a
    bound."""
    return float(2.0 ** (math.ceil(math.log2(bound)) - (exact_bits(config) - 2)))


def exact_bits(config: Config) -> int:
    """Bits of one site's value where sums are exact: the same in each sum, whoever is in it."""
    s = config.secagg
    return s.value_bits or min(s.ring_bits - EXACT_SITES.bit_length(), MAX_VALUE_BITS)


def value_bits_of(config: Config, extras: Extras) -> int:
    """secagg.value_bits; fixed where sums are exact."""
    return exact_bits(config) if extras.exact else config.secagg.value_bits


def round_seed(config: Config, number: int, site: SiteId) -> bytes:
    """The seed of a site's random rounding in a round, 16 bytes."""
    return rounding_seed(config.run.seed, number, site)


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


def check_metric(config: Config) -> None:
    """ConfigError for an evaluate.metric that nobody knows under masks."""
    name = config.evaluate.metric
    metric, suffix = split(name)
    if config.evaluate.every and suffix:
        raise ConfigError(
            f"evaluate.metric = {name!r}: under masks nobody knows each site's metrics, only their average. "
            f"Use {metric!r}, or data of the server's own (evaluate.server), or set secagg.enabled = false."
        )


def longest_vector(config: Config, schema: Schema, extras: Extras = NO_EXTRAS) -> int:
    """Ring elements of the longest vector that a site of this run may send."""
    smallest = replace(fixed_point(config, SITES), value_bits=4)  # has the most limbs
    points = (smallest,) * len(extras.up)
    return (
        Encoding(smallest, extras.update(schema), extras=extras, points=points).numel([""] * msg.MAX_NAMES)
        + smallest.limbs * MAX_SUMS
        + smallest.digits(msg.CHECKSUM_BITS)
    )
