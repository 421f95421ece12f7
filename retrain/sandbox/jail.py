"""What runs between the server and the program: namespaces, a new root, limits, a seccomp filter.

A process that the server forks enters new namespaces and forks the *init*, process 1 in there. It
builds the root, gives up all privileges, starts the program and watches it. When the init ends, the
kernel kills whatever is left in the sandbox.

Linux 5.14 or later: older kernels count the processes of all sandboxes of a user together. This
module and `server` import only what starts within milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

Spec = dict[str, Any]
"""A request as JSON: argv, files, limits, ... See `server`."""

SCRATCH = "/tmp"
"""The working folder of a program, the only one that it can write to."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": SCRATCH, "LANG": "C.UTF-8"}
NOBODY = 65534
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""The exit codes of an init that was killed; the second one is bubblewrap's."""
STATUS = 3
"""The descriptor to which the init reports."""
NEAR = b"near\n"
"""The first line of the status if the processes have used half of the memory that they may use."""
TICK = 0.05
"""Seconds between two looks at the memory of all processes together."""
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives"),
)
"""What a program sees of the host, read-only, besides Python."""
DEVICES = ("null", "zero", "full", "random", "urandom")

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_REC, _PRIVATE = 16384, 1 << 18
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _NO_NEW_PRIVS, _SECCOMP = 1, 4, 24, 38, 22
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def start(spec: Spec, descriptors: Sequence[int]) -> int:
    """Start the init in new namespaces; returns its process. It dies with this one.

    `descriptors` are its input, its two outputs, and the one to which it reports.
    """
    bubblewrap = spec["mode"] == "bubblewrap"
    if not bubblewrap:
        uid, gid = os.geteuid(), os.getegid()
        others = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
        # Root needs no user namespace to set up the others, and so the program can't own them.
        _call("unshare", others if uid == 0 else others | _NEWUSER)
        if uid != 0:
            _map(uid, gid)
    init = os.fork()
    if init == 0:
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64) for number in descriptors]
        for target, number in enumerate(high):
            os.dup2(number, target, inheritable=target < STATUS)
        os.closerange(STATUS + 1, 2**16)
        guarded(partial(_bubblewrap if bubblewrap else _init, spec))
    return init


def guarded(work: Callable[[], None]) -> NoReturn:
    """Run `work`, which doesn't return; an error is reported."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the sandbox failed
        _report({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)  # of a forked process, which must end here


def _init(spec: Spec) -> NoReturn:
    die_with_parent()
    proc = os.open("/proc", os.O_PATH)
    _build_root(spec["read_only"], spec["limits"])
    _call("sethostname", b"sandbox", 7)
    if os.geteuid() == 0:
        _become_nobody()
        die_with_parent(check=False)  # the kernel forgets it when the user changes
    with suppress(OSError):  # a container may show it read-only; the filter denies them as well
        # Through the old /proc; it concerns only our new user namespace.
        write(os.open("sys/user/max_user_namespaces", os.O_WRONLY, dir_fd=proc), b"0")
    os.close(proc)
    supervise(spec)


def supervise(spec: Spec) -> NoReturn:
    """Start the program, watch it, and report how it ended."""
    # If the machine lacks memory, the kernel kills this process before the program: if a program
    # is killed and this process is not, the program did it.
    score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    os.write(score, b"%d" % max(500, int(os.read(score, 9))))
    _drop_privileges()
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)  # no access to our memory for processes of the same user
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so the kernel ignores those of the sandbox
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.chdir(SCRATCH)
    for name, text in spec["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        write(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), text.encode())
    program = os.fork()
    if program == 0:
        guarded(partial(_program, spec))
    write(score, b"1000")
    os.closerange(0, 3)
    _report(ending(program, spec["limits"]))
    os._exit(0)


def _program(spec: Spec) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and it is inherited
    os.setsid()
    set_limits(spec["limits"])
    filter_system_calls()
    argv = spec["argv"]
    os.execvpe(argv[0], argv, {**ENVIRONMENT, **spec["environment"]})


def set_limits(limits: dict[str, Any]) -> None:
    cpu, memory, disk = limits["cpu_seconds"], limits["memory"] << 20, limits["disk"] << 20
    for number, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, 256, 256),
        # The init, the judge of a program and, for an ordinary user, its parent count too.
        (resource.RLIMIT_NPROC, limits["processes"] + 3, limits["processes"] + 3),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, most = resource.getrlimit(number)
        most = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(number, (min(soft, most), most))


def ending(program: int, limits: dict[str, Any]) -> dict[str, Any]:
    """How the program ended. If this process lacks memory or files, the program has taken them."""
    with suppress(OSError, MemoryError):
        return _watched(program, limits)
    return {"code": -signal.SIGKILL}


def _watched(program: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Wait for the program, and reap what it abandoned; end it above the limits."""
    near = False
    while True:
        while True:
            process, code = os.waitpid(-1, os.WNOHANG)
            if process == program:
                exit_code = os.waitstatus_to_exitcode(code)
                return {"code": exit_code, "limit": "cpu" if exit_code == -signal.SIGXCPU else ""}
            if process == 0:
                break
        count, kilobytes = _usage()
        if not near and kilobytes > limits["memory"] << 9:
            near = True
            os.write(STATUS, NEAR)
        if kilobytes > limits["memory"] << 10:
            return {"code": -signal.SIGKILL, "limit": "memory"}
        if count > limits["processes"] + 3:  # where RLIMIT_NPROC doesn't count, as for root
            return {"code": -signal.SIGKILL, "limit": "processes"}
        signal.sigtimedwait([signal.SIGCHLD], TICK)


