"""Tokenizers with chat templates that several tests share, built here: nothing is downloaded.

`character` has single-token role markers, as the built-in model has; the others share a byte-level
BPE that is trained on a small text, so that a text has many encodings beside the canonical one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHARACTER = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRIMMING = (
    "{{ '<|begin|>' }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

THINKING = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}
{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_user -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Drops the reasoning of turns before the last user message, as Qwen3's does."""

TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>tool\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 17 + 25? The answer is 42.",
    "user assistant system tool Guess a number between 1 and 100: higher, lower, right!",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "<think>\nFirst I add them up, then I check the sum.\n</think>\n\nThe sum is 42.",
    "Zoë's naïve café: 東京 😀 \n\n    return x + y\n",
]


def character() -> Any:
    """One token a character; role markers are single tokens and `<|end|>` is eos."""
    alphabet = ["\ufffd", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token=alphabet[0])
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    roles = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    return _wrap(core, CHARACTER, eos="<|end|>", extra=roles)


def byte_level(template: str | None = CHATML, *, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE; decode(encode(text)) is text for any text."""
    extra = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>"]
    return _wrap(Tokenizer.from_str(_bpe()), template, eos=eos, extra=extra)


def space_prefixed(template: str | None) -> Any:
    """A BPE that puts a space before every text that it encodes, as SentencePiece models do."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    core.train_from_iterator([*_CORPUS, "User: Hi\nBot: Hello\n"], trainer)
    return _wrap(core, template, eos="</s>", extra=[])


@cache
def _bpe() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return str(core.to_str())


def _wrap(core: Tokenizer, template: str | None, *, eos: str, extra: list[str]) -> Any:
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (eos, *extra)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer
