"""What a trainer trains on: files, tables, rows, columns and data modules."""

import json

import pytest

from retrain import Environment
from retrain.errors import ConfigError, NotFoundError, PromptError
from retrain.trainer import DPOTrainer, SFTTrainer
from tests.trainer_kit import ROWS, SMALL, grpo, variety

pytestmark = pytest.mark.usefixtures("own_folder")


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
        ([{"text": "a", "label": 1}], PromptError, "row 0"),
        ([*ROWS, {"answer": "a"}], PromptError, "row 4.*`prompt`.*`messages`"),
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
    ("mapping", "text"), [({"q": "promt"}, "'promt'"), ({"question": "prompt"}, "row 0")]
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
