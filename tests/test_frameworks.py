"""Agents of other frameworks train through the endpoint: each where its package is installed.

    AGENT_VENVS=/path/to/venvs pytest tests/test_frameworks.py

AGENT_VENVS is a folder with one environment each: langchain, openai-agents, pydantic-ai and
smolagents. Without it, the packages beside pytest count. `npm install` in examples/agents/node
enables Node's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import retrain
from environments.verifiers import Verifiers
from retrain.cli.run import main

ROOT = Path(retrain.__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "agents"
PYTHON = {
    "langchain": ("langchain_openai", "langchain_agent.py"),
    "openai-agents": ("agents", "openai_agents_sdk.py"),
    "smolagents": ("smolagents", "smolagents_agent.py"),
}
CONFIG = {
    "model": "tiny",
    "prompts": [{"prompt": "a=", "answer": "aaaa"}],
    "algorithm": {"type": "grpo", "group_size": 2},
    "sampling": {"max_tokens": 4},
    "rollout": {"max_turns": 6},
    "train": {"total_train_steps": 1, "groups_per_step": 1},
}
TASKSET = """
import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class Data(vf.TaskData):
    answer: str

class Letters(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def same(self, trace: vf.Trace) -> float:
        said = trace.nodes[-1].message.content or ""
        return sum(letter in "abcdefghijklm" for letter in said) / 4

class LettersTaskset(vf.Taskset[Letters]):
    def load(self):
        for letter in "abcd":
            yield Letters(Data(prompt=f"{letter}=", answer=letter * 4), self.config.task)

class Direct(vf.Harness):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        key = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=key, timeout=None) as http:
            (await http.post("chat/completions", json=body)).raise_for_status()
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Direct", "LettersTaskset"]
"""


def trained(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """The rollouts of a short run."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, **sections}))
    assert main([str(config), "--run-dir", str(folder / "run")]) == 0
    lines = (folder / "run" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def python_of(name: str, module: str) -> str:
    """The interpreter that has a package; skips if none has."""
    python = sys.executable
    if "AGENT_VENVS" in os.environ:
        python = f"{os.environ['AGENT_VENVS']}/{name}/bin/python"
    script = (
        f"import importlib.util; raise SystemExit(importlib.util.find_spec({module!r}) is None)"
    )
    if not Path(python).exists() or subprocess.run([python, "-c", script], check=False).returncode:
        pytest.skip(f"{name} is not installed")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PYTHON, "node"])
def test_an_agent_of_a_framework_trains(name: str, tmp_path: Path) -> None:
    agent, command = EXAMPLES / "node" / "agent.mjs", ["node"]
    if name in PYTHON:
        module, file = PYTHON[name]
        agent, command = EXAMPLES / file, [python_of(name, module)]
    elif not shutil.which("node") or not (agent.parent / "node_modules" / "openai").is_dir():
        pytest.skip("node or its package openai is not installed")
    environment = {"type": "agent", "command": [*command, str(agent), "{prompt}"]}
    rows = trained(tmp_path, environment=environment, rewards=[{"type": "slot_match"}])
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


REJECTING = {
    "openai-agents": (
        "agents",
        """
import sys
from agents import Agent, Runner, set_tracing_disabled
from pydantic import BaseModel

class City(BaseModel):
    name: str

set_tracing_disabled(True)
print(Runner.run_sync(Agent("cities", model="policy", output_type=City), sys.argv[1]).final_output)
""",
    ),
    "pydantic-ai": (
        "pydantic_ai",
        """
import sys
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

class City(BaseModel):
    name: str

print(Agent(OpenAIChatModel("policy"), output_type=City).run_sync(sys.argv[1]).output)
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REJECTING)
def test_rollouts_whose_output_a_framework_rejects_are_scored(name: str, tmp_path: Path) -> None:
    module, text = REJECTING[name]
    (tmp_path / "agent.py").write_text(text)
    command = [python_of(name, module), str(tmp_path / "agent.py"), "{prompt}"]
    environment = {"type": "agent", "command": command}
    rows = trained(tmp_path, environment=environment, rewards=[{"type": "slot_match"}])
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    for row in rows:
        assert "truncated" in row["info"] or "unusable" in row["info"]
        assert row["rewards"]["slot_match"] >= 0.0


@pytest.mark.slow
def test_a_taskset_of_verifiers_trains_with_its_rubric_as_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "letters_v1.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    rows = trained(
        tmp_path,
        prompts={"type": "environment"},
        environment={"type": "verifiers", "id": "letters-v1"},
    )
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert len({row["metadata"]["idx"] for row in rows}) == 1, "all tasks, one group per step"
    for row in rows:
        asked, said = row["messages"]
        assert asked["content"] == f"{'abcd'[row['metadata']['idx']]}="
        expected = 2 * sum(letter in "abcdefghijklm" for letter in said["content"]) / 4
        assert row["reward"] == pytest.approx(expected)
        assert row["info"]["rubric"] == {"same": pytest.approx(expected)}


PLAYED = """

class Played(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[Played]):
    async def run(self, task, agents):
        trace = await agents.player.run(task)
        {after}

__all__ = ["Direct", "Game", "LettersTaskset"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "max_tokens", "info"),
    [
        ("trace.record_reward('game', 1.0)", 4, None),
        ("raise ValueError('not an action')", 1, {"truncated": "length"}),
    ],
)
def test_an_environment_of_verifiers_whose_agent_is_a_player_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    max_tokens: int,
    info: dict[str, Any] | None,
) -> None:
    pytest.importorskip("verifiers.v1")
    name = f"letters_{max_tokens}"
    (tmp_path / f"{name}.py").write_text(TASKSET + PLAYED.format(after=after))
    monkeypatch.syspath_prepend(tmp_path)
    rows = trained(
        tmp_path,
        prompts={"type": "environment"},
        environment={"type": "verifiers", "id": name},
        sampling={"max_tokens": max_tokens},
    )
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    for row in rows:
        if info is not None:
            assert row["reward"] == 0.0
            assert {key: row["info"][key] for key in info} == info


def test_each_agent_of_a_verifiers_environment_runs_on_this_machine_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for what the environment uses of verifiers."""

    class AgentConfig: ...

    fields = {
        "player": types.SimpleNamespace(default=AgentConfig()),
        "judge": types.SimpleNamespace(default=AgentConfig()),
        "timeout": types.SimpleNamespace(default=None),
    }
    agents: Any = types.ModuleType("verifiers.v1.configs.agent")
    agents.AgentConfig = AgentConfig
    loaders: Any = types.ModuleType("verifiers.v1.utils.loaders")
    loaders.env_config_type = lambda taskset, env: types.SimpleNamespace(model_fields=fields)
    loaders.resolve_env_config = lambda config: config
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.configs", "verifiers.v1.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, agents.__name__, agents)
    monkeypatch.setitem(sys.modules, loaders.__name__, loaders)
    docker = {"runtime": {"type": "docker"}}
    made = Verifiers(id="openenv", env={"judge": docker, "taskset": {"base_url": "http://a"}})
    assert made.config == {
        "player": {"runtime": {"type": "subprocess"}},
        "judge": docker,
        "taskset": {"base_url": "http://a", "id": "openenv"},
    }


def test_without_verifiers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    config = tmp_path / "config.yaml"
    environment = {"type": "verifiers", "id": "letters-v1"}
    config.write_text(yaml.safe_dump({**CONFIG, "environment": environment}))
    assert main([str(config), "--dry-run"]) == 2
    assert "'verifiers>=0.4'" in capsys.readouterr().err
