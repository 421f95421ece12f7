"""Runs programs that nobody has read, within limits, and grades them by tests.

The interface for containers is `Sandbox`. `local` runs programs in namespaces of this machine.
"""

from retrain.sandbox.base import SandboxLimits, Sandbox, SandboxError, SandboxResult
from retrain.sandbox.choice import SandboxChoice, sandbox_of
from retrain.sandbox.grading import Graded, grade, program_in, tests_of

__all__ = [
    "Graded",
    "SandboxLimits",
    "Sandbox",
    "SandboxChoice",
    "SandboxError",
    "SandboxResult",
    "grade",
    "program_in",
    "sandbox_of",
    "tests_of",
]
