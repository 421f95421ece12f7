"""NeMo RL's page of trainer classes, example by example, on the built-in model.

Changed against the page: import lines, the model, the data sets' paths, and numbers that make it
small. `...` and `my_fn` are completed by the rows and the reward below.
"""

# ruff: noqa: T201 - the page's examples print

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from retrain.errors import ConfigError
from retrain.trainer import (
    BaseTrainer,
    Callback,
    DPOTrainer,
    GRPOTrainer,
    SFTTrainer,
    create_trainer,
    get_algorithm,
    list_algorithms,
)

MATH = "data/openmath.jsonl"
STEER = "data/helpsteer.jsonl"
FEW = {"sampling": {"max_tokens": 4}}
"""Short answers keep the model quick; the page leaves this at max_sequence_length."""


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the columns of OpenMathInstruct-2 and of HelpSteer2."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    math = [
        {
            "problem": f"1+{n}=",
            "generated_solution": str(1 + n),
            "expected_answer": str(1 + n),
            "problem_source": "augmented_math",
        }
        for n in range(4)
    ]
    scores = {"correctness": 3, "coherence": 4, "complexity": 1, "verbosity": 1}
    steer = [
        {"prompt": f"say {c}", "response": c * n, "helpfulness": n, **scores}
        for c in "ab"
        for n in (1, 3)
    ]
    for path, rows in ((MATH, math), (STEER, steer)):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def my_fn(prompt: str, response: str) -> float:
    return len(set(response)) / 4


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize(
    ("trainer", "keys", "scoring"),
    [
        (
            GRPOTrainer,
            {
                "num_prompts_per_step": 32,
                "num_generations_per_prompt": 16,
                "learning_rate": 1e-6,
                "max_sequence_length": 512,
                "tensor_parallel_size": 1,
            },
            ["reward_fn", "environment"],
        ),
        (SFTTrainer, {"batch_size": 32, "learning_rate": 2e-5, "max_sequence_length": 512}, []),
        (DPOTrainer, {"batch_size": 32, "learning_rate": 1e-6, "beta": 0.1}, []),
    ],
)
def test_the_classes_have_the_page_s_signatures(trainer, keys, scoring) -> None:
    assert issubclass(trainer, BaseTrainer)
    assert defaults_of(trainer.from_pretrained) == keys
    assert list(defaults_of(trainer.fit)) == [*scoring, "max_steps", "max_epochs", "callbacks"]
    config = trainer.from_pretrained("tiny").config
    assert config["policy"]["learning_rate"] == keys["learning_rate"]
    if trainer is GRPOTrainer:  # keywords, in the table of parameters
        assert config["grpo"]["normalize_rewards"] is True
        assert config["grpo"]["use_leave_one_out_baseline"] is True


def test_the_grpo_example(capsys: pytest.CaptureFixture[str]) -> None:
    # Initialize from pretrained
    trainer = GRPOTrainer.from_pretrained(
        "tiny",
        num_prompts_per_step=2,
        num_generations_per_prompt=4,
        learning_rate=1e-6,
        **FEW,
    )

    # Define reward function
    def reward_fn(prompt: str, response: str) -> float:
        return 1.0 if "correct" in response else 0.0

    # Train
    result = trainer.fit(
        dataset=MATH,
        reward_fn=reward_fn,
        max_steps=2,
    )

    print(f"Training completed: {result.metrics}")
    assert "Training completed: {" in capsys.readouterr().out
    assert result.total_steps == trainer.current_step == 2


def test_the_sft_example() -> None:
    # Initialize
    trainer = SFTTrainer.from_pretrained(
        "tiny",
        batch_size=4,
        learning_rate=2e-5,
    )

    # Train (no reward function needed)
    result = trainer.fit(
        dataset=MATH,
        max_steps=2,
    )
    assert result.total_steps == result.total_epochs == 2
    assert result.metrics["loss"] > 0


def test_the_dpo_example() -> None:
    # Initialize
    trainer = DPOTrainer.from_pretrained(
        "tiny",
        batch_size=2,
        beta=0.1,
    )

    # Train with preference data
    result = trainer.fit(
        dataset=STEER,  # Preference dataset
        max_steps=1,
    )
    assert result.metrics["loss"] == pytest.approx(0.693147, abs=1e-6)  # ln 2 at the first step


def test_accessing_results(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = GRPOTrainer.from_pretrained(
        "tiny", num_prompts_per_step=2, num_generations_per_prompt=2, **FEW
    )
    result = trainer.fit(dataset=MATH, reward_fn=my_fn, max_steps=1)

    # Access metrics
    print(f"Loss: {result.metrics['loss']}")
    print(f"Reward: {result.metrics.get('mean_reward', 'N/A')}")

    # Use checkpoint
    print(f"Best checkpoint: {result.best_checkpoint_path}")

    said = capsys.readouterr().out
    assert "N/A" not in said
    assert "Best checkpoint: None" not in said
    trainer.load_checkpoint(str(result.best_checkpoint_path))
    assert trainer.current_step == 1


def test_the_callback_example(capsys: pytest.CaptureFixture[str]) -> None:
    class MyCallback(Callback):
        def on_train_begin(self, trainer):
            print("Training started")

        def on_step_begin(self, trainer, step):
            pass

        def on_step_end(self, trainer, step, metrics):
            if step % 2 == 0:
                print(f"Step {step}: {metrics}")

        def on_epoch_end(self, trainer, epoch, metrics):
            print(f"Epoch {epoch} completed")

        def on_train_end(self, trainer, result):
            print(f"Training finished: {result.metrics}")

    trainer = GRPOTrainer.from_pretrained(
        "tiny", num_prompts_per_step=2, num_generations_per_prompt=2, max_epochs=1, **FEW
    )
    trainer.console = False
    # Use callback
    trainer.fit(
        dataset=MATH,
        reward_fn=my_fn,
        callbacks=[MyCallback()],
    )
    said = capsys.readouterr().out.splitlines()
    assert [line.split("{")[0].strip(": ") for line in said] == [
        "Training started", "Step 2", "Epoch 1 completed", "Training finished",
    ]  # fmt: skip


def advanced_config(tensor_parallel_size: int) -> dict[str, Any]:
    return {
        "policy": {
            "model_name": "tiny",
            "learning_rate": 1e-6,
            "dtensor_cfg": {
                "enabled": True,
                "tensor_parallel_size": tensor_parallel_size,
            },
        },
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
        },
    }


def test_the_advanced_configuration_s_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2.*set.*1"):
        GRPOTrainer(advanced_config(tensor_parallel_size=2))


def test_the_advanced_configuration_trains_in_one_process() -> None:
    config = advanced_config(tensor_parallel_size=1) | FEW
    trainer = GRPOTrainer(config)
    result = trainer.fit(dataset=MATH, reward_fn=my_fn)
    assert result.total_epochs == 1


def test_the_functional_api(capsys: pytest.CaptureFixture[str]) -> None:
    # List available algorithms
    print(list_algorithms())  # the page's three, and rloo
    assert capsys.readouterr().out == "['dpo', 'grpo', 'rloo', 'sft']\n"

    # Get trainer class
    GRPOCls = get_algorithm("grpo")
    assert GRPOCls is GRPOTrainer

    # Create trainer dynamically
    trainer = create_trainer(
        "grpo",
        model="tiny",
        learning_rate=1e-6,
    )
    assert isinstance(trainer, GRPOTrainer)
