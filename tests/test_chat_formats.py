"""Tool calls and reasoning as the models of each vendor write them, over several turns."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.agents.calls import Calls
from retrain.assembly import tool_format
from retrain.chat import Chat, Conversation
from retrain.chat.probing import format_named, formats
from retrain.chat.tools import parse_reply
from retrain.check.scripted import FixedSampler, scripted
from retrain.config import Plugin, RunConfig
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import Action, Environment, StepResult, ToolSpec
from retrain.errors import ConfigError, PluginError
from retrain.rollout import Slot
from retrain.scoring import Scorer, WeightedReward, reward
from retrain.types import Completion, Message, Prompt, Trajectory
from tests import chat_kit, formats_kit
from tests.calls_kit import Scripted, given_back
from tests.conversation_kit import ADD, say
from tests.formats_kit import CASES, Case

SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI: Message = {"role": "user", "content": "1 + 2?"}
MORE: Message = {"role": "user", "content": "And now?"}


def opened(name: str) -> tuple[Case, Any, Chat, Conversation]:
    case = CASES[name]
    if case.source is None:
        pytest.skip("needs the chat templates of trl")
    tokenizer = formats_kit.tokenizer_of(case)
    chat = Chat(tokenizer)
    return case, tokenizer, chat, chat.begin([SYSTEM, HI], [ADD])


def replied(
    conversation: Conversation, completion: Completion, answers: list[Message]
) -> tuple[bool, list[int]]:
    """Whether the next prompt extends the reply, and what follows it."""
    before = [*conversation.prompt_ids, *completion.token_ids]
    conversation.observe(answers)
    after = conversation.prompt_ids
    return after[: len(before)] == before, after[len(before) :]


def rendered(tokenizer: Any, conversation: Conversation) -> list[int]:
    """The whole conversation as the template's text, encoded anew."""
    chat = conversation._chat
    text = chat.template.render(conversation.messages, [ADD.as_template()])
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_and_every_sampled_token_stays_unless_the_template_rewrites(
    name: str,
) -> None:
    case, tokenizer, chat, conversation = opened(name)
    assert chat.format is format_named(case.form)
    ends = [tokenizer.decode([token]) for token in chat.stop_token_ids]
    assert case.ending in ends
    completion = say(tokenizer, case.one + case.ending)
    action = conversation.reply(completion)
    [call] = action.tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "b": 2}, None)
    assert (action.text.strip(), action.reasoning) == ("", case.reasoning)
    assert ("tool_calls" in conversation.messages[-1]) is case.shown
    answer = Message(role="tool", content="3", tool_call_id=call.id)
    extends, behind = replied(conversation, completion, [answer])
    assert extends is case.extends
    if extends:
        text = tokenizer.decode(behind)
        assert "3" in text
        assert case.ending not in text.lstrip("\n")[: len(case.ending)]  # it was sampled
    else:
        assert conversation.prompt_ids == rendered(tokenizer, conversation)
    # an answer, and the user's next question
    completion = say(tokenizer, case.answer)
    action = conversation.reply(completion)
    assert (action.text, action.tool_calls) == ("It is 3.", ())
    assert conversation.turn().text == "It is 3."
    extends, _ = replied(conversation, completion, [MORE])
    assert extends or conversation.prompt_ids == rendered(tokenizer, conversation)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].two])
def test_parallel_calls_are_read_in_order_and_kept(name: str) -> None:
    case, tokenizer, _, conversation = opened(name)
    completion = say(tokenizer, case.two + case.ending)
    calls = conversation.reply(completion).tool_calls
    assert [(c.name, c.arguments, c.error) for c in calls] == [("add", {"a": 1, "b": 2}, None)] * 2
    assert len({c.id for c in calls}) == 2
    answers = [Message(role="tool", content="3", tool_call_id=c.id) for c in calls]
    extends, _ = replied(conversation, completion, answers)
    assert extends


