"""A few cases of each campaign in `tests/chaos`; `make chaos` plays all of them."""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.planted import BUGS
from tests.chaos.simulation import campaign, play, violations
from tests.chaos.virtual_time import virtual
from tests.pipe_kit import ROOT

FAULTS = [
    "BadStrError in step", "cancel_later in reset", "swallow_once in step", "the observation 5",
    "cancel in setup", "a regex in a reward",
]  # fmt: skip


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # outages
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
def test_simulated_histories_keep_their_promises():
    found, met = campaign(40, seed=0)
    assert found == {}
    assert min(met["crash"], met["interrupt"], met["fault"]) > 10


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    with virtual(), BUGS[bug]():
        assert any(broken(seed) for seed in range(80))


def broken(seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return violations(play(seed, Path(folder)))


def test_faults_of_user_code_have_their_outcomes():
    command = [sys.executable, "-m", "tests.chaos.user_code", *FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert f"{len(FAULTS)} of {len(FAULTS)} " in done.stdout, done.stdout + done.stderr
