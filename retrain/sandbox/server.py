"""A process that runs sandboxes: forking it is cheap, and it reads their outputs beside the run.

`local` starts it and writes frames to its standard input, each a length of four bytes and JSON:
`{"id", "argv", "files", "stdin", "limits", ...}` starts a sandbox, `{"cancel": id}` ends it. Each
request gets one reply on standard output, `{"id", "code", "limit", "stdout", "stderr", "seconds"}`
or `{"id", "error"}`. The end of the input ends all sandboxes and the server, so none survives the
run, whatever ended it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import signal
import struct
import time
from typing import Any

from retrain.sandbox import jail

CHUNK = 2**16


class Job:
    """A sandbox: its outer process, its pipes, and what it wrote so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id: int = request["id"]
        self.started = time.monotonic()
        self.deadline = self.started + request["limits"]["seconds"]
        self.most = request["limits"]["output"] << 10
        self.limit = ""
        self.outputs = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        pipes = {name: os.pipe2(os.O_CLOEXEC) for name in self.outputs}
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        jail._write(os.dup(stdin), request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        # Sealed, as the memory of this file counts for no limit.
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, 0xF)
        try:
            self.process = os.fork()
        except OSError:  # too many processes: this request fails, and later ones need descriptors
            for descriptor in (stdin, *(end for pipe in pipes.values() for end in pipe)):
                os.close(descriptor)
            raise
        if self.process == 0:
            start(request, stdin, {name: pipe[1] for name, pipe in pipes.items()})
        os.close(stdin)
        for _, write_end in pipes.values():
            os.close(write_end)
        self.open = {name: read_end for name, (read_end, _) in pipes.items()}
        self.pidfd = os.pidfd_open(self.process)
        self.alive = True
        self.exit_code = 0

    def kill(self, limit: str) -> None:
        """End everything in the sandbox: its init dies with the outer process."""
        if self.alive:
            self.limit = self.limit or limit
            os.kill(self.process, signal.SIGKILL)

    def reply(self) -> dict[str, Any]:
        near = self.outputs["status"].startswith(jail.NEAR)
        report = self.outputs["status"].removeprefix(jail.NEAR)
        try:
            status = json.loads(report.partition(b"\n")[0] or b"{}")
        except ValueError:
            status = {"error": "the status of the sandbox is damaged"}
        if not status and not self.limit and self.exit_code == jail.KILLED and near:
            status = {"code": -signal.SIGKILL}  # its own init: the program took the memory
        elif not status and not self.limit:
            status = {"error": "the sandbox was killed from outside; is the machine out of memory?"}
        if self.limit or status.get("code") is not None:
            status.pop("error", None)
        code = status.get("code", -signal.SIGKILL)
        texts = {n: base64.b64encode(self.outputs[n]).decode() for n in ("stdout", "stderr")}
        seconds = time.monotonic() - self.started
        limit = self.limit or status.get("limit", "")
        return {"id": self.id, **status, "code": code, "limit": limit, "seconds": seconds, **texts}


def start(request: dict[str, Any], stdin: int, pipes: dict[str, int]) -> None:
    """In the forked process: only the program's descriptors stay open, and then it is the jail."""
    order = (stdin, pipes["stdout"], pipes["stderr"], pipes["status"])
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64) for number in order]
    for target, number in enumerate(high):
        os.dup2(number, target, inheritable=target < 3)
    os.closerange(4, 2**16)
    jail.guarded(3, lambda: jail.outer(request, 3))


class Server:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.jobs: dict[int, Job] = {}
        self.input = bytearray()
        self.output = bytearray()

    def serve(self) -> None:
        self.selector.register(0, selectors.EVENT_READ)
        while True:
            until = min((job.deadline for job in self.jobs.values()), default=float("inf"))
            left = None if until == float("inf") else max(0.0, until - time.monotonic())
            for key, _ in self.selector.select(left):
                if key.data is None:
                    if not self.listen():
                        return
                else:
                    self.read(key.fd, *key.data)
            now = time.monotonic()
            for job in self.jobs.values():
                if now >= job.deadline:
                    job.deadline = float("inf")
                    job.kill("time")

    def listen(self) -> bool:
        """Take the requests that have arrived; False at the end of the input."""
        data = os.read(0, 2**20)
        self.input += data
        while len(self.input) >= 4:
            (size,) = struct.unpack(">I", self.input[:4])
            if len(self.input) < 4 + size:
                break
            request = json.loads(self.input[4 : 4 + size])
            del self.input[: 4 + size]
            self.obey(request)
        return bool(data)

    def obey(self, request: dict[str, Any]) -> None:
        if "cancel" in request:
            if job := self.jobs.get(request["cancel"]):
                job.kill("cancelled")
            return
        try:
            job = Job({**self.config, **request})
        except OSError as error:
            send({"id": request["id"], "error": str(error)})
            return
        self.jobs[job.id] = job
        for name, descriptor in (*job.open.items(), ("process", job.pidfd)):
            self.selector.register(descriptor, selectors.EVENT_READ, (job, name))

    def read(self, descriptor: int, job: Job, name: str) -> None:
        if name == "process":
            self.selector.unregister(descriptor)
            os.close(descriptor)
            job.exit_code = os.waitstatus_to_exitcode(os.waitpid(job.process, 0)[1])
            job.alive = False
        elif data := os.read(descriptor, CHUNK):
            kept = job.outputs[name]
            kept += data[: job.most - len(kept)]
            if len(kept) >= job.most:
                job.kill("output")
        else:
            self.selector.unregister(descriptor)
            os.close(descriptor)
            del job.open[name]
        if not job.alive and not job.open:
            del self.jobs[job.id]
            send(job.reply())


def send(reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(1, data) :]


def main(config: dict[str, Any]) -> None:
    """Serve until the run closes our input; the kernel then ends the sandboxes with us."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    Server(config).serve()
