"""The guardian's program: it ends a run whose interpreter is held, and the children of a dead run.

`guardian.py` starts it as `python -I -S guardian_process.py RUN_PID SIGNALS FAULTS OWN...`, so it
imports only what starts within milliseconds, and nothing of retrain. It reads three pipes:

- standard input, the messages of the run, one per line (see `Guardian.obey`). Its end is the end of
  the run, whatever caused it.
- SIGNALS, one byte per signal: C code of the interpreter writes it, also while Python is held.
- FAULTS, the stacks that faulthandler writes after a crash, or when `DUMP` asks for them.

It measures silence in its own ticks. Time in which this process or the run is suspended does not
count.
"""

import os
import select
import signal
import sys
import time

DUMP = signal.SIGURG
"""Makes faulthandler write all stacks. The default action of this signal is to do nothing."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK = 0.5
ANSWER_SECONDS = 2.0
"""How long the run may take to answer a signal."""
REMEDY = "A reward with `processes: 2` runs in processes that can be ended one by one"
LEAVE_SECONDS = 15.0
"""How long a run may take to exit after it said so."""
CHILD_SECONDS = 3.0
"""How long children may take to end after SIGTERM."""
MARK = "RETRAIN_PROGRAM"
"""The environment variable of a program, and of all that it starts: RUN_PID-ID."""
WAITING = ("threading.py", "selectors.py", "queue.py")
"""Files of the standard library that are the innermost ones of a thread that waits."""


class Guardian:
    """Watches the process `run`, the parent of this one."""

    def __init__(self, run: int, signals: int, faults: int, own: "list[str]") -> None:
        self.run, self.signals, self.faults, self.own = run, signals, faults, own
        self.folders: list[str] = []
        """The directories of the active runs."""
        self.limit = 0.0
        """How long the run may be silent, in seconds; 0 while there is nothing to watch."""
        self.leaving = False
        self.silent = 0.0
        self.asked = 0
        """Interrupts without an answer, and the seconds since the last one."""
        self.unanswered = 0.0
        self.hinted = False
        self.groups: dict[int, bytes] = {}
        """Process groups to end, and when their first processes started."""
        self.stacks = b""
        self.rest = b""

    def guard(self) -> None:
        """Watch until the run is gone; then report how it ended, and end its children."""
        last = time.monotonic()
        while os.getppid() == self.run:
            tick = min(TICK, self.limit / 4 or TICK)
            ready = select.select([0, self.signals, self.faults], [], [], tick)[0]
            passed, last = time.monotonic() - last, time.monotonic()
            self.silent += min(passed, 2 * tick)
            self.unanswered += min(passed, 2 * tick)
            if self.signals in ready:
                self.count(os.read(self.signals, 4096))
            if self.faults in ready:
                self.stacks += os.read(self.faults, 65536)
            if 0 in ready and not self.listen():
                break
            self.judge()
        self.farewell()

    def listen(self) -> bool:
        """Obey the messages that have arrived; False at their end."""
        data = os.read(0, 65536)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.obey(line)
        return bool(data)

    def obey(self, line: bytes) -> None:
        """One message: a sign of life in any case, and perhaps a change of what is watched."""
        self.silent = 0.0
        word, *values = line.split()
        if word == b"watch":
            self.limit = float(values[0])
            self.folders = [bytes.fromhex(v.decode()).decode(errors="replace") for v in values[1:]]
        elif word == b"heard":
            self.asked, self.hinted = 0, False
        elif word == b"leaving":
            self.leaving, self.limit, self.asked = True, LEAVE_SECONDS, 0
        elif word == b"child":
            self.groups[int(values[0])] = born(int(values[0]))
        elif word == b"ended":
            self.groups.pop(int(values[0]), None)

    def count(self, numbers: bytes) -> None:
        self.asked += sum(number in INTERRUPTS for number in numbers)
        self.unanswered = 0.0

    def judge(self) -> None:
        """End the run if it is silent for too long, or doesn't answer a second interrupt."""
        if self.limit and self.silent > self.limit / 2 and stopped(self.run):
            self.silent = 0.0
        if self.limit and self.silent > self.limit:
            self.end(f"no Python code could run for {self.limit:g} s")
        elif self.asked and self.unanswered > ANSWER_SECONDS and not stopped(self.run):
            if self.asked > 1:
                self.end("the process did not respond to two interrupts")
            elif not self.hinted:
                self.hinted = True
                say("The process does not respond. Press Ctrl-C again to quit now.")

    def end(self, why: str) -> None:
        """Get the stacks, say why, and kill the run, unless the signal has woken it up."""
        if not self.leaving:
            self.stacks = b""
            self.send(DUMP)
            self.drain(1.0)
            if select.select([0], [], [], 0)[0]:
                return
            self.leaving = True
            try:
                holders = " or ".join(places(self.stacks.decode(errors="replace"), self.own))
            except Exception:  # noqa: BLE001 - whatever the text is, the run must end
                holders = ""
            held = f"; the interpreter (GIL) is held by {holders}" if holders else ""
            self.report(f"{why}{held}. The process was ended. {REMEDY}")
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        try:  # noqa: SIM105 - importing contextlib takes longer than everything here
            os.kill(self.run, number)
        except ProcessLookupError:
            pass  # it has just ended

    def drain(self, seconds: float) -> None:
        """Read stacks until there are none for a moment."""
        while select.select([self.faults], [], [], seconds)[0]:
            data = os.read(self.faults, 65536)
            if not data:
                return
            self.stacks += data
            seconds = min(seconds, 0.1)

    def farewell(self) -> None:
        """The run is gone: report an end without a shutdown, then end the children."""
        while select.select([0], [], [], 0)[0] and self.listen():
            pass
        self.drain(0)
        if self.limit and not self.leaving:
            text = self.stacks.decode(errors="replace")
            _, _, fault = text.partition("Fatal Python error: ")
            if fault:
                _, marker, current = text.partition("Current thread")
                found = places(marker + current, self.own)
                where = f" in {found[0]}" if found else ""
                self.report(f"the process crashed{where}: {fault.splitlines()[0]}")
            else:
                self.report(
                    "the process ended without shutting down: it was killed, ran out of memory, "
                    "or code called os._exit"
                )
        # whoever reads the run's output need not wait for the children
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        end_groups(self.groups)
        end_marked(f"{self.run}-")

    def report(self, message: str) -> None:
        """Write the last words of each run to stderr and, with the stacks, to error.txt."""
        if not self.folders:
            say(f"{message}.")
        for folder in self.folders:
            words = f"{message.rstrip('.')}. {advice(folder)}"
            try:
                with open(os.path.join(folder, "error.txt"), "ab") as file:
                    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                    file.write(f"{stamp} {words}\n".encode(errors="replace") + self.stacks)
                if self.stacks:
                    words += f" The stacks are in {folder}/error.txt."
            except OSError:
                pass  # the directory is gone or the disk is full: stderr remains
            say(words)


