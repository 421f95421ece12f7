"""How a trainer scores: reward functions and environments, their forms and their mistakes."""

import asyncio
import math

import numpy as np
import pytest

from retrain import Environment, Reward, RewardCalculator, StepResult, reward
from retrain.errors import ConfigError, RewardError, UserCodeError
from retrain.trainer import DPOTrainer, EnvironmentReturn, SFTTrainer, batched
from tests.trainer_kit import ROWS, grpo, rollouts, variety

pytestmark = pytest.mark.usefixtures("own_folder")


# --- how to score


@pytest.mark.parametrize("both", [True, False])
def test_one_of_reward_fn_and_environment_is_expected(both, nothing_loads):
    keys = {"reward_fn": variety, "environment": Environment} if both else {}
    with pytest.raises(ValueError, match="got both" if both else "got neither"):
        grpo().fit(ROWS, **keys)


def test_sft_and_dpo_take_no_reward(nothing_loads):
    with pytest.raises(TypeError, match="'reward_fn'"):
        SFTTrainer.from_pretrained("tiny").fit(ROWS, reward_fn=variety)
    with pytest.raises(TypeError, match="'environment'"):
        DPOTrainer.from_pretrained("tiny").fit(ROWS, environment=Environment)


async def later(prompt, response):
    await asyncio.sleep(0)
    return 0.5


@batched
def halves(prompts, responses, rows):
    assert [row["prompt"] for row in rows] == prompts
    return [0.5] * len(responses)


@batched
async def halves_later(prompts, responses):
    return [0.5] * len(responses)


@reward
def by_name(answer, prompt, completion, metadata):
    assert (prompt, metadata["solution"]) == (f"{answer}=", answer)
    return 0.5


@reward(scale=0.5)
async def by_name_later(completion, scale):
    return scale


class Judging(RewardCalculator):
    async def calculate(self, trajectory):
        return Reward(0.5, {"length": float(len(trajectory.completion))})


class Comparing(Judging):
    async def calculate_group(self, group):
        return [Reward(0.0, outcome="invalid"), *[0.5] * (len(group) - 1)]


@pytest.mark.parametrize(
    "reward_fn",
    [
        by_name,
        by_name_later,
        Judging(),
        Comparing(),
        lambda prompt, response: Reward(0.5),
        lambda prompt, response: 0.5,
        lambda prompt, response, row: len(row["answer"]) / 2,
        lambda prompt, response, row=None: len(row["answer"]) / 2,
        lambda prompt, response, scale=0.5: scale,
        lambda *pair: 0.5 if len(pair) == 3 else 0.0,
        lambda prompt, response: {"length": 0.25, "style": 0.25},
        later,
        halves,
        halves_later,
        batched(lambda prompts, responses: np.full(len(responses), 0.5)),
        batched(lambda prompts, responses: [{"a": 0.25, "b": 0.25} for _ in responses]),
    ],
)
def test_a_reward_function_has_many_forms(reward_fn):
    rows = [{**row, "solution": row["answer"]} for row in ROWS]
    result = grpo(max_steps=1).fit(rows, reward_fn)
    assert result.metrics["mean_reward"] == result.metrics["reward/mean"] == 0.5


def test_a_dict_s_parts_are_weighed():
    trainer = grpo(max_steps=1, reward_weights={"length": 1.0, "style": 3.0})
    result = trainer.fit(ROWS, lambda prompt, response: {"length": 0.25, "style": 0.5})
    assert result.metrics["mean_reward"] == 1.75
    assert result.metrics["reward/reward_fn.style/mean"] == 0.5


def test_weights_must_name_the_dict_s_parts():
    with pytest.raises(RewardError, match="reward_weights"):
        grpo(reward_weights={"b": 1.0}).fit(ROWS, lambda prompt, response: {"a": 1.0})
    with pytest.raises(ConfigError, match=r"grpo\.reward_weights\.a: got inf"):
        grpo(reward_weights={"a": math.inf})


def test_a_batched_function_is_called_once_per_group():
    groups = []

    @batched
    def score(prompts, responses):
        groups.append(prompts)
        return [0.5] * len(responses)

    grpo(max_steps=1, staleness={"target": 0}).fit(ROWS, score)
    assert len(groups) == 2
    assert all(len(prompts) == 2 and len(set(prompts)) == 1 for prompts in groups)


@pytest.mark.parametrize(
    "reward_fn",
    [
        lambda response: 0.0,
        lambda: 0.0,
        lambda prompt, response, row, more: 0.0,
        lambda prompt, response, answer: 0.0,
        lambda prompt, response, answers=None: 0.0,
        batched(lambda prompts, responses, answers=None: 0.0),
        lambda prompt, response, *, scale: 0.0,
        0.5,
    ],
)
def test_a_function_of_other_arguments_is_refused_before_anything_loads(reward_fn, nothing_loads):
    with pytest.raises(TypeError, match="reward_fn: "):
        grpo().fit(ROWS, reward_fn)


def failing(prompt, response):
    raise KeyError("truth")


@reward
def unknown(prompt, completion):
    raise KeyError("truth")


class TooFew(Judging):
    async def calculate_group(self, group):
        return [1.0]


class Nothing(Judging):
    async def calculate_group(self, group):
        return [Reward(math.nan) for _ in group]


