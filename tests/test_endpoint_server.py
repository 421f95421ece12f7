"""The endpoint over plain HTTP: wrong calls, slow and silent clients, addresses, and secrets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import retrain
from retrain.agents import connections
from retrain.agents.server import MOST_WARNINGS, EndpointServer
from retrain.config import EndpointConfig
from retrain.errors import RunError
from tests.endpoint_kit import ADD, TOKENIZER, Open, opened, saying

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, REWARD = "/v1/messages", "/v1/messages/count_tokens", "/v1/reward"
USER = {"role": "user", "content": "Hi"}
SAYS = {"messages": [USER]}
PREFILL = {
    "messages": [USER, {"role": "assistant", "content": "I"}],
    "continue_final_message": True,
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[EndpointServer]:
    server = EndpointServer(EndpointConfig(reward=True), TOKENIZER.decode)
    async with server.serving():
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield client


def post(http: httpx.AsyncClient, rollout: Open, path: str, body: Any, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {rollout.endpoint.api_key}", **headers}
    url = rollout.endpoint.anthropic_url + path
    return http.post(url, content=content, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, b"{", "JSON"),
        (CHAT, [1], "the body is a list, expected an object"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role: got 'robot'"),
        (CHAT, {"messages": [{**USER, "content": [IMAGE]}]}, "content.0"),
        (CHAT, {"messages": [{**USER, "content": "\ud800"}]}, "surrogate"),
        (CHAT, {**SAYS, "n": 0}, "n: "),
        (CHAT, {**SAYS, "temperature": float("nan")}, "temperature: "),
        (CHAT, {**SAYS, "logprobs": True, "top_logprobs": 5}, "top_logprobs: got 5"),
        (CHAT, {**SAYS, "tools": [{"type": "custom", "name": "x"}]}, "'function'"),
        (CHAT, {**SAYS, "tools": [{"function": {}}]}, "tools"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "\ud800"}, "surrogate"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt: got 2"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "1000000"),
        (TEXT, {"prompt": "a", "echo": True}, "echo: got true"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens: got 0"),
        (TEXT, {"prompt": ["a"] * 9, "n": 128}, "prompt: got 9"),
        (CHAT, {**SAYS, "top_logprobs": 0, "continue_final_message": True}, "last message of the"),
        (CHAT, {**SAYS, "add_generation_prompt": False}, "add_generation_prompt: got false"),
        (CHAT, PREFILL, "continue_final_message: got true"),
        (CHAT, {**SAYS, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {**SAYS, "tools": [{"function": ADD}], "tool_choice": {"name": "sub"}}, "or one of"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": [{"type": ["x"]}]}, "input.0"),
        (RESPONSES, {"input": [{"role": {}}]}, "input.0.role: got {}"),
        (RESPONSES, {"input": [{"type": "function_call", "name": 1}]}, "input.0.name: got 1"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "'function'"),
        (MESSAGES, SAYS, "max_tokens"),
        (MESSAGES, {**SAYS, "max_tokens": 0}, "max_tokens: "),
        (COUNT, {"messages": [{"role": "assistant", "content": "I"}]}, "the last message is the"),
        (COUNT, {"messages": [{**USER, "content": [{"type": "image"}]}]}, "type 'image'"),
        (COUNT, {**SAYS, "tools": [{"type": "bash_1", "name": "b"}]}, "'custom'"),
        (REWARD, {"reward": float("inf")}, "reward: got inf"),
        (REWARD, {"reward": 1e308}, "reward: got 1e+308"),
        (REWARD, {"reward": -(10**400)}, "expected a number from"),
        (REWARD, {"reward": True}, "reward: got True"),
    ],
)
async def test_a_wrong_call_gets_one_clear_error(server, http, path, body, says) -> None:
    async with opened("never", server=server) as rollout:
        answer = await post(http, rollout, path, body)
        error = answer.json()
        assert says in error["error"]["message"]
        assert (answer.status_code, error["error"]["type"]) == (400, "invalid_request_error")
        assert (error.get("type") == "error") == (path in (MESSAGES, COUNT))
        assert answer.headers["x-should-retry"] == "false"
        assert not rollout.script.asked
        assert rollout.calls.failure is None


async def test_the_first_invalid_call_of_a_kind_is_logged(http, caplog) -> None:
    async with opened() as rollout:
        for body in ({**SAYS, "n": 0}, {**SAYS, "n": 0}, {**SAYS, "temperature": "hot"}):
            assert (await post(http, rollout, CHAT, body)).status_code == 400
    logged = [one.args for one in caplog.records if one.name == "retrain.agents.server"]
    assert [(status, str(said).partition(":")[0]) for status, said in logged] == [
        (400, "n"),
        (400, "temperature"),
    ]


async def test_other_paths_methods_and_keys(server, http) -> None:
    async with opened(server=server) as rollout:
        base, key = rollout.endpoint.anthropic_url, rollout.endpoint.api_key
        for method, path, status, kind in [
            ("POST", "/v1/embeddings", 404, "invalid_request_error"),
            ("POST", "/v1/v1/messages", 404, "not_found_error"),
            ("GET", CHAT, 405, "invalid_request_error"),
            ("GET", MESSAGES, 405, "invalid_request_error"),
            ("POST", CHAT, 401, "invalid_request_error"),
            ("POST", MESSAGES, 401, "authentication_error"),
            ("GET", "/v1/models", 401, "invalid_request_error"),
        ]:
            answer = await http.request(method, base + path, headers={"x-api-key": "sk-wrong"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), path
        assert "server" not in answer.headers
        assert key not in repr(rollout.endpoint)
        headers = {"x-api-key": key, "anthropic-version": "1"}
        answer = await http.get(f"{base}/v1/nothing", headers=headers)
        assert answer.json()["type"] == "error"


async def test_posted_rewards_are_off_unless_the_config_allows_them(http) -> None:
    async with opened(reward=False) as closed, opened(reward=True) as open_:
        denied = await post(http, closed, REWARD, {"reward": 1.0})
        assert (denied.status_code, denied.json()["error"]["code"]) == (403, "reward_not_allowed")
        assert "endpoint.reward" in denied.json()["error"]["message"]
        assert (await post(http, open_, REWARD, {"reward": 1e6})).status_code == 200
        assert (closed.calls.rewarded, open_.calls.rewarded) == (0.0, 1e6)
        assert EndpointConfig().reward is False


async def test_a_fault_of_the_endpoint_is_an_error_500(server, http, monkeypatch, caplog) -> None:
    async with opened(server=server) as rollout:
        monkeypatch.setattr(rollout.calls, "count", lambda *_: 1 // 0)
        answer = await post(http, rollout, COUNT, SAYS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")
        assert rollout.endpoint.api_key not in caplog.text


async def test_a_body_over_the_limit_is_not_read(server, http, monkeypatch) -> None:
    monkeypatch.setattr(connections, "MAX_BODY", 100)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 50

    async with opened(server=server) as rollout:
        headers = {"authorization": f"Bearer {rollout.endpoint.api_key}"}
        url = f"{rollout.endpoint.base_url}/responses"
        answer = await http.post(url, content=parts(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_client_that_stops_sending_loses_its_connection(server, monkeypatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    async with opened(server=server) as rollout, asyncio.timeout(10):
        host, path = rollout.endpoint.base_url.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*host.split(":"))
        head = f"POST /{path}/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n"
        writer.write(f"{head}Authorization: Bearer {rollout.endpoint.api_key}\r\n\r\n{{".encode())
        assert (await reader.read())[9:12] == b"408"
        writer.close()


@pytest.mark.parametrize(
    ("config", "url", "warns"),
    [
        ({}, "http://127.0.0.1:", False),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:", True),
        ({"host": "::1"}, "http://[::1]:", False),
        ({"public_url": "https://box:7/x/"}, "https://box:7/x/r/", False),
    ],
)
async def test_addresses(http, caplog, config, url, warns) -> None:
    async with opened("a", **config) as rollout:
        assert rollout.endpoint.base_url.startswith(url)
        assert ("other machines" in caplog.text) == warns
        if "public_url" not in config:
            assert (await post(http, rollout, CHAT, SAYS)).status_code == 200


async def test_a_port_that_is_taken(server) -> None:
    async with opened() as rollout:
        port = int(rollout.endpoint.base_url.split(":")[2].split("/")[0])
        with pytest.raises(RunError, match=f"can't listen on 127.0.0.1:{port}.*endpoint.port"):
            async with opened(port=port):
                pass


JSON = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            CHAT,
            {
                **SAYS,
                "prediction": {"type": "content", "content": "a"},
                "modalities": ["text", "audio"],
                "audio": {"voice": "x"},
                "verbosity": "low",
                "guided_json": {},
                "guided_regex": "a",
                "tools": [{"type": "function", "function": {**ADD, "strict": True}}],
                "response_format": {**JSON, "json_schema": JSON},
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "temperature": 0.5,
            },
            (
                "prediction modalities audio verbosity guided_regex parallel_tool_calls "
                "tools.strict response_format tool_choice temperature"
            ),
        ),
        (
            CHAT,
            {**SAYS, "presence_penalty": 1, "response_format": {"type": "text"}},
            "presence_penalty",
        ),
        (TEXT, {"prompt": "a", "suffix": "b", "min_p": 0.1, "best_of": 1}, "suffix min_p"),
        (
            RESPONSES,
            {
                "input": "a",
                "reasoning": {"effort": "low"},
                "text": {"format": JSON},
                "include": ["reasoning.encrypted_content"],
                "truncation": "disabled",
            },
            "reasoning include text.format",
        ),
        (
            MESSAGES,
            {
                **SAYS,
                "max_tokens": 9,
                "mcp_servers": [{"type": "url"}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"format": JSON},
            },
            "mcp_servers output_config max_tokens",
        ),
    ],
)
async def test_every_name_without_effect_is_logged_once(http, caplog, path, body, names) -> None:
    """Unknown ones too, and no control character of theirs reaches a terminal."""
    body = {**body, "user": "me", "store": True, "x\x1b[31m": 1}
    many = {f"x{number}": 1 for number in range(2 * MOST_WARNINGS)}
    async with opened("a", "b", "c") as rollout:
        for more in ({}, {}, many):
            assert (await post(http, rollout, path, {**body, **more})).status_code == 200
        assert len(rollout.server._warned) <= MOST_WARNINGS
        assert [options for _, options in rollout.script.asked] == [{}] * 3
    found = logged(caplog)[: len(names.split()) + 1]
    assert sorted(found) == sorted([*names.split(), r"x\x1b[31m"])
    assert "\x1b" not in caplog.text


def logged(caplog: Any) -> list[str]:
    """The arguments that warnings name."""
    records = [record for record in caplog.records if record.name.endswith("server")]
    return [record.args[0].strip("'") for record in records]


async def test_interleaved_events_of_each_api(server, http) -> None:
    """The names of all events, which SDKs accept in no other order."""
    async with opened(*[saying("So:", a=1, b=2)] * 3, server=server) as rollout:
        function = {"type": "function", **ADD}
        flat = {"input": "Hi", "tools": [function], "stream": True}
        text = (await post(http, rollout, RESPONSES, flat)).text
        data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        numbers = [json.loads(line)["sequence_number"] for line in data]
        assert numbers == list(range(len(numbers)))
        assert _events(text, "response.") == (
            "created in_progress output_item.added content_part.added output_text.delta "
            "output_text.done content_part.done output_item.done output_item.added "
            "function_call_arguments.delta function_call_arguments.done output_item.done completed"
        )
        theirs = {**SAYS, "max_tokens": 9, "stream": True}
        theirs["tools"] = [{"name": "add", "input_schema": ADD["parameters"]}]
        assert _events((await post(http, rollout, MESSAGES, theirs)).text, "") == (
            "message_start content_block_start content_block_delta content_block_stop "
            "content_block_start content_block_delta content_block_stop message_delta message_stop"
        )
        ours = {**SAYS, "stream": True, "stream_options": {"include_usage": True}}
        answer = await post(http, rollout, CHAT, {**ours, "tools": [{"function": ADD}]})
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"] == []
        assert json.loads(lines[-2][6:])["usage"]["prompt_tokens"] > 0


def _events(text: str, prefix: str) -> str:
    names = [line[7:] for line in text.split("\n") if line.startswith("event: ")]
    return " ".join(name.removeprefix(prefix) for name in names)


AGENT = """\
import json, urllib.error, urllib.request
from pathlib import Path

