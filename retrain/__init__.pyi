"""The public names of `retrain` and their modules; `__init__.py` reads them here."""

# isort: off
from retrain.adapters.base import Adapter as Adapter, AdapterOptions as AdapterOptions
from retrain.adapters.base import AdapterState as AdapterState, Capabilities as Capabilities
from retrain.algorithms.base import Algorithm as Algorithm
from retrain.supervision.contexts import ContextTask as ContextTask
from retrain.supervision.crashes import ProgramError as ProgramError
from retrain.supervision.programs import Finished as Finished, file_of as file_of
from retrain.supervision.programs import owned_programs as owned_programs
from retrain.supervision.programs import run_program as run_program
from retrain.supervision.threads import DaemonPool as DaemonPool, in_thread as in_thread
from retrain.config import RunConfig as RunConfig, load_config as load_config
from retrain.config import parse_config as parse_config
from retrain.config.paths import CODE_OPTIONS as CODE_OPTIONS, find_command as find_command
from retrain.config.paths import find_file as find_file
from retrain.config.plugins import find_function as find_function, find_object as find_object
from retrain.environment import Action as Action, Endpoint as Endpoint
from retrain.environment import Environment as Environment
from retrain.environment import StepResult as StepResult, ToolCall as ToolCall
from retrain.environment import ToolSpec as ToolSpec
from retrain.errors import AdapterError as AdapterError, BudgetError as BudgetError
from retrain.errors import CheckpointError as CheckpointError
from retrain.errors import ConfigError as ConfigError, DeadlineError as DeadlineError
from retrain.errors import NoSignalError as NoSignalError, NonFiniteError as NonFiniteError
from retrain.errors import OutageError as OutageError
from retrain.errors import PluginError as PluginError, PromptError as PromptError
from retrain.errors import RetrainError as RetrainError, RunError as RunError
from retrain.errors import StallError as StallError, UserCodeError as UserCodeError
from retrain.errors import needing as needing
from retrain.observe.callbacks import Callback as Callback, TrainingResult as TrainingResult
from retrain.observe.loggers import Logger as Logger
from retrain.pipeline import train as train
from retrain.prompts import PromptSource as PromptSource
from retrain.scoring import Reward as Reward, RewardCalculator as RewardCalculator
from retrain.scoring import reward as reward
from retrain.sampler import Sampler as Sampler, SamplingParams as SamplingParams
from retrain.sampler import Tokenizer as Tokenizer
from retrain.environment.tools import (
    FunctionTool as FunctionTool,
    ToolEnvironment as ToolEnvironment,
)
from retrain.environment.tools import ToolError as ToolError
from retrain.sandbox import Graded as Graded, Sandbox as Sandbox
from retrain.sandbox import SandboxChoice as SandboxChoice, SandboxError as SandboxError
from retrain.sandbox import SandboxLimits as SandboxLimits, SandboxResult as SandboxResult
from retrain.sandbox import grade as grade, program_in as program_in
from retrain.sandbox import sandbox_of as sandbox_of, read_tests as read_tests
from retrain.sandbox import tests_of as tests_of
from retrain.wire.budgets import Budget as Budget
from retrain.wire.chat import ChatClient as ChatClient, ChatReply as ChatReply
from retrain.wire.replies import ReplyCache as ReplyCache
from retrain.types import Batch as Batch, Completion as Completion, Group as Group
from retrain.types import Message as Message, Metrics as Metrics, Prompt as Prompt
from retrain.types import Sample as Sample, Ticket as Ticket, Trajectory as Trajectory
from retrain.types import Row as Row, Turn as Turn

__version__: str
