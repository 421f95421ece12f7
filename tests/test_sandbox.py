"""Programs that try to leave the sandbox or to exceed its limits."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain import ConfigError
from retrain.sandbox import (
    Sandbox,
    SandboxChoice,
    SandboxError,
    SandboxResult,
    grade,
    read_tests,
    sandbox_of,
)
from retrain.sandbox.local import LocalSandbox
from retrain.sandbox.plain import _warn
from retrain.supervision.children import Child
from tests.pipe_kit import until
from tests.sandbox_kit import LIMITS, WORKING, needs_sandbox

SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def denied(*numbers_of):
    number = numbers_of[platform.machine() == "aarch64"]
    return libc.syscall(number, *[0] * 6) < 0 and ctypes.get_errno() in (1, 38)
"""
ESCAPES = {
    "loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "network": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    "abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{secret}')",
    "socket in a file": "import socket; socket.socket(socket.AF_UNIX).connect('{folder}/socket')",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "file of the user": "open('{folder}/secret')",
    "file of root": "open('/etc/shadow')",
    "home": "import os; os.listdir(os.path.expanduser('~{user}/.ssh'))",
    "environment": "import os; os.environ['SANDBOX_SECRET']",
    "environment of init": "open('/proc/1/environ').read()",
    "memory of init": "open('/proc/1/mem', 'rb')",
    "processes of the host": "open('/proc/{pid}/status').read().index('{name}')",
    "inherited descriptors": "import os; os.fstat(3)",
    "writing to /": "open('/x', 'w')",
    "writing to /usr": "open('/usr/x', 'w')",
    "writing to Python": "import os; open(os.__file__, 'a')",
    "writing to /dev": "open('/dev/x', 'w')",
    "writing to sysctl": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "device": "open('/dev/mem')",
    "disk": "import os; [open('/dev/' + d) for d in ('sda', 'vda', 'nvme0n1')][0]",
    "terminal": "open('/dev/tty')",
    "making a device": "import os, stat; os.mknod('x', 0o600 | stat.S_IFCHR, os.makedev(1, 1))",
    "being root": "import os; os.setresuid(0, 0, 0); open('/x', 'w')",
    "set-uid": "import os; os.chmod('/usr/bin/su', 0o4755)",
    "chroot": "import os; os.chroot('.')",
    "signal to the run": "import os; os.kill({pid}, 9)",
    "signal to everybody": "import os; os.kill(-1, 9)",
    "oom score": "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')",
    "file without limits": "import os; os.memfd_create('x')",
    "growing the input": "open('/proc/self/fd/0', 'r+b').write(b'x' * 2**20)",
    "raising a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "memory": "x = bytearray(2**30)",
    "big file": "f = open('x', 'wb', 0)\nfor i in range(20): assert f.write(bytes(2**20)) == 2**20",
    "disk in parts": "for i in range(20): open(str(i), 'wb').write(bytes(2**20))",
    "disk in /dev/shm": "for i in range(20): open(f'/dev/shm/{{i}}', 'wb').write(bytes(2**20))",
    "many files": "for i in range(200): open(str(i), 'w')",
    "open files": "x = [open('/dev/null') for i in range(1000)]",
    "fork bomb": "import os, time\nfor i in range(50): os.fork() or time.sleep(9)",
    "thread bomb": "from threading import Timer\nfor i in range(50): Timer(0.5, print).start()",
    "limits of init": "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))",
    "limits of the parent": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_AS)",
    "priority of init": "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "priority of the user": "import os; os.setpriority(os.PRIO_USER, 0, 19)",
    "scheduler of init": "import os as o; o.sched_setscheduler(1, o.SCHED_IDLE, o.sched_param(0))",
    "scheduling of init": "import os; os.sched_setparam(1, os.sched_param(0))",
    "cores of init": "import os; os.sched_setaffinity(1, {{0}})",
    "disk priority of init": SYSCALL + "assert libc.syscall({ioprio_set}, 1, 1, 0x6000) == 0",
    "user namespace": SYSCALL + "assert libc.unshare(0x10000000) == 0",
    "mount": SYSCALL + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "ptrace": SYSCALL + "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "System V memory": SYSCALL + "assert libc.shmget(0, 2**20, 0o1600) >= 0",
    "bpf": SYSCALL + "assert not denied(321, 280)",
    "io_uring": SYSCALL + "assert not denied(425, 425)",
    "keyctl": SYSCALL + "assert not denied(250, 219)",
    "userfaultfd": SYSCALL + "assert not denied(323, 282)",
    "clone3": SYSCALL + "assert not denied(435, 435)",
    "clone with namespaces": SYSCALL + "assert libc.syscall({clone}, 0x10000011, 0, 0, 0, 0) >= 0",
}
"""What must raise an exception."""
EXCEEDING = {
    "time": "import time; time.sleep(60)",
    "cpu": "while True: pass",
    "memory": """
import os, time
for i in range(6):
    if os.fork() == 0:
        x = b'x' * 2**26
        time.sleep(60)
time.sleep(60)
""",
    "output": "while True: print('x' * 1000)",
}
"""What must be ended by the limit of this name."""
SURVIVING = {
    "killing the parent": "import os; os.kill(os.getppid(), 9)",
    "stopping the parent": "import os; os.kill(os.getppid(), 19)",
    "interrupting the parent": "import os; os.kill(os.getppid(), 2)",
    "limits and priorities of its own": """
import os, resource
resource.prlimit(0, resource.RLIMIT_NOFILE, (9, 99))
resource.setrlimit(resource.RLIMIT_NOFILE, (19, 99))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
assert os.nice(3) == 3
""",
    "a daemon": """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{secret}'])
    os._exit(0)
os.wait()
""",
}
"""What must not prevent a normal end."""


