"""The trainers' arguments, one by one: what is taken, what is refused, and that it's told early."""

import asyncio
import json
import math
import signal
import types

import numpy as np
import pytest

from benchmarks.mock_engine import MockAdapter
from retrain import Environment, Reward, RewardCalculator, StepResult, reward
from retrain.assembly import Parts
from retrain.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    NoSignalError,
    NotFoundError,
    PromptError,
    RewardError,
    UserCodeError,
)
from retrain.trainer import (
    BaseTrainer,
    Callback,
    DPOTrainer,
    EnvironmentReturn,
    GRPOTrainer,
    RLOOTrainer,
    SFTTrainer,
    batched,
    create_trainer,
    get_algorithm,
    list_algorithms,
    register_algorithm,
)

ROWS = [{"prompt": f"{c}=", "answer": c} for c in "abcd"]
SMALL = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "backend": {"type": "benchmarks.mock_engine:MockOptions"},
    "chat": "none",
    "sampling": {"max_tokens": 4},
    "run_dir": "run",
}
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def nothing_loads(monkeypatch):
    def opened(parts):
        raise AssertionError("the backend was opened before the mistake was told")

    monkeypatch.setattr(Parts, "open_adapter", opened)


def grpo(**changes) -> GRPOTrainer:
    return GRPOTrainer.from_pretrained("tiny", **{**SMALL, **changes})


def variety(prompt: str, response: str) -> float:
    return len(set(response)) / 4


def rollouts(result) -> list[dict]:
    lines = (result.run_dir / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- making one


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        ({"learnin_rate": 3.0}, TypeError, "'learnin_rate'"),
        (
            {"num_prompts_per_step": 0},
            ConfigError,
            "_step: got 0",
        ),
        ({"num_prompts_per_step": True}, ConfigError, "got true"),
        ({"num_generations_per_prompt": 1}, ConfigError, "got 1"),
        ({"learning_rate": 0.0}, ConfigError, "got 0.0"),
        ({"learning_rate": math.inf}, ConfigError, "learning_rate: got inf"),
        ({"tensor_parallel_size": 2}, ConfigError, "got 2"),
        ({"seed": "1"}, ConfigError, "grpo.seed: got '1'"),
        ({"train": {"seed": 1}}, ConfigError, "train.seed.*grpo.seed"),
        ({"staleness": {"targt": 1}}, ConfigError, "staleness.targt"),
        (
            {"learning_rate": 1e-3, "backend": {"type": "trl", "learning_rate": 1e-4}},
            ConfigError,
            "backend.learning_rate.*policy.learning_rate",
        ),
    ],
)
def test_a_bad_argument_is_told_when_the_trainer_is_made(keys, kind, text):
    with pytest.raises(kind, match=text):
        grpo(**keys)


def test_a_missing_model_folder_is_not_looked_for_on_the_hub():
    with pytest.raises(FileNotFoundError, match="folder not found"):
        GRPOTrainer.from_pretrained("./no/such/model")
    with pytest.raises(ValueError, match="folder not found"):
        SFTTrainer.from_pretrained("/no/such/model")


def test_an_unknown_key_of_the_nested_config_is_told_by_its_path():
    config = {"policy": {"model_name": "tiny", "learnin_rate": 1.0}, "grpo": {"num_prompts": 2}}
    with pytest.raises(ConfigError) as error:
        GRPOTrainer(config)
    first, second = error.value.problems
    assert first == "policy.learnin_rate: unknown key; did you mean policy.learning_rate?"
    assert second.startswith("grpo.num_prompts: unknown key; did you mean grpo.num_prompts_per_st")


def policy(learning_rate: float | None = None, **kwargs: float) -> dict:
    rate = {} if learning_rate is None else {"learning_rate": learning_rate}
    return {"policy": {"model_name": "tiny", **rate, "optimizer": {"kwargs": kwargs}}}


@pytest.mark.parametrize("config", [policy(lr=1e-5), policy(1e-5, lr=1e-5)])
def test_the_optimizer_s_learning_rate_is_the_policy_s(config):
    trainer = GRPOTrainer(config)
    assert trainer.config["policy"]["learning_rate"] == 1e-5
    assert trainer._run_config().backend.arguments["learning_rate"] == 1e-5
    assert GRPOTrainer(trainer.config).config == trainer.config


def test_two_learning_rates_that_disagree_are_refused():
    text = r"policy: learning_rate is 1e-06 and optimizer\.kwargs\.lr is 1e-05: remove one"
    with pytest.raises(ConfigError, match=text):
        GRPOTrainer(policy(1e-6, lr=1e-5))


