"""Tool calls in a conversation: as they were sampled, and as the template shows them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from retrain.assembly import assemble, tool_format
from retrain.chat import Chat, Conversation
from retrain.chat.formats.hermes import Hermes
from retrain.chat.template import NOT_SHOWN
from retrain.chat.tools import as_template
from retrain.check import check_subject
from retrain.config import RunConfig, parse_config
from retrain.errors import ConfigError, PluginError
from retrain.types import Message
from tests import chat_kit
from tests.conversation_kit import ADD, CALL, HI, extends, say, seen, user

# Tools


def tools_chat() -> tuple[Any, Conversation]:
    tokenizer = chat_kit.byte_level(chat_kit.TOOLS, eos="<|endoftext|>")
    return tokenizer, Chat(tokenizer).begin([HI], [ADD])


def test_a_tool_call_is_parsed_and_kept_in_the_template_s_form() -> None:
    tokenizer, conversation = tools_chat()
    action = conversation.reply(say(tokenizer, f"I add.\n{CALL}<|im_end|>"))
    [call] = action.tool_calls
    assert action.text == "I add."
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "b": 2}, None)
    assert conversation.messages[-1] == {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
            }
        ],
    }
    conversation.observe([{"role": "tool", "content": "3", "tool_call_id": call.id}])
    assert seen(tokenizer, conversation).endswith(
        f"<|im_start|>assistant\nI add.\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call>',  # another spelling
        f"{CALL} and then some",  # text behind the call
        f"{CALL}{CALL}",
        "<tool_call>{oops}</tool_call>",
        f"{CALL}<tool_call>{{oops",
        '<tool_call>{"name": "add", "arguments": {"a": "\\u00e9", "b": 1e3}}</tool_call>',
    ],
)
def test_a_tool_call_stays_as_it_was_sampled_however_it_is_spelled(said: str) -> None:
    tokenizer, conversation = tools_chat()
    prompt_ids, completion = conversation.prompt_ids, say(tokenizer, said)
    conversation.reply(completion)
    conversation.observe([{"role": "tool", "content": "3"}])
    assert extends(conversation, prompt_ids, completion)
    assert seen(tokenizer, conversation).endswith(
        f"<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_drops_the_text_beside_a_call_rewrites_history() -> None:
    template = chat_kit.TOOLS.replace(
        "'\\n' + m.content", "'\\n' + ('' if m.tool_calls else m.content)"
    )
    tokenizer = chat_kit.byte_level(template)
    conversation = Chat(tokenizer).begin([HI], [ADD])
    prompt_ids, completion = conversation.prompt_ids, say(tokenizer, f"I add.\n{CALL}<|im_end|>")
    conversation.reply(completion)
    conversation.observe([{"role": "tool", "content": "3"}])
    assert not extends(conversation, prompt_ids, completion)
    assert "I add." not in seen(tokenizer, conversation)


def test_a_template_without_tools_is_shown_the_call_as_text_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = chat_kit.byte_level()
    chat = Chat(tokenizer, tools=Hermes())
    with caplog.at_level(logging.WARNING, "retrain"):
        conversation = chat.begin([HI], [ADD])
        chat.begin([user("Again")], [ADD])
    assert len(caplog.records) == 1
    action = conversation.reply(say(tokenizer, f"{CALL}<|im_end|>"))
    assert [call.name for call in action.tool_calls] == ["add"]
    assert conversation.messages[-1] == {"role": "assistant", "content": CALL}
    conversation.observe([{"role": "tool", "content": "3"}])
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in seen(tokenizer, conversation)


STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [chat_kit.CHATML, STRICT, chat_kit.TOOLS])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_system_message_shows_the_tools_and_the_tokens_extend(
    template: str, system: list[Message]
) -> None:
    config = RunConfig.model_validate({"chat": {"tools": {"show": "system"}}})
    tokenizer = chat_kit.byte_level(template)
    chat = Chat(tokenizer, tools=tool_format(config))
    assert chat.problem_with_tools() == ""
    assert Hermes.in_system is False
    conversation = chat.begin([*system, HI], [ADD])
    first = seen(tokenizer, conversation)
    assert first.count(json.dumps(ADD.as_template())) == 1
    assert first.count("Be brief.") == len(system)
    for _ in range(2):
        prompt_ids = conversation.prompt_ids
        completion = say(tokenizer, f"So: {CALL}{CALL}<|im_end|>")
        action = conversation.reply(completion)
        assert [call.arguments for call in action.tool_calls] == [{"a": 1, "b": 2}] * 2
        results = [{"role": "tool", "content": n, "tool_call_id": f"{n}"} for n in ("3", "4")]
        conversation.observe(results)
        assert extends(conversation, prompt_ids, completion)
    response = "<tool_response>\n{}\n</tool_response>"
    both = "\n".join(map(response.format, "34"))
    whole = seen(tokenizer, conversation)
    assert whole.endswith(f"<|im_start|>user\n{both}<|im_end|>\n<|im_start|>assistant\n")
    # a history that was not sampled here says the same
    called = {"role": "assistant", "content": "", "tool_calls": [as_template(action.tool_calls[0])]}
    given = chat.begin([*system, HI, called, results[0]], [ADD])
    assert f"assistant\n{CALL}<|im_end|>" in seen(tokenizer, given)
    spelt = chat.begin([*system, HI], [ADD]).spell(called)
    assert tokenizer.decode(spelt).startswith(CALL)


def test_what_can_t_be_shown_by_a_system_message_is_rejected() -> None:
    for chat in ({"tools": {"format": "mistral", "show": "system"}},
                 {"tools": {"show": "system"}, "template": "none"}):  # fmt: skip
        with pytest.raises(PluginError, match=r"^chat\.tools\.show: "):
            tool_format(RunConfig.model_validate({"chat": chat}))


@pytest.mark.parametrize("agent", [False, True])
def test_a_template_without_tools_is_found_before_the_model_loads(
    agent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_kit.byte_level().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text(f"{TOOL}{AGENT}")
    kind = {"type": "mine.py:Mine"} if agent else {"type": "tools", "tools": ["mine.py:add"]}
    mapping = {"model": str(tmp_path), "prompts": ["a"], "environment": kind, "rewards": "contains"}

    def warnings(**chat: Any) -> list[str]:
        parts = assemble(parse_config({**mapping, "chat": chat}, tmp_path))
        return [text for text in parts.warnings if "tools" in text]

    if agent:
        [warning] = warnings()
        assert "show" in warning
    else:
        with pytest.raises(ConfigError, match=r"^chat\.tools: .*show"):
            warnings()
    assert warnings(tools="hermes") == [NOT_SHOWN]
    assert warnings(tools={"show": "system"}) == []
    if agent:
        (tmp_path / "it.yaml").write_text(json.dumps(mapping))
        found = asyncio.run(check_subject(str(tmp_path / "it.yaml")))
        assert warning in [finding.what for finding in found if finding.warning]


TOOL = """
from retrain import Environment

def add(a: int) -> int:
    \"\"\"Add one.\"\"\"
    return a + 1
"""

AGENT = """
class Mine(Environment):
    async def run(self, prompt, endpoint):
        return ""
"""


def test_call_ids_are_unique_in_a_conversation() -> None:
    tokenizer, conversation = tools_chat()
    ids: list[str] = []
    for _ in range(2):
        action = conversation.reply(say(tokenizer, f"{CALL}{CALL}<|im_end|>"))
        ids += [call.id for call in action.tool_calls]
        conversation.observe([{"role": "tool", "content": "3", "tool_call_id": ids[-1]}])
    assert ids == ["call00000", "call00001", "call00002", "call00003"]


def test_markup_is_plain_text_when_no_tools_are_offered() -> None:
    tokenizer = chat_kit.byte_level(chat_kit.TOOLS)
    action = Chat(tokenizer).begin([HI]).reply(say(tokenizer, CALL))
    assert action.text == CALL
    assert action.tool_calls == ()
