"""1 if a regular expression matches the completion, else 0."""

from __future__ import annotations

from retrain import Reward, RewardCalculator, Trajectory, in_thread, needing


class Regex(RewardCalculator):
    """1 if the pattern matches, else 0.

    The syntax is that of the package `regex`: Python's `re`, and more. If a search takes longer
    than `timeout` seconds, the rollout gets the outcome `timeout` and no reward.

    Args:
        pattern: The regular expression. Write it in single quotes in YAML.
        full: Match the whole completion, except for surrounding whitespace, instead of a part.
        group: The number or name of a group, whose text in the last match must be the answer.
        reasoning: Also search the reasoning of the last turn, with its tags.
        timeout: The time limit of a search in seconds.
    """

    def __init__(
        self,
        pattern: str,
        full: bool = False,
        group: int | str | None = None,
        reasoning: bool = False,
        timeout: float = 1.0,
    ) -> None:
        with needing("remote"):
            import regex  # re has no timeout
        try:
            self.pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"pattern: got {pattern!r}, which is invalid: {error}") from None
        groups = (*range(self.pattern.groups + 1), *self.pattern.groupindex)
        if group is not None and group not in groups:
            raise ValueError(f"group is {group}, which the pattern {pattern!r} does not have")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout:g}, expected a number > 0")
        self.full, self.group, self.reasoning, self.timeout = full, group, reasoning, timeout
        self.needs_answer = group is not None

    async def calculate(self, trajectory: Trajectory) -> float | Reward:
        answer, turns = trajectory.prompt.answer, trajectory.turns
        if self.needs_answer and answer is None:
            raise ValueError("the prompt has no answer: add an `answer` to its row")
        whole = self.reasoning and turns
        text = turns[-1].completion.text if whole else trajectory.completion
        try:
            found = await in_thread(lambda: self.last_match(text.strip()))
        except TimeoutError:
            return Reward(0.0, outcome="timeout")
        if found is None or self.group is None:
            return float(found is not None)
        return float((found or "").strip() == str(answer).strip())

    def last_match(self, text: str) -> str | None:
        """The text of the group in the last match."""
        keys = {"concurrent": True, "timeout": self.timeout}  # it releases the interpreter's lock
        if self.full:
            match = self.pattern.fullmatch(text, **keys)
            return match and (match[self.group or 0] or "")
        found = None
        for match in self.pattern.finditer(text, **keys):
            found = match[self.group or 0] or ""
            if self.group is None:
                break
        return found
