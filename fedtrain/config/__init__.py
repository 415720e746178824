"""fedtrain.toml as frozen dataclasses: schema.py has the settings, load.py reads them, values.py checks."""

from .load import Source, build
from .own import class_of, is_own, kind_in, own_class
from .policy import SitePolicy, keep_policy, policy_from
from .schema import (
    COMMAND_WORDS,
    COMMANDS,
    MACHINE,
    AggregationConfig,
    AsynchronousConfig,
    CompressionConfig,
    Config,
    EvaluateConfig,
    GossipConfig,
    LimitsConfig,
    ParallelConfig,
    PrivacyConfig,
    SecAggConfig,
    StrategyConfig,
    TrainConfig,
)  # fmt: skip
from .simulated import SITE_MODELS, SimulateConfig, numbers_in
from .values import (
    UNITS,
    Seconds,
    check_options,
    one_of,
    options_in,
    options_of,
    require,
    value_of,
)  # fmt: skip

__all__ = [
    "COMMANDS", "COMMAND_WORDS", "MACHINE", "SITE_MODELS", "UNITS", "AggregationConfig", "AsynchronousConfig",
    "CompressionConfig", "Config", "EvaluateConfig", "GossipConfig", "LimitsConfig", "ParallelConfig",
    "PrivacyConfig", "SecAggConfig", "Seconds", "SimulateConfig", "SitePolicy", "Source", "StrategyConfig",
    "TrainConfig", "build", "check_options", "class_of", "is_own", "keep_policy", "kind_in", "numbers_in",
    "one_of", "options_in", "options_of", "own_class", "policy_from", "require", "value_of",
]  # fmt: skip
