"""Compare the whole pipe with TRL's GRPOTrainer on the same task, with a slow environment.

    python -m benchmarks.pipe_beside_trl [--latencies 0 100 500] [--rounds 3]

The task is the echo task of the quickstart on the model `tiny`: 16 prompts x 8 rollouts x 4 tokens
per step, with one OpenMP thread per worker. Each rollout waits for the latency once:

- `trl, gathering`: in an async reward function that waits for its whole batch concurrently, the
  fastest approach that TRL allows.
- `trl, environments`: in a tool of its environment_factory. TRL awaits one row after the other, so
  only a few steps are measured, after warm-up steps without latency. A model this small never
  writes a tool call, so a response template makes every reply the argument of the tool, and a chat
  template removes the tool from the prompt: the tokens equal those of the other arms. TRL drops the
  answer of the tool, which would exceed max_completion_length, so no second turn is sampled. An
  empty reply calls nothing and waits for nothing.
- `ours, S=n`: in Environment.step, with `train()` and its run directory.

Only steps in the middle of a run are timed. The arms take turns; ratios are those of wall time,
medians of the rounds. Bars at 100 ms and S=2: 2x faster than S=0 and than `gathering`, 20x faster
than `environments`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # environment_factory is experimental, and says so

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.sampler import device_name
from retrain import Action, Environment, StepResult
from retrain.adapters.trl.build import hush
from retrain.config import RunConfig, load_config
from retrain.engine.models import load_model, load_tokenizer
from retrain.engine.tiny import CHAT_TEMPLATE, tiny_folder
from retrain.observe.callbacks import Callback
from retrain.pipeline import train

ROOT = Path(__file__).parents[1]
PROMPTS, SIZE, TOKENS, LEARNING_RATE = 16, 8, 4, 2e-3
LETTERS = "abcdefgh"
WARM_UP = 5
STALENESS = (0, 1, 2, 4)
GATHERING, ENVIRONMENTS = "trl, gathering", "trl, environments"
BARS = ((GATHERING, 2.0), (ENVIRONMENTS, 20.0), ("ours, S=0", 2.0))
"""At 100 ms: how many times faster S=2 must be."""

EVERY_REPLY_CALLS = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "reply", "arguments": {"text": "{content}"}},
            },
        }
    },
}
WITHOUT_TOOLS = "{%- set tools = none %}" + CHAT_TEMPLATE


def slot_match(text: str, answer: str) -> float:
    """The reward of the quickstart."""
    return sum(a == b for a, b in zip(answer, text, strict=False)) / len(answer)


# --- ours


class Waiting(Environment):
    """The echo task, whose only step takes `latency` seconds."""

    def __init__(self, latency: float) -> None:
        self.latency = latency

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self.latency)
        return StepResult([], 0.0, True, False, {})


class Step(NamedTuple):
    """The cost of a step in milliseconds."""

    wall: float
    cpu: float
    """Of all threads of this process; other load on the machine hardly changes it."""


class Clock(Callback):
    """Records when each step ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any) -> None:  # any: the step's own, which is not used
        self.ends.append((time.perf_counter(), time.process_time()))

    def per_step(self, steps: int) -> Step:
        """The mean of `steps` steps after the warm-up."""
        before, after = self.ends[WARM_UP - 1], self.ends[WARM_UP + steps - 1]
        return Step(*(1e3 * (b - a) / steps for a, b in zip(before, after, strict=True)))


def ours(staleness: int) -> Callable[[float, int], Step]:
    """The pipe at staleness `staleness`."""

    def run(latency: float, steps: int) -> Step:
        clock = Clock()
        with tempfile.TemporaryDirectory() as scratch:
            # The last S steps have no work issued beside them: they are not measured.
            total = WARM_UP + steps + staleness + 1
            config = our_config(latency, staleness, total, Path(scratch))
            asyncio.run(train(config, callbacks=[clock], console=False))
        return clock.per_step(steps)

    return run


def our_config(latency: float, staleness: int, steps: int, run_dir: Path) -> RunConfig:
    return load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            "environment.type=benchmarks.pipe_beside_trl:Waiting",
            f"environment.latency={latency}",
            f"staleness={{target: {staleness}, max: {2 * staleness}}}",
            f"train.total_train_steps={steps}",
            "checkpoint.every=0",
            f"run_dir={run_dir}",
        ],
    )


# --- TRL


