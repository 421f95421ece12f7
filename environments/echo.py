"""The task of the quickstart, a single turn: the prompt is "k=", the answer "kkkk"."""

from __future__ import annotations

from retrain import Environment


class Echo(Environment):
    """Shows the prompt and ends with the first reply; rewards do the scoring."""
