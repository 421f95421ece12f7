"""Ends a run whose interpreter is held, and the children of a run that is gone.

`leash.py` starts it as `python -I -S watcher.py RUN`. Standard input has one message per line, each
a sign of life: `watch SECONDS FILE`, `child GROUP`, `ended GROUP` or `beat`. Its end is the run's
end. Silence is counted in this process's own ticks: suspended time doesn't count.
"""

import os
import select
import signal
import sys

run, limit, file, silent, rest, groups = int(sys.argv[1]), 0.0, b"", 0.0, b"", set()


def say(words: str) -> None:
    line = f"retrain: {words}\n".encode()
    with open(file, "ab") as errors:
        errors.write(line)
    os.write(2, b"\n" + line)


def suspended() -> bool:
    with open(f"/proc/{run}/stat", "rb") as stat:
        return stat.read().rpartition(b") ")[2][:1] in b"Tt"


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
while True:
    tick = min(0.5, limit / 4 or 0.5)
    if select.select([0], [], [], tick)[0]:
        if not (data := os.read(0, 65536)):
            break
        silent = 0.0
        *lines, rest = (rest + data).split(b"\n")
        for word, *values in map(bytes.split, lines):
            if word == b"watch":
                limit, file = float(values[0]), bytes.fromhex(values[1].decode())
            elif word == b"child":
                groups.add(int(values[0]))
            elif word == b"ended":
                groups.discard(int(values[0]))
    elif os.getppid() != run:  # a fork of the run holds the pipe
        break
    elif limit and not suspended():
        silent += tick
        if silent > limit:
            say(f"no Python code ran for {limit:g} s, so the process was ended; its stacks follow")
            limit = 0.0
            os.kill(run, signal.SIGABRT)
if limit:
    say("the process ended without shutting down: it was killed, crashed or ran out of memory")
for group in groups:
    try:  # noqa: SIM105 - importing contextlib takes longer than everything here
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass  # it has ended