def test_the_optimizer_s_weight_decay_reaches_the_backend():
    config = policy(weight_decay=0.25)
    assert GRPOTrainer(config)._run_config().backend.arguments["weight_decay"] == 0.25
    with pytest.raises(ConfigError, match=r"backend\.weight_decay"):
        GRPOTrainer({**config, "backend": {"weight_decay": 0.5}})
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.kwargs\.weight_decay: got -1"):
        GRPOTrainer(policy(weight_decay=-1.0))


def test_any_mapping_is_a_config_and_is_copied():
    section = {"num_prompts_per_step": 3}
    config = types.MappingProxyType(
        {"policy": types.MappingProxyType({"model_name": "tiny"}), "grpo": section}
    )
    trainer = GRPOTrainer(config)
    section["num_prompts_per_step"] = 99
    assert trainer.config["grpo"]["num_prompts_per_step"] == 3


def test_a_name_where_the_config_belongs_is_explained():
    with pytest.raises(TypeError, match="from_pretrained"):
        GRPOTrainer("tiny")


def test_the_config_is_a_json_copy_of_which_another_trainer_can_be_made():
    trainer = grpo(seed=7)
    config = json.loads(json.dumps(trainer.config))
    assert GRPOTrainer(config).config == config
    trainer.config["grpo"]["seed"] = 8
    assert trainer.config["grpo"]["seed"] == 7
    with pytest.raises(AttributeError):
        trainer.config = {}
    with pytest.raises(AttributeError):
        trainer.current_step = 3


def test_the_keys_reach_the_pipe():
    config = grpo(use_leave_one_out_baseline=False, normalize_rewards=False)._run_config()
    assert config.algorithm.arguments == {"baseline": "mean", "scale": "none"}
    config = grpo()._run_config()
    assert config.algorithm.arguments == {"baseline": "leave_one_out", "scale": "group"}
    assert config.algorithm.group_size == config.train.groups_per_step == 2
    assert config.rollout.max_sequence_length == 512


# --- what to train on


@pytest.mark.parametrize(
    ("dataset", "kind", "text"),
    [
        ((row for row in ROWS), TypeError, "list.generator."),
        (iter(ROWS), TypeError, "got list_iterator"),
        (None, TypeError, "got NoneType"),
        (3, TypeError, "got int"),
        ([], PromptError, "is empty, expected at least one row"),
        ("", PromptError, "got an empty string"),
        ("no/such/file.jsonl", NotFoundError, "no/such"),
        ("./nowhere", FileNotFoundError, "no file or folder nowhere"),
        (
            [{"text": "a", "label": 1}],
            PromptError,
            "row 0",
        ),
        (
            [*ROWS, {"answer": "a"}],
            PromptError,
            "row 4.*`prompt`.*`messages`",
        ),
        ([{"question": "a", "input": "b"}], PromptError, "question, input could each be the prom"),
        ([{"prompt": " "}], PromptError, "the prompt is empty"),
        ([{"prompt": None}], PromptError, "row 0: `prompt`"),
        ({"train": ROWS}, TypeError, "got dict"),
    ],
)
def test_a_bad_dataset_is_told_before_any_model_loads(dataset, kind, text, nothing_loads):
    with pytest.raises(kind, match=text):
        grpo().fit(dataset, variety)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"q": "promt"}, "'promt'"),
        (
            {"question": "prompt"},
            "row 0",
        ),
    ],
)
def test_a_bad_column_mapping_is_told(mapping, text, nothing_loads):
    with pytest.raises(PromptError, match=text):
        grpo(column_mapping=mapping).fit([{"q": "a", "a": "b"}], variety)


def test_columns_are_mapped_as_told():
    seen = []
    trainer = grpo(column_mapping={"q": "prompt", "a": "answer"}, max_steps=1)
    trainer.fit([{"q": "say b", "a": "b"}], lambda p, r, row: seen.append((p, row)) or 0.0)
    prompt, row = seen[0]
    assert prompt == row["q"] == row["prompt"] == "say b"
    assert row["a"] == row["answer"] == "b"


def test_two_columns_that_could_be_the_response_are_refused_for_sft(nothing_loads):
    trainer = SFTTrainer.from_pretrained("tiny", backend=SMALL["backend"])
    with pytest.raises(PromptError, match="output, solution"):
        trainer.fit([{"prompt": "a", "output": "b", "solution": "c"}])
    with pytest.raises(ConfigError, match="row 0: "):
        trainer.fit([{"prompt": "a", "topic": "b"}])


