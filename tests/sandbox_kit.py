"""The sandboxes that this machine has, and narrow limits."""

from __future__ import annotations

import pytest

from retrain.sandbox import SandboxLimits, local
from retrain.sandbox.choice import MODES

WORKING = [mode for mode in MODES if not local.why_not(mode)]
needs_sandbox = pytest.mark.skipif(not WORKING, reason="no namespaces here")
LIMITS = SandboxLimits(
    seconds=30, cpu_seconds=1, memory=200, disk=8, files=100, processes=8, output=64
)
