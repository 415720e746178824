"""What a strategy can't be combined with. Each mode refuses before anything is trained."""

from __future__ import annotations

from ...config import Config
from ...errors import ConfigError
from ...strategies import Strategy, extras_of, overrides, remembers
from .answers import compares, rule_of


def check_strategy(config: Config, strategy: Strategy) -> None:
    """ConfigError for settings of a federation that would break the strategy's promise."""
    extras, kind = extras_of(strategy), config.strategy.kind
    further = [each.name for each in (*extras.up, *extras.scalars)]
    if config.asynchronous.enabled:
        why = "without rounds a site trains again before it knows whether it counted"
        check_plain(config, strategy, "asynchronous.enabled", f"{why}. Set asynchronous.enabled = false")
    if strategy.one_by_one and (config.strategy.min_sites != 1 or config.secagg.enabled):
        raise ConfigError(
            f"strategy.kind: {kind} asks one site a round. Set strategy.min_sites = 1 and secagg.enabled = "
            f"false: a sum over one site would hide nothing."
        )
    if further and not rule_of(config).linear:
        raise ConfigError(
            f"{compares(config)} would guard the deltas of {kind}, and not its "
            f'{", ".join(further)}, which one hostile site could set. Use aggregation.rule = "mean" without '
            f"aggregation.before, or a strategy whose sites send a delta alone."
        )
    if strategy.sigma is not None and (not rule_of(config).linear or config.secagg.groups > 1):
        raise ConfigError(
            f"strategy.kind: the noise of {kind} hides a site in the sum of all. Use aggregation.rule = "
            f'"mean", without aggregation.before, and secagg.groups = 1.'
        )
    if config.compression.up and (extras.up or extras.exact):
        raise ConfigError(
            f"compression.up: {kind} needs what its sites send as it was summed, not an approximation. Leave "
            f"it out."
        )
    if config.compression.down and strategy.down:
        raise ConfigError(
            f"compression.down: {kind} sends {', '.join(strategy.down)} with the weights, which no patch "
            f"holds. Leave it out."
        )
    if config.secagg.enabled and config.limits.max_norm and extras.exact:
        raise ConfigError(
            f"limits.max_norm: under masks it shortens a delta after {kind} has remembered it. Leave it out."
        )


def check_noise(config: Config, strategy: Strategy) -> None:
    """ConfigError where something of a site's data would leave it without noise."""
    if config.privacy.noise_multiplier:
        why = "the noise is on the deltas of a plain training. Use another strategy"
        check_plain(config, strategy, "privacy.noise_multiplier", why)


def check_plain(config: Config, strategy: Strategy, key: str, why: str) -> None:
    """ConfigError, about a key, for a strategy that is more than a server's step and a correction."""
    if reasons := beyond(strategy):
        raise ConfigError(f"{key}: {config.strategy.kind} {reasons[0]}, and {why}.")


def beyond(strategy: Strategy) -> list[str]:
    """What the strategy does besides a step at the server and a correction at the sites."""
    more = {
        "keeps a memory at its sites": remembers(strategy),
        "trains in a way of its own": overrides(strategy, "train", "finish", "personal"),
        "sends more than weights": overrides(strategy, "down", "up", "scalars", "max_weight"),
        "asks one site a round": strategy.one_by_one,
        "leaves tensors out of the training": bool(strategy.fixed),
    }
    return [what for what, holds in more.items() if holds]
