"""Both official SDKs against the local service: every scenario of sdk_scenarios.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow(10)
def test_the_official_sdks_work_unmodified_on_the_local_service() -> None:
    """With its own sampler, and what samples with vLLM's too.

    In a process of its own: the SDKs leave sockets and threads behind, and here that fails."""
    pytest.importorskip("tinker")
    pytest.importorskip("weaver")
    scenarios = Path(__file__).with_name("sdk_scenarios.py")
    lenient = ["-p", "no:unraisableexception", "-p", "no:threadexception", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *lenient]
    done = subprocess.run(
        [*command, str(scenarios)],
        cwd=scenarios.parent.parent,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
