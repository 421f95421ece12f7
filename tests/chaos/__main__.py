"""All campaigns, one after the other, and their score: `make chaos`, or `python -m tests.chaos`.

It exits with 1 if a guarantee was violated, and prints which. Another `--seed` plays other
histories, kills at other points and sends other requests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def campaigns(seed: int, part: float) -> dict[str, list[str]]:
    """The arguments of each campaign's module; `part` scales those that draw their cases."""
    drawn = ["--seed", str(seed)]
    return {
        "simulation": ["--histories", str(round(3000 * part)), *drawn],
        "user_code": [],
        "damage": [],
        "network": [],
        "servers": [],
        "requests": ["--requests", str(round(10_000 * part)), *drawn],
        "ranks": ["--kills", str(round(part)), "--part", str(0.3 * part), *drawn],
        "kills": ["--kills", str(round(60 * part)), *drawn],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=float, default=1.0, help="0.1 plays a tenth of the cases")
    arguments = parser.parse_args()
    started, scores, failed = time.monotonic(), [], 0
    for name, words in campaigns(arguments.seed, arguments.part).items():
        command = [sys.executable, "-m", f"tests.chaos.{name}", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        *details, score = done.stdout.splitlines() or [f"exit code {done.returncode}"]
        print("\n".join(details), end="\n" * bool(details), flush=True)
        scores.append(f"{name:12} {score}")
        failed += done.returncode != 0
    print("\n".join(scores))
    seconds = time.monotonic() - started
    print(f"{len(scores) - failed} of {len(scores)} campaigns held, in {seconds:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
