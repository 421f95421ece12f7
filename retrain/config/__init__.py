"""The config of a run: its keys, reading it from YAML, and finding the plug-ins that it names."""

from retrain.config.reading import load_config, parse_config, plain
from retrain.config.sections import (
    AlgorithmConfig,
    ChatConfig,
    CheckpointConfig,
    DeadlinesConfig,
    EndpointConfig,
    EvalConfig,
    MismatchConfig,
    Plugin,
    PromptsConfig,
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
    "EndpointConfig",
    "EvalConfig",
    "MismatchConfig",
    "Plugin",
    "PromptsConfig",
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
