"""What conversations share, and which messages, replies and templates they reject."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.errors import ConfigError, UserCodeError
from tests import chat_kit
from tests.conversation_kit import ADD, CALL, HI, extends, say, seen, user

# What is shared, and what isn't


def test_equal_openings_share_their_ids() -> None:
    chat = Chat(chat_kit.byte_level(chat_kit.TOOLS))
    assert chat.begin([HI]).prompt_ids is chat.begin([dict(HI)]).prompt_ids  # type: ignore[list-item]
    assert chat.begin([HI]).prompt_ids != chat.begin([HI], [ADD]).prompt_ids
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
    turn, history = one.ended_by(say(tokenizer, "3"))
    assert (turn.text, history[:-1], one.messages) == ("3", [HI], [HI])
    for conversation, said in ((one, "4"), (other, "5")):
        conversation.reply(say(tokenizer, said))
    late = one.fork()
    for conversation in (one, other, late):
        conversation.observe([user("More")])
    assert one.prompt_ids == late.prompt_ids
    assert [m["content"] for m in one.messages] == ["Hi", "4", "More"]
    assert [m["content"] for m in other.messages] == ["Hi", "5", "More"]
    assert one.prompt_ids != other.prompt_ids


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


# Errors and warnings


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
        (None, {"template": "none", "arguments": {"x": 1}}, "chat.template"),
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
