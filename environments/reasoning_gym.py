"""Tasks of Reasoning Gym, which generates them and scores the answers.

    environment: {type: reasoning_gym, dataset: chain_sum, config: {max_terms: 3}, size: 10000}

A row's `idx` is the number of its task, which is scored. See docs/games.md.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from retrain import (
    Action,
    ConfigError,
    Environment,
    Message,
    Prompt,
    StepResult,
    in_thread,
    needing,
)

_made: dict[str, Any] = {}
"""The datasets by their keys: all instances share one."""


class ReasoningGym(Environment):
    """A dataset of Reasoning Gym, or a mixture of several; the reward is the dataset's own score.

    Args:
        dataset: The name of the dataset, or a list of mappings, each with `name`, `weight` (1) and
            `config`.
        config: The parameters of the dataset, such as min_terms.
        size: The number of tasks.
        seed: The seed of the task generator; another seed gives other tasks.
        answer_tag: The tag that encloses the answer: `answer` reads the text in the last
            `<answer>...</answer>`. Set "" to use the whole reply.
        system: The system message, or the name of one of Reasoning Gym's prompts. By default its
            `default` prompt, which asks for the tags; none if `answer_tag` is not `answer`.
    """

    def __init__(
        self,
        *,
        dataset: str | list[dict[str, Any]],
        config: dict[str, Any] | None = None,
        size: int = 1000,
        seed: int = 0,
        answer_tag: str = "answer",
        system: str | None = None,
    ) -> None:
        with needing("reasoning-gym"):
            from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
        if system is None:
            system = "default" if answer_tag == "answer" else ""
        system = SYSTEM_PROMPTS.get(system, system)
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.answer_tag, self.extract, self.size = answer_tag, extract_answer, size
        key = json.dumps([dataset, config, size, seed], sort_keys=True, default=repr)
        if key not in _made:
            _made[key] = _dataset(dataset, config, {"size": size, "seed": seed})
        self.dataset = _made[key]

    def prompts(self) -> Tasks:
        return Tasks(self.dataset)

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        index = prompt.metadata.get("idx")
        if not isinstance(index, int) or not 0 <= index < self.size:
            raise ValueError(f"prompt: got the idx {index!r}, expected 0 to {self.size - 1}")
        self.entry = await in_thread(lambda: self.dataset[index])
        question: Message = {"role": "user", "content": self.entry["question"]}
        return [*self.system, *(prompt.messages or [question])]

    async def step(self, action: Action) -> StepResult:
        text = action.text.strip()
        answer = self.extract(text, tag_name=self.answer_tag) if self.answer_tag else text
        score = await in_thread(lambda: self.dataset.score_answer(answer, self.entry))
        source = self.entry["metadata"].get("source_dataset")
        info = {"answer": answer, "expected": self.entry["answer"], "dataset": source}
        return StepResult([], float(score), True, False, info)


class Tasks(Sequence[dict[str, Any]]):
    """The rows of a dataset, each created when it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:  # an index; a slice of it is never read
        entry = self.dataset[range(len(self))[index]]  # a dataset itself has no end
        return {"prompt": entry["question"], "answer": entry["answer"], "idx": index}


def _dataset(
    dataset: str | list[dict[str, Any]], config: dict[str, Any] | None, shared: dict[str, int]
) -> Any:
    """The dataset; raises ConfigError for a wrong name or parameter."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    _check_names([{"name": dataset}] if isinstance(dataset, str) else dataset)
    try:
        if isinstance(dataset, str):
            made = create_dataset(dataset, **{**shared, **(config or {})})
        else:
            if config:
                raise ValueError("each of several datasets has its own config")
            specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in dataset]
            made = create_dataset("composite", datasets=specs, **shared)
        made[0]
    except Exception as error:
        said = str(error) or type(error).__name__
        raise ConfigError(f"environment.config: {dataset}: {said}") from error
    return made


def _check_names(parts: Sequence[dict[str, Any]]) -> None:
    from reasoning_gym.factory import DATASETS

    for name in [str(part.get("name")) for part in parts]:
        if name not in DATASETS:
            near = " or ".join(difflib.get_close_matches(name, DATASETS) or DATASETS)
            raise ConfigError(
                f"environment.dataset: unknown dataset {name!r}; did you mean {near}?"
            )
