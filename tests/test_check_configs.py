"""`retrain check` of a config: its rewards, rows and tools are tried and shown."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from retrain.check import replay, subject
from retrain.check.subject import INSTANCES
from retrain.cli.commands import command
from retrain.config import RunConfig
from retrain.config.plugins import find_object
from retrain.errors import INCLUDED, blame

REWARDS = """
import signal
from retrain import Reward, RewardCalculator, reward

@reward
def parts(completion): return Reward(0.5, {"long": len(completion)})
def none(completion): return None
def listed(completion): return [1.0]
def divides(completion): return 1 / len(completion)
def alarmed(completion): signal.signal(signal.SIGALRM, signal.SIG_DFL); return 1
def excludes(completion): return Reward(0.0, outcome="invalid")
def reads_info(metadata, trajectory): return trajectory.info["turns"]

class Down(RewardCalculator):
    def __init__(self, port: int, hook: str): self.port, self.hook = port, hook
    async def _ask(self, hook):
        if hook == self.hook:
            import httpx
            async with httpx.AsyncClient() as client:
                await client.get(f"http://127.0.0.1:{self.port}")
    async def setup(self): await self._ask("setup")
    async def calculate(self, trajectory): await self._ask("calculate"); return 1.0
    async def close(self): await self._ask("close")

class Ranked(RewardCalculator):
    async def calculate(self, trajectory): raise NotImplementedError
    async def calculate_group(self, group): return [len(group)] * len(group)
"""

COUNTING = """
from retrain import Environment, StepResult
class Counting(Environment):
    async def step(self, action): return StepResult([], 0.0, True, False, {"turns": 1})
