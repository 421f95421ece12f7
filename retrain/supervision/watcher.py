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

run, limit, file, silent, groups = int(sys.argv[1]), 0.0, b"", 0.0, set[int]()


def say(words: str) -> None:
    for place in (file, 2):  # the folder, the terminal or the space on the disk may be gone
        with suppress(OSError), open(place, "ab", 0, closefd=place != 2) as output:
            output.write(f"\nretrain: {words}\n".encode())


def read(path: str) -> bytes:
    with suppress(OSError), open(path, "rb") as status:
        return status.read()
    return b""  # it has ended, or is not ours; macOS has no /proc


signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 3, 15})  # hang-up, Ctrl-C, Ctrl-\, kill
while True:
    if select.select([0], [], [], tick := min(0.5, limit / 4 or 0.5))[0]:
        if not (data := os.read(0, 2**16)):  # all that a pipe holds, so whole lines
            break
        silent = 0.0
        for word, *values in map(bytes.split, data.splitlines()):
            if word == b"watch":
                limit, file = float(values[0]), bytes.fromhex(values[1].decode())
            elif values:
                (groups.add if word == b"child" else groups.discard)(int(values[0]))
    elif os.getppid() != run:  # a fork of the run holds the pipe
        break
    elif limit and read(f"/proc/{run}/stat").rpartition(b") ")[2][:1] not in {b"T", b"t"}:
        silent += tick  # it is not suspended
        if silent > limit:
            say(f"no Python code ran for {limit:g} s, so the process was ended; its stacks follow")
            limit = 0.0
            os.kill(run, signal.SIGABRT)
if limit:
    say("the process ended without shutting down: it was killed, crashed or ran out of memory")
mark = b"\0RETRAIN_PROGRAM=%d-" % run  # of the daemons of a program (see `programs`); Linux only
daemons = [path for path in glob("/proc/[0-9]*/environ") if mark in b"\0" + read(path)]
for process in [*(-group for group in groups), *(int(path.split("/")[2]) for path in daemons)]:
    with suppress(OSError):  # it has ended
        os.kill(process, signal.SIGKILL)