def test_scored_responses_without_a_named_score_are_explained_for_dpo(nothing_loads):
    trainer = DPOTrainer.from_pretrained("tiny")
    with pytest.raises(ConfigError, match=r"algorithm.pair_by"):
        trainer.fit([{"prompt": "a", "response": "b", "rating": 3}])


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "list", "datasets", "pandas"])
def test_a_dataset_has_many_forms(kind, tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    files = {"json": json.dumps(ROWS), "jsonl": "\n".join(map(json.dumps, ROWS))}
    files["csv"] = "prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in ROWS)
    given = {"list": ROWS, "datasets": table, "pandas": table.to_pandas()}
    path = tmp_path / f"rows.{kind}"
    if kind in files:
        path.write_text(files[kind])
    elif kind == "parquet":
        table.to_parquet(path)
    answers = set()
    grpo().fit(given.get(kind, str(path)), lambda p, r, row: answers.add(row["answer"]) or 0.5)
    assert answers == set("abcd")


def test_a_data_module_is_set_up_read_and_torn_down():
    calls = []

    class Module:
        def setup(self, stage):
            calls.append(f"setup {stage}")

        def train_dataloader(self):
            return [{"prompt": ["a=", "b="], "answer": ["a", "b"]}, {"prompt": "c=", "answer": "c"}]

        def val_dataloader(self):
            return [[{"prompt": "z=", "answer": "z"}]]

        def teardown(self, stage):
            calls.append(f"teardown {stage}")

    asked = []
    trainer = grpo(eval={"every": 1})
    result = trainer.fit(Module(), lambda p, r, row: asked.append((p, row["answer"])) or 0.5)
    assert calls == ["setup fit", "teardown fit"]
    assert set(asked) == {(f"{c}=", c) for c in "abcz"}  # each with its own row, z held out
    assert result.best_checkpoint_path is not None


def test_a_data_module_is_torn_down_when_the_run_can_not_begin(nothing_loads):
    calls = []

    class Module:
        def train_dataloader(self):
            return ROWS

        def teardown(self, stage):
            calls.append(stage)

    with pytest.raises(ConfigError, match="reward"):
        grpo().fit(Module(), environment=Environment)
    assert calls == ["fit"]


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
        (
            lambda prompt, response: None,
            r"prompt='.=', response='.*'\)",
        ),
        (lambda prompt, response: "1", "returned '1'"),
        (lambda prompt, response: math.nan, "returned nan"),
        (lambda prompt, response: 10**400, "expected a finite number or a dict of them"),
        (lambda prompt, response: {}, "returned {}"),
        (lambda prompt, response: {"a": "b"}, "expected finite numbers"),
        (lambda prompt, response: later(prompt, response), "`async def`"),
        (failing, "raised KeyError: 'truth' .test_trainer_api.py:"),
        (TooFew(), r"returned \[1\.0\], expected a list of 2 rewards"),
        (batched(lambda prompts, responses: [1.0]), "expected a list of 2 rewards"),
        (batched(lambda prompts, responses: None), "returned None, expected a list of 2"),
        (batched(lambda prompts, responses: ["1", 1.0]), "'1'"),
        (batched(failing), "raised KeyError: 'truth' .test_trainer_api.py:"),
        (unknown, r"prompt='.=', response='.*'\) raised KeyError: 'truth' .test_trainer_api.py:"),
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


# --- how long


@pytest.mark.parametrize("name", ["max_steps", "max_epochs"])
def test_a_bad_limit_is_refused_before_anything_loads(name, nothing_loads):
    with pytest.raises(ValueError, match=f"{name}: got -1"):
        grpo().fit(ROWS, variety, **{name: -1})
    with pytest.raises(ValueError, match=f"{name}: got True"):
        grpo().fit(ROWS, variety, **{name: True})
    with pytest.raises(ValueError, match=f"{name}: got '3'"):
        grpo().fit(ROWS, variety, **{name: "3"})


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({}, 2, 1),
        ({"max_epochs": 2}, 4, 2),
        ({"max_steps": 3}, 3, 1),
        ({"max_steps": 3, "max_epochs": 1}, 2, 1),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 0}, 0, 0),
    ],
)
def test_the_limit_that_comes_first_ends_training(limits, steps, epochs):
    result = grpo().fit(ROWS, variety, **limits)
    assert (result.total_steps, result.total_epochs) == (steps, epochs)
    assert len(result.history) == steps