@pytest.mark.parametrize("name", CASES)
async def test_an_agent_that_gives_the_history_back_continues_the_tokens(name: str) -> None:
    case, tokenizer, chat, _ = opened(name)
    texts = iter([case.one + case.ending, case.answer])
    sampler = Scripted(lambda: say(tokenizer, next(texts)).token_ids, tokenizer.decode)
    calls = Calls(chat, sampler, 9, None)
    [first] = await calls.chat([SYSTEM, HI], (ADD,))
    assert [(c.name, c.arguments) for c in first.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert (first.text.strip(), first.reasoning) == ("", case.reasoning)
    said = given_back(first, 2)  # as reasoning_content
    answer = Message(role="tool", content="3", tool_call_id=first.tool_calls[0].id)
    [second] = await calls.chat([SYSTEM, HI, said, answer], (ADD,))
    assert (second.text, second.tool_calls) == ("It is 3.", ())
    assert calls.turns[1].parent == 0
    assert calls.turns[0].is_start_of(calls.turns[1].prompt_ids) is case.extends
    anew = Calls(chat, Scripted(lambda: [], tokenizer.decode), 9, None)
    assert anew.count([SYSTEM, HI, said, answer], (ADD,)) > 0  # in another rollout


@pytest.mark.parametrize("form", sorted(formats_kit.SHORT))
def test_the_built_in_model_can_use_tools_in_each_format_of_ascii_markup(form: str) -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, template=formats_kit.short(form))
    assert chat.format is format_named(form)
    conversation = chat.begin([HI], [ADD])
    said = next(case.two for case in CASES.values() if case.form == form and case.two)
    said = said.rpartition("</think>")[2].strip()
    completion = say(tokenizer, f"{said}<|end|>")
    calls = conversation.reply(completion).tool_calls
    assert [(c.name, c.error) for c in calls] == [("add", None)] * 2
    answers = [Message(role="tool", content="3", tool_call_id=c.id) for c in calls]
    extends, behind = replied(conversation, completion, answers)
    assert extends
    assert tokenizer.decode(behind) == "<|tool|>3<|tool|>3<|assistant|>"


MALFORMED = {
    "hermes": ("<tool_call>{oops</tool_call>", "<tool_call>{}",
               '<tool_call>{"name": 1}</tool_call>'),
    "qwen3_coder": (
        "<tool_call>{}</tool_call>",
        "<tool_call><function=add></tool_call>",
        "<tool_call><function=add><parameter=a>1</function></tool_call>",
        "<tool_call><function=add>1</function></tool_call>",
        "<function=add>",
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": 1',
        '<|python_tag|>print("hi")',
        '{"name": "add", "parameters": 3}',
        "<|python_tag|>{}",
    ),
    "pythonic": ("[add(a=1", "[add(1, 2)]", "[add(a=b)]", "[add(**{})]", "[add(a=1), 3]",
                 "[add(a='\ud800')]".encode("unicode_escape").decode(), "[add(a=1e999)]",
                 f"[add(a={'[' * 5000}{']' * 5000})]", "[add(a=b'x')]", "[add(a=-x)]"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS][{}]", "[TOOL_CALLS]add[ARGS]{oops",
                '[TOOL_CALLS]add[ARGS]"x"', "[TOOL_CALLS][3]"),
    "deepseek": (
        "<｜tool▁call▁begin｜>add",
        "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{oops<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}\n<｜tool▁call▁end｜>",
    ),
    "glm": (
        "<tool_call>add",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        "<tool_call>add\n<arg_key>a</arg_key></tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</tool_call>",
    ),
    "gpt_oss": (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{oops",
        " to=functions.add<|channel|>commentary json<|message|>[1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_malformed_call_is_an_error_and_no_exception(name: str) -> None:
    assert set(MALFORMED) == set(formats())
    for text in MALFORMED[name]:
        reply = parse_reply(text, [ADD], format_named(name))
        assert reply.calls, text
        assert not reply.readable, text
        assert any(call.error for call in reply.calls), text


PIECES = sorted(
    {piece for form in formats().values() for piece in (*form.tokens, *form.ends)}
    | {'<tool_call>{"name": "add", "arguments": ', "}</tool_call>"}
    | {*"[](){}<>'\"\\,;:= \n", "\x00", "\ud7ff", "<think>", "</think>", "[THINK]", "[/THINK]"}
    | {"<function=add>", "</function>", "<parameter=a>", "</parameter>", "```json\n", "\n```"}
    | {"add", '{"name": "add", ', '"parameters": {"a": 1}}', "[add(", "a=1", " to=functions.add"}
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
).map(json.dumps)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    text=st.lists(st.sampled_from(PIECES) | st.text(max_size=4) | JSON, max_size=14).map("".join),
    opener=st.sampled_from(["", "<think>\n", "[THINK]"]),
)
def test_nothing_that_a_model_writes_raises_in_any_format(text: str, opener: str) -> None:
    for form in formats().values():
        reply = parse_reply(text, [ADD], form, opener=opener)
        form.split(reply.text, opener)
        assert all(isinstance(call.arguments, Mapping) for call in reply.calls)
        if not reply.calls:
            assert reply.text == text


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_long_reply_of_markup_is_read_in_little_time(name: str) -> None:
    form = format_named(name)
    said = next(case.one for case in CASES.values() if case.form == name).rpartition("</think>")[2]
    pieces = (*form.tokens, "<parameter=a>", "</parameter>", "<arg_key>", "[add(", "a", "'", "{",
              '{"name": ', "\n", "\n```", "</think>")  # fmt: skip
    for piece in pieces:
        for at in (0, 1, len(said) // 2, len(said)):
            text = f"{said[:at]}{piece * 4000}{said[at:]}"
            started = time.process_time()
            parse_reply(text, [ADD], form)
            assert time.process_time() - started < 1.0, (piece, at)  # a quadratic one takes long


def test_the_tag_of_mistral_may_be_in_strings_of_a_call() -> None:
    tags = {"a": "x[TOOL_CALLS]y", "b": [1, "z[TOOL_CALLS]"], "c": "[TOOL_CALLS] [TOOL_CALLS]"}
    found, *_ = format_named("mistral").find(f"[TOOL_CALLS]add[ARGS]{json.dumps(tags)} hi", 0)
    assert (found.error, found.arguments) == (None, tags)


def test_thousands_of_broken_calls_of_mistral_are_read_in_little_time() -> None:
    for broken in ('[TOOL_CALLS]add[ARGS]{"a": ', '[TOOL_CALLS]add[ARGS]{"a": "\\"'):
        started = time.process_time()
        assert len(format_named("mistral").find(broken * 20_000, 0)) == 20_000
        assert time.process_time() - started < 1.2, broken


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_call_that_does_not_fit_the_schema_is_an_error_that_says_where(name: str) -> None:
    said = next(case.one for case in CASES.values() if case.form == name)
    wants = ToolSpec("add", "", {"properties": {"a": {"type": "array"}, "b": {}}})
    opener = "<think>\n" if "</think>" in said and "<think>" not in said else ""
    reply = parse_reply(said, [wants], format_named(name), opener=opener)
    [call] = reply.calls
    assert reply.readable
    assert call.error == "arguments.a: 1 is not of type 'array'"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "I would call <tool_cal"),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", 'It is {"name": "add", "parameters": {}}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "Use [add(a=1)]"),
        ("mistral", "[{}]"),
        ("gpt_oss", "Just text."),
        ("gpt_oss", "<|channel|>final<|message|>4"),
    ],
)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert parse_reply(text, [ADD], format_named(form)) == (text, (), True)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"x": 1}', '{"x": 1}'),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, " 0.5\n", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "three", "three"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/word"}, "3", "3"),
        ({"type": "integer"}, "three", "three"),
        ({}, "<b>\n  1\n", "<b>\n  1\n"),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
