"""What a run is put together from is checked before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.algorithms.grpo import GRPO
from retrain.errors import PluginError
from tests.plugin_kit import make, problems, written

pytestmark = pytest.mark.usefixtures("clean_imports")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def test_a_run_is_put_together(folder: Path) -> None:
    parts = make(
        folder,
        environment={"type": "mine.py:Mine", "size": 3},
        algorithm={"type": "grpo", "baseline": "leave_one_out", "loss_config": {"epsilon": 0.1}},
        eval={"prompts": ["b", {"prompt": "c", "answer": "c"}]},
    )
    assert len(parts.prompts) == 1
    assert parts.eval_prompts is not None
    assert len(parts.eval_prompts) == 2
    assert parts.environment() is not parts.environment()
    assert isinstance(parts.algorithm, GRPO)
    assert (parts.loss, parts.normalisation) == ("dapo", None)
    assert parts.loss_config == {"epsilon": 0.1}
    assert "dapo" in parts.capabilities.losses
    assert parts.scorer.rewards[0].name == "exact_match"
    assert parts.warnings == ()


def test_an_environments_constructor_that_raises_is_a_config_error(folder: Path) -> None:
    (folder / "e.py").write_text(
        "from retrain import Environment\n"
        "class E(Environment):\n    def __init__(self): raise KeyError('HOME')"
    )
    assert "environment: E(...) raised KeyError: 'HOME' at " in problems(
        folder, environment="e.py:E"
    )


def test_the_problems_of_all_parts_come_together(folder: Path) -> None:
    message = problems(
        folder,
        environment={"type": "mine.py:Mine", "siz": 3},
        rewards=["exact_mach"],
        algorithm={"type": "grpo", "baselin": "mean"},
        backend={"type": "trl", "learning_rat": 1},
        prompts={"type": "file", "path": "gone.jsonl"},
        model="./nowhere",
    )
    for part in (
        "environment.siz: unknown key; did you mean environment.size?",
        "environment.size: missing",
        "did you mean exact_match?",
        "algorithm.baselin: unknown key; did you mean algorithm.baseline?",
        "backend.learning_rat: unknown key; did you mean backend.learning_rate?",
        "prompts: file not found",
        "model: folder not found:",
    ):
        assert part in message


def test_foreign_keys_inside_plug_in_sections_are_explained(folder: Path) -> None:
    message = problems(
        folder,
        algorithm={"type": "grpo", "hyperparameters": {"learning_rate": 1, "num_generations": 2}},
        environment={"type": "mine.py:Mine", "size": 1, "env_specific_config": {"mode": "x"}},
        backend={"type": "trl", "loss_fn": "ppo"},
    )
    for part in (
        "algorithm.hyperparameters.learning_rate: unknown key; use backend.learning_rate",
        "algorithm.hyperparameters.num_generations: unknown key; use algorithm.group_size",
        "environment.env_specific_config.mode: unknown key; use environment.mode",
        "backend.loss_fn: unknown key; use algorithm.loss",
    ):
        assert part in message


LIMITED = """
from retrain import AdapterOptions, Capabilities
class Options(AdapterOptions):
    adapter = "nowhere:Adapter"
    def capabilities(self):
        return Capabilities(losses=frozenset({"ppo", "importance_sampling", "dro"}),
                            max_staleness=3, sampling=frozenset({"max_tokens", "temperature"}))
    def problems(self, config):
        return ["backend: from problems()"] if config.train.seed == 13 else []
