"""The rows that `prompts.held_out` holds out of training."""

from __future__ import annotations

from retrain.errors import PromptError
from retrain.prompts.base import Origin, PromptSource


def held_out(origin: Origin) -> PromptSource:
    """The rows that `prompts.held_out` holds out of training: `eval: {prompts: held_out}`."""
    source = origin.held_out()
    if source is None:
        raise PromptError(
            "got held_out, but prompts.held_out is not set; set it to the fraction to hold out, "
            "such as 0.05"
        )
    return source