def test_arguments_in_xml_get_the_types_of_the_schema(
    form: str, schema: dict[str, Any], text: str, value: object
) -> None:
    said = {
        "qwen3_coder": f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function>"
        "</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[form]
    tool = ToolSpec("f", "", {"properties": {"x": schema}, "$defs": {"word": {"type": "string"}}})
    [call] = parse_reply(said, [tool], format_named(form)).calls
    assert call.arguments == {"x": value}
    assert (call.error is None) is (text != "three" or "anyOf" in schema)


def test_a_malformed_call_where_tools_may_answer_only_calls_keeps_its_tokens() -> None:
    _, tokenizer, _, conversation = opened("gpt-oss")
    broken = formats_kit.HARMONY.replace(formats_kit.ARGUMENTS, "{oops")
    completion = say(tokenizer, f"{broken}<|call|>")
    [call] = conversation.reply(completion).tool_calls
    assert "JSON" in str(call.error)
    answer = Message(role="tool", content="error", tool_call_id=call.id)
    assert replied(conversation, completion, [answer])[0]


def test_text_before_a_call_of_gpt_oss_is_kept_with_the_reasoning() -> None:
    _, tokenizer, _, conversation = opened("gpt-oss")
    preamble = "<|end|><|start|>assistant<|channel|>commentary<|message|>Let me add.<|end|>"
    said = formats_kit.HARMONY.replace("<|end|>", preamble)
    completion = say(tokenizer, f"{said}<|call|>")
    action = conversation.reply(completion)
    assert (action.text, action.reasoning) == ("Let me add.", "I add.")
    answer = Message(role="tool", content="3", tool_call_id=action.tool_calls[0].id)
    replied(conversation, completion, [answer])
    assert "Let me add." in tokenizer.decode(conversation.prompt_ids)


def test_tools_with_an_unknown_format_are_an_error_that_names_the_formats() -> None:
    plain = "{{ (tools or [])[:9] }}" + chat_kit.CHATML
    chat = Chat(chat_kit.byte_level(plain))
    chat.begin([HI])
    with pytest.raises(ConfigError, match=r"chat\.tools"):
        chat.begin([HI], [ADD])


PIPES = """
import json
import re
from retrain.chat.formats.base import Format, named_call

class Pipes(Format):
    def find(self, text, start):
        calls = re.finditer(r"[|](\\w+) (.*?)[|]", text[start:])
        return [named_call(start + c.start(), start + c.end(), c[1], c[2]) for c in calls]
"""


def test_a_format_is_named_in_the_config_or_is_the_user_s_own(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"prompts": {"type": "list"}, "model": "tiny", "chat": {"tools": "mistral"}}
    )
    form = tool_format(config)
    assert form is not None
    chat = Chat(chat_kit.byte_level(), tools=form)
    action = chat.begin([HI], [ADD]).reply(say(chat.tokens._tokenizer, formats_kit.NAMED))
    assert [call.name for call in action.tool_calls] == ["add"]
    (tmp_path / "pipes.py").write_text(PIPES)
    chats = config.chat.model_copy(update={"tools": "pipes.py:Pipes"})
    own = tool_format(config.model_copy(update={"chat": chats, "base_dir": tmp_path}))
    assert own is not None
    assert [c.name for c in parse_reply('|add {"a": 1}|', [ADD], own).calls] == ["add"]
    wrong = config.model_copy(update={"chat": config.chat.model_copy(update={"tools": "mistrl"})})
    with pytest.raises(PluginError, match=r"chat\.tools: .*'mistrl'"):
        tool_format(wrong)