def advice(folder: str) -> str:
    """How to continue the run in `folder`."""
    try:
        names = os.listdir(os.path.join(folder, "checkpoints"))
    except OSError:
        names = []
    steps = [int(name[5:]) for name in names if name[:5] == "step_" and name[5:].isdecimal()]
    if steps:
        return f"Continue {folder} with --resume, from step {max(steps)}."
    return f"There is no checkpoint in {folder}: --resume starts at the first step."


def places(stacks: str, own: "list[str]") -> "list[str]":
    """The lines of user code that run, "judge (rewards.py:5)": at most one per thread.

    `stacks` is faulthandler's text, innermost frame first. `own` are the folders of retrain, of the
    standard library and of installed packages. A thread that waits, or runs retrain's own code, is
    left out.
    """
    retrain, library, *_ = own
    found: list[str] = []
    searching = False
    for line in stacks.splitlines():
        if not line.startswith("  File "):
            searching = "most recent call first" in line
            continue
        if not searching:
            continue
        path, _, rest = line[len('  File "') :].rpartition('", line ')
        number, _, name = rest.partition(" in ")
        inner = path.startswith(tuple(own))
        waits = os.path.basename(path) in WAITING or path.startswith(f"{library}/asyncio/")
        if path.startswith(retrain) or (inner and waits):
            searching = False
        elif not inner:
            searching = False
            place = f"{name} ({os.path.basename(path)}:{number})"
            if place not in found:
                found.append(place)
    return found[:3]


def stopped(process: int) -> bool:
    """Whether a process is suspended, as by Ctrl-Z, or stopped by a debugger."""
    if state := fields(process)[:1]:
        return state[0] in b"Tt"
    import subprocess  # only here, on systems without /proc: it starts slowly

    command = ["ps", "-o", "state=", "-p", str(process)]
    try:
        found = subprocess.run(command, capture_output=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return found.strip()[:1] == b"T"


def fields(process: int) -> "list[bytes]":
    """What Linux says about a process, from its state on; empty elsewhere, or if it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def born(process: int) -> bytes:
    """When a process started; empty where that is unknown."""
    return b"".join(fields(process)[19:20])


def end_groups(groups: "dict[int, bytes]") -> None:
    """Terminate the process groups, and kill those that remain."""
    until = time.monotonic() + CHILD_SECONDS
    # the number of a group that ended may belong to another process by now
    ours = {group for group, start in groups.items() if born(group) in (start, b"")}
    left = {group for group in ours if signalled(group, signal.SIGTERM)}
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = {group for group in left if signalled(group, 0)}
    for group in left:
        signalled(group, signal.SIGKILL)


def signalled(group: int, number: int) -> bool:
    """Send a signal to a process group; False if there is none."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS, for a group of zombies
        return number != 0
    return True


def end_marked(mark: str) -> None:
    """Kill the processes whose MARK begins with `mark`, also those that left their group.

    Only where there is /proc.
    """
    until = time.monotonic() + CHILD_SECONDS
    while (left := marked(mark)) and time.monotonic() < until:  # one may start another meanwhile
        for process in left:
            try:  # noqa: SIM105 - see Guardian.send
                os.kill(process, signal.SIGKILL)
            except OSError:
                pass  # it has just ended
        time.sleep(0.01)


def marked(mark: str) -> "list[int]":
    """The processes whose MARK begins with `mark`; a zombie has no environment."""
    wanted, found = f"\0{MARK}={mark}".encode(), []
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(process)}/environ", "rb") as file:
                if wanted in b"\0" + file.read():
                    found.append(int(process))
        except (OSError, ValueError):
            pass  # no process, one of somebody else, or one that has ended
    return found


def say(message: str) -> None:
    try:  # noqa: SIM105 - see Guardian.send
        os.write(2, f"\nretrain: {message}\n".encode(errors="replace"))
    except OSError:
        pass  # the terminal is closed


def main() -> None:
    for number in (*INTERRUPTS, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    run, signals, faults, *own = sys.argv[1:]
    Guardian(int(run), int(signals), int(faults), own).guard()


if __name__ == "__main__":
    main()