def test_limits_of_the_config_are_overridden_by_fit():
    assert grpo(max_steps=1).fit(ROWS, variety, max_steps=2).total_steps == 2
    assert grpo(max_epochs=1).fit(ROWS, variety).total_steps == 2


def test_fewer_rows_than_a_step_takes_are_gone_through_again():
    result = grpo(num_prompts_per_step=8).fit(ROWS[:3], variety)
    assert (result.total_steps, result.total_epochs) == (1, 2)


def test_a_prompt_as_long_as_the_limit_is_left_out_and_counted():
    rows = [{"prompt": "x" * 40}, *ROWS]
    result = grpo(max_sequence_length=20, num_prompts_per_step=4, max_epochs=2).fit(rows, variety)
    assert sum(row["groups/dropped_failed"] for row in result.history) >= 1
    played = [r for r in rollouts(result) if r["outcome"] == "ok"]
    assert all(len(r["messages"][0]["content"]) < 20 for r in played)


def test_a_run_whose_prompts_are_all_too_long_ends_and_names_the_limit():
    with pytest.raises(NoSignalError, match=r"20, .*rollout\.max_sequence_length\."):
        grpo(max_sequence_length=20).fit([{"prompt": "x" * 40}], variety)


# --- again


def test_a_second_fit_goes_on_and_limits_are_absolute():
    trainer = grpo()
    assert trainer.fit(ROWS, variety, max_steps=2).total_steps == 2
    again = trainer.fit(ROWS, variety, max_steps=5)
    assert (again.total_steps, len(again.history), again.total_epochs) == (5, 3, 2)
    assert [row["step"] for row in again.history] == [3, 4, 5]
    done = trainer.fit(ROWS, variety, max_steps=5)
    assert (done.total_steps, len(done.history)) == (5, 0)
    assert done.metrics == again.metrics
    assert trainer.current_step == 5


def test_a_second_fit_on_other_rows_begins_them_anew_with_the_weights_of_the_first(monkeypatch):
    trainer = grpo()
    first = trainer.fit(ROWS, variety, max_steps=3)
    loaded = []
    load = MockAdapter.load

    async def watched(self, state):
        loaded.append(state.data["version"])
        await load(self, state)

    monkeypatch.setattr(MockAdapter, "load", watched)
    result = trainer.fit(ROWS[:2], variety, max_epochs=2)
    assert loaded == [first.metrics["version"]]
    assert (result.total_steps, result.total_epochs) == (5, 2)


def test_a_second_fit_at_the_same_time_is_refused():
    trainer = grpo(max_steps=1)
    messages = []

    class Nested(Callback):
        async def on_step_end(self, trainer, step, metrics):
            try:
                await trainer.train(ROWS, variety)
            except RuntimeError as error:
                messages.append(str(error))

    trainer.fit(ROWS, variety, callbacks=[Nested()])
    assert messages == [
        "this GRPOTrainer is already training; wait until it is done, or make another trainer"
    ]


async def test_fit_inside_a_running_loop_points_to_train(nothing_loads):
    with pytest.raises(RuntimeError, match=r"`await trainer\.train"):
        grpo().fit(ROWS, variety)


