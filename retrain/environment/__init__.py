"""What a user's environment is, and what it exchanges with a rollout; environments with tools."""

from retrain.environment.base import Action as Action
from retrain.environment.base import Endpoint as Endpoint
from retrain.environment.base import Environment as Environment
from retrain.environment.base import StepResult as StepResult
from retrain.environment.base import ToolCall as ToolCall
from retrain.environment.base import ToolSpec as ToolSpec
