"""The start-up time of `import retrain`, `--help`, and a dry run of a remote config.

Wall time of new processes, the best of several. The first row is the interpreter alone; the other
rows include it. Bars: 0.2, 0.5 and 0.7 s, and no torch loaded.

    python -m benchmarks.imports
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 7
HEAVY = ("torch", "trl", "transformers", "datasets", "pandas")
REMOTE = """
model: Qwen/Qwen3-8B
prompts: [{prompt: "a=", answer: aaaa}]
rewards: slot_match
algorithm: {type: grpo, loss: ppo}
backend: {type: tinker, url: "http://127.0.0.1:1"}
"""
_RUN = "import sys; from retrain.cli.run import main; sys.argv = {argv!r}\ntry: main()\n"
_HEAVY = f"\nimport sys\nsys.stderr.write(' '.join(m for m in {HEAVY} if m in sys.modules))"


def main() -> int:
    """Print the table; returns 1 if a bar is missed."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "remote.yaml"
        config.write_text(REMOTE)
        help_ = _RUN.format(argv=["run", "--help"]) + "except SystemExit: pass"
        dry = _RUN.format(argv=["run", str(config), "--dry-run"]) + "except SystemExit: pass"
        rows = (
            ("python alone", "pass", None),
            ("import retrain", "import retrain", 0.2),
            ("--help", help_, 0.5),
            ("--dry-run, remote", dry, 0.7),
        )
        missed = 0
        print(f"{'':20}{'best s':>8}{'median s':>10}{'bar s':>8}  heavy modules loaded")
        for name, script, bar in rows:
            seconds, loaded = measure(script)
            best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
            over = bar is not None and (best > bar or bool(loaded))
            missed += over
            limit = "" if bar is None else f"{bar:.1f}"
            verdict = loaded or "none"
            print(f"{name:20}{best:8.3f}{median:10.3f}{limit:>8}  {verdict}{'  OVER' * over}")
    return int(missed > 0)


def measure(script: str) -> tuple[list[float], str]:
    """Seconds of each new process, and the heavy modules that the script loaded.

    Raises RuntimeError when the script fails.
    """
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
        if done.returncode or "error:" in done.stderr:
            raise RuntimeError(done.stderr)
    probe = subprocess.run([sys.executable, "-c", script + _HEAVY], capture_output=True, text=True)
    return seconds, probe.stderr.rpartition("\n")[2].strip()


if __name__ == "__main__":
    sys.exit(main())
