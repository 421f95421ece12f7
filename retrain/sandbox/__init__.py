"""Runs programs that nobody has read, within limits, and grades them by tests.

The interface for containers is `Sandbox`. `local` runs programs in namespaces of this machine.
"""

from retrain.sandbox.base import Sandbox, SandboxError, SandboxLimits, SandboxResult
from retrain.sandbox.choice import SandboxChoice, sandbox_of
from retrain.sandbox.grading import Graded, grade, program_in, read_tests, tests_of

__all__ = [
    "Graded",
    "Sandbox",
    "SandboxChoice",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "grade",
    "program_in",
    "read_tests",
    "sandbox_of",
    "tests_of",
]
