"""Python functions and classes as tools, turn by turn and in whole rollouts."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import threading
import urllib.error
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from environments.tools import Tools
from retrain import ConfigError, Prompt, ToolError, find_object
from retrain.chat.tools import check_tools
from retrain.check import check_environment
from retrain.pipeline.meter import Meter
from retrain.types import Group, Trajectory
from tests.tools_kit import PROMPT, ROOT, answers, played, reply, written

HERE = Path(__file__)
CALC = "configs/tools/calculator.py:calc"
calculate = find_object("configs/tools/calculator.py:calculate", ROOT, "")
together = asyncio.Barrier(2)
in_threads = threading.Barrier(2, timeout=30)


@dataclass
class Item:
    name: str
    count: int = 1


async def search(query: str, *, limit: int = 2, kind: Literal["page", "book"] = "page") -> list:
    """Search the pages.

    A second paragraph.

    Args:
        query: What to
            find.

    Returns:
        The titles.
    """
    return [query.title(), kind][:limit]


def order(item: Item, tags: list[str] | None = None) -> str:
    """Order an item."""
    return f"{item.count} {item.name} {tags}"


def broken(kind: str) -> str:
    """Raise an error."""
    if kind == "timeout":
        raise TimeoutError
    if kind == "cause":
        raise ValueError("wrapped") from ConnectionResetError("lost")
    raise {
        "value": ValueError("a bad value"),
        "tool": ToolError("try a number"),
        "refused": ConnectionRefusedError("nobody listens"),
        "404": urllib.error.HTTPError("", 404, "Not Found", None, None),  # type: ignore[arg-type]
        "503": urllib.error.HTTPError("", 503, "Busy", None, None),  # type: ignore[arg-type]
    }[kind]


async def meet(name: str) -> str:
    """Return when two calls are under way."""
    await together.wait()
    return name


def meet_in_threads(name: str) -> str:
    """Return when two calls are under way."""
    in_threads.wait()
    return name


async def hang() -> None:
    """Never return."""
    await asyncio.Event().wait()


def give(text: str, times: int = 1) -> Any:
    """Return a text many times, or an object."""
    return object if text == "object" else text * times


class Shop:
    """What a rollout buys; the methods are tools."""

    closed: list[list[str]] = []  # noqa: RUF012 - of all rollouts

    def __init__(self, prompt: Prompt) -> None:
        self.budget = prompt.metadata["n"]
        self.thread = threading.get_ident()
        self.rows = sqlite3.connect(":memory:")  # may only be used in the thread that opened it
        self.rows.execute("create table bought (item text)")
        self.info: dict[str, Any] = {}

    async def setup(self) -> None:
        self.info["ready"] = True

    def buy(self, item: str) -> str:
        """Buy an item."""
        self.rows.execute("insert into bought values (?)", [item])
        self.info["bought"] = self.bought_so_far()
        return f"{self.budget - len(self.info['bought'])} left"

    async def look(self) -> dict[str, Any]:
        """Show what is bought."""
        return self.info

    def bought_so_far(self) -> list[str]:
        """List what is bought."""
        assert threading.get_ident() == self.thread
        return [item for (item,) in self.rows.execute("select item from bought")]

    def _hidden(self) -> None: ...

    def close(self) -> None:
        self.closed.append(self.bought_so_far())
        self.rows.close()


class Stuck:
    """What never closes."""

    def noop(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def tools(*names: str, **keys: Any) -> Tools:
    return Tools(tools=[n if ".py" in n else f"{HERE}:{n}" for n in names], base_dir=ROOT, **keys)


async def ready(*names: str, **keys: Any) -> Tools:
    environment = tools(*names, **keys)
    await environment.reset(PROMPT)
    return environment


def test_a_signature_and_a_docstring_describe_the_tool() -> None:
    found = [tool.as_template()["function"] for tool in tools("search", "order", "Shop").tools]
    assert found[0] == {
        "name": "search",
        "description": "Search the pages.\n\nA second paragraph.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to find."},
                "limit": {"type": "integer", "default": 2},
                "kind": {"type": "string", "enum": ["page", "book"], "default": "page"},
            },
            "required": ["query"],
        },
    }
    assert found[1]["parameters"]["properties"]["item"] == {"$ref": "#/$defs/Item"}
    assert [tool["name"] for tool in found[2:]] == ["buy", "look", "bought_so_far"]
    assert found[3]["parameters"] == {"type": "object", "properties": {}}
    check_tools(tools("search", "order", "Shop").tools)


async def test_calls_are_answered_in_order_and_a_reply_without_calls_ends_the_episode() -> None:
    environment = await ready("search", "order", CALC)
    assert await answers(
        environment,
        ("order", {"item": {"name": "pen", "count": 2}, "tags": ["a"]}),
        ("search", {"query": "the sea", "limit": 1}),
        ("calc", {"x": "1/0"}),
        ("calc", {"x": "2*(3+4)"}),
        ("order", {"item": {"name": 5}}),
    ) == [
        "2 pen ['a']",
        '["The Sea"]',
        "error: ZeroDivisionError: Fraction(1, 0)",
        "14",
        "error: item.name: Input should be a valid string",
    ]
    last = await environment.step(reply())
    assert (last.observation, last.reward, last.terminated, last.truncated) == ([], 0, True, False)
    assert last.info == {"tool_calls": 5, "tool_errors": 2}


@pytest.mark.parametrize("name", ["meet", "meet_in_threads"])
async def test_the_calls_of_a_reply_run_at_the_same_time(name: str) -> None:
    environment = await ready(name)
    calls = [(name, {"name": letter}) for letter in "ab"]
    async with asyncio.timeout(30):
        assert await answers(environment, *calls) == ["a", "b"]


async def test_each_rollout_has_an_object_of_its_own_that_knows_the_prompt() -> None:
    closed = find_object(f"{HERE}:Shop", ROOT, "").closed
    closed.clear()
    first, second = await ready("Shop"), await ready("Shop")
    calls = [("buy", {"item": item}) for item in "abc"]
    assert await answers(first, *calls) == ["2 left", "1 left", "0 left"]
    assert await answers(second, ("look", {})) == ['{"ready": true}']
    assert (await first.step(reply())).info["bought"] == ["a", "b", "c"]
    assert closed == [["a", "b", "c"]], "the episode is over"
    await first.reset(PROMPT)
    assert await answers(first, ("bought_so_far", {})) == ["[]"]
    await first.close()
    await second.close()
    await second.close()
    assert closed[1:] == [[], []]


@pytest.mark.parametrize("limit", [0.05, 60.0])
async def test_an_object_that_does_not_close_holds_up_no_other(limit: float) -> None:
    closed = find_object(f"{HERE}:Shop", ROOT, "").closed
    environment = await ready("Stuck", "Shop", tool_seconds=limit)
    idents = {state.state.thread for state in environment.objects.values() if state.info()}
    [thread] = [thread for thread in threading.enumerate() if thread.ident in idents]
    closed.clear()
    closing = asyncio.create_task(environment.close())
    await asyncio.wait([closing], timeout=None if limit < 1 else 0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closed == ([[]] if limit < 1 else [])
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("value", "error: ValueError: a bad value"),
        ("tool", "error: try a number"),
        ("404", "error: HTTPError: HTTP Error 404: Not Found"),
        ("refused", ConnectionRefusedError),
        ("503", urllib.error.HTTPError),
        ("timeout", TimeoutError),
        ("cause", ValueError),
    ],
)
async def test_an_exception_is_an_observation_and_an_outage_is_a_fault(
    kind: str, answer: Any
) -> None:
    environment = await ready("broken", "search")
    calls = ("broken", {"kind": kind}), ("search", {"query": "a"})
    if isinstance(answer, str):
        assert await answers(environment, *calls) == [answer, '["A", "page"]']
    else:
        with pytest.raises(answer):
            await environment.step(reply(*calls))


async def test_a_late_call_is_an_observation_and_a_long_result_is_cut() -> None:
    environment = await ready("hang", "give", tool_seconds=0.05, max_result_characters=20)
    long, late, odd = await answers(
        environment,
        ("give", {"text": "ab", "times": 50}),
        ("hang", {}),
        ("give", {"text": "object"}),
    )
    assert long == "ab" * 10 + "\n[cut: the first 20 of 100 characters]"
    assert late.startswith("error: hang took lon")
    assert odd == "\"<class 'object'>\""
    assert environment.max_turns is None


async def test_groups_end_by_an_answer_or_the_limit_and_an_outage_is_no_reward() -> None:
    calls = [written("calc", x=f"{i}+1") for i in range(5)]
    make = partial(tools, CALC, "broken", max_turns=3)
    down = written("broken", kind="refused")
    first, second = await played(make, [calls[0], "done"], calls[1:], [down], rounds=2)
    for group in (first, second):
        answered, truncated, lost = group.trajectories
        assert [t.outcome for t in group.trajectories] == ["ok", "ok", "infra_error"]
        assert [m["role"] for m in answered.messages] == ["user", "assistant", "tool", "assistant"]
        assert answered.info == {"tool_calls": 1, "tool_errors": 0}
        assert len(truncated.turns) == 3
        assert truncated.info["truncated"] == "environment.max_turns"
        assert lost.outage
        assert "nobody listens" in lost.info["error"]
        meter = Meter()
        meter.group(group)
        found = meter.evaluation()
        assert (found["eval/rollouts/tool_calls"], found["eval/rollouts/tool_errors"]) == (4, 0)


def test_a_rollout_with_seats_counts_its_calls_once_and_other_values_are_not_counted() -> None:
    info = {"tool_calls": 3, "tool_errors": 1}
    seated = [Trajectory(PROMPT, info=info, seat=seat) for seat in ("a", "b", "a", "b")]
    own = Trajectory(PROMPT, info={"tool_calls": ["search"]})
    for trajectories, expected in ((seated, (6, 2)), ([own], (None, None))):
        meter = Meter()
        meter.group(Group(PROMPT, trajectories))
        found = meter.evaluation()
        assert tuple(found.get(f"eval/rollouts/tool_{n}") for n in ("calls", "errors")) == expected


@pytest.mark.parametrize("names", [("Shop", "order"), (CALC,)])
async def test_the_environment_keeps_what_an_environment_promises(names: tuple[str, ...]) -> None:
    findings = await check_environment(partial(tools, *names), [PROMPT])
    assert [str(finding) for finding in findings if not finding.good] == []


WRONG = '''
import threading
def bare(x): ...
def odd(x: threading.Thread, *rest: int):
    """Odd."""
def twice(x: int):
    """One."""
class Needs:
    def __init__(self, path): ...
    def tool(self):
        """Tool."""
class Empty:
    def _hidden(self): ...
VALUE = 3
'''


def test_what_is_no_tool_is_reported_at_once_with_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    names = ["bare", "odd", "Needs", "Empty", "VALUE", "missing", "twice", "twice"]
    paths = [*(f"wrong.py:{name}" for name in names), "number"]
    with pytest.raises(ConfigError) as caught:
        Tools(tools=paths, base_dir=tmp_path)
    expected = [
        "0: bare has no docstring. Add one",
        "0: bare(x) has no type hint. Add one, such as `x: str`",
        "1: odd(x): threading.Thread has no JSON schema",
        "1: odd(rest): got *rest: int, expected named arguments",
        "2: Needs requires 'path', expected no argument but `prompt`",
        "3: Empty has no public methods",
        "4: got 3, expected a function or a class",
        "5: there is no missing in ",
        "7: got a second tool named 'twice'",
        "8: there is no object 'number'; write module:name or path/file.py:name",
    ]
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(f"environment.tools.{start}")
    for keys in ({"tools": []}, {"tools": [CALC], "max_turns": 0}):
        with pytest.raises(ConfigError, match=r"environment\.\w+: got (0|an empty list), expected"):
            Tools(**keys, base_dir=ROOT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", "7"), (" 2 + 3 * 4 ", "14"), ("(2+3)*4", "20"), ("-2--3", "1"), ("0.1+0.2", "3/10"),
        ("1/3/2", "1/6"), ("123456789*987654321", "121932631112635269"), ("1.50", "3/2"),
        ("(" * 90 + "1" + ")" * 90, "1"), ("-" * 199 + "1", "-1"),
    ],
)  # fmt: skip
def test_expressions_are_worked_out_exactly(expression: str, value: str) -> None:
    assert str(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 2", "2**9", "9" * 201, "7//2", "1,2", "()", "1(2)", "...", "1e9", "1_0", "x", "1\n+1",
     "\0", "(" * 200, "0.0.0"],
)  # fmt: skip
def test_anything_else_is_a_value_error_or_a_syntax_error(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


async def test_the_calculators_data_says_what_the_calculator_says() -> None:
    environment = await ready(CALC)
    offered = [tool.as_template()["function"] for tool in environment.tools]
    asked = {}
    for row in rows_of("calculator_demonstrations"):
        ask, call, heard, answer = row["messages"]
        assert row["tools"] == offered
        [written_call] = re.findall("<tool_call>(.*)</tool_call>", call["content"])
        arguments = json.loads(written_call)["arguments"]
        assert await answers(environment, ("calc", arguments)) == [heard["content"]]
        asked[ask["content"]] = answer["content"]
    assert asked == {row["prompt"]: row["answer"] for row in rows_of("calculator")}


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
