"""Conversations by hand: what the model sees after each turn, and what a user is told."""

from __future__ import annotations

import asyncio
import json
import logging
from importlib.util import find_spec
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
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import ToolSpec
from retrain.errors import ConfigError, PluginError, UserCodeError
from retrain.types import Completion, Message
from tests import chat_kit

ADD = ToolSpec(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
HI: Message = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def say(tokenizer: Any, text: str) -> Completion:
    """The sampler's completion of a text, special tokens included."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    return Completion(ids, [-1.0] * len(ids), plain, "stop", 0)


def seen(tokenizer: Any, conversation: Conversation) -> str:
    return str(tokenizer.decode(conversation.prompt_ids))


def extends(conversation: Conversation, prompt_ids: list[int], completion: Completion) -> bool:
    seen = [*prompt_ids, *completion.token_ids]
    return conversation.prompt_ids[: len(seen)] == seen


APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

TABLE = {
    "chatml, end sampled": (
        chat_kit.CHATML,
        "4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "chatml, cut off": (
        chat_kit.CHATML,
        "4",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "chatml, nothing but the end": (
        chat_kit.CHATML,
        "<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "chatml, nothing at all": (
        chat_kit.CHATML,
        "",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "chatml, a marker in the middle": (
        chat_kit.CHATML,
        "4<|im_start|>5<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_start|>5<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "chatml, another end than the template's": (
        chat_kit.CHATML,
        "4<|endoftext|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|endoftext|><|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "a template that trims": (
        chat_kit.TRIMMING,
        "\n 4 \n<|im_end|>",
        (
            "<|begin|>[user]\nHi<|im_end|>[assistant]\n\n 4 \n<|im_end|>"
            "[user]\nMore<|im_end|>[assistant]\n"
        ),
    ),
    "a template that trims before a newline": (
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
        "4\n",
        "user: Hi\n\nassistant: 4\n\nuser: More\n\nassistant: ",
    ),
    "a template that trims and then adds what was trimmed": (
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
        " 4\n",
        "user: Hi\nassistant:  4\nuser: More\nassistant: ",
    ),
    "the next turn's marker ends a turn": (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        "4<|im_start|>",
        "<|im_start|>user\nHi<|im_start|>assistant\n4<|im_start|>user\nMore<|im_start|>assistant\n",
    ),
    "a space before the end": (
        (
            "{% for m in messages %}<|begin|>{{ m.role }}:{{ m.content }} <|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}"
        ),
        "4<|im_end|>",
        (
            "<|begin|>user:Hi <|im_end|><|begin|>assistant:4<|im_end|>"
            "<|begin|>user:More <|im_end|><|begin|>assistant:"
        ),
    ),
    "reasoning that is kept": (
        chat_kit.CHATML,
        "<think>\nHm\n</think>\n\n4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nHm\n</think>\n\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "reasoning that the prompt has opened": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n"),
        "Hm\n</think>\n\n4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nHm\n</think>\n\n4"
            "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ),
    ),
    "reasoning that is cut off": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n"),
        "Hm",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nHm\n</think>\n\n"
            "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ),
    ),
    "reasoning in a field of its own": (
        APART,
        "Hm\n</think>\n\n4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nHm\n</think>\n\n4"
            "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_next_prompt_holds_the_reply_as_sampled_and_what_the_template_adds(case: str) -> None:
    template, said, expected = TABLE[case]
    tokenizer = chat_kit.byte_level(template, eos="<|endoftext|>")
    conversation = Chat(tokenizer).begin([HI])
    prompt_ids, completion = conversation.prompt_ids, say(tokenizer, said)
    conversation.reply(completion)
    conversation.observe([user("More")])
    assert seen(tokenizer, conversation) == expected
    assert extends(conversation, prompt_ids, completion)


REWRITINGS = {
    "reasoning is dropped": (
        chat_kit.THINKING,
        "<think>\nHm\n</think>\n\n4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "the turn's opening is dropped": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n~ "),
        "4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n~ "
        ),
    ),
    "a newline is put before the reply": (
        chat_kit.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant"),
        "4<|im_end|>",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant"
        ),
    ),
    "something is put before the reply": (
        chat_kit.CHATML.replace("{{ m.content }}", "{{ '> ' + m.content }}"),
        "4<|im_end|>",
        (
            "<|im_start|>user\n> Hi<|im_end|>\n<|im_start|>assistant\n> 4<|im_end|>\n"
            "<|im_start|>user\n> More<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "something is put behind a reply that has ended": (
        chat_kit.CHATML.replace("{{ m.content }}", "{{ m.content + ' /end' }}"),
        "4<|im_end|>",
        (
            "<|im_start|>user\nHi /end<|im_end|>\n<|im_start|>assistant\n4 /end<|im_end|>\n"
            "<|im_start|>user\nMore /end<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    "the opening changes with what follows": (
        "{{ messages | length }}" + chat_kit.CHATML,
        "4<|im_end|>",
        (
            "3<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
}


@pytest.mark.parametrize("case", REWRITINGS)
def test_a_history_that_the_template_rewrites_is_rendered_anew(case: str) -> None:
    template, said, expected = REWRITINGS[case]
    tokenizer = chat_kit.byte_level(template, eos="<|endoftext|>")
    conversation = Chat(tokenizer).begin([HI])
    prompt_ids, completion = conversation.prompt_ids, say(tokenizer, said)
    conversation.reply(completion)
    conversation.observe([user("More")])
    assert not extends(conversation, prompt_ids, completion)
    assert conversation.prompt_ids == tokenizer.encode(expected, add_special_tokens=False)


def test_after_a_rewriting_the_next_turns_extend_again() -> None:
    tokenizer = chat_kit.byte_level(chat_kit.THINKING)
    conversation = Chat(tokenizer).begin([HI])
    conversation.reply(say(tokenizer, "<think>\nHm\n</think>\n\n4<|im_end|>"))
    conversation.observe([user("More")])
    prompt_ids, completion = conversation.prompt_ids, say(tokenizer, "5<|im_end|>")
    conversation.reply(completion)
    conversation.observe([user("And more")])
    assert extends(conversation, prompt_ids, completion)


def test_reasoning_before_a_tool_call_stays_while_no_user_speaks() -> None:
    tokenizer = chat_kit.byte_level(chat_kit.THINKING)
    conversation = Chat(tokenizer).begin([HI])
    prompt_ids = conversation.prompt_ids
    completion = say(tokenizer, "<think>\nHm\n</think>\n\n4<|im_end|>")
    conversation.reply(completion)
    conversation.observe([{"role": "tool", "content": "3"}])
    assert extends(conversation, prompt_ids, completion)


def test_the_built_in_model_s_conversation_costs_one_token_a_turn_beside_its_text() -> None:
    tokenizer = tiny_tokenizer()
    conversation = Chat(tokenizer).begin([HI])
    assert seen(tokenizer, conversation) == "<|user|>Hi<|assistant|>"
    conversation.reply(say(tokenizer, "4<|end|>"))
    conversation.observe([user("More")])
    assert (
        seen(tokenizer, conversation) == "<|user|>Hi<|assistant|>4<|end|><|user|>More<|assistant|>"
    )


# Without a template


def test_without_a_template_texts_are_joined_as_they_are() -> None:
    tokenizer = chat_kit.byte_level(None, eos="<|endoftext|>")
    chat = Chat(tokenizer, template="none")
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    conversation = chat.begin([{"role": "system", "content": "Q: "}, user("2+2? A:")])
    assert seen(tokenizer, conversation) == "Q: 2+2? A:"
    conversation.reply(say(tokenizer, " 4<|endoftext|>"))
    conversation.observe([user("\nQ: 3+3? A:")])
    assert seen(tokenizer, conversation) == "Q: 2+2? A: 4<|endoftext|>\nQ: 3+3? A:"


def test_without_a_template_a_prompt_begins_as_the_tokenizer_begins_its_texts() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_kit.byte_level(None)
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    conversation = Chat(tokenizer, template="none").begin([HI])
    conversation.reply(say(tokenizer, " you"))
    conversation.observe([user("!")])
    assert seen(tokenizer, conversation) == "<|begin|>Hi you!"


def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_inside_a_conversation() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = chat_kit.space_prefixed(template)
    conversation = Chat(tokenizer).begin([HI])
    hello = tokenizer.convert_tokens_to_ids(list("Hello"))
    conversation.reply(Completion(hello, [-1.0] * 5, "Hello", "stop", 0))
    conversation.observe([user("more")])
    assert seen(tokenizer, conversation) == "user: Hi\nassistant: Hello\nuser: more\nassistant: "


# Where turns end


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (chat_kit.CHATML, ["<|endoftext|>", "<|im_end|>"]),
        (chat_kit.TRIMMING, ["<|endoftext|>", "<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ["<|endoftext|>"]),
        ("{% for m in messages %}<|begin|>{{ m.content }}{% endfor %}",
         ["<|endoftext|>", "<|begin|>"]),
        ("{{ messages[0].content }}", ["<|endoftext|>"]),
    ],
)  # fmt: skip
def test_sampling_stops_at_eos_and_at_the_template_s_own_end(
    template: str, ends: list[str]
) -> None:
    tokenizer = chat_kit.byte_level(template, eos="<|endoftext|>")
    chat = Chat(tokenizer)
    assert [tokenizer.decode([token]) for token in chat.stop_token_ids] == ends


def test_an_end_that_decodes_as_text_is_no_part_of_what_was_said() -> None:
    tokenizer = chat_kit.byte_level(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<stop>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.add_tokens(["<stop>"])  # not a special token: decoding shows it
    conversation = Chat(tokenizer).begin([HI])
    action = conversation.reply(say(tokenizer, "4<stop>"))
    conversation.observe([user("More")])
    assert action.text == "4"
    assert seen(tokenizer, conversation) == (
        "user: Hi<stop>assistant: 4<stop>user: More<stop>assistant: "
    )


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


def test_markup_that_is_a_special_token_is_still_read() -> None:
    tokenizer = chat_kit.byte_level(chat_kit.TOOLS)
    special = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    conversation = Chat(tokenizer).begin([HI], [ADD])
    action = conversation.reply(say(tokenizer, f"{CALL}<|im_end|>"))
    assert [call.name for call in action.tool_calls] == ["add"]


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


def test_tools_are_part_of_what_an_opening_is_known_by() -> None:
    chat = Chat(chat_kit.byte_level(chat_kit.TOOLS))
    assert chat.begin([HI]).prompt_ids != chat.begin([HI], [ADD]).prompt_ids


# What is shared, and what isn't


def test_equal_openings_share_their_ids() -> None:
    chat = Chat(chat_kit.byte_level())
    assert chat.begin([HI]).prompt_ids is chat.begin([dict(HI)]).prompt_ids  # type: ignore[list-item]
    assert chat.begin([HI]).prompt_ids is chat.begin([HI]).fork().prompt_ids


def test_openings_are_forgotten_when_they_grow_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.chat.conversation._CACHED_TOKENS", 40)
    chat = Chat(chat_kit.character())
    first = chat.begin([user("a" * 20)]).prompt_ids
    assert chat.begin([user("a" * 20)]).prompt_ids is first
    chat.begin([user("b" * 20)])
    again = chat.begin([user("a" * 20)]).prompt_ids
    assert again == first
    assert again is not first


def test_forks_go_their_own_ways() -> None:
    tokenizer = chat_kit.byte_level()
    one = Chat(tokenizer).begin([HI])
    other = one.fork()
    for conversation, said in ((one, "4"), (other, "5")):
        conversation.reply(say(tokenizer, said))
        conversation.observe([user("More")])
    assert [m["content"] for m in one.messages] == ["Hi", "4", "More"]
    assert [m["content"] for m in other.messages] == ["Hi", "5", "More"]
    assert one.prompt_ids != other.prompt_ids


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        (chat_kit.CHATML, (), "4<|im_end|>"),
        (chat_kit.TOOLS, (ADD,), CALL),
        (chat_kit.THINKING, (), "4</think>5"),
    ],
)
def test_a_last_reply_ends_the_history_and_leaves_the_conversation(template, tools, said) -> None:
    tokenizer = chat_kit.byte_level(template)
    conversation, last = Chat(tokenizer).begin([HI], tools), say(tokenizer, said)
    other = conversation.fork()
    other.reply(last)
    assert conversation.ended_by(last) == (other.turn(), other.messages)
    assert conversation.messages == [HI]
    conversation.reply(last)  # it has had no reply yet


def test_a_fork_after_a_reply_can_be_observed() -> None:
    tokenizer = chat_kit.byte_level()
    one = Chat(tokenizer).begin([HI])
    one.reply(say(tokenizer, "4"))
    other = one.fork()
    one.observe([user("More")])
    other.observe([user("More")])
    assert one.prompt_ids == other.prompt_ids


def test_an_environment_that_reuses_its_message_does_not_change_history() -> None:
    tokenizer = chat_kit.byte_level()
    message = user("first")
    conversation = Chat(tokenizer).begin([message])
    message["content"] = "second"
    assert conversation.messages == [user("first")]


def test_an_empty_observation_starts_another_turn_of_the_model() -> None:
    tokenizer = chat_kit.byte_level()
    conversation = Chat(tokenizer).begin([HI])
    conversation.reply(say(tokenizer, "4<|im_end|>"))
    conversation.observe([])
    assert seen(tokenizer, conversation).endswith("4<|im_end|>\n<|im_start|>assistant\n")


# What a user is told


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("Hi", TypeError, '[{"role": "user"'),
        (None, TypeError, "got None"),
        ({"role": "user", "content": "Hi"}, TypeError, "expected a list of messages such as [{"),
        (["Hi"], TypeError, "[0]: got 'Hi'"),
        ([{"content": "Hi"}], ValueError, "[0]: got role"),
        ([{"role": 3, "content": "Hi"}], ValueError, "got role 3"),
        ([{"role": "user"}], ValueError, "[0] has no content"),
        ([{"role": "user", "content": None}], ValueError, 'write "" for an empty one'),
        ([{"role": "tool", "content": 42}], TypeError, "got content 42"),
        ([HI, {"role": "user", "content": ["Hi"]}], TypeError, "[1]: got content ['Hi']"),
        ([{"role": "user", "content": "\ud800"}], ValueError, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_messages_is_refused_by_name(
    messages: Any, error: type[Exception], message: str
) -> None:
    tokenizer = chat_kit.byte_level()
    chat = Chat(tokenizer)
    with pytest.raises(error) as opening:
        chat.begin(messages)
    conversation = chat.begin([HI])
    conversation.reply(say(tokenizer, "4"))
    before = (list(conversation.messages), conversation.prompt_ids)
    with pytest.raises(error) as observation:
        conversation.observe(messages)
    assert message in str(opening.value)
    assert message in str(observation.value)
    assert (conversation.messages, conversation.prompt_ids) == before


def test_a_rollout_needs_something_to_start_with() -> None:
    with pytest.raises(ValueError, match="rollout"):
        Chat(chat_kit.byte_level()).begin([])
    with pytest.raises(ValueError, match="token"):
        Chat(chat_kit.byte_level(None), template="none").begin([user("")])


def test_an_observation_cannot_speak_for_the_model() -> None:
    tokenizer = chat_kit.byte_level()
    conversation = Chat(tokenizer).begin([HI])
    conversation.reply(say(tokenizer, "4"))
    with pytest.raises(ValueError, match="assistant"):
        conversation.observe([{"role": "assistant", "content": "5"}])


def test_replies_and_observations_alternate() -> None:
    tokenizer = chat_kit.byte_level()
    conversation = Chat(tokenizer).begin([HI])
    with pytest.raises(RuntimeError, match=r"reply\(\)"):
        conversation.observe([HI])
    conversation.reply(say(tokenizer, "4"))
    with pytest.raises(RuntimeError, match=r"observe\(\)"):
        conversation.reply(say(tokenizer, "5"))


def test_a_role_that_the_template_refuses_is_told_with_its_own_words() -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('No tools here.') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = chat_kit.byte_level(refusing)
    conversation = Chat(tokenizer).begin([HI])
    conversation.reply(say(tokenizer, "4"))
    with pytest.raises(UserCodeError, match=r"roles user, assistant, tool: .*No tools here\."):
        conversation.observe([{"role": "tool", "content": "3"}])
    conversation.observe([user("3")])


def test_a_role_that_the_template_drops_is_an_error() -> None:
    dropping = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    chat = Chat(chat_kit.byte_level(dropping))
    with pytest.raises(UserCodeError, match="'tool'"):
        chat.begin([HI, {"role": "tool", "content": "3"}])


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (None, {}, "`chat: none`"),
        (chat_kit.CHATML, {"template": "chat.jinja"}, "got 'chat.jinja'.*{{ }}"),
        (chat_kit.CHATML, {"template": "{% for %}"}, "can't render a user message"),
        (chat_kit.CHATML, {"arguments": {"tools": []}}, "can't set tools"),
        (
            None,
            {"template": "none", "arguments": {"x": 1}},
            "chat.template",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_of_the_config(
    own: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Chat(chat_kit.byte_level(own), **options)


def test_a_template_of_one_s_own_and_its_arguments_reach_the_rendering() -> None:
    tokenizer = chat_kit.byte_level()
    chat = Chat(
        tokenizer, template="{{ tone }}:{{ messages[0].content }}", arguments={"tone": "ok"}
    )
    assert seen(tokenizer, chat.begin([HI])) == "ok:Hi"


# Templates in the wild

_TRL = find_spec("trl")
WILD = sorted(
    path
    for folder in (_TRL.submodule_search_locations or [] if _TRL else [])
    for path in (Path(folder) / "chat_templates").glob("*.jinja")
    if not path.stem.endswith("_training")
)


@pytest.mark.parametrize("path", WILD, ids=lambda path: path.stem)
def test_templates_in_the_wild_extend_the_sampled_ids_or_are_rendered_anew(path: Path) -> None:
    tokenizer = chat_kit.byte_level(path.read_text(encoding="utf-8"), eos="<|endoftext|>")
    tokenizer.bos_token = "<|begin|>"
    chat = Chat(tokenizer, tools=Hermes())
    turns = [
        (f"<think>\nHm\n</think>\n\nI add.\n{CALL}", {"role": "tool", "content": "3"}),
        ("Hm\n</think>\n\nIt is 3.", user("More")),
        (" 4 \n", user("Yet more")),
    ]
    try:
        conversation = chat.begin([HI], [ADD])
    except UserCodeError:  # a vision template that takes no plain text
        return
    for said, answer in turns:
        prompt_ids, completion = conversation.prompt_ids, say(tokenizer, said)
        conversation.reply(completion)
        try:
            conversation.observe([answer])
        except UserCodeError:  # no tools
            conversation.observe([user("3")])
        rendered = tokenizer.apply_chat_template(
            conversation.messages,
            tools=[ADD.as_template()],
            add_generation_prompt=True,
            tokenize=False,
        )
        anew = tokenizer.encode(rendered, add_special_tokens=False)
        assert extends(conversation, prompt_ids, completion) or conversation.prompt_ids == anew
        assert rendered.endswith(seen(tokenizer, conversation)[-40:])