@pytest.fixture(params=WORKING or [pytest.param("", marks=pytest.mark.skip("no namespaces here"))])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandbox_of(SandboxChoice(request.param, processes=4)) as made:
        yield made


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Things that a program must not reach; they exist."""
    monkeypatch.setenv("SANDBOX_SECRET", "x")
    (tmp_path / "secret").write_text("x")
    secret = secrets.token_hex(8)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        for listening, address in ((abstract, f"\0{secret}"), (named, f"{tmp_path}/socket")):
            listening.bind(address)
            listening.listen()
        yield {
            "port": server.getsockname()[1],
            "secret": secret,
            "folder": tmp_path,
            "user": "root" if os.geteuid() == 0 else "",
            "pid": os.getpid(),
            "name": Path(f"/proc/{os.getpid()}/comm").read_text().strip(),
            "clone": 220 if os.uname().machine == "aarch64" else 56,
            "ioprio_set": 30 if os.uname().machine == "aarch64" else 251,
        }


async def run_all(
    sandbox: Sandbox, programs: dict[str, str], host: dict[str, object]
) -> dict[str, SandboxResult]:
    sources = {name: text.format_map(host) for name, text in programs.items()}
    limits = {"time": replace(LIMITS, seconds=0.5)}
    runs = [
        sandbox.run(
            ["python", "main.py"],
            {"main.py": f"{text}\nprint('reached')"},
            limits=limits.get(name, LIMITS),
        )
        for name, text in sources.items()
    ]
    return dict(zip(sources, await asyncio.gather(*runs), strict=True))


@pytest.mark.slow(8)
async def test_no_program_reaches_what_is_outside_or_more_than_its_limits(
    sandbox: LocalSandbox, host: dict[str, object]
) -> None:
    escapes, exceeding, surviving = await asyncio.gather(
        run_all(sandbox, ESCAPES, host),
        run_all(sandbox, EXCEEDING, host),
        run_all(sandbox, SURVIVING, host),
    )
    reached = {n for n, r in escapes.items() if "reached" in r.stdout or r.exit_code == 0}
    assert reached <= ({"many files"} if sandbox.mode == "bubblewrap" else set())
    unusual = ("SyntaxError", "NameError", "ModuleNotFoundError")
    assert [(n, r.stderr) for n, r in escapes.items() if any(e in r.stderr for e in unusual)] == []
    assert {name: result.limit for name, result in exceeding.items()} == {n: n for n in EXCEEDING}
    assert all(len(result.stdout) <= 64 << 10 for result in exceeding.values())
    assert [(n, r) for n, r in surviving.items() if r.stdout != "reached\n"] == []
    assert str(host["secret"]) not in running()


def running() -> str:
    """The command lines of all processes of this machine."""
    return "\n".join(map(text_of, processes()))


def processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*/cmdline")


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parent_of(process: Path) -> int:
    [line] = [x for x in text_of(process / "status").splitlines() if x.startswith("PPid:")]
    return int(line.split()[1])


async def test_a_program_has_its_input_files_and_working_folder(sandbox: Sandbox) -> None:
    program = "import pathlib; print(input(), pathlib.Path('a/b').read_text(), pathlib.Path.cwd())"
    result = await sandbox.run(["python", "-c", program], {"a/b": "ü"}, stdin="é\n")
    assert (result.stdout, result.exit_code, result.limit) == ("é ü /tmp\n", 0, "")
    shell = await sandbox.run(["sh", "-c", "echo $0; exit 3"], {})
    assert (shell.stdout, shell.exit_code) == ("sh\n", 3)
    with pytest.raises(ValueError, match=r"'\.\./x'"):
        await sandbox.run(["python"], {"../x": ""})
    with pytest.raises(SandboxError, match=r"FileNotFoundError.*nonsense"):
        await sandbox.run(["nonsense"], {})


async def test_a_cancelled_program_ends_with_all_it_started(sandbox: Sandbox) -> None:
    secret = secrets.token_hex(8)
    program = "import os, time; os.fork(); time.sleep(60)"
    task = asyncio.create_task(sandbox.run(["python", "-c", program, secret], {}))
    await until(lambda: running().count(secret) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: secret not in running())
    assert (await sandbox.run(["python", "-c", "print(1)"], {})).stdout == "1\n"


async def test_an_init_that_the_machine_kills_is_an_error_of_the_sandbox(sandbox: Sandbox) -> None:
    secret = secrets.token_hex(8)
    program = "import time; time.sleep(60)"
    task = asyncio.create_task(sandbox.run(["python", "-c", program, secret], {}))
    await until(lambda: secret in running())
    [init] = [parent_of(path.parent) for path in processes() if secret in text_of(path)]
    os.kill(init, signal.SIGKILL)
    with pytest.raises(SandboxError, match="out of memory"):
        await task


async def test_a_machine_without_memory_kills_the_init_first(sandbox: Sandbox) -> None:
    scores = "print(*(int(open(f'/proc/{p}/oom_score_adj').read()) for p in ('self', 1)))"
    result = await sandbox.run(["python", "-c", scores], {})
    own = max(500, int(text_of(Path("/proc/self/oom_score_adj"))))
    assert result.stdout == f"{own} 1000\n"


NEAR = """
import os, signal
from retrain.sandbox import jail, server
if (program := os.fork()) == 0:
    signal.pause()
