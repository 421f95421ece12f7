"""Conversations: the next prompt extends the sampled ids, or is the template's own rendering."""

from __future__ import annotations

import pytest

from retrain.chat import Chat
from retrain.types import Completion
from tests import chat_kit
from tests.conversation_kit import HI, extends, say, seen, user


def chatml(said: str) -> str:
    """What the model sees after `HI`, this reply and `More`."""
    return (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

TABLE = {
    "chatml, end sampled": (chat_kit.CHATML, "4<|im_end|>", chatml("4")),
    "chatml, cut off": (chat_kit.CHATML, "4", chatml("4")),
    "chatml, nothing at all": (chat_kit.CHATML, "", chatml("")),
    "chatml, another end than the template's": (
        chat_kit.CHATML,
        "4<|endoftext|>",
        chatml("4<|endoftext|>"),
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
    "reasoning that the prompt has opened": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n"),
        "Hm\n</think>\n\n4<|im_end|>",
        chatml("<think>\nHm\n</think>\n\n4") + "<think>\n",
    ),
    "reasoning that is cut off": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n"),
        "Hm",
        chatml("<think>\nHm\n</think>\n\n") + "<think>\n",
    ),
    "reasoning in a field of its own": (
        APART,
        "Hm\n</think>\n\n4<|im_end|>",
        chatml("<think>\nHm\n</think>\n\n4") + "<think>\n",
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
        chatml("4"),
    ),
    "the turn's opening is dropped": (
        chat_kit.CHATML.replace("assistant\n", "assistant\n~ "),
        "4<|im_end|>",
        chatml("4") + "~ ",
    ),
    "a newline is put before the reply": (
        chat_kit.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant"),
        "4<|im_end|>",
        chatml("4").removesuffix("\n"),
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
        "3" + chatml("4"),
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


def test_reasoning_stays_until_a_user_speaks_and_the_turns_after_that_extend_again() -> None:
    tokenizer = chat_kit.byte_level(chat_kit.THINKING)
    conversation = Chat(tokenizer).begin([HI])
    turns = [("tool", "3", True), ("user", "More", False), ("user", "And more", True)]
    for said, (role, content, kept) in zip(
        ["<think>\nHm\n</think>\n\n4", "5", "6"], turns, strict=True
    ):
        prompt_ids, completion = conversation.prompt_ids, say(tokenizer, f"{said}<|im_end|>")
        conversation.reply(completion)
        conversation.observe([{"role": role, "content": content}])
        assert extends(conversation, prompt_ids, completion) is kept


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