def _usage() -> tuple[int, int]:
    """The number of processes, and the kilobytes of their memory that are not of files."""
    count = kilobytes = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            with suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
                count += 1
                for line in file:
                    if line.startswith((b"RssAnon:", b"RssShmem:")):
                        kilobytes += int(line.split()[1])
    return count, kilobytes


def _build_root(read_only: list[str], limits: dict[str, Any]) -> None:
    """Make a root of read-only copies of system folders and empty folders in memory."""
    _mount("none", "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", SCRATCH, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m,nr_inodes=4096")
    os.chdir(SCRATCH)
    os.mkdir("old", 0o755)
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    for path in ("/dev", "/proc", SCRATCH):
        os.makedirs(path, 0o755, exist_ok=True)
    size = f"mode=1777,size={limits['disk']}m,nr_inodes={limits['files']}"
    _mount("tmpfs", SCRATCH, "tmpfs", _NOSUID | _NODEV, size)
    for path in (*SYSTEM, *read_only):
        _show(path)
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}")
    for name, target in (("fd", "/proc/self/fd"), ("shm", SCRATCH)):
        os.symlink(target, f"/dev/{name}")
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "subset=pid")
    _call("umount2", b"/old", 2)
    os.rmdir("/old")
    _mount("none", "/", flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _show(path: str) -> None:
    """Show a file or folder of the host, read-only, at the same place."""
    if os.path.lexists(path) or not os.path.lexists(f"/old{path}"):
        return  # a folder that is shown contains it
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    if os.path.islink(f"/old{path}"):
        os.symlink(os.readlink(f"/old{path}"), path)
    else:
        _bind(f"/old{path}", path)
        # struct mount_attr: read-only, no set-uid, no devices; with all that is mounted below
        attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, -100, path.encode(), 0x8000, attributes, len(attributes))


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(source, target, flags=_BIND | _REC)


def _become_nobody() -> None:
    """Be an ordinary user in a user namespace of its own, which has its own count of processes."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("prctl", _DUMPABLE, 1, 0, 0, 0)  # else the files of /proc/self belong to root
    _call("unshare", _NEWUSER)
    _map(NOBODY, NOBODY)


def _map(uid: int, gid: int) -> None:
    """Set the only user and group of our new user namespace."""
    maps = {"uid_map": f"{uid} {uid} 1", "setgroups": "deny", "gid_map": f"{gid} {gid} 1"}
    for name, text in maps.items():
        write(os.open(f"/proc/self/{name}", os.O_WRONLY), text.encode())


def _drop_privileges() -> None:
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    number = 0
    while _libc.prctl(_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _call("capset", header, none)


def die_with_parent(check: bool = True) -> None:
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if check and os.getppid() == 1 and os.getpid() != 1:
        os._exit(1)  # the parent ended first


# System calls that a program doesn't need, and that reach beyond the sandbox, attack the kernel, or
# get memory that the limits don't count: (x86_64, aarch64, name).
_TABLE = """
101 117 ptrace         165 40 mount            166 39 umount2          155 41 pivot_root
161 51 chroot          167 224 swapon          168 225 swapoff         169 142 reboot
163 89 acct            175 105 init_module     176 106 delete_module   179 60 quotactl
246 104 kexec_load     248 217 add_key         249 218 request_key     250 219 keyctl
272 97 unshare         298 241 perf_event_open 300 262 fanotify_init   303 264 name_to_handle_at
308 268 setns          304 265 open_by_handle_at  310 270 process_vm_readv
313 273 finit_module   311 271 process_vm_writev  319 279 memfd_create  321 280 bpf
323 282 userfaultfd    320 294 kexec_file_load    425 425 io_uring_setup
428 428 open_tree      429 429 move_mount      430 430 fsopen          432 432 fsmount
433 433 fspick         438 438 pidfd_getfd     442 442 mount_setattr   447 447 memfd_secret
29 194 shmget          64 190 semget           68 186 msgget           240 180 mq_open
440 440 process_madvise  448 448 process_mrelease
"""
_DENIED = _TABLE.split()
# What sets limits and priorities of processes, and could starve the init, which has the same user.
# The first arguments must have these values; 0 is the calling process.
_LIMITS = """
302 261 0 prlimit64      144 119 0 sched_setscheduler   142 118 0 sched_setparam
314 274 0 sched_setattr  203 122 0 sched_setaffinity    141 140 0,0 setpriority
251 30 1,0 ioprio_set    256 238 0 migrate_pages        279 239 0 move_pages
"""
_OWN = _LIMITS.split()
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 41), "aarch64": (1, 0xC00000B7, 220, 198)}
"""The column above, the kernel's number of the architecture, and those of clone and socket."""
_CLONE3, _FAMILIES = 435, (1, 2, 10)  # sockets: Unix and Internet, which reach nothing in here
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_Code = list[tuple[int, int, int, int]]
"""Lines of a filter: (operation, jump if true, jump if false, value)."""


