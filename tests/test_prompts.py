"""Prompts: every form of row and file, and errors that name the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.assembly import Given, assemble
from retrain.config import Plugin, PromptsConfig, RunConfig
from retrain.errors import ConfigError, PromptError
from retrain.prompts import DatasetPrompts, FilePrompts, ListPrompts, PromptSource, Row, epoch_order
from retrain.prompts.preparing import prepared
from retrain.types import Prompt, Ticket


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, **keys: Any) -> str:
    with pytest.raises(PromptError) as caught:
        read(str(path), **keys)
    return str(caught.value)


def read(path: str, base_dir: Path | None = None, **keys: Any) -> PromptSource:
    """A file as `prompts` of a config reads it."""
    source = FilePrompts(path, keys.pop("format", None), base_dir)
    return prepared(source, PromptsConfig(type="file", **keys))


def hub(path: str, base_dir: Path, **keys: Any) -> PromptSource:
    return prepared(DatasetPrompts(path, base_dir=base_dir), PromptsConfig(type="hf", **keys))


def listed(rows: list[Any], **keys: Any) -> PromptSource:
    return prepared(ListPrompts(rows), PromptsConfig(type="list", **keys))


def test_a_tilde_that_names_no_user_is_a_letter(tmp_path: Path) -> None:
    assert "~no-user" in refused(Path("~no-user-of-this-name/rows.jsonl"))
    (tmp_path / "~mine").mkdir()
    file(tmp_path / "~mine", "rows.txt", "a=")
    assert len(read("~mine/rows.txt", base_dir=tmp_path)) == 1


def test_a_row_is_a_text_or_a_mapping() -> None:
    source = listed(
        [
            "plain",
            {"prompt": "asked", "answer": 5, "level": "hard"},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            {"prompt": [{"role": "user", "content": "as messages"}]},
        ]
    )
    assert [len(source.row(i).messages) for i in range(4)] == [1, 1, 2, 1]
    prompt = source.prompt(Ticket(2, 1, 3))
    assert (prompt.id, prompt.text, prompt.answer) == ("2.1.3", "asked", 5)
    assert prompt.metadata == {"level": "hard"}
    assert source.row(0).metadata == {}


def test_a_message_with_tool_calls_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    source = listed([{"messages": [{"role": "user", "content": "u"}, call]}])
    assert source.row(0).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (5, "`messages`"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "`prompt`"),
        ({"question": "a"}, "`messages`"),
        ({}, "its columns are none"),
        ({"prompt": 5}, "prompt: got 5"),
        ({"messages": ["a"]}, "messages[0]: got 'a'"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0]: got content [1]"),
    ],
)
def test_a_bad_row_is_named(row: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        listed(["good", row])
    assert str(caught.value).startswith("the list, row 1: ")
    assert message in str(caught.value)


ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", "\n".join(json.dumps(row) for row in ROWS) + "\n\n"),
        ("p.JSONL", "\ufeff" + "\n".join(json.dumps(row) for row in ROWS)),
        ("p.json", json.dumps(ROWS, indent=1)),
        ("p.csv", 'prompt,answer\none,1\n"two",2\n'),
    ],
)
def test_every_text_format_gives_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    source = read(str(file(tmp_path, name, text)))
    assert [source.prompt(Ticket(0, i)).text for i in range(len(source))] == ["one", "two"]
    assert [source.row(i).answer for i in range(len(source))] == ["1", "2"]


def test_an_empty_field_of_csv_is_null(tmp_path: Path) -> None:
    source = read(str(file(tmp_path, "p.csv", 'prompt,answer,level\none,,"2"\n')))
    assert (source.row(0).answer, source.row(0).metadata) == (None, {"level": "2"})


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    source = read(str(file(tmp_path, "p.txt", "one \n\ntwo\r\n")))
    assert [source.prompt(Ticket(0, i)).text for i in range(len(source))] == ["one ", "two"]


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"q": "one", "a": "1"}, {"q": "two", "a": "2"}])
    data.to_parquet(tmp_path / "p.parquet")
    data.save_to_disk(tmp_path / "saved")
    keys = {"prompt_column": "q", "answer_column": "a"}
    section = PromptsConfig(type="hf", limit=5, **keys)
    for source in (
        read("p.parquet", base_dir=tmp_path, **keys),
        hub("saved", tmp_path, **keys),
        hub("saved", tmp_path, limit=2, **keys),
        prepared(DatasetPrompts("saved", base_dir=tmp_path, streaming=True), section),
    ):
        assert [source.row(i).answer for i in range(len(source))] == ["1", "2"]
    with pytest.raises(PromptError, match=r"row 0.*`x`"):
        hub("saved", tmp_path, prompt_column="x")
    file(tmp_path, "bad.parquet", "not parquet")
    assert "invalid parquet" in refused(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", "is empty, expected at least one prompt"),
        ("p.jsonl", "\n\n", "is empty"),
        ("p.json", "", "is empty"),
        ("p.json", "[]", "is empty"),
        ("p.csv", "prompt,answer\n", "is empty"),
        ("p.jsonl", '"a"\n{"prompt": \n', "p.jsonl, line 2"),
        ("p.json", '[\n"a",\n}', "line 3"),
        ("p.jsonl", '"a"\n' + "[" * 10**5, "p.jsonl, line 2"),
        ("p.json", "[" * 10**5, "p.json"),
        (
            "p.json",
            '{"prompt": "a"}',
            "contains a dict, expected a list of rows; for one object per line",
        ),
        ("p.jsonl", '"a"\n\n5', "p.jsonl, line 3: got int"),
        ("p.csv", "prompt,answer\na,1,2\n", "line 2"),
        ("p.csv", "prompt,answer\na\n", "line 2"),
        ("p.csv", "a,b,a\n1,2,3\n", "two columns have the same name: a, b, a"),
        ("p.csv", f"long,answer\n{'x' * 200_000},1\n", "its columns are long, answer"),
        ("p.csv", "question,answer\na,1\n", "its columns are question, answer"),
        ("p.xyz", "a", "`format`"),
    ],
)
def test_a_bad_file_names_itself_and_the_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = file(tmp_path, name, text)
    found = refused(path)
    assert str(path) in found
    assert message in found


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "p.jsonl", json.dumps({"question": "q", "solution": "s"}))
    source = read(str(path), prompt_column="question", answer_column="solution")
    assert source.row(0).answer == "s"
    found = refused(path, prompt_column="question", answer_column="result")
    assert "`result`" in found


def test_a_file_is_looked_up_beside_the_config_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    here.mkdir()
    beside.mkdir()
    monkeypatch.chdir(here)
    file(here, "both.txt", "here")
    file(beside, "both.txt", "beside")
    file(here, "one.txt", "here")
    assert read("both.txt", base_dir=beside).prompt(Ticket(0, 0)).text == "beside"
    assert read("one.txt", base_dir=beside).prompt(Ticket(0, 0)).text == "here"
    with pytest.raises(PromptError, match=r"beside/no\.txt.*here/no\.txt"):
        read("no.txt", base_dir=beside)
    with pytest.raises(PromptError, match="is a folder, expected a file"):
        read(str(beside))
    (beside / "link.txt").symlink_to("gone.txt")
    with pytest.raises(PromptError, match=r"link\.txt.*gone\.txt"):
        read("link.txt", base_dir=beside)


def test_a_format_may_be_given(tmp_path: Path) -> None:
    path = file(tmp_path, "prompts", "one\ntwo")
    assert len(read(str(path), format="txt")) == 2
    (tmp_path / "latin").write_bytes(b"one\ntw\xe9\n")
    assert "line 2" in refused(tmp_path / "latin", format="txt")


def test_a_data_set_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(PromptError, match=r"dataset hollow \(train\): "):
        DatasetPrompts("hollow", base_dir=tmp_path)


@given(st.integers(0, 50), st.integers(1, 60), st.integers(0, 1000))
def test_every_epoch_is_a_permutation_and_repeats_itself(epoch: int, rows: int, seed: int) -> None:
    order = epoch_order(epoch, rows, seed, True)
    assert sorted(order) == list(range(rows))
    assert order == epoch_order(epoch, rows, seed, True)
    assert epoch_order(epoch, rows, seed, False) == range(rows)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(epoch, 20, seed, True)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
    assert list(epoch_order(0, 5, 0, True)) == [2, 3, 1, 0, 4]  # a resume on another machine agrees


class Own(PromptSource):
    """A source of the user's."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Any:
        if isinstance(self.rows[index], Exception):
            raise self.rows[index]
        return self.rows[index]


USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "row", ["hello", {"prompt": "hello"}, {"messages": USER}, Row(USER), Row(USER, None, {})]
)
def test_a_source_may_return_a_row_a_mapping_or_a_string(row: Any) -> None:
    plain = row == "hello" or "prompt" in row
    prompt = Prompt("0.0.0", tuple(USER), plain=plain)
    assert replace(Own(row).prompt(Ticket(0, 0)), seed=0) == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (5, "Own.row(0): got int, expected a string, or a mapping with `prompt` or `messages`"),
        ({"question": "a"}, "Own.row(0): column `prompt` or `messages` is missing"),
        ((USER, "a"), "Own.row(0): got tuple, expected a string"),
        (Row([]), "Own.row(0): messages is an empty list"),
        (Row(USER, None, [1]), "Own.row(0): metadata is list, expected a mapping"),
        (KeyError("x"), "Own.row(0) raised KeyError: 'x' (test_prompts.py:"),
    ],
)
def test_another_row_of_a_source_is_a_problem_of_the_config(row: Any, message: str) -> None:
    rows = [row, "good"] if isinstance(row, int | Exception) else ["good", row]
    config = RunConfig(prompts=Plugin(type="given"), environment=Plugin(type="echo"))
    with pytest.raises(ConfigError) as caught:
        assemble(config, Given(prompts=Own(*rows)))
    assert f"prompts: {message.replace('row(0)', f'row({rows.index(row)})')}" in str(caught.value)