def usage():
    os.kill(program, 9)
    return 1, 60 << 10
jail._usage = usage
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
read, write = (os.dup2(end, 10 + end) for end in os.pipe())
os.dup2(write, jail.STATUS)
jail.ending(program, {"memory": 100, "processes": 1})
job = server.Program.__new__(server.Program)
job.started, job.limit, job.exit_code = 0, "", -9
job.outputs = {"stdout": b"", "stderr": b"", "status": os.read(read, 99)}
assert job.reply()["code"] == -9 and "error" not in job.reply()
"""


STARVED = """
import os, resource, signal
from retrain.sandbox import jail
if (program := os.fork()) == 0:
    signal.pause()
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
assert jail.ending(program, {}) == {"code": -9}
os.kill(program, 9)
"""


@needs_sandbox
@pytest.mark.parametrize("script", [NEAR, STARVED], ids=["near", "starved"])
def test_an_init_that_the_program_starves_is_its_failure(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def test_a_server_that_dies_fails_its_programs_and_is_replaced(sandbox: LocalSandbox) -> None:
    secret = secrets.token_hex(8)
    task = asyncio.create_task(
        sandbox.run(["python", "-c", "import time; time.sleep(60)", secret], {})
    )
    await until(lambda: secret in running())
    assert sandbox._server is not None
    os.kill(sandbox._server.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the server of the sandboxes ended"):
        await task
    await until(lambda: secret not in running())
    assert (await sandbox.run(["python", "-c", "print(1)"], {})).stdout == "1\n"


KILLED = """
import asyncio, sys
from retrain.sandbox import SandboxChoice, sandbox_of
async def main():
    async with sandbox_of(SandboxChoice(sys.argv[1])) as sandbox:
        program = "import os, time; os.fork(); time.sleep(60)"
        await sandbox.run(["python", "-c", program, sys.argv[2]], {})
