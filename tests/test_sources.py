"""Sources of prompts, and the keys that all of them have: filter, map, limit, held_out, ..."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from retrain.assembly import Parts, assemble
from retrain.config import parse_config
from retrain.errors import ConfigError
from retrain.prompts import PromptSource
from retrain.prompts import files as formats
from retrain.prompts.preparing import long_prompts

OWN = """
import itertools
def rows(n, start=0):
    for number in range(start, start + n):
        yield {"prompt": f"{number}=", "answer": str(number)}
def listed(n):
    return [f"{number}=" for number in range(n)]
def endless():
    return ({"prompt": f"{number}="} for number in itertools.count())
async def later(n):
    return ["a"]
def number():
    return 5
def even(row):
    return int(row["answer"]) % 2 == 0
def longer(row):
    return {"prompt": row["prompt"] * 2, "answer": row["answer"]}
def broken(row):
    return row["no"]
"""


def parts_of(folder: Path, prompts: Any, evaluated: Any = None, **sections: Any) -> Parts:
    (folder / "own.py").write_text(OWN)
    config = {"prompts": prompts, "rewards": "own.py:number", **sections}
    if evaluated is not None:
        config["eval"] = {"prompts": evaluated}
    return assemble(parse_config(config, folder))


def texts(source: PromptSource | None) -> list[str]:
    assert source is not None
    return [source.checked_row(i).messages[-1]["content"] for i in range(len(source))]


def sums(count: int) -> list[Mapping[str, Any]]:
    rows = range(count)
    return [{"q": f"{n}+1", "answer": f"{n} plus 1 #### {n + 1}", "level": n % 3} for n in rows]


COLUMN = {"type": "list", "prompt_column": "q"}


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ({"level": 1}, "14"),
        ({"level": [0, 2]}, "0235"),
        ({"level": {"min": 1}}, "1245"),
        ({"level": {"max": 1, "not": 0}}, "14"),
        ({"level": {"not": [0, 1]}}, "25"),
        ({"level": 1, "q": "4+1"}, "4"),
    ],
)
def test_a_filter_is_a_condition_on_columns(tmp_path: Path, condition: Any, kept: str) -> None:
    source = parts_of(tmp_path, {**COLUMN, "rows": sums(6), "filter": condition}).prompts
    assert texts(source) == [f"{n}+1" for n in kept]


@pytest.mark.parametrize(
    ("changes", "prompt", "answer"),
    [
        ({"answer": {"after": "####"}}, "0+1", "1"),
        ({"prompt": "Q: {q} {{q}} \\frac{1}{2}", "answer": "level"}, "Q: 0+1 {q} \\frac{1}{2}", 0),
        ({"result": {"column": "answer", "after": "plus"}, "answer": "q"}, "0+1", "0+1"),
        ({"messages": [{"role": "user", "content": "{q}?"}]}, "0+1?", "0 plus 1 #### 1"),
    ],
)  # fmt: skip
def test_a_map_makes_columns(tmp_path: Path, changes: Any, prompt: str, answer: Any) -> None:
    section = {"type": "list", "rows": sums(2), "map": {"prompt": "q", **changes}}
    if "messages" in changes:
        del section["map"]["prompt"]
    row = parts_of(tmp_path, section).prompts.checked_row(0)
    assert (row.messages[-1]["content"], row.answer) == (prompt, answer)


def test_functions_filter_and_map_before_the_limit(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,answer\n1=,1\n"2\n=",2\n3=,3\n\n4=,4\n6=,6\n')
    keys = {"filter": "own.py:even", "map": "own.py:longer", "limit": 2, "system": "Short."}
    source = parts_of(tmp_path, {"type": "file", "path": "rows.csv", **keys}).prompts
    assert texts(source) == ["2\n=2\n=", "4=4="]
    assert source.checked_row(0).messages[0] == {"role": "system", "content": "Short."}
    assert source.place(1) == f"{tmp_path / 'rows.csv'}, line 7"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"filter": {"size": 1}}, "`size`"),
        ({"filter": {"level": 7}}, "prompts"),
        ({"type": "mixture", "sources": [["a"]], "weights": [1]},
         "prompts.weights"),
        ({"origin": 1}, "prompts.origin"),
        ({"filter": {"level": {"least": 1}}}, "expected a value, a list of values, or a mapp"),
        ({"filter": "own.py:no"}, "prompts.filter"),
        ({"map": {"prompt": "text"}}, "`text`"),
        ({"map": {"prompt": "{text}"}}, "`text`"),
        ({"map": {"answer": {"after": "===="}}}, "'0 plus 1 #### 1' (map.answer)"),
        ({"map": {"answer": {"before": "="}}}, "map.answer: got {'before'"),
        ({"map": {"answer": {"column": "level", "after": "="}}}, "`level` is 0"),
        ({"map": "own.py:broken"}, "KeyError: 'no' (own.py"),
        ({"limit": 0}, "prompts.limit: got 0"),
        ({"held_out": 1}, "prompts.held_out: got 1"),
        ({"held_out": 0.99999}, "held_out: 0.99999"),
        ({"lmit": 2}, "prompts.limit"),
        ({"prompts_column": 2}, "prompts.prompts_column"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_one_clear_error(tmp_path: Path, section: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of(tmp_path, {**COLUMN, "rows": sums(4), **section})
    assert message in str(caught.value)


def test_empty_and_repeated_rows_are_counted_with_their_lines(tmp_path: Path) -> None:
    rows = ["a", "", "b", {"prompt": None}, "a", {"prompt": "c", "messages": None}, "a", "  "]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    parts = parts_of(tmp_path, "rows.jsonl")
    assert texts(parts.prompts) == ["a", "b", "a", "c", "a"]
    path, often = tmp_path / "rows.jsonl", "which is thus used more often than others"
    assert parts.warnings == (
        f"prompts: skipped 3 of 8 rows, whose prompt is empty: {path}, line 3, line 7, line 15",
        f"prompts: 2 of 5 rows repeat an earlier row, {often}: {path}, line 9, line 13",
    )


def test_held_out_rows_are_chosen_by_their_prompt(tmp_path: Path) -> None:
    rows = [f"{n}=" for n in range(200)]
    held = {"type": "held_out"}
    parts = parts_of(tmp_path, {"type": "list", "rows": rows, "held_out": 0.2}, held)
    out = texts(parts.eval_prompts)
    assert sorted(texts(parts.prompts) + out) == sorted(rows)
    assert 20 < len(out) < 60
    more = [{"prompt": text, "answer": 1} for text in [*rows[::-1], "new", *rows[:50]]]
    again = parts_of(tmp_path, {"type": "list", "rows": more, "held_out": 0.2}, held)
    assert set(texts(again.eval_prompts)) - {"new"} == set(out), "in another order, and repeated"
    limited = parts_of(
        tmp_path, {"type": "list", "rows": rows, "held_out": 0.2}, {**held, "limit": 3}
    )
    assert texts(limited.eval_prompts) == out[:3]
    few = parts_of(tmp_path, {"type": "list", "rows": ["a", "b"], "held_out": 0.01}, "held_out")
    assert len(texts(few.eval_prompts)) == len(texts(few.prompts)) == 1
    lost = parts_of(tmp_path, {"type": "list", "rows": rows, "held_out": 0.2}, None)
    assert "nothing evaluates on them" in str(lost.warnings)
    assert "nothing evaluates on them" not in str(parts.warnings)
    with pytest.raises(ConfigError, match=r"eval.prompts: got held_out.*prompts.held_out"):
        parts_of(tmp_path, ["a"], "held_out")


def test_a_pattern_stands_for_several_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, rows in (("b.jsonl", '"c"\n\n"d"\n'), ("a.jsonl", '"a"\n"b"\n')):
        (tmp_path / "data" / name).write_text(rows)
    source = parts_of(tmp_path, "data/*.jsonl").prompts
    assert texts(source) == ["a", "b", "c", "d"]
    assert source.place(3) == "data/*.jsonl, b.jsonl, line 3"
    with pytest.raises(ConfigError, match=r"/data/\*\.json"):
        parts_of(tmp_path, "data/*.json")
    with pytest.raises(ConfigError, match=r"data/\*\.jsonl"):
        parts_of(tmp_path, {"type": "file", "path": "data/"})


def test_a_large_file_is_read_by_index_and_must_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "IN_MEMORY", 10)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'"{n}="\n' for n in range(50)))
    source = parts_of(tmp_path, "rows.jsonl").prompts
    assert texts(source) == [f"{n}=" for n in range(50)]
    path.write_text('"new"\n' * 60)
    with pytest.raises(ConfigError, match=r"rows.jsonl"):
        source.checked_row(7)


def test_parquet_is_read_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(formats, "CACHED", 1)
    table = arrow.table({"prompt": [f"{n}=" for n in range(10)], "answer": list(range(10))})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    source = parts_of(tmp_path, "rows.parquet").prompts
    assert [source.checked_row(i).answer for i in (9, 0, 4, 3, 8)] == [9, 0, 4, 3, 8]
    assert texts(source) == [f"{n}=" for n in range(10)]


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"type": "own.py:rows", "n": 3, "start": 2}, ["2=", "3=", "4="]),
        ({"type": "own.py:listed", "n": 2}, ["0=", "1="]),
        ({"type": "own.py:endless", "limit": 2}, ["0=", "1="]),
        ({"type": "own.py:rows", "n": 9, "filter": "own.py:even", "limit": 3}, ["0=", "2=", "4="]),
    ],
)
def test_a_function_may_yield_the_rows(tmp_path: Path, section: Any, found: list[str]) -> None:
    assert texts(parts_of(tmp_path, section).prompts) == found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "own.py:rows"}, "(own.py:3)"),
        ({"type": "own.py:rows", "n": 1, "size": 1}, "prompts.size"),
        ({"type": "own.py:rows", "n": 0}, "prompts: own.py:rows"),
        ({"type": "own.py:number"}, "prompts: own.py:number"),
        ({"type": "own.py:later", "n": 1}, "own.py:later"),
        ({"type": "own.py:endless"}, "own.py:endless"),
    ],
)  # fmt: skip
def test_a_function_that_yields_no_rows_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: Any, message: str
) -> None:
    monkeypatch.setattr("retrain.prompts.sequences.MOST", 100)
    with pytest.raises(ConfigError) as caught:
        parts_of(tmp_path, section)
    assert message in str(caught.value)


def mixture(*sources: Any, **keys: Any) -> dict[str, Any]:
    return {"type": "mixture", "sources": list(sources), **keys}


LETTERS = {"type": "list", "name": "letters", "rows": [f"{c}=" for c in "abcdefg"], "weight": 2}


def test_a_mixture_has_exact_shares(tmp_path: Path) -> None:
    numbers = {"type": "own.py:rows", "n": 30}
    source = parts_of(tmp_path, mixture(LETTERS, numbers)).prompts
    assert len(source) == 37
    assert source.epoch_length == len(source.order(0, 0, True)) == 7 + 4
    assert source.checked_row(0).metadata == {"mixture": "letters"}
    assert (source.place(0), source.place(9)) == ("the list, row 0", "own.py:rows, row 2")
    assert source.checked_row(36).metadata == {"mixture": "own.py:rows"}
    for shuffle in (True, False):
        epochs = [source.order(epoch, 5, shuffle) for epoch in range(15)]
        assert epochs == [source.order(epoch, 5, shuffle) for epoch in range(15)]
        assert all(len(set(order)) == len(order) for order in epochs), "a ticket is issued once"
        for order in epochs:
            for end in range(1, len(order)):
                assert abs(sum(row < 7 for row in order[:end]) - end * 2 / 3) <= 1
        used = Counter(row for order in epochs for row in order)
        assert {used[row] for row in range(7)} == {15}
        assert {used[row] for row in range(7, 37)} == {2}, "each row before any again"
    assert source.order(0, 5, True) != source.order(1, 5, True) != source.order(1, 6, True)
    assert list(source.order(0, 5, False))[:6] == [0, 7, 1, 2, 8, 3]


def test_a_mixture_holds_out_rows_of_each_source(tmp_path: Path) -> None:
    numbers = {"type": "own.py:rows", "n": 30, "map": {"prompt": "{prompt}?"}}
    keys = {"held_out": 0.3, "system": "Short."}
    parts = parts_of(tmp_path, mixture(LETTERS, numbers, **keys), "held_out")
    out = texts(parts.eval_prompts)
    assert {text[0].isalpha() for text in out} == {True, False}
    assert not set(out) & set(texts(parts.prompts))
    assert len(out) + len(parts.prompts) == 37
    assert parts.prompts.checked_row(0).messages[0]["content"] == "Short."


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (mixture(), "prompts"),
        (mixture({**LETTERS, "weight": 0}), "prompts.sources.0.weight: got 0"),
        (mixture(LETTERS, {"type": "list"}), "prompts.sources.1.rows"),
        (mixture(LETTERS, {"type": "file", "path": "no.txt"}), "prompts.sources.1"),
        (mixture(mixture(LETTERS)), "prompts.sources.0.type: got mixture"),
        ({"type": "mixture"}, "prompts.sources"),
    ],
)  # fmt: skip
def test_a_wrong_mixture_names_the_source(tmp_path: Path, section: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of(tmp_path, section)
    assert message in str(caught.value)


def test_a_mixture_of_demonstrations_is_trained_in_its_order(tmp_path: Path) -> None:
    answered = {**LETTERS, "map": {"answer": "{prompt}!"}}
    numbers = {"type": "own.py:rows", "n": 30}
    sections = {"algorithm": "sft", "rewards": []}
    prompts = parts_of(tmp_path, mixture(answered, numbers), **sections).prompts
    assert prompts.epoch_length == 11
    assert prompts.checked_row(0).answer == (({"role": "assistant", "content": "a=!"},),)


def test_only_prompts_that_may_be_too_long_are_tokenised(tmp_path: Path) -> None:
    rows = ["a" * n for n in (1, 30, 5, 40, 31)]
    source = parts_of(tmp_path, rows).prompts
    seen = []

    def tokens(messages: Any) -> int:
        seen.append(len(messages[-1]["content"]))
        return seen[-1]

    assert long_prompts(source, tokens, 30) == (
        "2 of 5 prompts have more than 30 tokens: the list, row 3, row 4"
    )
    assert sorted(seen) == [1, 30, 31, 40], "the first one, and those of at least 30 bytes"
    assert long_prompts(source, tokens, 50) == ""


def test_without_the_hub_the_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach\n'nobody/nothing' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError) as caught:
        parts_of(tmp_path, {"type": "hf", "path": "nobody/nothing", "revision": "v1"})
    assert str(caught.value) == (
        "prompts: dataset nobody/nothing (train): no such folder, and the Hub can't be reached "
        "(ConnectionError: Couldn't reach 'nobody/nothing' on the Hub); check the network, or "
        "download the dataset and give its folder"
    )
