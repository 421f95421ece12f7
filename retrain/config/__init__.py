"""What a run is: the keys of the YAML, how a file is read, and plug-ins found by name."""

from retrain.config.reading import load_config, parse_config, plain
from retrain.config.sections import (
    AlgorithmConfig,
    ChatConfig,
    CheckpointConfig,
    DeadlinesConfig,
    EvalConfig,
    Plugin,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Section,
    StalenessConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ChatConfig",
    "CheckpointConfig",
    "DeadlinesConfig",
    "EvalConfig",
    "Plugin",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "StalenessConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
    "plain",
]
