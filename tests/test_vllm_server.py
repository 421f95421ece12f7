"""A vLLM server that the run starts: its command, its start, its end, and what its log says."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from retrain.errors import AdapterError
from retrain.supervision import starting
from retrain.vllm.client import VllmClient
from retrain.vllm.server import Launch, VllmServer, _reserved_port, cause, write_worker
from retrain.vllm.transfer import EXTENSION

HEALTHY = """\
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])  # the engine
print("the engine is", child.pid, "for", os.environ.get("ONE_API_KEY"), flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(next(a for a in sys.argv if a.startswith("--port=")).split("=")[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
Make = Callable[..., VllmServer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A server whose `python` runs this script in the place of vLLM."""

    def made(script: str, seconds: float = 30.0) -> VllmServer:
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable}\n{script}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        launch = Launch(program, "model", seconds=seconds)
        (tmp_path / "worker").mkdir(exist_ok=True)
        return VllmServer(launch, folder=tmp_path / "worker", log=tmp_path / "vllm.log")

    return made


def test_the_environment_has_no_secrets_and_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HF_TOKEN": "s", "TINKER_API_KEY": "s", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in {**given, "VLLM_API_KEY": "k", "NCCL_DEBUG": "INFO"}.items():
        monkeypatch.setenv(name, value)
    found = Launch(Path("python"), "a", devices=[2, 3]).environment(Path("/private"))
    assert not found.keys() & given.keys()
    wanted = {"VLLM_API_KEY": "k", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "2,3"}
    wanted |= {"PYTHONPATH": "/private", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    assert wanted.items() <= found.items()
    assert "CUDA_VISIBLE_DEVICES" not in Launch(Path("python"), "a").environment(Path()) or (
        "CUDA_VISIBLE_DEVICES" in os.environ
    )


def test_the_servers_part_of_retrain_needs_torch_and_vllm_alone(tmp_path: Path) -> None:
    write_worker(tmp_path)
    assert (tmp_path / "retrain" / "vllm" / "transfer.py").is_file()
    module, _, _ = EXTENSION.rpartition(".")
    assert tmp_path.joinpath(*module.split(".")).with_suffix(".py").is_file()
    found = set()
    for file in tmp_path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
    own = {name for name in found if name.startswith("retrain")}
    assert own == {"retrain.vllm.transfer"}
    others = {name.partition(".")[0] for name in found - own} - sys.stdlib_module_names
    assert others == {"torch", "vllm"}


async def test_a_start_that_takes_long_shows_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "EVERY_SECONDS", 0.0)
    (log := tmp_path / "vllm.log").write_text("earlier\n\x1b[32mloading 7 of 9\n\n")
    for begin, shown in ((0, "(vllm.log: loading 7 of 9)"), (log.stat().st_size, "0 s ...")):
        caplog.clear()
        async with starting.announced("starting vLLM", [tmp_path / "none", log], begin):
            while not caplog.messages:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0)
        assert caplog.messages[-1].endswith(shown)


async def test_a_server_ends_with_all_its_processes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONE_API_KEY", "a secret")
    server = make(HEALTHY)
    url = await server.start()
    engine = int((tmp_path / "vllm.log").read_text().split()[3])
    async with VllmClient(url) as client:
        assert await client.health()
        assert not server.failed
        await server.close()
        assert not await client.health()
    assert gone(engine)
    assert "for None" in (tmp_path / "vllm.log").read_text()
    await server.close()


async def test_a_killed_server_is_noticed_and_restarted(make: Make, tmp_path: Path) -> None:
    server = make(HEALTHY)
    try:
        await server.start()
        assert server._child is not None
        engine = int((tmp_path / "vllm.log").read_text().split()[3])
        os.kill(server._child.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            await server._child.exited()
        assert server.failed
        assert "SIGKILL" in server.last_lines()
        url = await server.start()
        assert gone(engine)
        assert not server.failed
        async with VllmClient(url) as client:
            assert await client.health()
        assert (tmp_path / "vllm.log").read_text().count("the engine is") == 2
    finally:
        await server.close()


async def test_the_engine_of_a_killed_server_can_free_its_shared_memory(
    make: Make, tmp_path: Path
) -> None:
    script = "trap 'echo freed; exit' TERM; echo ready; while :; do sleep 0.1; done"
    engine = f'["sh", "-c", "{script}"]'
    server = make(HEALTHY.replace('["sleep", "600"]', engine))
    await server.start()
    log = tmp_path / "vllm.log"
    while "ready" not in log.read_text():  # noqa: ASYNC110 - the log has no event
        await asyncio.sleep(0.01)
    assert server._child is not None
    os.kill(server._child.pid, signal.SIGKILL)
    await server._child.exited()
    await server.close()
    assert "freed" in log.read_text()


@pytest.mark.parametrize(
    ("script", "seconds", "said"),
    [
        ("raise ValueError('no such model')", 30, "exit code 1 .*: ValueError"),
        ("import time; time.sleep(60)", 0.3, "start_seconds = 0.3"),
        ("import os; os.kill(os.getpid(), 9)", 30, "SIGKILL"),
        ("print('one'); print('two'); raise SystemExit(3)", 30, "exit code 3 .*: one\ntwo"),
    ],
)
async def test_a_start_that_fails_says_why(
    make: Make, script: str, seconds: float, said: str
) -> None:
    server = make(script, seconds)
    with pytest.raises(AdapterError, match=said) as raised:
        await server.start()
    assert "vllm.log" in str(raised.value)
    await server.close()


async def test_nobody_is_given_the_port_of_a_server_that_starts() -> None:
    with closing(_reserved_port()) as reservation:
        host, port = reservation.getsockname()
        with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        with socket.create_server((host, port)) as server:  # as vLLM does
            assert server.getsockname()[1] == port


async def test_a_missing_program_is_named(tmp_path: Path) -> None:
    missing = VllmServer(Launch(tmp_path / "none", "a"), folder=tmp_path, log=tmp_path / "log")
    with pytest.raises(AdapterError, match=r"backend\.sampler\.python"):
        await missing.start()


WORKER = """\
(Worker pid=7) ERROR 11-21 21:09:17 [multiproc_executor.py:960] Traceback (most recent call last):
(Worker pid=7) ERROR 11-21 21:09:17 [multiproc_executor.py:960]   File "worker.py", line 1, in f
(Worker pid=7) ERROR 11-21 21:09:17 [multiproc_executor.py:960] ValueError: head_dim=16 is no good
(EngineCore pid=6) ERROR 11-21 21:09:17 [core.py:1] Exception: WorkerProc initialization failed \
due to an exception in a background process. See stack trace for root cause.
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed \
core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (WORKER, "ValueError: head_dim=16 is no good"),
        ("usage: x\napi_server.py: error: unrecognized arguments: --a", "unrecognized arguments"),
        ("INFO: fine\n\ntorch.OutOfMemoryError: no room\nINFO: bye", "OutOfMemoryError: no room"),
        ("vllm.v1.engine.exceptions.EngineDeadError: See stack trace", "EngineDeadError"),
        (
            "(EngineCore pid=6) ERROR 11-21 21:30:52 [core.py:315] Worker V died unexpectedly\n",
            "Worker V died unexpectedly",
        ),
        ("a\nb\n", "a\nb"),
    ],
)
def test_the_cause_is_found_in_the_log(log: str, said: str) -> None:
    assert said in cause(log.splitlines())
    assert "(Worker" not in cause(log.splitlines())


def gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return True
    return state == "Z"
