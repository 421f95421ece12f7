"""Rows of a dataset in the form that they are trained in: demonstrations and pairs."""

import json
import tracemalloc

import pytest

from retrain.algorithms.dpo import DPO
from retrain.algorithms.sft import SFT
from retrain.config import PromptsConfig
from retrain.errors import PromptError
from retrain.prompts import ListPrompts
from retrain.prompts.examples import Demonstrations, Pairs
from retrain.prompts.preparing import prepared
from retrain.prompts.sources.file import FilePrompts

ASK = {"role": "user", "content": "2+3?"}
SAY = {"role": "assistant", "content": "5"}


def source(rows, keys):
    return prepared(ListPrompts(list(rows)), PromptsConfig(type="list", **keys))


def demonstrations(*rows, **keys) -> Demonstrations:
    return Demonstrations.of(source(rows, keys))


def pairs(*rows, pair_by=None, **keys) -> Pairs:
    return Pairs.of(source(rows, keys), pair_by)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "2+3?", "answer": "5"}, {}),
        ({"prompt": "2+3?", "response": "5"}, {}),
        ({"prompt": "2+3?", "completion": "5", "answer": None}, {}),
        ({"prompt": [ASK], "completion": [SAY]}, {}),
        ({"messages": [ASK, SAY]}, {}),
        ({"messages": [ASK], "answer": "5"}, {}),
        ({"problem": "2+3?", "solution": "5"}, {"prompt_column": "problem",
                                                "answer_column": "solution"}),
    ],
)  # fmt: skip
def test_the_usual_columns_make_one_and_the_same_demonstration(row, keys):
    made = demonstrations(row, **keys).row(0)
    assert list(made.messages) == [ASK]
    assert [list(said) for said in made.answer] == [[SAY]]


def test_of_a_conversation_every_assistant_turn_is_a_part_of_the_continuation():
    system = {"role": "system", "content": "Be short."}
    again = {"role": "user", "content": "And 2+4?"}
    then = {"role": "assistant", "content": "6"}
    row = {"messages": [system, ASK, SAY, again, then, {"role": "user", "content": "Thanks"}]}
    made = demonstrations(row).row(0)
    assert list(made.messages) == [system, ASK]
    assert [list(said) for said in made.answer] == [[SAY, again, then]]


def test_an_assistant_turn_in_the_prompt_is_context_where_an_answer_is_given():
    again = {"role": "user", "content": "And 2+4?"}
    made = demonstrations({"prompt": [ASK, SAY, again], "answer": "6"}).row(0)
    assert list(made.messages) == [ASK, SAY, again]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("just a text", "has no assistant tokens"),
        ({"messages": [ASK]}, "has no assistant tokens, so there is nothing to learn"),
        ({"prompt": "2+3?", "answer": " "}, "has no assistant tokens: the answer is empty"),
        ({"prompt": "2+3?", "answer": [ASK]}, "has no assistant tokens: the answer contains no"),
        ({"prompt": "2+3?", "answer": 5}, "the answer: got 5, expected a string or a list"),
        ({"messages": [SAY]}, "its first message is the assistant's"),
        ({"messages": [ASK, SAY, SAY]}, "two assistant messages in a row"),
        ({"prompt": "2+3?", "answer": [{"role": "assistant"}]}, "no content"),
    ],
)
def test_a_row_without_anything_to_imitate_is_an_error_that_names_it(row, message):
    with pytest.raises(PromptError, match="row 1") as caught:
        demonstrations({"prompt": "a", "answer": "b"}, row)
    assert message in str(caught.value)


def test_a_pair_is_the_prompt_and_two_answers_that_may_repeat_it():
    row = {"prompt": "2+3?", "chosen": [ASK, SAY], "rejected": "6"}
    made = pairs(row).row(0)
    assert list(made.messages) == [ASK]
    assert [list(said) for said in made.answer] == [[SAY], [{"role": "assistant", "content": "6"}]]


