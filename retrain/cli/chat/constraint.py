"""Replies of a given form: a JSON schema, or a tool call. Needs the extra `constrain`.

A grammar (llguidance) says which tokens may come next; the sampler draws from the others' rest. For
a tool call, the grammar is what the chat template writes around the name and the arguments, or the
format where a system message shows the tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from retrain.agents.api import Extra, invalid
from retrain.chat import Chat
from retrain.chat.formats.base import read_json_at
from retrain.chat.reasoning import reasoning_opener
from retrain.chat.template import PROBE_CALL
from retrain.environment import ToolSpec
from retrain.errors import install_command
from retrain.sampler import Tokenizer

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it: a weak model could go on with spaces for ever."""
TAIL = 32
"""Tokens of a prompt that may begin the reasoning."""


class Constraints:
    """The grammars of one model's replies; methods may take a second, so call them in a thread."""

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        self._chat, self._tokenizer = chat, tokenizer

    def mask(self, extra: Extra, prompt_ids: Sequence[int]) -> Callable[[], Matching]:
        """Makes the masks of replies; raises CallError 400 for what can't be enforced."""
        try:
            return self._mask(extra, prompt_ids)
        except ValueError as error:
            name = "tool_choice" if extra.forced else "the JSON schema"
            raise invalid(f"{name} can't be enforced: {error}") from error

    def _mask(self, extra: Extra, prompt_ids: Sequence[int]) -> Callable[[], Matching]:
        if find_spec("llguidance") is None:
            raise ValueError(f"llguidance is not installed: {install_command('constrain')}")
        if extra.schema is not None and extra.forced:
            raise ValueError("a call can't also have a JSON schema and a forced tool_choice")
        if not self._stops:
            raise ValueError("the model has no token that ends a reply")
        end = self._tokenizer.decode(prompt_ids[-TAIL:])
        if reasoning_opener(end) or self._chat.format.channels:
            raise ValueError("the model's replies begin with reasoning")
        from llguidance import LLMatcher

        lark = self._of_call(extra.forced) if extra.forced else _of_json("start", extra.schema)
        grammar = LLMatcher.grammar_from_lark(lark)
        if problem := LLMatcher.validate_grammar(grammar, self._tokens):
            raise ValueError(problem.partition("\n")[0])
        first = LLMatcher(self._tokens, grammar, log_level=0)
        if not any(first.compute_bitmask()) or first.is_error():
            raise ValueError("no reply matches it")
        return lambda: Matching(LLMatcher(self._tokens, grammar, log_level=0), self._stops[0])

    @property
    def _stops(self) -> list[int]:
        return list(self._chat.stop_token_ids)

    @cached_property
    def _tokens(self) -> Any:  # an LLTokenizer
        from llguidance.hf import from_tokenizer

        return from_tokenizer(cast(Any, self._tokenizer), eos_token=self._stops)

    def _of_call(self, tools: Sequence[ToolSpec]) -> str:
        """The grammar of a call of one of these tools, as the template writes it."""
        around = self._around_call()
        before, between, after = map(self._literal, around)
        quoted = around[0].endswith('"')
        rules = [f"start: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if quoted else tool.name
            rules.append(f"call{i}: {before} {json.dumps(name)} {between} json{i} {after}")
            closed = {"additionalProperties": False} if tool.parameters.get("properties") else {}
            rules.append(_of_json(f"json{i}", {"type": "object", **closed, **tool.parameters}))
        return "\n".join(rules)

    def _around_call(self) -> tuple[str, str, str]:
        """The texts before the name of a tool, before its arguments and after them."""
        template, tokens = self._chat.template, self._chat.tokens
        if template.form is not None:
            written = template.form.write({"function": PROBE_CALL})
        else:
            written = template.with_calls(1, text=template.calls_as_text)
        said = self._tokenizer.decode(
            [i for i in tokens.encode_reply(written) if i not in self._stops]
        )
        start = said.find("{")
        while start >= 0:
            try:
                value, end = read_json_at(said, start)
            except ValueError:
                value, end = None, start
            if value == PROBE_CALL["arguments"]:
                before, name, between = said[:start].rpartition(str(PROBE_CALL["name"]))
                if name:
                    return before, between, said[end:]
            start = said.find("{", start + 1)
        raise ValueError("the format of the model's tool calls is not supported")

    def _literal(self, text: str) -> str:
        """A text in a grammar, where special tokens are numbers."""
        decode, parts, plain = self._tokenizer.decode, [], list[int]()
        for token in [*self._chat.tokens.encode_inside(text), None]:
            if token is not None and decode([token], skip_special_tokens=True):
                plain.append(token)
                continue
            parts += [json.dumps(decode(plain))] * bool(plain)
            parts += [f"<[{token}]>"] * (token is not None)
            plain = []
        return " ".join(parts)


class Matching:
    """The tokens that continue a reply of the grammar: `engine.drawing.Mask`."""

    def __init__(self, matcher: Any, end: int) -> None:  # an LLMatcher
        self._matcher, self._end = matcher, end

    def allowed(self) -> NDArray[np.bool_]:
        """Only the end of the reply, if the grammar is too complex to go on."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        if not found.any():
            found[self._end] = True
        return found

    def drew(self, token: int) -> None:
        self._matcher.consume_token(token)


def _of_json(rule: str, schema: Mapping[str, Any] | None) -> str:
    return f"{rule}: %json {json.dumps({**(schema or {}), 'x-guidance': COMPACT})}"