def test_a_first_ctrl_c_checkpoints_and_is_raised():
    class Press(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    trainer = grpo(max_steps=100)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(ROWS, variety, callbacks=[Press()])
    signal.signal(signal.SIGINT, before)
    assert 2 <= trainer.current_step < 100
    assert trainer.fit(ROWS, variety, max_steps=trainer.current_step + 1).status == "completed"


# --- callbacks


@pytest.mark.parametrize(
    ("callbacks", "text"),
    [
        ([Callback], "Callback'>"),
        ([object()], "retrain.Callback"),
        (Callback, "Callback"),
        (Callback(), "callbacks: got <.*Callback"),
    ],
)
def test_a_bad_callback_is_told_before_any_model_loads(callbacks, text, nothing_loads):
    with pytest.raises(TypeError, match=text):
        grpo().fit(ROWS, variety, callbacks=callbacks)


def test_every_hook_is_called_in_order_with_the_trainer():
    calls = []

    class Sync(Callback):
        def on_epoch_begin(self, trainer, epoch):
            calls.append(("epoch begins", epoch))

        def on_step_begin(self, trainer, step):
            calls.append(("begins", step, trainer.current_step))

        def on_step_end(self, trainer, step, metrics):
            calls.append(("ends", step, trainer.current_step))
            metrics.clear()  # it's a copy of its own

        def on_checkpoint(self, trainer, step, path):
            calls.append(("checkpoint", step))

        def on_train_end(self, trainer, result):
            calls.append(("done", result.status, "mean_reward" in result.metrics))

    class Async(Callback):
        async def on_step_end(self, trainer, step, metrics):
            await asyncio.sleep(0)
            assert all(isinstance(value, float) for value in metrics.values())
            calls.append(("async", step, metrics["mean_reward"] == metrics["reward/mean"]))

        async def on_epoch_end(self, trainer, epoch, metrics):
            calls.append(("epoch", epoch))

    trainer = grpo()
    trainer.fit(ROWS, variety, callbacks=[Sync(), Async()])
    assert calls == [
        ("epoch begins", 1), ("begins", 1, 0), ("ends", 1, 1), ("async", 1, True),
        ("begins", 2, 1), ("ends", 2, 2), ("async", 2, True), ("epoch", 1),
        ("checkpoint", 2), ("done", "completed", True),
    ]  # fmt: skip


def test_a_callback_that_raises_stops_training_and_is_raised_itself():
    ends = []

    class Raises(Callback):
        def on_step_end(self, trainer, step, metrics):
            raise LookupError("mine")

        def on_train_end(self, trainer, result):
            ends.append(result.status)

    with pytest.raises(LookupError, match="mine") as raised:
        grpo().fit(ROWS, variety, callbacks=[Raises()])
    assert raised.value.__notes__[0] == "raised by the callback Raises.on_step_end"
    assert ends == ["failed"]


def test_a_callback_that_never_ends_is_named_and_does_not_keep_the_trainer():
    class Hangs(Callback):
        async def on_train_end(self, trainer, result):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineError, match=r"^Hangs.on_train_end") as raised:
        grpo(deadlines={"stall": 2.0}).fit(ROWS, variety, callbacks=[Hangs()])
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(("hook", "steps"), [("on_step_begin", 1), ("on_step_end", 2)])
def test_a_callback_may_ask_for_the_end(hook, steps):
    class Stop(Callback):
        pass

    def stop(self, trainer, step, *_):
        if step == 2:
            trainer.request_stop()

    setattr(Stop, hook, stop)
    result = grpo(max_steps=100).fit(ROWS, variety, callbacks=[Stop()])
    assert (result.status, result.total_steps) == ("completed", steps)


def test_there_is_nothing_to_stop_before_training():
    with pytest.raises(RuntimeError, match="no training is running"):
        grpo().request_stop()


# --- checkpoints


def test_a_saved_checkpoint_is_where_another_trainer_goes_on(tmp_path):
    first = grpo()
    saved = first.fit(ROWS, variety, max_steps=2)
    first.save_checkpoint(tmp_path / "saved")
    second = grpo(run_dir="other")
    second.load_checkpoint(str(tmp_path / "saved"))
    assert second.current_step == 2
    result = second.fit(ROWS, variety, max_steps=4)
    assert [row["step"] for row in result.history] == [3, 4]
    published = result.history[0]["grad_norm"] > 0  # a step without a signal publishes nothing
    assert result.history[0]["version"] == saved.metrics["version"] + published


def test_a_checkpoint_asked_for_in_a_hook_is_written_at_that_step_and_outlives_pruning(tmp_path):
    class Save(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 1:
                trainer.save_checkpoint(tmp_path / "first")

    trainer = grpo(checkpoint={"every": 1, "keep": 1})
    result = trainer.fit(ROWS, variety, max_steps=4, callbacks=[Save()])
    assert (result.run_dir / "checkpoints" / "step_1").is_dir()
    trainer.load_checkpoint(tmp_path / "first")
    assert trainer.current_step == 1


def test_the_best_checkpoint_is_the_one_with_the_best_mean_reward():
    rewards = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.2}
    step = [1]

    class Next(Callback):
        def on_step_end(self, trainer, number, metrics):
            step[0] = number + 1

    trainer = grpo(checkpoint={"every": 1, "keep": 1}, staleness={"target": 0})
    result = trainer.fit(ROWS, lambda p, r: rewards[step[0]], max_steps=4, callbacks=[Next()])
    assert result.best_checkpoint_path == result.run_dir / "checkpoints" / "step_3"
    assert (result.best_checkpoint_path / "manifest.json").exists()


