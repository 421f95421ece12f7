"""Ends a run whose interpreter is held, and the children of a run that is gone.

`leash.py` starts it as `python -I -S watcher.py RUN`. Standard input has one message per line, each
a sign of life: `watch SECONDS FILE`, `child GROUP`, `ended GROUP` or `beat`. Its end is the run's
end. Silence is counted in this process's own ticks: suspended time doesn't count.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from glob import glob

run, limit, file, silent, rest = int(sys.argv[1]), 0.0, b"", 0.0, b""
groups: set[int] = set()


def say(words: str) -> None:
    for place in (file, 2):  # the folder, the terminal or the space on the disk may be gone
        with suppress(OSError), open(place, "ab", 0, closefd=place != 2) as output:
            output.write(f"\nretrain: {words}\n".encode())


def suspended() -> bool:
    with suppress(OSError), open(f"/proc/{run}/stat", "rb") as stat:
        return stat.read().rpartition(b") ")[2][:1] in b"Tt"
    return False  # macOS has no /proc


signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 3, 15})  # hang-up, Ctrl-C, Ctrl-\, kill
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
            elif values:
                (groups.add if word == b"child" else groups.discard)(int(values[0]))
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
    with suppress(OSError):  # it has ended
        os.killpg(group, signal.SIGKILL)
for place in glob("/proc/[0-9]*/environ"):  # a program's daemons (see `programs`); Linux only
    with suppress(OSError), open(place, "rb") as environment:
        if b"\0RETRAIN_PROGRAM=%d-" % run in b"\0" + environment.read():
            os.kill(int(place.split("/")[2]), signal.SIGKILL)
