"""What of an update may leave a site under [privacy], and what that tells of the site's data at most.

Noise that protects an update is added in the trainer (`Workbench.train`), before any other process sees the
update: once, or in each optimizer step where examples are protected (`training/dp_sgd.py`). Noise that
protects sums is added to the integers that are masked (`secure_site.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import msgspec

from ...arena import Arena
from ...config import Config, SitePolicy
from ...errors import ConfigError
from ...keystream import KEY_BYTES, Keystream
from ...messages import SiteId, Update
from ...privacy import Gaussian, Release, check_accounting, refuse_moving_buffers

Streams = Callable[[int, SiteId, Arena], Keystream]


def check_config(config: Config) -> None:
    """ConfigError for what would not protect as [privacy] promises."""
    privacy, train = config.privacy, config.train
    if not privacy.noise_multiplier:
        return
    if privacy.unit == "example":
        for key, value, other in (
            ("train.accumulate", train.accumulate != 1, "1, as a sampled batch is cut up as memory needs it"),
            ("parallel.ranks", config.parallel.ranks != 1, "1, as one process clips each gradient"),
            ("train.precision", train.precision == "fp16", "bf16 or fp32, which take no step again"),
        ):
            if value:
                raise ConfigError(f'{key}: with privacy.unit = "example" it must be {other}.')
        if train.batch_size:
            check_accounting()
    if privacy.in_sums and (not config.secagg.enabled or config.asynchronous.enabled):
        raise ConfigError(
            'privacy.where = "sum": noise that is shared among sites protects a sum that nobody sees without '
            "it, so it needs secagg.enabled = true (and asynchronous.enabled = false). Set them, or "
            'privacy.where = "site".'
        )
    if privacy.in_sums and config.compression.up:
        raise ConfigError(
            f"compression.up: {config.compression.up} stretches some updates beyond privacy.clip, so that "
            'privacy.where = "sum" would promise too much. Leave one of them out.'
        )


def check_policy(config: Config, policy: SitePolicy) -> None:
    """ConfigError for settings with less noise than a site's policy wants on all that leaves."""
    own, key = config.privacy, "policy.noise" if policy.noise != "none" else "policy.epsilon"
    if (policy.noise != "none" or policy.epsilon) and not own.noise_multiplier:
        raise ConfigError(
            f"{key}: nothing leaves this site without noise, and privacy.noise_multiplier = 0. Set "
            f"privacy.noise_multiplier and privacy.clip; or let the site's people change {key}, by fedtrain "
            f"policy set."
        )
    if policy.noise == "site" and own.unit != "site":
        raise ConfigError(
            f'policy.noise: "site": noise must protect all data of this site, not single examples, and '
            f'privacy.unit = "{own.unit}". Set it to "site"; or run: fedtrain policy set noise=example'
        )


def fresh_key(config: Config, site: SiteId, round: int, weights: Arena, simulated: bool) -> bytes:
    """A key for a round's noise that nobody else can know; a simulated run has the same in a repetition."""
    if not simulated:
        return os.urandom(KEY_BYTES)
    text = f"noise/{config.run.seed}/{round}/{site}/{weights.digest}"
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def simulated_sum_key(config: Config, site: SiteId, round: int) -> bytes:
    """The key of a simulated site's noise in a round's sum, the same with masks and without."""
    text = f"noise in sums/{config.run.seed}/{round}/{site}"
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def noised(
    config: Config, update: Update, site: SiteId, round: int, weights: Arena, simulated: bool
) -> Update:
    """The update as it may leave the site, or go into a sum with noise. It has no metrics: the loss would
    tell of the data as well. In a sum with noise all sites count alike: the sum of weights has no noise."""
    privacy = config.privacy
    assert isinstance(update.delta, Arena), update.delta
    refuse_moving_buffers(update.delta)
    if privacy.in_sums:
        return msgspec.structs.replace(update, num_examples=1.0, metrics={})
    if privacy.unit == "site":
        key = fresh_key(config, site, round, weights, simulated)
        Gaussian(privacy.clip, privacy.noise_multiplier).apply(update.delta, key)
    return msgspec.structs.replace(update, metrics={})


def clip_before_noise(config: Config) -> float:
    """The most that an update's L2 norm is before a site's noise; 0.0 where there is no such noise, or each
    optimizer step has noise (privacy.unit = "example")."""
    privacy = config.privacy
    whole = privacy.noise_multiplier and privacy.unit == "site" and not privacy.in_sums
    return privacy.clip if whole else 0.0


def release_of(config: Config, examples: float) -> Release:
    """What an update of a site with so many examples gives away."""
    privacy = config.privacy
    if privacy.unit == "example":
        count = round(examples)
        batch = min(config.train.batch_size or count, count)
        steps = config.train.steps_in_round(count)
        return Release("gaussian", privacy.noise_multiplier, batch / count, steps)
    sigma = Gaussian(privacy.clip, privacy.noise_multiplier).sigma
    return Release("discrete_gaussian" if privacy.in_sums else "gaussian", sigma)


def streams_of(config: Config, simulated: bool) -> Streams:
    """What training.dp_sgd draws from, in a round at a site from these weights."""
    return lambda round, site, weights: Keystream(fresh_key(config, site, round, weights, simulated))