asyncio.run(main())
"""


@needs_sandbox
async def test_a_run_that_is_killed_leaves_no_program() -> None:
    secret = secrets.token_hex(8)
    run = await Child.start([sys.executable, "-c", KILLED, WORKING[0], secret])
    try:
        await until(lambda: running().count(secret) == 3)
        run.signal(signal.SIGKILL)
        await until(lambda: secret not in running())
    finally:
        await run.end()


async def test_without_a_sandbox_only_limits_hold(caplog: pytest.LogCaptureFixture) -> None:
    _warn.cache_clear()
    made, _ = (SandboxChoice("none", processes=4).make() for _ in range(2))
    assert caplog.text.count("with your files, your network") == 1
    programs = {
        "memory": "x = bytearray(2**30)",
        "environment": "import os; print(sorted(os.environ))",
        "time": EXCEEDING["time"],
        "cpu": EXCEEDING["cpu"],
    }
    runs = await run_all(made, programs, {})
    graded = await grade(made, "def f(x): return x + 1", read_tests(["assert f(1) == 2"]))
    assert "MemoryError" in runs["memory"].stderr
    names = ["HOME", "LANG", "PATH", "RETRAIN_PROGRAM"]
    assert runs["environment"].stdout == f"{names}\nreached\n"
    assert (runs["time"].limit, runs["cpu"].limit) == ("time", "cpu")
    assert graded.passed == (True,)


@pytest.mark.filterwarnings("ignore:sandbox. none")
async def test_a_cancelled_run_without_a_sandbox_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with sandbox_of(SandboxChoice("none")) as sandbox:
        for steps in range(4):
            run = asyncio.create_task(sandbox.run(["python", "-c", "input()"], {"a": "b"}))
            for _ in range(steps):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait([run])
    assert not os.listdir(tmp_path)


OWN = """
from retrain import Sandbox, SandboxResult
class Own(Sandbox):
    async def run(self, command, files, *, stdin="", limits=None):
        return SandboxResult(0, stdin, "")
"""


async def test_a_class_of_the_users_is_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    choice = SandboxChoice("own.py:Own", base_dir=tmp_path)
    async with sandbox_of(choice) as sandbox, sandbox_of(choice) as same:
        assert sandbox is same
        graded = await grade(sandbox, "", read_tests([{"input": "a", "output": "a"}]))
    assert graded.passed == (True,)


async def test_a_sandbox_that_fails_leaves_no_run_behind() -> None:
    class Failing(Sandbox):
        ended = 0

        async def run(self, command: Any, files: Any, **keys: Any) -> SandboxResult:
            try:
                if keys["stdin"] == "bad":
                    raise SandboxError("it failed")
                await asyncio.sleep(0)
                return SandboxResult(0, "", "")
            finally:
                self.ended += 1

    tests = read_tests([{"input": text, "output": ""} for text in ("bad", "good", "good")])
    with pytest.raises(SandboxError, match="it failed"):
        await grade(failing := Failing(), "", tests)
    assert failing.ended == 3


def test_without_namespaces_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.sandbox.choice.why_not", lambda mode: f"{mode} fails")
    with pytest.raises(ConfigError, match=r"sandbox: none"):
        SandboxChoice()
