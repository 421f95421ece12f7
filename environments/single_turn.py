"""Single turn: the model answers the prompt, and the episode ends. The default environment."""

from __future__ import annotations

from retrain import Environment


class SingleTurn(Environment):
    """Shows the prompt's messages and ends with the first reply; rewards do the scoring."""
