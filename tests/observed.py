"""A run as callbacks see it, and a finished run directory: what the tests of `observe` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.config import RunConfig
from retrain.observe.callbacks import Callbacks, TrainingResult
from retrain.observe.rollout_lines import encoded
from retrain.observe.run_dir import RunDirectory
from retrain.types import Completion, Group, Prompt, Trajectory, Turn
from tests.run_dir_kit import config


@dataclass
class ObservedRun:
    """The face that the pipe's run shows to callbacks."""

    run_dir: RunDirectory
    config: RunConfig = field(default_factory=config)
    step: int = 0
    version: int = 0
    total_steps: int = 4

    async def play(
        self, callbacks: Callbacks, rows: list[dict[str, float]], status: Any = "completed"
    ) -> TrainingResult:
        """Call every hook that a run of these steps would."""
        await callbacks.call("on_train_begin", self)
        for row in rows:
            self.step = int(row["step"])
            await callbacks.call("on_step_begin", self, self.step)
            await callbacks.call("on_step_end", self, self.step, row)
        result = TrainingResult(
            status, self.step, 1, self.run_dir.path, rows[-1] if rows else {}, rows
        )
        await callbacks.end(self, result, 60.0)
        return result


def played(ticket: str, reply: str, rewards: list[float], error: str = "") -> Group:
    """A group that was played and scored; with `error`, its first rollout failed."""
    prompt = Prompt(ticket, [{"role": "user", "content": "say it"}])
    group = Group(prompt, [])
    for index, reward in enumerate(rewards):
        failed = bool(error) and index == 0
        group.trajectories.append(
            Trajectory(
                prompt,
                [Turn([1, 2], Completion([3, 4], [-0.5, -0.5], reply, "stop", 1))],
                rewards={"match": reward},
                info={"error": error} if failed else {},
                outcome="invalid" if failed else "ok",
                reward=reward,
                messages=[*prompt.messages, {"role": "assistant", "content": reply}],
                seconds={"sample": 1.0, "reward": 0.25},
                index=index,
            )
        )
    return group


def write_run(path: Path, steps: int = 4, reply: str = "done", end: bool = True) -> None:
    """A run directory as a run of `steps` steps of two groups leaves it.

    Each step also drops one stale group; without `end` the run was cut off.
    """
    run_dir = RunDirectory.open(path, config(train={"total_train_steps": steps}))
    for step in range(1, steps + 1):
        tickets = [f"0.{3 * step + i}.0" for i in range(3)]
        for ticket in tickets:
            run_dir.event("issued", ticket=ticket)
            group = played(ticket, reply, [0.0, step / steps], "it broke" if step == 2 else "")
            run_dir.event(
                "rollout",
                ticket=ticket,
                started=1.7e9 + step,
                ended=1.7e9 + step + 0.5,
                outcomes=[t.outcome for t in group.trajectories],
                versions=[step - 1],
                tokens=4,
            )
            run_dir.count(group)
            trained = ticket != tickets[2]
            run_dir.rollouts(encoded(group), *([step] if trained else [None, "stale"]))
        run_dir.event("dropped", ticket=tickets[2], cause="stale")
        times = {"started": 1.7e9 + step + 0.5, "ended": 1.7e9 + step + 0.8}
        run_dir.event("update", step=step, tickets=tickets[:2], loss=0.1, **times)
        run_dir.metrics(
            {
                "step": step,
                "reward/mean": step / steps,
                "reward/match/mean": step / steps,
                "loss": 0.1,
                "time/step": 1.0,
                "time/wait_for_batch": 0.6,
                "time/update": 0.3,
                "time/publish": 0.05,
            }
        )
    if end:
        run_dir.event("export", path="tinker://a/weights/b")
        run_dir.event("end", status="completed", step=steps)
    run_dir.close()