class Keeps(Environment):
    """Two turns; keeps what the actions say."""

    said: ClassVar[list[tuple[str, str]]] = []

    async def step(self, action: Action) -> StepResult:
        self.said.append((action.text, action.reasoning))
        return StepResult([MORE], 0.0, len(self.said) > 1, False, {})


@pytest.mark.parametrize("make", [Environment, Keeps])
async def test_rewards_get_the_answer_as_completion_and_may_ask_for_the_reasoning(
    make: type[Environment],
) -> None:
    asked: list[tuple[str, str, str]] = []

    @reward
    def judge(completion: str, reasoning: str, trajectory: Trajectory) -> float:
        asked.append((completion, reasoning, trajectory.turns[-1].completion.text))
        return 1.0

    script = FixedSampler()
    script.reply = "<think>Hm</think>4"
    config = RunConfig(prompts=Plugin(type="list"))
    slot = Slot(1, make, scripted(config, script), Scorer([WeightedReward("own", 1.0, judge)]))
    await slot.play(Prompt("0.0.0", [HI]))
    await slot.close()
    assert asked == [("4", "Hm", script.reply)]
    assert Keeps.said in ([], [("4", "Hm")] * 2)
    Keeps.said.clear()


GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + chat_kit.CHATML
)


@pytest.mark.parametrize("template", ["gemma", GEMMA])
def test_without_a_system_role_its_text_is_put_in_front_of_the_first_user_message(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case("", template, "")
    if case.source is None:
        pytest.skip("needs the chat templates of trl")
    tokenizer = formats_kit.tokenizer_of(case)
    chat = Chat(tokenizer)
    with caplog.at_level(logging.WARNING, "retrain"):
        conversation = chat.begin([SYSTEM, HI])
        chat.begin([SYSTEM, MORE])
    [warning] = [r.message for r in caplog.records if "takes no system message" in r.message]
    assert "first user message" in warning
    assert "Be brief.\n\n1 + 2?" in tokenizer.decode(conversation.prompt_ids)
    completion = say(tokenizer, "3")
    conversation.reply(completion)
    assert replied(conversation, completion, [MORE])[0]
    assert conversation.messages[0] == SYSTEM


@pytest.mark.parametrize(
    ("prompt", "said", "reasoning", "answer"),
    [
        ("", "4", "", "4"),
        ("", "<think>\nHm\n</think>\n\n4", "Hm", "4"),
        ("", "<think>Hm", "Hm", ""),
        ("", "4</think>5", "", "4</think>5"),
        ("<think>\n", "Hm\n</think>\n\n4", "Hm", "4"),
        ("<think>\n", "Hm", "Hm", ""),
        ("[THINK]", "Hm[/THINK]4", "Hm", "4"),
        ("", "[THINK]Hm[/THINK]4", "Hm", "4"),
        ("<think>\n\n</think>\n\n", "4", "", "4"),
    ],
)
def test_reasoning_is_split_from_the_answer_and_one_that_never_ends_has_none(
    prompt: str, said: str, reasoning: str, answer: str
) -> None:
    template = chat_kit.CHATML.replace("assistant\n", f"assistant\n{prompt}")
    tokenizer = chat_kit.byte_level(template)
    conversation = Chat(tokenizer).begin([HI])
    action = conversation.reply(say(tokenizer, said))
    assert (action.reasoning, action.text) == (reasoning, answer)
    turn = conversation.turn()
    assert (turn.reasoning, turn.text, turn.completion.text) == (reasoning, answer, said)
