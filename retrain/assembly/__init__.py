"""From a RunConfig to the checked parts of a run, before any model loads."""

from retrain.assembly.build import assemble, chat_template, tool_format
from retrain.assembly.kinds import KINDS, maker, target_of
from retrain.assembly.learner import Learner
from retrain.assembly.parts import Given, Parts, adapter_of

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
