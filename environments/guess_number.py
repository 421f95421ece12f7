"""Multi-turn: the model guesses a secret number, the environment says on which side of it to look.

The secret is the prompt's answer, so the same prompt text may hide any of the numbers. Each guess
is answered with `<` (the secret is smaller), `>` (it is larger) or `?` (that was no number of the
range): one character, since to a model of characters each one is a token. The episode ends when
the number is found or the guesses are used up.

The reward is 1 for finding the number. Else the last guess earns up to half of that, the more the
closer it came: without such a slope a random model would hardly ever learn that numbers are wanted.
"""

from __future__ import annotations

from retrain import Action, Environment, Message, Prompt, StepResult


class GuessNumber(Environment):
    """From `low` to `high` in `guesses` turns; by halving, the defaults can be won every time."""

    def __init__(self, low: int = 1, high: int = 7, guesses: int = 3) -> None:
        if high <= low or guesses < 1:
            raise ValueError(
                f"got low {low}, high {high}, guesses {guesses}: high must be above low, and there "
                "must be a guess"
            )
        self.low, self.high, self.guesses = low, high, guesses

    async def reset(self, prompt: Prompt) -> list[Message]:
        secret = self.number(str(prompt.answer))
        if secret is None:
            raise ValueError(
                f"the prompt's answer must be a number from {self.low} to {self.high}, "
                f"got {prompt.answer!r}"
            )
        self.secret, self.left = secret, self.guesses
        return list(prompt.messages)

    async def step(self, action: Action) -> StepResult:
        self.left -= 1
        guess = self.number(action.text.strip())
        if guess == self.secret:
            return StepResult([], 1.0, True, False, {"guesses": self.guesses - self.left})
        if self.left == 0:
            return StepResult([], 0.5 * self.closeness(guess), True, False, {})
        hint = "?" if guess is None else "<" if self.secret < guess else ">"
        return StepResult([{"role": "user", "content": hint}], 0.0, False, False, {})

    def number(self, text: str) -> int | None:
        """The guess, if the text is a number of the range."""
        guess = int(text) if text.isdecimal() and len(text) <= len(str(self.high)) else None
        return guess if guess is not None and self.low <= guess <= self.high else None

    def closeness(self, guess: int | None) -> float:
        """From 1 (the secret) to 0 (at the range's far end, or no number)."""
        return 0.0 if guess is None else 1 - abs(guess - self.secret) / (self.high - self.low)
