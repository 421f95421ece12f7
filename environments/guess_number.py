"""Multi-turn: the model guesses a secret number, and the environment says where it is.

The secret is the prompt's answer. The environment replies to each guess with `<` (the secret is
smaller), `>` (it is larger) or `?` (not a number in the range): one character, which is one token
of the model `tiny`. The episode ends when the number is found or no guess is left.

The reward is 1 for finding the number. Otherwise the last guess earns up to 0.5, more the closer it
is: without that slope a random model hardly ever learns to answer with numbers.
"""

from __future__ import annotations

from retrain import Action, Environment, Message, Prompt, StepResult


class GuessNumber(Environment):
    """Guess a number from `low` to `high`; with the defaults, bisection always finds it.

    Args:
        low: The smallest number.
        high: The largest number.
        guesses: The number of turns.
    """

    def __init__(self, low: int = 1, high: int = 7, guesses: int = 3) -> None:
        if high <= low or guesses < 1:
            raise ValueError(
                f"got low {low}, high {high}, guesses {guesses}: expected high > low and at least "
                "one guess"
            )
        self.low, self.high, self.guesses = low, high, guesses

    def prompts(self) -> list[dict[str, object]]:
        """One task per number."""
        numbers = range(self.low, self.high + 1)
        return [{"prompt": f"{self.low}-{self.high}?", "answer": number} for number in numbers]

    async def reset(self, prompt: Prompt) -> list[Message]:
        secret = self.number(str(prompt.answer))
        if secret is None:
            raise ValueError(
                f"the prompt's answer is {prompt.answer!r}, expected a number from {self.low} to "
                f"{self.high}"
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
        """The guess, or None if the text is not a number in the range."""
        guess = int(text) if text.isdecimal() and len(text) <= len(str(self.high)) else None
        return guess if guess is not None and self.low <= guess <= self.high else None

    def closeness(self, guess: int | None) -> float:
        """From 1 (the secret) to 0 (the other end of the range, or not a number)."""
        return 0.0 if guess is None else 1 - abs(guess - self.secret) / (self.high - self.low)
