"""A process that forks sandboxes, since starting one anew takes longer.

`local` starts it with a socket as its standard input. Each byte on that comes with the socket of
one program, which a forked process serves: it reads a line of JSON, `{"argv", "files", "limits",
...}`, and replies `{"code", "limit", "stdout", "stderr", "seconds"}` or `{"error"}`. If the other
end closes earlier, the program ends. The end of the standard input, and so that of the run, ends
the server and all sandboxes.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from typing import Any, NoReturn

from retrain.sandbox import jail

CHUNK = 2**16


def main(config: dict[str, Any]) -> None:
    """Serve until the run closes our input; the kernel then ends the sandboxes with us."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps our children
    with socket.socket(fileno=0) as programs:
        while (received := socket.recv_fds(programs, 1, 1))[0]:
            with socket.socket(fileno=received[1][0]) as connection:
                _fork(programs, connection, config)


def one(config: dict[str, Any]) -> None:
    """Serve a single program, whose socket is our standard input."""
    serve(socket.socket(fileno=0), config)


def _fork(programs: socket.socket, connection: socket.socket, config: dict[str, Any]) -> None:
    try:
        process = os.fork()
    except OSError as error:  # too many processes: this request fails
        _send(connection, {"error": str(error)})
        return
    if process == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        programs.close()
        serve(connection, config)


def serve(connection: socket.socket, config: dict[str, Any]) -> NoReturn:
    """In a process of its own: run the program of a request, and reply."""
    try:
        jail.die_with_parent()
        if request := connection.makefile("rb").readline():
            try:
                reply = Program({**config, **json.loads(request)}, connection).finished()
            except OSError as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            _send(connection, reply)
    finally:
        os._exit(0)


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody waits for it
        connection.sendall(json.dumps(reply).encode())


class Program:
    """A sandbox: its init, its pipes, and what it wrote so far."""

    def __init__(self, request: dict[str, Any], connection: socket.socket) -> None:
        self.started = time.monotonic()
        self.seconds: float = request["limits"]["seconds"]
        self.most: int = request["limits"]["output"] << 10
        self.limit = ""
        self.outputs = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        pipes = {name: os.pipe2(os.O_CLOEXEC) for name in self.outputs}
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        jail.write(os.dup(stdin), request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        # Sealed, as the memory of this file counts for no limit.
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, 0xF)
        self.init = jail.start(request, (stdin, *(end for _, end in pipes.values())))
        for _, end in pipes.values():
            os.close(end)
        self.selector = selectors.DefaultSelector()
        for name, (end, _) in pipes.items():
            self.selector.register(end, selectors.EVENT_READ, name)
        self.selector.register(os.pidfd_open(self.init), selectors.EVENT_READ, "init")
        self.selector.register(connection, selectors.EVENT_READ, "connection")
        self.exit_code: int | None = None

    def finished(self) -> dict[str, Any]:
        """Run it to its end; returns the reply."""
        while len(self.selector.get_map()) > 1:  # the connection stays
            left = self.started + self.seconds - time.monotonic()
            events = self.selector.select(None if self.limit else max(0.0, left))
            for key, _ in events:
                self.read(key.fd, key.data)
            if not events:
                self.kill("time")
        return self.reply()

    def kill(self, limit: str) -> None:
        """End everything in the sandbox: the kernel does so when its init dies."""
        self.limit = self.limit or limit
        if self.exit_code is None:
            os.kill(self.init, signal.SIGKILL)

    def read(self, descriptor: int, name: str) -> None:
        if name == "connection":
            os._exit(1)  # nobody waits: the init dies with its parent
        elif name == "init":
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.init, 0)[1])
        elif data := os.read(descriptor, CHUNK):
            kept = self.outputs[name]
            kept += data[: self.most - len(kept)]
            if len(kept) >= self.most:
                self.kill("output")
            return
        self.selector.unregister(descriptor)

    def reply(self) -> dict[str, Any]:
        ending = {"code": -signal.SIGKILL, "limit": "", **self.status()}
        if self.limit:
            ending["limit"] = self.limit
        texts = {n: base64.b64encode(self.outputs[n]).decode() for n in ("stdout", "stderr")}
        return {**ending, **texts, "seconds": time.monotonic() - self.started}

    def status(self) -> dict[str, Any]:
        """What the init reported, or why it could not."""
        near = self.outputs["status"].startswith(jail.NEAR)
        report = self.outputs["status"].removeprefix(jail.NEAR).partition(b"\n")[0] or b"{}"
        try:
            status: dict[str, Any] = json.loads(report)
        except ValueError:
            status = {"error": "the status of the sandbox is damaged"}
        if self.limit or "code" in status:
            status.pop("error", None)
        elif not status and self.exit_code in jail.KILLED and near:
            return {}  # its own init: the program took the memory
        elif not status:
            return {"error": "the sandbox was killed from outside; is the machine out of memory?"}
        return status
