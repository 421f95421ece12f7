"""`retrain`: RL post-training for language models as one asyncio program.

The public names load when they are first used: `import retrain` imports no torch, trl,
transformers or pydantic.
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
    if name == "run":  # the module, which is callable: `await retrain.run(config)`
        return import_module("retrain.run")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:  # `as`: exported, for type checkers
    from retrain import run as run
    from retrain.adapters.base import (
        Adapter as Adapter,
    )
    from retrain.adapters.base import (
        AdapterOptions as AdapterOptions,
    )
    from retrain.adapters.base import (
        AdapterState as AdapterState,
    )
    from retrain.adapters.base import (
        Capabilities as Capabilities,
    )
    from retrain.algorithms.base import (
        Algorithm as Algorithm,
    )
    from retrain.config import (
        RunConfig as RunConfig,
    )
    from retrain.config import (
        load_config as load_config,
    )
    from retrain.config import (
        parse_config as parse_config,
    )
    from retrain.environment import (
        Action as Action,
    )
    from retrain.environment import (
        Environment as Environment,
    )
    from retrain.environment import (
        StepResult as StepResult,
    )
    from retrain.environment import (
        ToolCall as ToolCall,
    )
    from retrain.environment import (
        ToolSpec as ToolSpec,
    )
    from retrain.errors import (
        AdapterError as AdapterError,
    )
    from retrain.errors import (
        CheckpointError as CheckpointError,
    )
    from retrain.errors import (
        ConfigError as ConfigError,
    )
    from retrain.errors import (
        DeadlineError as DeadlineError,
    )
    from retrain.errors import (
        NonFiniteError as NonFiniteError,
    )
    from retrain.errors import (
        NoSignalError as NoSignalError,
    )
    from retrain.errors import (
        PluginError as PluginError,
    )
    from retrain.errors import (
        PromptError as PromptError,
    )
    from retrain.errors import (
        RetrainError as RetrainError,
    )
    from retrain.errors import (
        RunError as RunError,
    )
    from retrain.errors import (
        StallError as StallError,
    )
    from retrain.errors import (
        UserCodeError as UserCodeError,
    )
    from retrain.observe.callbacks import (
        Callback as Callback,
    )
    from retrain.observe.callbacks import (
        TrainingResult as TrainingResult,
    )
    from retrain.pipeline import (
        train as train,
    )
    from retrain.prompts import (
        PromptSource as PromptSource,
    )
    from retrain.rewarding import (
        Reward as Reward,
    )
    from retrain.rewarding import (
        RewardCalculator as RewardCalculator,
    )
    from retrain.rewarding import (
        reward as reward,
    )
    from retrain.sampler import (
        Sampler as Sampler,
    )
    from retrain.sampler import (
        SamplingParams as SamplingParams,
    )
    from retrain.sampler import (
        Tokenizer as Tokenizer,
    )
    from retrain.types import (
        Batch as Batch,
    )
    from retrain.types import (
        Completion as Completion,
    )
    from retrain.types import (
        Group as Group,
    )
    from retrain.types import (
        Message as Message,
    )
    from retrain.types import (
        Metrics as Metrics,
    )
    from retrain.types import (
        Prompt as Prompt,
    )
    from retrain.types import (
        Sample as Sample,
    )
    from retrain.types import (
        Ticket as Ticket,
    )
    from retrain.types import (
        Trajectory as Trajectory,
    )
    from retrain.types import (
        Turn as Turn,
    )