def test_save_checkpoint_refuses_what_it_can_t_do(tmp_path):
    trainer = grpo()
    with pytest.raises(RuntimeError, match="call fit first"):
        trainer.save_checkpoint(tmp_path / "saved")
    trainer.fit(ROWS, variety, max_steps=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        trainer.save_checkpoint(tmp_path / "notes")


def test_load_checkpoint_refuses_what_is_missing_torn_or_of_another_training(tmp_path):
    trainer = grpo()
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer.load_checkpoint(tmp_path / "missing")
    (tmp_path / "torn").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        trainer.load_checkpoint(tmp_path / "torn")
    trainer.fit(ROWS, variety, max_steps=1)
    trainer.save_checkpoint(tmp_path / "saved")
    keys = {key: value for key, value in SMALL.items() if key != "run_dir"}
    with pytest.raises(CheckpointError, match=r"backend.type: was 'benchmarks.mock_engine"):
        RLOOTrainer.from_pretrained("tiny").load_checkpoint(tmp_path / "saved")
    other = RLOOTrainer.from_pretrained("tiny", **keys)
    with pytest.raises(CheckpointError, match=r"'grpo'.*'rloo'; strict=False"):
        other.load_checkpoint(tmp_path / "saved")
    other.load_checkpoint(tmp_path / "saved", strict=False)
    assert other.fit(ROWS, variety, max_steps=2).total_steps == 2


def test_a_callback_s_state_is_kept_with_the_checkpoint():
    class Counter(Callback):
        seen = 0

        def on_step_end(self, trainer, step, metrics):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    trainer, second = grpo(), Counter()
    trainer.fit(ROWS, variety, max_steps=2, callbacks=[Counter()])
    trainer.fit(ROWS, variety, max_steps=3, callbacks=[second])
    assert second.seen == 3


@pytest.mark.parametrize("service", ["tinker", "weaver"])
def test_a_local_service_s_checkpoint_is_where_other_runs_begin(service, tmp_path):
    keys = {**SMALL, "backend": {"type": service, "url": "local"}, "chat": "auto"}
    first = GRPOTrainer.from_pretrained("tiny", **keys, algorithm={"loss": "ppo"})
    first.fit(ROWS, variety, max_steps=1)
    first.save_checkpoint(tmp_path / "saved")
    assert first.fit(ROWS, variety, max_steps=2).total_steps == 2
    second = GRPOTrainer.from_pretrained("tiny", **keys, algorithm={"loss": "ppo"})
    second.load_checkpoint(tmp_path / "saved")
    assert [row["step"] for row in second.fit(ROWS, variety, max_steps=2).history] == [2]


def test_another_algorithm_begins_from_the_exported_model():
    few = {"backend": "trl", "chat": "auto"}
    taught = SFTTrainer.from_pretrained("tiny", batch_size=2).fit(ROWS, max_steps=1)
    trainer = GRPOTrainer.from_pretrained(taught.run_dir / "final", **{**SMALL, **few})
    assert trainer.fit(ROWS, variety, max_steps=1).total_steps == 1


# --- by name


def test_algorithms_are_found_in_any_case_and_told_apart():
    assert get_algorithm("GRPO") is GRPOTrainer
    with pytest.raises(ValueError, match="got 'grp'"):
        get_algorithm("grp")
    with pytest.raises(ValueError, match="got None"):
        get_algorithm(None)
    with pytest.raises(ValueError, match="model: got ''"):
        create_trainer("sft", "")


def test_a_trainer_class_of_one_s_own_is_registered_once(monkeypatch):
    known = {name: get_algorithm(name) for name in list_algorithms()}
    monkeypatch.setattr("retrain.trainer.registry.TRAINERS", known)

    class Mine(GRPOTrainer):
        pass

    register_algorithm("Mine", Mine)
    assert list_algorithms() == ["dpo", "grpo", "mine", "rloo", "sft"]
    assert get_algorithm("MINE") is Mine
    assert isinstance(create_trainer("mine", "tiny", seed=3), Mine)
    with pytest.raises(ValueError, match="mine"):
        register_algorithm("mine", Mine)
    register_algorithm("grpo", Mine, override=True)
    assert get_algorithm("grpo") is Mine
    for other in (dict, GRPOTrainer.from_pretrained("tiny")):
        with pytest.raises(TypeError, match=r"other.*BaseTrainer"):
            register_algorithm("other", other)
    with pytest.raises(TypeError, match=r"BaseTrainer.*from_pretrained"):
        register_algorithm("other", BaseTrainer)


async def test_step_too_takes_either_a_reward_function_or_an_environment(nothing_loads):
    with pytest.raises(ValueError, match="reward_fn"):
        await grpo().step(ROWS, variety, environment=Environment)
