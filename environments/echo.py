"""Single turn: the prompt is "k=", the model answers, the episode ends. Rewards do the scoring."""

from __future__ import annotations

from retrain import Environment


class Echo(Environment):
    """The defaults are the whole task: reset shows the prompt, the first reply ends it."""