def solve(prompt, base_url, api_key):
    with open(Path(__file__).with_name("keys.txt"), "a") as file:
        print(api_key, file=file)
    body = json.dumps({"prompt": prompt}).encode()
    for key in (api_key, "sk-wrong"):
        headers = {"Authorization": "Bearer " + key}
        request = urllib.request.Request(base_url + "/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            error.close()
            raise ValueError(str(error)) from None
        if "5" in prompt:
            return answer["choices"][0]["text"]

def fives(completion):
    return completion.count("5")
"""


async def test_no_key_is_in_what_a_run_writes_or_logs(tmp_path: Path, caplog: Any) -> None:
    """Though agents fail."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "agent.py").write_text(AGENT)
    result = await retrain.train(
        {
            "run_dir": str(tmp_path / "run"),
            "backend": {"type": "benchmarks/mock_engine.py:MockOptions"},
            "model": "mock",
            "chat": {"template": "none"},
            "prompts": [{"prompt": "4"}, {"prompt": "5"}],
            "rewards": [{"type": f"{tmp_path}/agent.py:fives"}],
            "environment": {"type": "agent", "run": f"{tmp_path}/agent.py:solve"},
            "train": {"total_train_steps": 2, "groups_per_step": 1},
        }
    )
    keys = (tmp_path / "keys.txt").read_text().split()
    assert result.status == "completed"
    assert len(keys) > 2
    written = [file.read_text() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert "HTTP Error 401" in "".join(written)
    for text in (*written, caplog.text):
        assert not [key for key in keys if key in text]