@pytest.mark.parametrize(
    ("reward_fn", "text"),
    [
        (lambda prompt, response: None, r"prompt='.=', response='.*'\)"),
        (lambda prompt, response: "1", "returned '1'"),
        (lambda prompt, response: math.nan, "returned nan"),
        (lambda prompt, response: 10**400, "expected a finite number or a dict of them"),
        (lambda prompt, response: {}, "returned {}"),
        (lambda prompt, response: {"a": "b"}, "expected finite numbers"),
        (lambda prompt, response: later(prompt, response), "`async def`"),
        (failing, r"KeyError.*test_trainer_scoring.py:"),
        (TooFew(), r"returned \[1\.0\], expected a list of 2 rewards"),
        (batched(lambda prompts, responses: [1.0]), "expected a list of 2 rewards"),
        (batched(lambda prompts, responses: None), "returned None, expected a list of 2"),
        (batched(lambda prompts, responses: ["1", 1.0]), "'1'"),
        (batched(failing), r"KeyError.*test_trainer_scoring.py:"),
        (unknown, r"prompt='.=', response='.*'\) raised KeyError.*test_trainer_scoring.py:"),
        (Nothing(), r"returned Reward\(value=nan"),
    ],
)
def test_a_reward_that_fails_ends_training_with_the_pair(reward_fn, text):
    with pytest.raises(RewardError, match=text):
        grpo(max_steps=50).fit(ROWS, reward_fn)


def test_a_reward_that_fails_is_left_out_and_counted_when_it_is_to_be_dropped():
    calls = []

    def every_other(prompt, response):
        calls.append(prompt)
        if len(calls) % 2:
            raise ValueError("no")
        return 1.0

    result = grpo(max_steps=1, on_reward_error="drop").fit(ROWS, every_other)
    assert result.metrics["rollouts/failed"] == 2
    assert result.metrics["mean_reward"] == 1.0


def test_a_batched_reward_that_fails_drops_its_group_when_it_is_to_be_dropped():
    @batched
    def only_some(prompts, responses):
        return [1.0] * len(responses) if prompts[0] in ("a=", "b=") else []

    result = grpo(max_steps=1, on_reward_error="drop").fit(ROWS, only_some)
    assert result.metrics["mean_reward"] == 1.0
    # Which prompts the step gets depends on the seed and on timing.
    outcomes = {(r["messages"][0]["content"], r["reward"], r["outcome"]) for r in rollouts(result)}
    good = {("a=", 1.0, "ok"), ("b=", 1.0, "ok")}
    assert outcomes & good
    assert outcomes - good <= {(p, None, "infra_error") for p in ("c=", "d=")}


# --- environments


class Guess(Environment):
    def __init__(self, bonus: float = 0.5) -> None:
        self.bonus = bonus

    async def step(self, action) -> StepResult:
        return StepResult([], self.bonus, True, False, {})


class Plain:
    """NeMo RL's face, on an object that inherits from nothing."""

    def __init__(self) -> None:
        self.turns = 0

    def step(self, message_log_batch, metadata):
        [log], [row] = message_log_batch, metadata
        assert log[-1]["role"] == "assistant"
        self.turns += 1
        observation = {"role": "environment", "content": f"turn {self.turns}"}
        over = len(log) >= 3
        return EnvironmentReturn([observation], [row], [None], [0.25], [over])


class Asynchronous(Plain):
    async def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, metadata)
        return answer._replace(rewards={"right": [0.1], "short": [0.15]})


class PostProcessed(Plain):
    def global_post_process_and_metrics(self, batch):
        assert {len(column) for column in batch.values()} == {4}
        assert {row["answer"] for row in batch["metadata"]} <= set("abcd")
        batch["rewards"] = [reward + 1.0 for reward in batch["rewards"]]
        return batch, {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("environment", "reward"),
    [
        (Guess, 0.5),
        (Guess(0.75), 0.75),
        (lambda: Guess(0.25), 0.25),
        (Plain, 0.5),
        (Plain(), 0.5),
        (Asynchronous(), 0.5),
    ],
)
def test_an_environment_has_many_forms(environment, reward):
    result = grpo(max_steps=1).fit(ROWS, environment=environment)
    assert result.metrics["mean_reward"] == reward


def test_nemo_s_conversation_and_post_processing():
    result = grpo(max_steps=1).fit(ROWS, environment=PostProcessed())
    assert result.metrics["environment/accuracy"] == 0.75
    assert result.metrics["mean_reward"] == 1.5  # 0.25 a turn, and 1 of the hook
    roles = [message["role"] for message in rollouts(result)[0]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_an_instance_is_copied_for_each_slot():
    given = Plain()
    grpo(max_steps=2).fit(ROWS, environment=given)
    assert given.turns == 0


def test_an_instance_that_can_t_be_copied_is_refused_before_anything_loads(nothing_loads):
    environment = Guess()
    environment.generator = (n for n in range(3))
    with pytest.raises(TypeError, match="Guess"):
        grpo().fit(ROWS, environment=environment)


@pytest.mark.parametrize("environment", [3, object(), lambda: None])
def test_what_is_no_environment_is_refused_before_anything_loads(environment, nothing_loads):
    with pytest.raises(TypeError, match="environment: "):
        grpo().fit(ROWS, environment=environment)


def test_a_post_processing_hook_that_fails_ends_training():
    class Wrong(Plain):
        def global_post_process_and_metrics(self, batch):
            return {"rewards": [1.0]}, {}

    with pytest.raises(UserCodeError, match=r"global_post_process_and_metrics.*ValueError"):
        grpo(max_steps=1).fit(ROWS, environment=Wrong())