def test_pairs_of_equal_answers_are_dropped_and_counted():
    made = pairs(
        {"prompt": "a", "chosen": "x", "rejected": "y"},
        {"prompt": "b", "chosen": "x", "rejected": "x"},
    )
    assert len(made) == 1
    assert made.dropped == {"chosen equals rejected": 1}
    with pytest.raises(PromptError, match="no pair in 1 rows: 1 x chosen equals"):
        pairs({"prompt": "b", "chosen": "x", "rejected": "x"})


SCORED = [
    {"prompt": "a", "response": "good", "helpfulness": 4, "verbosity": 1},
    {"prompt": "a", "response": "bad", "helpfulness": 1, "verbosity": 2},
    {"prompt": "b", "response": "this", "helpfulness": 2, "verbosity": 0},
    {"prompt": "b", "response": "that", "helpfulness": 2, "verbosity": 3},
    {"prompt": "c", "response": "alone", "helpfulness": 3, "verbosity": 3},
    {"prompt": "d", "response": "middle", "helpfulness": 2, "verbosity": 1},
    {"prompt": "d", "response": "worst", "helpfulness": 0, "verbosity": 1},
    {"prompt": "d", "response": "best", "helpfulness": 3, "verbosity": 1},
]
"""As HelpSteer2's rows are: single responses with integer scores, some to one prompt."""


def test_scored_responses_are_paired_best_with_worst_of_each_prompt():
    made = pairs(*SCORED, pair_by="helpfulness")
    said = [[answer[0]["content"] for answer in made.row(i).answer] for i in range(len(made))]
    assert said == [["good", "bad"], ["best", "worst"]]
    assert made.dropped == {"equal helpfulness": 1, "only one response to the prompt": 1}


@pytest.mark.parametrize(
    ("rows", "pair_by", "message"),
    [
        ([{"prompt": "a", "chosen": "x"}], None,
         "has no rejected; its other columns are chosen; expected prompt, chosen"),
        (SCORED, None, "has no chosen and no rejected; its other columns are response, help"),
        (SCORED, None, "algorithm.pair_by"),
        (SCORED, "quality", "'quality' (algorithm.pair_by)"),
        ([{"prompt": "a", "score": 1}], "score", "has no answer, response or completion;"),
    ],
)  # fmt: skip
def test_rows_that_make_no_pair_are_refused_with_the_columns_found(rows, pair_by, message):
    with pytest.raises(PromptError, match="row 0: ") as caught:
        pairs(*rows, pair_by=pair_by)
    assert message in str(caught.value)


def test_rows_that_are_in_form_already_stay_as_they_are():
    for algorithm, row in (
        (SFT(), {"prompt": "a", "answer": "b"}),
        (DPO(), {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ):
        formed = algorithm.rows(ListPrompts([row]))
        assert algorithm.rows(formed) is formed


def test_a_million_examples_take_the_memory_of_their_indices(tmp_path):
    """The rows of a file: 8 bytes each, not the messages."""
    file = tmp_path / "rows.jsonl"
    for algorithm, row in (
        (SFT(), {"prompt": "a", "answer": "b" * 99}),
        (DPO(), {"prompt": "a", "chosen": "b" * 99, "rejected": "c"}),
        (DPO(pair_by="score"), None),
    ):
        rows = [row] * 1000 if row else [
            {"prompt": str(n // 2), "response": "b" * 99 + str(n), "score": n} for n in range(2000)
        ]  # fmt: skip
        file.write_text("\n".join(map(json.dumps, rows)))
        source = FilePrompts(str(file))
        tracemalloc.start()
        made = algorithm.rows(source)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(made) == 1000
        assert made.row(999).answer[0][0]["content"].startswith("b" * 99)
        assert made.place(999) == f"{file}, line {1000 if row else 2000}"
        assert kept < 100_000


CALC = {"name": "calc", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("calc", "expected JSON"),
        ({"calc": 1}, "list of tools"),
        ("[" * 10**5, "expected JSON"),
        (["calc"], "'calc'"),
        ([CALC, CALC], "two tools"),
        ([{**CALC, "parameters": {"type": "text"}}], "type: 'text' is not one of"),
    ],
)
def test_tools_that_are_none_are_refused_with_their_row(tools, complaint):
    with pytest.raises(PromptError, match=f"row 0: .*{complaint}"):
        demonstrations({"messages": [ASK, SAY], "tools": tools})
