"""From a RunConfig to the checked parts of a run, before any model loads."""

from retrain.assembly.learner import Learner
from retrain.assembly.parts import KINDS, Parts, adapter_of, assemble, chat_template, target_of

__all__ = [
    "KINDS",
    "Learner",
    "Parts",
    "adapter_of",
    "assemble",
    "chat_template",
    "target_of",
]
