"""`retrain serve` as a process: where it listens, how it ends, what a kill leaves behind."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

import retrain
from retrain.errors import install_command
from retrain.service.serve import _parser, main
from tests.service_kit import Tinker, as_process, in_process, passed


@pytest.mark.slow
async def test_a_killed_service_comes_back_with_its_checkpoints(tmp_path):
    with as_process(tmp_path) as (process, url):
        async with httpx.AsyncClient(base_url=url) as http:
            tinker = Tinker(http, None)
            await tinker.start()
            await tinker.forward_backward(1)
            await tinker.step(2)
            path = (await tinker.done("save_weights", 3, path="kept"))["path"]
            expected = await tinker.logprobs(4)
            await tinker.submit("forward_backward", 5, **passed())
            await tinker.submit("save_weights", 6, path="torn")
            process.kill()
    assert process.wait() == -signal.SIGKILL
    async with in_process(tmp_path) as tinker:
        tinker.session_id = (await tinker.post("create_session", {}))["session_id"]
        assert await tinker.logprobs(1, await tinker.loaded(path)) == expected
    assert not list(tmp_path.glob(".draft-*"))


def test_a_taken_port_is_said_to_be_taken(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--folder", str(tmp_path)]) == 1
    assert "--port" in capsys.readouterr().err


def test_other_machines_are_let_in_with_a_key_alone(capsys, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    assert main(["--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--api-key-env" in capsys.readouterr().err
    assert main(["--host", "0.0.0.0", "--port", "0", "--api-key-env", "A_KEY"]) == 2
    assert "A_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--port", "99999"), "--port: got 99999"),
        (("--port", "-1"), "--port: got -1"),
        (("--threads", "0"), "--threads: got 0"),
        (("--max-connections", "0"), "--max-connections: got 0"),
        (("--header-timeout", "0"), "--header-timeout: got 0"),
        (("--body-timeout", "nan"), "--body-timeout: got nan"),
        (("--allow-host", "a:80"), "--allow-host: got 'a:80'"),
        (("--folder", f"{__file__}/x"), "test_service_serve.py/x"),
        (("--device", "tpu9"), "--device tpu9"),
        (("--max-samples", "0"), "--max-samples: got 0"),
        (("--model", f"{__file__}/nothing"), "nothing"),
    ],
)
def test_a_setting_that_cannot_be_is_told_in_a_sentence(setting, message, capsys, tmp_path):
    assert main(["--port", "0", "--folder", str(tmp_path), *setting]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_page_describes_every_option():
    page = (Path(retrain.__file__).parent.parent / "docs/serve.md").read_text(encoding="utf-8")
    for action in _parser()._actions[1:]:
        [row] = re.findall(rf"^\| `{action.option_strings[0]}` \| (.*?) \|", page, re.MULTILINE)
        default = getattr(action.default, "name", action.default)
        if isinstance(default, str | float | int):
            assert row == (f"`{default:g}`" if isinstance(default, float) else f"`{default}`")


def test_a_missing_library_is_named_with_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "retrain.service.http_server")  # it has found uvicorn
    assert main(["--port", "0", "--folder", str(tmp_path)]) == 2
    assert install_command("service") in capsys.readouterr().err
