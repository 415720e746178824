"""fedtrain.toml as frozen dataclasses: schema.py has the settings, load.py reads them, values.py checks."""

from .load import Source, build
from .policy import SitePolicy, keep_policy, policy_from
from .schema import (
    COMMAND_WORDS,
    COMMANDS,
    MACHINE,
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
    user_module,
    value_of,
)  # fmt: skip

__all__ = [
    "COMMANDS", "COMMAND_WORDS", "MACHINE", "SITE_MODELS", "UNITS", "AsynchronousConfig",
    "CompressionConfig", "Config", "EvaluateConfig", "GossipConfig", "LimitsConfig", "ParallelConfig",
    "PrivacyConfig", "SecAggConfig", "Seconds", "SimulateConfig", "SitePolicy", "Source", "StrategyConfig",
    "TrainConfig", "build", "check_options", "keep_policy", "numbers_in", "one_of", "options_in",
    "options_of", "policy_from", "require", "user_module", "value_of",
]  # fmt: skip
