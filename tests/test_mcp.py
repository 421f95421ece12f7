"""Tools of real MCP servers, over stdio and streamable HTTP, that crash and come back."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from environments import mcp
from environments.mcp import Mcp, Server
from retrain import ConfigError, ContextTask, in_thread
from retrain.assembly import assemble
from retrain.config import parse_config
from tests.tools_kit import PROMPT, answers, played, written

HERE = Path(__file__).parent
STDIO = {"command": ["python", "mcp_server.py"]}


def mcp_of(*servers: dict[str, Any], **keys: Any) -> Mcp:
    return Mcp(servers=[Server.model_validate(server) for server in servers], **keys)


@asynccontextmanager
async def opened(*servers: dict[str, Any], **keys: Any) -> AsyncIterator[Mcp]:
    """An environment in its first rollout."""
    environment = mcp_of(*servers, base_dir=HERE, **keys)
    try:
        await environment.setup()
        await environment.reset(PROMPT)
        yield environment
    finally:
        await environment.close()


async def pid_of(environment: Mcp) -> int:
    [text] = await answers(environment, ("pid", {}))
    return int(text)


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended may still be a zombie for a moment."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_each_rollout_has_a_server_of_its_own_which_ends_with_it() -> None:
    async with opened(STDIO) as environment:
        *texts, wrong = await answers(
            environment,
            ("add", {"a": 1, "b": 2}),
            ("picture", {}),
            ("fail", {}),
            ("add", {"a": "x", "b": 2}),
        )
        assert texts == ["3", "a text\n[image: not supported]", "error: Error executing tool fail"]
        assert wrong.startswith("error: ")
        first = await pid_of(environment)
        await environment.reset(PROMPT)
        second = await pid_of(environment)
        assert first != second
        assert not lives(first)
        assert lives(second)
    assert not lives(second)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_rollouts_may_share_a_server_and_get_a_new_one_when_it_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "TRUST_SECONDS", 0.0)
    async with opened(STDIO, share=True, tools=["pid", "crash"]) as one:
        assert [tool.name for tool in one.tools] == ["pid", "crash"]
        async with opened(STDIO, share=True) as other:
            first = await pid_of(one)
            assert await pid_of(other) == first
            os.kill(first, signal.SIGKILL)  # between two rollouts
            await asyncio.gather(one.reset(PROMPT), other.reset(PROMPT))
            second = await pid_of(one)
            assert second == await pid_of(other) != first
        assert lives(second), "it is still in use"
        with pytest.raises(ConnectionError, match=r"mcp_server.py .*crash: .* out of memory"):
            await answers(one, ("crash", {}))
    assert not lives(second)


async def test_a_crash_fails_its_rollout_and_the_next_one_has_a_new_server() -> None:
    make = partial(mcp_of, STDIO, base_dir=HERE)
    script = [written("add", a=2, b=2), written("crash")]
    for group in await played(make, script, rounds=2):
        [lost] = group.trajectories
        assert lost.outcome == "infra_error"
        assert lost.outage
        assert "failed in a call of crash" in lost.info["error"]
        assert lost.turns[0].observation[0]["content"] == "4"


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (
            {"command": ["python", "-c", "raise SystemExit('no index at pages.db')"]},
            r"MCP.*: no index at pages.db$",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9/mcp .*ConnectError"),
        ({"command": ["python", "-c", ""]}, r"without any output; does the script call run\(\)\?$"),
    ],
)
async def test_a_server_that_does_not_start_is_named_with_what_it_said(
    server: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with opened(server):
            pass


async def test_a_server_that_prints_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a test that loads the plug-in by its name has a second module with a filter of its own
    monkeypatch.setattr(logging.getLogger("mcp.client.stdio"), "filters", [])
    (tmp_path / "noisy.py").write_text(
        "import sys, runpy\nprint('starting', flush=True)\nprint('up', flush=True)\n"
        f"runpy.run_path({str(HERE / 'mcp_server.py')!r}, run_name='__main__')\n"
    )
    async with opened({"command": ["python", str(tmp_path / "noisy.py")]}) as environment:
        assert await answers(environment, ("add", {"a": 1, "b": 2})) == ["3"]
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "noisy.py" in record.getMessage()
    assert "ignored 'starting'" in record.getMessage()
    assert "Failed to parse" not in caplog.text


async def test_a_server_that_never_worked_ends_the_run_and_one_that_did_does_not(
    tmp_path: Path,
) -> None:
    script = tmp_path / "server.py"
    script.write_text("raise SystemExit('no index')")
    make = partial(mcp_of, {"command": ["python", str(script)]})
    with pytest.raises(ConfigError, match=r"environment.servers: .*: no index$"):
        await played(make, [written("pid"), "ok"])
    script.write_text((HERE / "mcp_server.py").read_text())
    [group] = await played(make, [written("pid"), "ok"])
    assert group.trajectories[0].outcome == "ok"
    script.write_text("raise SystemExit('no index')")
    [group] = await played(make, [written("pid"), "ok"])
    assert group.trajectories[0].outcome == "infra_error"


async def test_a_setup_that_is_cut_short_leaves_no_process(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "pid")
    silent = f"trap '' TERM; echo $$ > {fifo}; cat > /dev/null"
    environment = mcp_of({"command": ["sh", "-c", silent]})
    setup = asyncio.create_task(environment.setup())
    pid = int(await in_thread(fifo.read_text))
    assert lives(pid)
    setup.cancel()
    await asyncio.wait([setup])
    assert setup.cancelled()
    await environment.close()
    assert not lives(pid)


async def test_a_setup_that_is_cancelled_costs_those_that_share_it_no_tools(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "started")
    served = f"exec {sys.executable} {HERE}/mcp_server.py"
    first_is_silent = f"mkdir {tmp_path}/x && echo > {fifo} && exec cat; {served}"
    server = {"command": ["sh", "-c", first_is_silent]}
    one, other = (mcp_of(server, share=True) for _ in range(2))
    setups = [asyncio.create_task(mcp.setup()) for mcp in (one, other)]
    await in_thread(fifo.read_text)
    setups[0].cancel()
    await asyncio.wait(setups)
    assert setups[0].cancelled()
    assert [tool.name for tool in other.tools][:2] == ["add", "pid"]
    for environment in one, other:
        await environment.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_server_shows_no_secret() -> None:
    url = {"url": "http://me:secret@host/mcp?key=secret", "headers": {"A": "secret"}}
    environment = mcp_of(url, {"command": ["sh"], "env": {"A": "secret"}})
    assert "secret" not in repr(environment.servers)
    assert environment.servers[0].label == "http://host/mcp"


@contextmanager
def http_server(port: int = 0) -> Iterator[int]:
    """A server process on a free port."""
    command = [sys.executable, str(HERE / "mcp_server.py"), "http", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def test_a_server_is_reached_by_http_with_headers_and_again_after_a_restart() -> None:
    with http_server() as port:
        url = f"http://127.0.0.1:{port}/mcp"
        allowed = {"url": url, "headers": {"Authorization": "Bearer key"}}
        rootless = {**allowed, "url": url.removesuffix("/mcp")}
        for server, problem in (({"url": url}, "401"), (rootless, "404; .* expect /mcp at")):
            with pytest.raises(ConfigError, match=rf"can't be used: .*; HTTP {problem}"):
                async with opened(server):
                    pass
        twice = opened(allowed, {**allowed, "prefix": "my_"}, tools=["add", "my_pid", "crash"])
        environment = await twice.__aenter__()
        assert await answers(environment, ("add", {"a": 1, "b": 2}), ("my_pid", {})) == ["3", ANY]
        with pytest.raises(ConnectionError, match="failed in a call of crash"):
            await answers(environment, ("crash", {}))
    with http_server(port):
        await environment.reset(PROMPT)
        assert await answers(environment, ("add", {"a": 2, "b": 2})) == ["4"]
        await twice.__aexit__(None, None, None)
        with pytest.raises(ValueError, match=r"'add' \(.*\): .*`prefix`"):
            async with opened(allowed, allowed):
                pass
        with pytest.raises(ValueError, match=r"got 'fly'.* add, pid, fail"):
            async with opened(allowed, tools=["fly"]):
                pass


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ([], "servers: got an empty list, expected servers"),
        ([{}], "servers.0: expected either `command` (a program) or `url`"),
        ([{"command": ["no-such-program"]}], "servers.0.command: there is no program"),
        ([{"url": "ftp://x"}], "servers.0: url: got 'ftp://x', expected http://"),
        ([{"url": "http://x", "env": {"A": "1"}}], "servers.0: `env` is only for `command`"),
        ([{"command": ["sh"], "headers": {"A": "1"}}], "servers.0: `headers` is only for `url`"),
        (
            [{"url": "http://x", "headers": {"A": "Bearer sk-secret ${NOT_SET_HERE}"}}],
            "servers.0.headers.A: the environment variable NOT_SET_HERE is not set",
        ),
        ([{"url": "http://x", "headers": "sk-secret"}], "servers.0: headers: expected a mapping"),
        ([{"command": ["sh"], "env": {"A": ["sk-secret"]}}], "servers.0: env: expected a mapping"),
        (
            [{"comand": ["sh"]}],
            "servers.0.comand: unknown key; did you mean environment.servers.0.com",
        ),
        ([{"command": "sh x"}], "servers.0.command: got 'sh x', expected a list"),
        (["x.py"], "servers.0: got 'x.py', expected a mapping"),
    ],
)
def test_wrong_servers_are_reported_before_the_run(servers: list[Any], problem: str) -> None:
    environment = {"type": "mcp", "servers": servers}
    with pytest.raises(ConfigError, match=re.escape(f"environment.{problem}")) as raised:
        assemble(parse_config({"prompts": ["a="], "environment": environment}))
    assert "sk-secret" not in str(raised.value)


def test_servers_may_be_mappings_in_python() -> None:
    servers: list[Any] = [{"command": ["sh"], "env": {"A": "1"}}]
    assert Mcp(servers=servers).servers == mcp_of(*servers).servers
    with pytest.raises(ConfigError, match=r"^environment.servers.0.prefix: "):
        Mcp(servers=[{"command": ["sh"], "prefix": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("ending", "error"), [(asyncio.CancelledError(), ConnectionError), (SystemExit(3), SystemExit)]
)
async def test_a_context_that_cancels_itself_or_exits_fails_for_who_opens_it(
    ending: BaseException, error: type[BaseException]
) -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        raise ending
        yield

    context = ContextTask(failing, "sessions")
    with pytest.raises(error):
        await context.open()
    await context.close()


def test_the_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.client.client", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[mcp\]'"):
        mcp_of(STDIO, base_dir=HERE)
