"""`retrain`: RL post-training for language models as one asyncio program.

The public names load on first use: `import retrain` imports no torch, trl, transformers or
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "retrain.adapters.base": ("Adapter", "AdapterOptions", "AdapterState", "Capabilities"),
    "retrain.algorithms.base": ("Algorithm",),
    "retrain.config": ("RunConfig", "load_config", "parse_config"),
    "retrain.environment": ("Action", "Environment", "StepResult", "ToolCall", "ToolSpec"),
    "retrain.errors": (
        "AdapterError",
        "CheckpointError",
        "ConfigError",
        "DeadlineError",
        "NoSignalError",
        "NonFiniteError",
        "PluginError",
        "PromptError",
        "RetrainError",
        "RunError",
        "StallError",
        "UserCodeError",
    ),
    "retrain.observe.callbacks": ("Callback", "TrainingResult"),
    "retrain.observe.loggers": ("Logger",),
    "retrain.pipeline": ("train",),
    "retrain.prompts": ("PromptSource",),
    "retrain.rewarding": ("Reward", "RewardCalculator", "reward"),
    "retrain.sampler": ("Sampler", "SamplingParams", "Tokenizer"),
    "retrain.types": (
        "Batch",
        "Completion",
        "Group",
        "Message",
        "Metrics",
        "Prompt",
        "Sample",
        "Ticket",
        "Trajectory",
        "Turn",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", "run", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:  # any: whichever public name
    if name == "run":  # the callable module: `await retrain.run(config)`
        return import_module("retrain.run")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    # `as` exports a name to type checkers; isort would write one statement per name
    # isort: off
    from retrain import run as run
    from retrain.adapters.base import (
        Adapter as Adapter,
        AdapterOptions as AdapterOptions,
        AdapterState as AdapterState,
        Capabilities as Capabilities,
    )
    from retrain.algorithms.base import Algorithm as Algorithm
    from retrain.config import (
        RunConfig as RunConfig,
        load_config as load_config,
        parse_config as parse_config,
    )
    from retrain.environment import (
        Action as Action,
        Environment as Environment,
        StepResult as StepResult,
        ToolCall as ToolCall,
        ToolSpec as ToolSpec,
    )
    from retrain.errors import (
        AdapterError as AdapterError,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DeadlineError as DeadlineError,
        NoSignalError as NoSignalError,
        NonFiniteError as NonFiniteError,
        PluginError as PluginError,
        PromptError as PromptError,
        RetrainError as RetrainError,
        RunError as RunError,
        StallError as StallError,
        UserCodeError as UserCodeError,
    )
    from retrain.observe.callbacks import Callback as Callback, TrainingResult as TrainingResult
    from retrain.observe.loggers import Logger as Logger
    from retrain.pipeline import train as train
    from retrain.prompts import PromptSource as PromptSource
    from retrain.rewarding import (
        Reward as Reward,
        RewardCalculator as RewardCalculator,
        reward as reward,
    )
    from retrain.sampler import (
        Sampler as Sampler,
        SamplingParams as SamplingParams,
        Tokenizer as Tokenizer,
    )
    from retrain.types import (
        Batch as Batch,
        Completion as Completion,
        Group as Group,
        Message as Message,
        Metrics as Metrics,
        Prompt as Prompt,
        Sample as Sample,
        Ticket as Ticket,
        Trajectory as Trajectory,
        Turn as Turn,
    )
