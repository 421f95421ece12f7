"""Environments of the package `verifiers` (0.4), by their own harness, client and rubric.

    environment: {type: verifiers, id: my_taskset}

Without `prompts`, a run plays all tasks of the taskset. The column `idx` of a prompt is the number
of its task; a text of the prompt is only a label: the harness sends the messages of the task, to
the endpoint of the run. The reward is the rubric's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Literal

from retrain import ConfigError, Endpoint, Environment, ProgramError, StepResult

NO_KEY = "RETRAIN_ENDPOINT"
"""A variable that is not set: without it, the client would send the key of a hosted service."""

OUTSIDE = ("InterceptionError", "SandboxError", "TunnelError")
"""Errors of what an episode runs in."""
TOO_MANY = 429


class Verifiers(Environment):
    """Runs the tasks of a taskset, with a harness as a process on this machine.

    Args:
        id: The installed taskset package.
        env: Further keys of its `env` section, as in its own configs: `taskset`, `interception`,
            and its agents by their names, such as `agent` or `player`.
        on_error: What an episode with an error is: by default (`fail`) it is scored only if the
            model is the cause, see docs/agents.md; with `score` also for any other error, except
            for outages and timeouts.
    """

    def __init__(
        self,
        *,
        id: str,
        env: dict[str, Any] | None = None,
        on_error: Literal["fail", "score"] = "fail",
    ) -> None:
        try:
            from verifiers.v1.configs.agent import AgentConfig
            from verifiers.v1.utils.loaders import env_config_type, resolve_env_config
        except ImportError as error:
            raise ConfigError(
                f"environment verifiers: {error}; install it with `pip install 'verifiers>=0.4'`"
            ) from error
        given, self.on_error = env or {}, on_error
        here = {"runtime": {"type": "subprocess"}}
        try:
            fields = env_config_type(id, given.get("id", "")).model_fields.items()
            names = [name for name, field in fields if isinstance(field.default, AgentConfig)]
            agents = {name: {**here, **given.get(name, {})} for name in names}
            taskset = {**given.get("taskset", {}), "id": id}
            self.config = resolve_env_config({**given, **agents, "taskset": taskset})
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"environment verifiers: {error}") from error

    def prompts(self) -> Iterator[dict[str, int]]:
        from verifiers.v1.utils.loaders import load_taskset

        return ({"idx": task.data.idx} for task in load_taskset(self.config.taskset))

    async def setup(self) -> None:
        from verifiers.v1 import load_environment

        self.opened = AsyncExitStack()
        self.env = load_environment(self.config)
        await self.opened.enter_async_context(self.env.serving())

    async def run(self, endpoint: Endpoint) -> StepResult:
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(
            base_url=endpoint.base_url,
            api_key_var=NO_KEY,
            headers={"X-Api-Key": endpoint.api_key},
        )
        [slot] = self.env.slots(self._task())
        episode = await self.env.run_slot(slot, ModelContext(endpoint.model, client))
        errors = [*episode.errors, *[error for t in episode.traces for error in t.errors]]
        if errors:
            raise _error(errors[-1])
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        scores = {name: r.value for t in trained for name, r in t.rewards.items() if r is not None}
        reward = sum(trace.reward for trace in trained)
        return StepResult([], reward, True, False, {"rubric": scores})

    async def close(self) -> None:
        await self.opened.aclose()

    def _task(self) -> Any:
        """The task of the prompt; raises ValueError if the taskset has none of its number."""
        index = self.prompt.metadata.get("idx")
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"prompt: got the idx {index!r}, expected the number of a task")
        for task in self.env.taskset.include(idx=[f"{index}:{index + 1}"]):
            return task
        raise ValueError(f"prompt: the taskset has no task {index}")


def _error(recorded: Any) -> Exception:
    """What an episode recorded, as an exception that can be judged by its type."""
    said, status = f"{recorded.type}: {recorded.message}", recorded.status_code or 0
    if recorded.type in OUTSIDE or status == TOO_MANY or status >= 500:
        return ConnectionError(said)
    return ProgramError(said, f"{recorded.message}\n{recorded.traceback or ''}")