class TrlClock(TrainerCallback):
    """The same for TRL."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:  # any: as above
        self._clock.on_step_end()


def gathering(latency: float, steps: int) -> Step:
    """TRL, with a reward function that waits for all rows concurrently."""

    async def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
        await asyncio.gather(*(asyncio.sleep(latency) for _ in completions))
        return [
            slot_match(completion[0]["content"], wanted)
            for completion, wanted in zip(completions, answer, strict=True)
        ]

    return measure_trl(steps, reward_funcs=reward)


def environments(latency: float, steps: int) -> Step:
    """TRL, with one environment per row, whose tool waits."""
    clock = Clock()

    class Echo:
        def reset(self, answer: str, **_: Any) -> None:
            self.answer, self.score = answer, 0.0

        async def reply(self, text: str) -> str:
            """Give an answer.

            Args:
                text: The answer.
            """
            if len(clock.ends) >= WARM_UP:
                await asyncio.sleep(latency)
            self.score = slot_match(text, self.answer)
            return "seen"

        def get_reward(self) -> float:
            return self.score

    tokenizer = load_tokenizer("tiny")
    tokenizer.response_template = EVERY_REPLY_CALLS
    tokenizer.chat_template = WITHOUT_TOOLS
    return measure_trl(steps, clock, environment_factory=Echo, processing_class=tokenizer)


def measure_trl(steps: int, clock: Clock | None = None, **arguments: Any) -> Step:
    """A step of a new GRPOTrainer with these `arguments`."""
    clock = clock or Clock()
    folder = tiny_folder()
    arguments.setdefault("processing_class", load_tokenizer(folder))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            load_model(folder, "cpu"),
            args=trl_args(scratch, WARM_UP + steps),
            train_dataset=trl_rows(),
            callbacks=[TrlClock(clock)],
            **arguments,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.per_step(steps)


def trl_args(folder: str, steps: int) -> GRPOConfig:
    """The settings of the quickstart, without those that make TRL slower on a CPU."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SIZE,
        num_generations=SIZE,
        max_completion_length=TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trl_rows() -> Dataset:
    """The prompts of one step."""
    letters = LETTERS * (PROMPTS // len(LETTERS))
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"{letter}="}] for letter in letters],
            "answer": [letter * TOKENS for letter in letters],
        }
    )


# --- the comparison


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table."""

    name: str
    run: Callable[[float, int], Step]
    """Takes the latency in seconds and the number of steps; returns the cost of a step."""
    sequential: bool = False
    """It awaits one row after the other: there is only time for a few steps."""


ARMS = (
    Arm(GATHERING, gathering),
    Arm(ENVIRONMENTS, environments, sequential=True),
    *(Arm(f"ours, S={s}", ours(s)) for s in STALENESS),
)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.trl_threads)
    hush()
    print(
        f"tiny, {device_name('cpu')}, {os.cpu_count()} cores, TRL on {arguments.trl_threads} "
        f"thread(s), ours on one per worker; {PROMPTS} x {SIZE} rollouts of {TOKENS} tokens"
    )
    for latency in arguments.latencies:
        report(latency, compare(latency, arguments))


def compare(latency: int, arguments: argparse.Namespace) -> dict[str, list[Step]]:
    """A step of each arm, round by round."""
    found: dict[str, list[Step]] = {arm.name: [] for arm in ARMS}
    for number in range(arguments.rounds):
        for arm in ARMS:
            slow = arm.sequential and latency > 0
            if slow and number:
                continue  # one round takes minutes
            steps = arguments.sequential_steps if slow else arguments.steps
            found[arm.name].append(arm.run(latency / 1e3, steps))
    return found


def report(latency: int, found: dict[str, list[Step]]) -> None:
    print(f"\n{latency} ms latency; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':20}{'ms per step':>12}{'least':>10}{'CPU ms':>10}{GATHERING:>18}{ENVIRONMENTS:>20}")
    for name, steps in found.items():
        walls = [step.wall for step in steps]
        cpu = median(step.cpu for step in steps)
        ratios = [f"{faster(found, other, name):.2f}x" for other in (GATHERING, ENVIRONMENTS)]
        print(
            f"{name:20}{median(walls):12.1f}{min(walls):10.1f}{cpu:10.1f}"
            f"{ratios[0]:>18}{ratios[1]:>20}"
        )
    if latency == 100:
        for other, bar in BARS:
            ratio = faster(found, other, "ours, S=2")
            verdict = "met" if ratio >= bar else "missed"
            print(f"S=2 is {ratio:.1f}x faster than {other!r}, bar {bar:.0f}x {verdict}")


def faster(found: dict[str, list[Step]], other: str, name: str) -> float:
    """How many times `name` is faster than `other`: the median of the rounds."""
    theirs, mine = ([step.wall for step in found[arm]] for arm in (other, name))
    if len(theirs) != len(mine):
        return median(theirs) / median(mine)
    return median(a / b for a, b in zip(theirs, mine, strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 100, 500], help="in ms")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="measured in a round")
    parser.add_argument("--sequential-steps", type=int, default=2)
    parser.add_argument("--trl-threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