"""


def test_a_configs_rewards_are_called_and_shown(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "scores.py").write_text(REWARDS)
    (own_folder / "counting.py").write_text(COUNTING)
    (own_folder / "task.yaml").write_text("prompts: [{prompt: a, answer: aa}]\nrewards: []")

    def shown(*overrides: str) -> tuple[int, str]:
        code = command(["check", "task.yaml", *overrides])
        out = capsys.readouterr().out
        return code, re.sub(r"[0-9.]+ ms", "N ms", out[out.index("tried with replies") :])

    same = (
        "      every reply gets the same value. Try a reply that should score differently: "
        "--reply TEXT"
    )
    good = "[exact_match, scores.py:parts, scores.py:excludes, scores.py:reads_info]"
    code, text = shown(f"rewards={good}", "environment=counting.py")
    assert code == 0
    assert text.splitlines() == [
        "tried with replies to row 0: 'a'",
        "ok    reward 'exact_match'",
        "      answer 'aa': 1 in N ms",
        "      empty reply: 0 in N ms",
        "      garbage: 0 in N ms",
        "warn  reward 'parts'",
        "      answer 'aa': 0.5 (long 2) in N ms",
        "      empty reply: 0.5 (long 0) in N ms",
        "      garbage: 0.5 (long 248) in N ms",
        same,
        "ok    reward 'excludes'",
        "      answer 'aa': invalid in N ms",
        "      empty reply: invalid in N ms",
        "      garbage: invalid in N ms",
        "warn  reward 'reads_info'",
        "      answer 'aa': 1 in N ms",
        "      empty reply: 1 in N ms",
        "      garbage: 1 in N ms",
        same,
    ]
    thought = ["--reply", "<think>so</think>aa"]
    code, text = shown("rewards={type: format, tags: [think]}", "prompts=[a]", *thought)
    assert code == 0
    assert text.splitlines() == [
        "tried with replies to row 0: 'a'",
        "ok    the replies, as the rewards get them",
        "      reply '<think>so</think>aa': reasoning 'so', completion 'aa'",
        "ok    reward 'format'",
        "      reply '<think>so</think>aa': 1 in N ms",
        "      empty reply: 0 in N ms",
        "      garbage: 0 in N ms",
    ]
    opened = "rewards=[{type: format, tags: [think], opened: true}, exact_match]"
    code, text = shown(opened, "--reply", "<think>so</think>aa", "--reply", "so</think>aa")
    assert code == 0
    assert [line[6:] for line in text.splitlines() if line.startswith("      ")] == [
        "reply '<think>so</think>aa': reasoning 'so', completion 'aa'",
        "reply 'so</think>aa': reasoning 'so', completion 'aa'",
        *("answer 'aa': 0 in N ms", "reply '<think>so</think>aa': 1 in N ms"),
        *("reply 'so</think>aa': 1 in N ms", "empty reply: 0 in N ms", "garbage: 0 in N ms"),
        *("answer 'aa': 1 in N ms", "reply '<think>so</think>aa': 1 in N ms"),
        *("reply 'so</think>aa': 1 in N ms", "empty reply: 0 in N ms", "garbage: 0 in N ms"),
    ]
    code, text = shown("rewards={type: scores.py:Ranked, processes: 1}")
    assert code == 0
    assert text.count(": 3 in N ms") == 3, "one call, as in a run"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        down = f"type: scores.py:Down, port: {nobody.getsockname()[1]}"
        bad = ["none", "listed", "divides", "alarmed"]
        items = [*(f"scores.py:{name}" for name in bad), f"{{{down}, hook: calculate}}"]
        code, text = shown(f"rewards=[{', '.join(items)}]")
        assert code == 1
        assert text.count("FAIL  reward '") == 5
        everything = "      answer 'aa', empty reply, garbage: "
        assert f"{everything}reward 'none' returned None" in text
        assert f"{everything}reward 'listed' returned [1.0]" in text
        assert "\n      empty reply: reward 'divides' raised ZeroDivisionError" in text
        assert "`processes: 4`" in text
        assert f"{everything}reward 'Down' raised ConnectError" in text
        for hook in ("setup", "close"):
            code, text = shown(f"rewards=[{{{down}, hook: {hook}}}]")
            assert code == 1
            assert f"FAIL  rewards: {hook}\n      reward 'Down': {hook} raised ConnectE" in text


def test_a_reply_that_reasons_before_it_calls_a_tool_calls_it_once(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "own.py").write_text(
        "def now() -> str:\n    'The time.'\n    return '12:00'\n"
        "def calls(trajectory): return trajectory.info['tool_calls']\n"
    )
    tools = "environment: {type: tools, tools: [own.py:now]}\nrewards: own.py:calls"
    (own_folder / "task.yaml").write_text(f"prompts: [a]\n{tools}")
    reply = '<think>so</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert command(["check", "task.yaml", "--reply", reply]) == 0
    out = capsys.readouterr().out
    [line] = [
        line for line in out.splitlines() if line.startswith("      reply") and " in " in line
    ]
    assert ": 1 in " in line


def test_a_row_of_each_source_of_a_mixture_is_tried_and_named(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = "{type: list, name: sums, rows: [{prompt: 1+1=, answer: '2'}, {prompt: p, answer: '3'}]}"
    more = "{type: file, path: letters.jsonl}"
    rows = ['{"prompt": "say a", "answer": "a"}', '{"prompt": "say b", "answer": "b"}']
    (own_folder / "letters.jsonl").write_text("\n".join(rows))
    (own_folder / "own.py").write_text(MIXED)
    (own_folder / "task.yaml").write_text(
        f"prompts: {{type: mixture, sources: [{sums}, {sums.replace('sums', 'again')}, {more}]}}\n"
        "environment: own.py:Half\nrewards: exact_match"
    )
    assert command(["check", "task.yaml", "--reply", "a"]) == 0
    out = re.sub(r" in [0-9.]+ ms", "", capsys.readouterr().out)
    assert (
        """\
ok    the rewards are tried with replies to a row of each source
      sums, row 0: '1+1='
      again, row 0: '1+1='
      letters, line 1: 'say a'
"""
        in out
    )
    assert (
        """\
warn  the answers of 4 of 6 rows get less than 1
      sums, row 0: 0
      again, row 0: 0
      sums, row 1: 0
      again, row 1: 0
"""
        in out
    )
    lines = out[out.index("ok    reward 'exact_match'") :].splitlines()
    assert "      reply 'a' (sums, row 0): 0" in lines
    assert "      reply 'a' (letters, line 1): 1" in lines
    assert "      answer 'a' (letters, line 1): 1" in lines
    assert "      empty reply (letters, line 1): 0" in lines


MIXED = """
from retrain import Environment, StepResult
class Half(Environment):
    async def step(self, action):
        right = action.text == self.prompt.answer and action.text.isalpha()
        return StepResult([], float(right), True, False, {})
