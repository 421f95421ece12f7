"""The cost of a program in a sandbox: `python -m benchmarks.sandbox [--programs N]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time

from retrain.sandbox import SandboxChoice, grade, local, read_tests, sandbox_of
from retrain.sandbox.choice import MODES


async def measure(mode: str, programs: int, at_once: int) -> None:
    """Print the rate of programs that do nothing, and of graded programs."""
    async with sandbox_of(SandboxChoice(mode, at_once)) as sandbox:
        await sandbox.run(["python", "-c", "pass"], {})
        started = time.perf_counter()
        single = [sandbox.run(["python", "-c", "pass"], {}) for _ in range(programs)]
        results = await asyncio.gather(*single)
        wall = (time.perf_counter() - started) / programs
        assert not any(result.exit_code for result in results)
        median = sorted(result.seconds for result in results)[programs // 2]
        tests = read_tests(["assert f(1) == 2", "assert f(2) == 3"])
        started = time.perf_counter()
        graded = [grade(sandbox, "def f(x): return x + 1", tests) for _ in range(programs)]
        assert all(all(result.passed) for result in await asyncio.gather(*graded))
        both = (time.perf_counter() - started) / programs
    print(
        f"{mode:<12} {1 / wall:6.0f} programs/s, {1e3 * median:5.1f} ms for one from start to "
        f"end; {1 / both:6.0f} graded/s ({at_once} at the same time)"
    )


def bare(programs: int) -> None:
    """Print the same for Python started without a sandbox, one after the other."""
    argv = [*local.python_of(False)[0], "-c", "pass"]
    started = time.perf_counter()
    for _ in range(programs):
        subprocess.run(argv, check=True)
    wall = (time.perf_counter() - started) / programs
    print(
        f"{'bare Python':<12} {1 / wall:6.0f} programs/s, {1e3 * wall:5.1f} ms each (one at a time)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    bare(given.programs)
    for mode in MODES:
        if why := local.why_not(mode):
            print(f"{mode:<12} not measured: {why}", file=sys.stderr)
        else:
            asyncio.run(measure(mode, given.programs, given.at_once))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"the event loop's process used {usage.ru_utime + usage.ru_stime:.1f} s of CPU in total")


if __name__ == "__main__":
    main()
