"""From a RunConfig to the checked parts of a run, before any model loads."""

from retrain.assembly.build import assemble
from retrain.assembly.learner import Learner
from retrain.assembly.parts import KINDS, Given, Parts, adapter_of, maker, target_of
from retrain.assembly.sections import chat_template, tool_format

__all__ = [
    "KINDS",
    "Given",
    "Learner",
    "Parts",
    "adapter_of",
    "assemble",
    "chat_template",
    "maker",
    "target_of",
    "tool_format",
]
