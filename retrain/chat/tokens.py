"""The tokens of a conversation: encodes the template's text and finds where a turn ends.

Only text of the template and the environment is encoded here. The end of a turn is either sampled
or added, never both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from retrain.chat.formats.base import Format
from retrain.chat.reasoning import TAGS
from retrain.chat.template import Template
from retrain.sampler import Tokenizer
from retrain.types import Completion, Turn


class TurnTokens:
    """Encodes the text around the sampled tokens."""

    stops: tuple[int, ...]
    """The tokens at which sampling stops: eos, the template's end of turn and the format's."""
    start: list[int]
    """The tokens before every text (BOS), if no template writes them."""

    def __init__(self, tokenizer: Tokenizer, template: Template, form: Format) -> None:
        self._tokenizer = tokenizer
        # SentencePiece models put a space before every text
        self._pads = tokenizer.decode([*self.encode("\n"), *self.encode("\n")]) != "\n\n"
        self.start = self._before_texts() if template.joins else []
        eos = tokenizer.eos_token_id
        ends = [] if template.joins else [self._end_token(text) for text in template.closers()]
        own = {} if template.joins else self._single(form.ends)
        found = (token for token in (eos, *ends, *own) if token is not None)
        self.stops = tuple(dict.fromkeys(found))
        self._replaced = frozenset(t for t, text in own.items() if text in form.replaced)
        """What the model may end a turn with, but no history has."""
        self._instead = frozenset(own) - self._replaced - {eos, *ends}
        """What ends a turn in place of the template's end."""
        self._closers = frozenset[int]() if template.joins else frozenset(self.stops)
        decode = tokenizer.decode
        self._spelled = {
            t: s for t in self._closers if (s := decode([t], skip_special_tokens=True))
        }
        tags = [*TAGS, *TAGS.values(), *(form.tokens if form.channels else ())]
        self._markup = frozenset(self._single(tags, hidden=True))
        """Special tokens that a reply's text must show to be read."""
        self._call_markup = self._markup | self._single(form.tokens, hidden=True).keys()

    def encode(self, text: str) -> list[int]:
        """The ids of a text that begins a prompt; raises ValueError if it has no UTF-8 form."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:  # tokenizers report either
            raise ValueError(
                "the text of a message has half of a surrogate pair, expected valid Unicode; "
                'convert it with text.encode("utf-8", "replace").decode()'
            ) from error

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text without a chat template, after those before every text (BOS)."""
        return [*self._before_texts(), *self.encode(text)]

    def unknown(self, token_ids: Sequence[int]) -> list[int]:
        """The ids that the tokenizer doesn't have."""
        sized = cast(Any, self._tokenizer)
        size = len(sized) if hasattr(sized, "__len__") else 2**31
        return [token for token in token_ids if not 0 <= token < size]

    def encode_after(self, sampled: Sequence[int], text: str) -> list[int] | None:
        """The ids of `text`, without the end of the turn if the model has sampled it.

        None if `text` has other text before the end of the turn: then the template adds to the
        model's reply. None, too, if the sampled end is one that the template replaces.
        """
        ids = self.encode_inside(text)
        last = sampled[-1] if sampled else None
        if last in self._replaced:
            return None
        if last not in self._closers:
            return ids
        if last in self._instead and last not in ids:
            last = next((token for token in ids if token in self.stops), last)
        if last not in ids:
            return ids
        end = ids.index(last)
        return None if self._tokenizer.decode(ids[:end]).strip() else ids[end + 1 :]

    def extended(self, turn: Turn, text: str) -> list[int]:
        """The ids of a turn followed by `text`, without a chat template.

        An end of turn that the model sampled, but its text doesn't show, must be in `text`.
        """
        ids, added = [*turn.prompt_ids, *turn.completion.token_ids], self.encode_inside(text)
        end = ids[-1:]
        if end[0] in self.stops and not self.text(end):
            return [*ids, *added[1:]] if added[:1] == end else [*ids[:-1], *added]
        return [*ids, *added]

    def encode_reply(self, text: str) -> list[int]:
        """The ids of a reply up to its end of turn, which is added if `text` has none."""
        ids = self.encode_inside(text)
        end = next((index for index, token in enumerate(ids) if token in self.stops), None)
        return [*ids, *self.stops[:1]] if end is None else ids[: end + 1]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def text_of(self, completion: Completion, calls: bool) -> str:
        """The text of a completion, with its markup if `calls` must be read from it."""
        ids, text = completion.token_ids, completion.text
        end = ids[-1] if ids else None
        markup = self._call_markup if calls else self._markup
        if markup and not markup.isdisjoint(ids):
            return self._tokenizer.decode(ids[:-1] if end in self._closers else ids)
        return text.removesuffix(self._spelled[end]) if end in self._spelled else text

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text that follows other tokens."""
        if self._pads:
            for anchor in ("\n", "a"):
                before, both = self.encode(anchor), self.encode(anchor + text)
                if both[: len(before)] == before:
                    return both[len(before) :]
        return self.encode(text)

    def _single(self, texts: Iterable[str], *, hidden: bool = False) -> dict[int, str]:
        """The texts that are one token, by it; only those that decoding drops if `hidden`."""
        decode, found = self._tokenizer.decode, {}
        for text in texts:
            ids = self.encode(text)
            if len(ids) != 1 or decode(ids) != text:
                continue
            if not hidden or not decode(ids, skip_special_tokens=True):
                found[ids[0]] = text
        return found

    def _before_texts(self) -> list[int]:
        bare, full = self.encode("a"), self._tokenizer.encode("a", add_special_tokens=True)
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        return full[: starts[0]] if starts else []

    def _end_token(self, closer: str) -> int | None:
        """The first marker after a reply: a special token, or one that looks like it."""
        decode = self._tokenizer.decode
        for token in self.encode(closer):
            text = decode([token])
            special = bool(text) and not decode([token], skip_special_tokens=True)
            if special or (len(text) > 2 and text[0] == "<" and text[-1] == ">"):
                return token
        return None
