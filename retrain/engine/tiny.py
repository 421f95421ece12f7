"""The built-in model `tiny`: a Llama of about 0.1 M parameters that learns on a CPU in seconds.

It is built once, from a seed, in a cache folder that is then an ordinary Hugging Face model folder.
The folder's name has a hash of the recipe, so that another recipe makes another folder. A rename
makes the complete folder visible.

Its tokens are printable ASCII, newline, one token per role, and one for each of the four pieces of
JSON around a tool call. A larger vocabulary also has few tokens for these, and 57 characters of
markup would drown the argument. A chat of one user message adds two tokens to its text: a longer
wrapper would drown the prompt of so small a model. Role markers start a turn, and only the
assistant's turn ends with `<|end|>` (the eos token), so that the rendering of a conversation is
always a prefix of the rendering of its continuation.

`tiny_tokenizer` imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ('<tool_call>{"name": "', '", "arguments": {"', '": "', '"}}</tool_call>')
VOCABULARY = (PAD, END, UNKNOWN, *ROLES, "\n", *map(chr, range(32, 127)), *CALL)

CHAT_TEMPLATE = """\
{%- if tools %}
    {%- if messages[0].role == 'system' %}
        {{- '<|system|>' + messages[0].content + '\n' }}
    {%- else %}
        {{- '<|system|>' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
        {{- '' if loop.last else '\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>{"name": ' + call.name | tojson + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""

RECIPE = 2
"""Counts the changes of the recipe outside of the other constants."""
DRAFT = ".tiny-"
"""Prefix of the folders under construction."""
SEED = 0
CONFIG: dict[str, Any] = {  # LlamaConfig's arguments
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY.index(PAD),
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(END),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, except in `CALL`; non-ASCII characters are `<|unk|>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # ByteFallback changes nothing here; with it, llguidance reads this tokenizer.
    characters.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    characters.add_tokens([AddedToken(text, normalized=False) for text in CALL])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers types it partly
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_folder(cache: Path | None = None) -> Path:
    """The model's folder in `cache` (RETRAIN_CACHE or ~/.cache/retrain), built if missing."""
    cache = cache or default_cache()
    folder = cache / f"tiny-{recipe_hash()}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=cache) as draft:
        built = Path(draft, folder.name)
        _build(built)
        try:
            built.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process built it first
                raise
    return folder


def default_cache() -> Path:
    """RETRAIN_CACHE, or `retrain` in the user's cache folder."""
    if own := os.environ.get("RETRAIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrain"


def recipe_hash() -> str:
    """Twelve hex digits that change with every part of the recipe."""
    recipe = json.dumps([RECIPE, SEED, CONFIG, VOCABULARY, CHAT_TEMPLATE])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _build(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with quiet():
        model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Disables transformers' progress bars, which would disturb our own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers is partly typed
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # the same
