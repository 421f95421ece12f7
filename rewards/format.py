"""1 if the reply has the form of a template, else 0."""

from __future__ import annotations

import re

from retrain import RewardCalculator, Trajectory

_PIECE = re.compile(r"\.\.\.|<[^<>]*>|(?:(?!\.\.\.)[^<])+|<")
"""A gap, a tag, or other text of a template."""
THOUGHTS = ("think", "thinking", "reasoning")
"""Tags that contain no answer, so that one follows."""


class Format(RewardCalculator):
    """1 if the reply of the last turn has the form of the template, else 0.

    The reply is read with its reasoning. It has the form if the fixed parts of the template appear
    once each and in order, with some text in each gap, and only whitespace elsewhere. With
    `partial`, the reward is the fraction of the fixed parts that are right; the text around them
    counts as one more part.

    Args:
        tags: Tags in order: `[think, answer]` is `<think>...</think><answer>...</answer>`. If the
            last one is `think`, `thinking` or `reasoning`, the answer follows it, without tags.
        template: Instead of tags, a string in which each `...` stands for any text.
        partial: Give a fraction of the reward for a form that is partly right.
        opened: The prompt already ends with the first fixed part, as the chat templates of some
            thinking models do.
    """

    def __init__(
        self,
        tags: list[str] | None = None,
        template: str | None = None,
        partial: bool = False,
        opened: bool = False,
    ) -> None:
        if (tags is None) == (template is None):
            raise ValueError("expected either tags or template")
        given = template if tags is None else _template(tags)
        self.pieces = list(filter(None, map(str.strip, _PIECE.findall(given or ""))))
        self.fixed = [piece for piece in self.pieces if piece != "..."]
        if "..." not in self.pieces or not self.fixed:
            raise ValueError(f"got {given!r}, expected a template such as '<think>...</think>'")
        self.partial, self.opener = partial, self.fixed[0] if opened else ""

    async def calculate(self, trajectory: Trajectory) -> float:
        turns = trajectory.turns
        text = turns[-1].completion.text if turns else trajectory.completion
        held = self.conditions(self.opener + text)
        return sum(held) / len(held) if self.partial else float(all(held))

    def conditions(self, text: str) -> list[bool]:
        """Whether each fixed part appears once and in order, and if so, what is between them."""
        held, end, between = list[bool](), 0, list[str]()
        for part in self.fixed:
            start = text.find(part, end)
            held.append(start >= 0 and text.count(part) == 1)
            if held[-1]:
                between.append(text[end:start])
                end = start + len(part)
        between.append(text[end:])
        wanted = [False]  # text in the gaps of the template, and nowhere else
        for piece in self.pieces:
            if piece == "...":
                wanted[-1] = True
            else:
                wanted.append(False)
        return [*held, all(held) and [bool(text.strip()) for text in between] == wanted]


def _template(tags: list[str]) -> str:
    form = "".join(f"<{tag}>...</{tag}>" for tag in tags)
    return f"{form}..." if tags and tags[-1] in THOUGHTS else form