"""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "'dapo'"),
        ({"algorithm": {"loss": "pp"}}, "the loss 'pp'; the nearest is ppo"),
        ({"algorithm": {"loss": "my.py:loss"}}, "does not support custom losses"),
        ({"algorithm": {"loss": "dro", "normalisation": "sequence"}}, "can't be normalised by seq"),
        ({"algorithm": {"group_size": 1}}, "algorithm.group_size: got 1"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k: got 5"),
        ({"sampling": {"stop": ["x"]}}, "sampling.stop: got ('x',)"),
        ({"staleness": {"target": 2}}, "staleness.max: got 6"),
        ({"train": {"seed": 13}}, "backend"),
        ({"rewards": []}, "rewards"),
        (
            {"algorithm": {"loss": "importance_sampling"}, "staleness": {"target": 2, "max": 3}},
            "importance_sampling",
        ),
        ({"endpoint": {"honour": ["stop"]}}, "endpoint.honour: got stop"),
    ],
)
def test_what_the_backend_cannot_honour_is_refused(
    folder: Path, sections: dict[str, Any], message: str
) -> None:
    (folder / "limited.py").write_text(LIMITED)
    base = {"backend": "limited.py", "algorithm": {"loss": "ppo"}} if sections else {}
    assert message in problems(folder, **{"backend": "limited.py", **base, **sections})


def test_the_rewards_of_an_agent_may_be_its_own(folder: Path) -> None:
    (folder / "solve.py").write_text("def solve(base_url):\n    return {'reward': 1.0}")
    make(folder, rewards=[], environment={"type": "agent", "run": "solve.py:solve"})


def test_an_unclipped_loss_on_old_samples_can_be_forced(folder: Path) -> None:
    parts = make(
        folder,
        algorithm={"loss": "importance_sampling", "loss_config": {"force": True}},
        staleness={"target": 2},
    )
    assert (parts.loss, parts.normalisation, parts.loss_config) == (
        "importance_sampling",
        "token",
        {},
    )


def test_a_normalisation_beside_trls_own_loss_is_refused(folder: Path) -> None:
    message = problems(folder, algorithm={"loss": "dapo", "normalisation": "token"})
    assert "dapo" in message


def test_seldom_meant_sampling_is_warned_of(folder: Path) -> None:
    (folder / "limited.py").write_text(LIMITED)
    backend = {"backend": "limited.py", "algorithm": {"loss": "ppo"}}
    (warm,) = make(folder, sampling={"temperature": 0.7}, **backend).warnings
    assert warm.startswith("sampling with temperature 0.7: ppo weighs tokens by the ratio")
    (greedy,) = make(folder, sampling={"temperature": 0}, **backend).warnings
    assert "the rollouts of a group are equal" in greedy


def test_a_short_name_of_a_key_beside_it_is_no_misspelling(folder: Path) -> None:
    message = problems(folder, backend={"lr": 4})
    assert message == "backend.lr: unknown key; use backend.learning_rate"
    message = problems(folder, backend={"args": {"optimm": 1}})
    assert message.endswith("has no key 'optimm' (did you mean 'optim'?)")


def test_rows_without_the_answer_that_a_reward_asks_for_are_warned_of(folder: Path) -> None:
    (folder / "bare.txt").write_text("a\nb\n")
    (folder / "mild.py").write_text("def mild(completion, answer=None): return 0.0")
    (warning,) = make(folder, prompts="bare.txt").warnings
    assert warning.startswith(f"prompts: no row of {folder / 'bare.txt'} has an answer, but the re")
    assert "exact_match" in warning
    (warning,) = make(folder, eval={"prompts": ["b"]}).warnings
    assert warning.startswith("eval.prompts: no row of the list has an answer")
    assert make(folder, prompts="bare.txt", rewards="mild.py").warnings == ()


def test_credit_per_turn_that_clip_disables_is_warned_of(folder: Path) -> None:
    turns, clipped = {"type": "grpo", "credit": "turns"}, {"type": "environment", "clip": [0, 1]}
    (warning,) = make(folder, algorithm=turns, rewards=[clipped]).warnings
    assert warning.startswith("rewards.0.clip: ")
    assert make(folder, algorithm={"type": "grpo"}, rewards=[clipped]).warnings == ()


def test_a_stall_shorter_than_another_deadline_is_warned_of(folder: Path) -> None:
    assert make(folder, deadlines={"stall": 3600, "blocked": 9000}).warnings == ()
    (warning,) = make(folder, deadlines={"stall": 1800, "step": 2000}).warnings
    assert warning.startswith(
        "deadlines.stall is 1800 s, less than deadlines.step (2000), sample (3600), update (3600): "
    )
    assert "3600" in warning


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./gone", "model"),
        ("/gone/model", "/gone/model"),
        ("a/b/c", "model"),
        ("  ", "model: got '  '"),
        ("hollow", "config.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused(folder: Path, model: str, message: str) -> None:
    (folder / "hollow").mkdir()
    assert message in problems(folder, model=model)


def test_a_hub_id_is_left_to_the_backend(folder: Path) -> None:
    assert make(folder, model="Qwen/Qwen3-0.6B").config.model == "Qwen/Qwen3-0.6B"


def test_a_backend_whose_library_is_missing_says_what_to_install(folder: Path) -> None:
    (folder / "limited.py").write_text(LIMITED.replace('"nowhere:', '"needs:'))
    (folder / "needs.py").write_text("import surely_not_there")
    parts = make(folder, backend="limited.py", algorithm={"loss": "ppo"})
    with pytest.raises(PluginError, match="surely_not_there"):
        parts.open_adapter()
