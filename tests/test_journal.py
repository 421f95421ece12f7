"""Lines of JSON: every value is one line, and damaged lines are cut, passed over or named."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.errors import RunError
from retrain.observe import journal
from retrain.observe.journal import Journal, encode, read_lines, repair


def test_numbers_that_json_lacks_become_null_and_are_named() -> None:
    line = json.loads(encode({"loss": math.nan, "rewards": {"a": math.inf, "b": 1.0}}))
    assert line == {
        "loss": None,
        "rewards": {"a": None, "b": 1.0},
        "nonfinite": {"loss": "nan", "rewards.a": "inf"},
    }


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_values_that_json_lacks_are_written_all_the_same() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    line = json.loads(
        encode(
            {
                "bytes": b"x",
                "path": Path("a/b"),
                "mapping": types.MappingProxyType({"k": 1}),
                "keys": {(1, 2): 3, 4: 5},
                "bad": Unprintable(),
                "cyclic": cyclic,
                "set": {1},
                "numbers": [numpy.float32(0.5), numpy.int64(3)],
            }
        )
    )
    assert line["bytes"] == "b'x'"
    assert line["path"] == "a/b"
    assert line["mapping"] == {"k": 1}
    assert line["keys"] == {"(1, 2)": 3, "4": 5}
    assert line["bad"] == "<Unprintable: its repr raised RuntimeError>"
    assert line["set"] == "{1}"
    assert line["numbers"] == [0.5, 3]
    assert "cyclic" in line


def test_a_lone_surrogate_and_odd_line_ends_stay_one_line(tmp_path: Path) -> None:
    text = "\udc80 \u2028 \x85 \r\n é 漢"
    (tmp_path / "x.jsonl").write_bytes(encode({"text": text}) + b'\n{"torn')
    assert list(read_lines(tmp_path / "x.jsonl")) == [{"text": text}]
    (tmp_path / "x.jsonl").read_bytes().decode("utf-8")


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_like, max_size=4))
def test_every_line_is_one_line_of_valid_json(line: dict[str, Any]) -> None:
    text = encode(line)
    assert b"\n" not in text
    json.loads(text, parse_constant=pytest.fail)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\0\0\n{"a":2}\n')
    with pytest.raises(RunError, match=r"x\.jsonl, line 2"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (b"torn", b""),
        (b"whole\n", b"whole\n"),
        (b"whole\ntorn", b"whole\n"),
        (b"whole\n" + b"x" * 200_000, b"whole\n"),
    ],
)
def test_repair_cuts_after_the_last_whole_line(tmp_path: Path, content: bytes, left: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    repair(path)
    assert path.read_bytes() == left


def test_many_lines_go_out_without_a_flush(tmp_path: Path) -> None:
    lines = Journal(tmp_path / "x.jsonl")
    for number in range(journal.CHUNK_LINES):
        lines.write(encode({"n": number}))
    assert len(list(read_lines(tmp_path / "x.jsonl"))) == journal.CHUNK_LINES
    lines.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel has no always-full device")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    full = tmp_path / "events.jsonl"
    full.symlink_to("/dev/full")
    lines = Journal(full)
    lines.write(encode({"n": 1}))
    with pytest.raises(RunError, match=r"events\.jsonl"):
        lines.flush()
    with pytest.raises(RunError, match="No space left"):
        lines.close()
    lines.close()