"""


def test_a_wrong_reference_solution_is_found_by_a_reward_that_checks_rows(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f'{{prompt: a, answer: "def f(): return {n}", tests: "assert f() == 2"}}' for n in "213"
    ]
    (own_folder / "task.yaml").write_text(f"prompts: [{', '.join(rows)}]\nrewards: code_tests")
    for gate in (False, True):
        gated = "[exact_match, {type: code_tests, only_if: exact_match}]"
        assert command(["check", "task.yaml", *([f"rewards={gated}"] if gate else [])]) == 0
        out = capsys.readouterr().out
        listed = "from 'code_tests'\n      row 1: 0\n      row 2: 0\n"
        assert (listed in out) == (not gate), "a gate may keep a reward from these rows"
    assert command(["check", "task.yaml", f"prompts=[{rows[1]}, {rows[1]}]"]) == 0
    out = capsys.readouterr().out
    assert "warn  reward 'code_tests'" in out
    assert "the answers of" not in out


def test_a_reward_that_ignores_the_answer_says_nothing_about_it(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{{prompt: a, answer: {answer}, schema: {{type: object}}}}" for answer in ("x", "y")]
    (own_folder / "task.yaml").write_text(f"prompts: [{', '.join(rows)}]")
    for reward in (
        "{type: contains, strings: x}",
        "{type: json_schema, column: schema}",
        "{type: json_schema, schema: {type: object}}",
    ):
        assert command(["check", "task.yaml", f"rewards={reward}"]) == 0
        out = capsys.readouterr().out
        assert f"{reward[7:15]}" in out
        assert "the answers of" not in out
    assert command(["check", "task.yaml", "rewards=contains"]) == 0
    assert "'contains'" in capsys.readouterr().out


def test_a_config_that_trains_rows_has_no_environment_to_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["check", "reverse_sft"]) == 0
    fit, repeated, unused = capsys.readouterr().out.splitlines()
    assert fit.startswith("ok ")
    assert repeated.startswith("warn  prompts: ")
    assert unused.startswith("ok ")


TOOLS = """
import itertools, time
from retrain import Environment, StepResult
calls = []
counter = itertools.count()
def area(side: float) -> float:
    "The area of a square."
    calls.append(side)
    return side * side
def clock() -> int:
    "The time."
    return next(counter)
def broken(page: str) -> str:
    "A page."
    raise KeyError(page)
def slow() -> str:
    "Takes long."
    calls.append("slow")
    time.sleep(0.5)
    return "done"
class Page: pass
def page() -> object:
    "A page."
    return Page()
"""


def test_the_tools_of_a_config_are_called_a_few_times_and_their_results_shown(
    own_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(replay, "SLOW_SECONDS", 0.45)
    (own_folder / "t.py").write_text(TOOLS)
    names = ("area", "clock", "broken", "slow", "page")
    (own_folder / "task.yaml").write_text(
        "prompts: [{prompt: a, answer: b}, {prompt: b}]\nrewards: exact_match\n"
        f"environment: {{type: tools, tools: [{', '.join(f't.py:{name}' for name in names)}]}}"
    )
    assert command(["check", "task.yaml"]) == 0, "a clock is no fault"
    lines = capsys.readouterr().out.splitlines()
    no_text = "got an object of Page, expected a string, JSON values, or an object with __str__"
    assert lines[1] == "warn  tools: area, clock, broken, slow, page"
    assert [re.sub(r"[0-9.]+ s,", "N s,", line).strip() for line in lines[2:7]] == [
        "area called with {'side': 1} -> '1.0'",
        "clock called with {} -> '0'",
        "broken called with {'page': '1'} -> \"error: KeyError: '1'\"",
        "slow called with {} -> 'done' in N s, not repeated",
        f"page called with {{}} -> 'error: page returned an unusable result: {no_text}'",
    ]
    at = lines.index("warn  the result of a tool differs for the same call")
    assert lines[at + 1] == "      clock called with {}: got '0', then '1'"
    calls = find_object("t.py:calls", own_folder, "")
    assert calls.count(1.0) == 2 + INSTANCES, "once per rollout, of the first row"
    assert calls.count("slow") == 1
    assert not caplog.records, "nothing about a chat template"
    assert command(["check", "t.py:area"]) == 2
    err = capsys.readouterr().err
    assert "t.py:area" in err
    assert "`environment: {type: tools, tools: [t.py:area]}`" in err
    assert command(["check", "tools", "tools=[t.py:area]"]) == 0, "as the message says"


STEPS = """
import asyncio
from retrain import Environment, StepResult, ToolSpec
class Lenient(Environment):
    async def step(self, action):
        right = action.text in ("", self.prompt.answer)
        return StepResult([], float(right), True, False, {})