def filter_system_calls() -> None:
    """Install the seccomp filter."""
    column, machine, clone, socket = _MACHINES[os.uname().machine]
    allow, eperm, enosys, eafnosupport = (
        (_RETURN, 0, 0, action) for action in (_ALLOW, _ERROR | 1, _ERROR | 38, _ERROR | 97)
    )
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if column == 0:  # the numbers of x32 would pass the list
        code += [(_AT_LEAST, 0, 1, 0x40000000), eperm]
    for number in _DENIED[column::3]:
        code += _for_call(int(number), [eperm])
    for number, given in zip(_OWN[column::4], _OWN[2::4], strict=True):
        checks = [
            line
            for i, value in enumerate(given.split(","))
            for line in ((_LOAD, 0, 0, 16 + 8 * i), (_EQUAL, 1, 0, int(value)), eperm)
        ]
        code += _for_call(int(number), [*checks, allow])
    # The flags of clone3 are in memory, where a filter can't read; libc falls back to clone.
    code += _for_call(_CLONE3, [enosys])
    namespaces = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
    code += _for_call(clone, [(_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, namespaces), eperm, allow])
    families = [line for family in _FAMILIES for line in ((_EQUAL, 0, 1, family), allow)]
    code += [*_for_call(socket, [(_LOAD, 0, 0, 16), *families, eafnosupport]), allow]
    table = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(table))
    _call("prctl", _SECCOMP, 2, program, 0, 0)


def _for_call(number: int, code: _Code) -> _Code:
    """The code of one system call, which returns."""
    return [(_EQUAL, 0, len(code), number), *code]


def _bubblewrap(spec: Spec) -> NoReturn:
    """Become bubblewrap, whose process 1 is this module again, from `supervise` on."""
    source, limits = os.path.abspath(__file__), spec["limits"]
    argv = [spec["bubblewrap"], "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session"]
    argv += ["--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    for path in SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            argv += ["--ro-bind", path, path]
    for path in (*spec["read_only"], source):
        argv += ["--ro-bind", path, path]
    argv += ["--dev", "/dev", "--remount-ro", "/dev", "--proc", "/proc"]
    argv += ["--size", str(limits["disk"] << 20), "--tmpfs", SCRATCH, "--remount-ro", "/"]
    passed = os.memfd_create("spec", 0)
    os.write(passed, json.dumps(spec).encode())
    os.lseek(passed, 0, os.SEEK_SET)
    os.set_inheritable(STATUS, True)
    argv += [spec["python"], "-I", "-S", "-B", source, str(passed)]
    os.execv(argv[0], argv)


def _report(message: dict[str, Any]) -> None:
    """One line; only the first one counts."""
    os.write(STATUS, json.dumps(message).encode() + b"\n")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = source.encode(), target.encode(), kind.encode() or None
    try:
        _call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} on {target})") from None


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


if __name__ == "__main__":  # in bubblewrap
    os.set_inheritable(STATUS, False)
    with open(int(sys.argv[1]), encoding="utf-8") as given:
        guarded(partial(supervise, json.load(given)))
