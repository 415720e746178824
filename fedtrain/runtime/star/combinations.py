"""What a strategy can't be combined with. Each mode refuses before anything is trained."""

from __future__ import annotations

from dataclasses import replace

from ...config import Config
from ...errors import ConfigError
from ...strategies import Strategy, corrects, extras_of, overrides, remembers
from .answers import compares, rule_of


def check_strategy(config: Config, strategy: Strategy) -> None:
    """ConfigError for settings of a federation that would break the strategy's promise."""
    extras, kind = extras_of(strategy), config.strategy.kind
    further = [each.name for each in (*extras.up, *extras.scalars)]
    if config.asynchronous.enabled:
        why = "without rounds a site trains again before it knows whether it counted"
        check_plain(
            config,
            replace(strategy, weights="auto"),
            "asynchronous.enabled",
            f"{why}. Set asynchronous.enabled = false",
        )
    if strategy.weights != "auto" and (config.privacy.in_sums or not rule_of(config).linear):
        alike = 'privacy.where = "sum"' if config.privacy.in_sums else compares(config)
        raise ConfigError(f"strategy.weights: {alike} counts all sites alike. Leave it out.")
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
    if config.secagg.enabled and config.secagg.verify is True and (strategy.sigma or keeps_state(strategy)):
        raise ConfigError(
            f"secagg.verify: {kind} moves the model by more than a sum of updates: by what the aggregator "
            f"alone has. Use a strategy without such, as fedavg or fedprox, or set secagg.verify = false."
        )
    if config.secagg.enabled and config.limits.max_norm and extras.exact:
        raise ConfigError(
            f"limits.max_norm: under masks it shortens a delta after {kind} has remembered it. Leave it out."
        )


def keeps_state(strategy: Strategy) -> bool:
    """Whether the strategy has something that changes from round to round, beside the weights."""
    import torch

    return bool(strategy.init(torch.zeros(1)))


def check_islands(config: Config, strategy: Strategy) -> None:
    """ConfigError for a strategy that is more than a step and a correction, where islands are no sites, and
    for one whose own check() refuses [train]."""
    strategy.check(config.train)
    if not (reasons := beyond(strategy)):
        return
    parallel, why = config.parallel, f"{config.strategy.kind} {reasons[0]}"
    if strategy.one_by_one:
        raise ConfigError(
            f"parallel.sync: {why}, while all other islands would wait. Use a federation (fedtrain simulate, "
            f"aggregator), or another strategy."
        )
    if parallel.carry:
        raise ConfigError(
            f"parallel.carry: {why}, so its islands begin each round as sites do, with a new optimizer and "
            f"order. Set parallel.carry = false."
        )
    streamed = ("fragments", 1), ("overlap", 0), ("mix", 0.0)
    for key in (name for name, off in streamed if getattr(parallel, name) != off):
        raise ConfigError(
            f"parallel.{key}: {why}, and its sums are of whole models after whole rounds. Leave it out."
        )
    cut = [key for key in ("tp", "pp", "cp") if getattr(parallel, key) > 1]
    if parallel.zero >= 2 or cut:
        key = cut[0] if cut else "zero"
        raise ConfigError(
            f"parallel.{key}: {why}, so each rank of an island needs the whole model. Set "
            f"parallel.{key} = {1 if cut else '0 or 1'}, or use a strategy whose islands exchange deltas "
            f"alone, such as fedavg, fedprox or diloco."
        )


def check_optimizer(config: Config, own: object) -> None:
    """ConfigError where the task has an optimizer of its `own`; for a strategy whose formula holds for plain
    SGD."""
    if own:
        raise ConfigError(
            f"strategy.kind: {config.strategy.kind}'s formula holds for the optimizer of [train]: leave "
            f"out the task's optimizer()."
        )


def check_noise(config: Config, strategy: Strategy) -> None:
    """ConfigError where something of a site's data would leave it without noise."""
    if config.privacy.noise_multiplier:
        why = "the noise is on the deltas of a plain training. Use another strategy"
        check_plain(config, replace(strategy, weights="auto"), "privacy.noise_multiplier", why)


def check_command(config: Config, strategy: Strategy) -> None:
    """ConfigError for settings that a command of the site's own can't keep."""
    check_plain(
        config,
        replace(strategy, weights="auto"),
        "train.command",
        "a command sends deltas alone. Use another strategy",
    )
    private = config.privacy
    refused = {
        f"strategy.kind = {config.strategy.kind} corrects each step": corrects(strategy),
        "privacy.unit = example adds noise to each step": bool(private.noise_multiplier)
        and private.unit == "example",
        f"parallel.ranks = {config.parallel.ranks} takes steps on several ranks": config.parallel.ranks > 1,
        f"simulate.engine = {config.simulate.engine} trains many sites at once": config.simulate.engine
        not in ("auto", "loop"),
    }
    for what in (words for words, holds in refused.items() if holds):
        raise ConfigError(f"train.command: {what}, and a command takes its steps itself. Leave out one.")


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
        "weighs its sites by strategy.weights": strategy.weights != "auto",
        "leaves tensors out of the training": bool(strategy.fixed),
    }
    return [what for what, holds in more.items() if holds]