class Strict(Environment):
    async def step(self, action):
        return StepResult([], float(action.text == self.prompt.answer), True, False, {})
class Picky(Environment):
    async def step(self, action):
        return StepResult([], float(action.text == "x"), True, False, {})
class Late(Environment):
    tools = [ToolSpec("look", "")]
    async def step(self, action):
        if action.tool_calls and action.tool_calls[0].name == "look":
            await asyncio.sleep(60)
        return StepResult([], 0.0, True, False, {})
class Down(Environment):
    async def setup(self): raise OSError("a\\nb")
"""


def test_the_reward_of_the_environment_is_shown_and_an_empty_reply_must_not_get_all(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "own.py").write_text(STEPS)
    answer = "SELECT count(*) FROM orders WHERE price > 3"
    (own_folder / "task.yaml").write_text(f"prompts: [{{prompt: a, answer: '{answer}'}}]")

    def shown(name: str, *keys: str) -> tuple[int, list[str]]:
        code = command(["check", "task.yaml", f"environment=own.py:{name}", *keys])
        return code, capsys.readouterr().out.splitlines()

    cases = [f"      answer '{answer}': 1", "      empty reply: 0", "      garbage: 0"]
    code, lines = shown("Strict")
    assert (code, lines[-4:]) == (0, ["ok    reward 'environment'", *cases])
    for keys in ([], ["prompts=[{prompt: a}]"]):  # with an answer, and without
        code, lines = shown("Lenient", *keys)
        assert code == 1
        assert "FAIL  reward 'environment'" in lines
        assert "empty reply" in lines[-1]
    assert "prompts.answer_column" in "".join(lines)

    rows = ["{prompt: a, answer: x}", "{prompt: b, answer: y}", "{prompt: c}"]
    code, lines = shown("Strict", f"prompts=[{', '.join([*rows, rows[0]])}]")
    assert (code, lines[-1]) == (0, "ok    the answers of 3 rows get 1 each")
    code, lines = shown("Picky", f"prompts=[{', '.join(rows)}]")
    assert (code, lines[-3:-1]) == (
        0,
        ["warn  the answers of 1 of 2 rows get less than 1", "      row 1: 0"],
    )
    code, lines = shown("Picky", f"prompts=[{rows[1]}]")
    assert (code, lines[-5]) == (0, "warn  reward 'environment'")
    assert "the answer" in lines[-1]

    code, lines = shown("Down", "rewards=[exact_match, slot_match]")
    assert code == 1
    assert [line for line in lines if "OSError" in line] == ["      Down.setup raised OSError: a"]
    assert lines[-1].startswith("FAIL  rewards")

    monkeypatch.setattr(subject, "DEADLINE", 1.0)  # a blocked loop ends the process after it
    for keys, said in (
        ([], "1 s, the limit of this check. To raise it, set deadlines.step."),
        (["deadlines.step=0.06"], "deadlines.step = 0.06 s"),
    ):
        code, lines = shown("Late", *keys)
        assert code == 1
        assert f"      look called with {{}}: Late.step took longer than {said}" in lines
    assert subject._limited(RunConfig()).deadlines.setup == 300, "an index may take long to load"


def test_an_error_names_a_line_of_the_users_files_only(tmp_path: Path) -> None:
    for file, line in ((tmp_path / "own.py", " (own.py:1)"), (Path(INCLUDED[0]) / "own.py", "")):
        scope: dict[str, Any] = {}
        exec(compile("def fails(): json.loads('x')\nimport json", file, "exec"), scope)
        with pytest.raises(ValueError, match="Expecting") as caught:
            scope["fails"]()
        error = caught.value.with_traceback(caught.tb.tb_next)  # without this file
        message = "it raised JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
        assert str(blame("it", error)) == message + line
