"""What the tests of agents share: groups that real agents play against a scripted model."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from environments.agent import Agent
from retrain.agents.server import EndpointServer
from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.check.scripted import Letters
from retrain.config import EndpointConfig, RunConfig, parse_config
from retrain.rollout import Rollouts, Slot
from retrain.sampler import SamplingParams
from retrain.scoring import Scorer
from retrain.types import Completion, Group, Prompt, StopReason, Trajectory

LETTERS = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
PROMPT = Prompt("0.0.0", ({"role": "user", "content": "a="},), answer="aaaa", metadata={"n": 1})
CALL = textwrap.dedent(
    """
    import json, os, urllib.error, urllib.request
    def call(text, base_url=None, api_key=None, path="/chat/completions", **body):
        base_url = base_url or os.environ["OPENAI_BASE_URL"]
        api_key = api_key or os.environ["OPENAI_API_KEY"]
        body = {"messages": [{"role": "user", "content": text}], **body}
        headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
        request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            error.close()
            raise
        return answer if "reward" in answer else answer["choices"][0]["message"]["content"]
    """
)
"""Calls the model with the standard library only."""


class Echo:
    """A model that repeats its prompt; it raises `failure` if there is one."""

    failure: Exception | None = None
    stop_reason: StopReason = "stop"

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        if self.failure is not None:
            raise self.failure
        ids = [token for token in prompt_ids if token][-params.max_tokens :]
        text = LETTERS.decode(ids)
        return [Completion(ids, [-0.5] * len(ids), text, self.stop_reason, 0)] * n


def written(folder: Path, text: str, name: str = "own.py") -> Path:
    """An agent's file, which may use `call`."""
    file = folder / name
    file.write_text(CALL + textwrap.dedent(text))
    return file


def config_of(**sections: Any) -> RunConfig:
    prompts = ["a="]
    return parse_config({"prompts": prompts, "environment": "agent", **sections})


async def played(
    keys: dict[str, Any] | Callable[[], Any],
    size: int = 1,
    prompt: Prompt = PROMPT,
    model: Echo | None = None,
    base_dir: Path = Path(),
    server: list[EndpointServer] | None = None,
    rewards: Sequence[Any] = (),
    **sections: Any,
) -> Group:
    """A group of an agent with these keys, as a run plays it."""
    config = config_of(**sections)
    make = partial(Agent, **keys, base_dir=base_dir) if isinstance(keys, dict) else keys
    door = EndpointServer(config.endpoint or EndpointConfig(), LETTERS.decode)
    if server is not None:
        server.append(door)
    chat = Chat(LETTERS, template="none", tools=Hermes())
    rollouts = Rollouts(config, model or Echo(), chat, 4096, door=door)
    async with door.serving():
        slot = Slot(size, make, rollouts, Scorer(list(rewards)))
        try:
            return await slot.play(prompt)
        finally:
            await slot.close()


ROOT = Path(__file__).parent.parent
AGENTS = """
import asyncio, sys, threading
from pathlib import Path

async def solve(prompt, base_url, api_key, model, extra=3):
    return await asyncio.to_thread(call, prompt, base_url, api_key) + model + "\\n"

def plain(messages, metadata, **rest):
    said = call(messages[0]["content"], rest["base_url"], rest["api_key"])
    call("", rest["base_url"], rest["api_key"], "/reward", reward=0.5)
    return {"completion": said * 2, "reward": 1.0, "n": metadata["n"], "folder": rest["folder"]}

def in_process(prompt, folder):
    print("not the result")
    return {"completion": call(prompt), "here": folder == str(Path.cwd())}

def picky(prompt, base_url, api_key):
    return 1 / (call(prompt, base_url, api_key) == "hello")

def unread(prompt, base_url, api_key):
    class ValidationError(Exception): pass
    said = call(prompt, base_url, api_key)
    if said != "42":
        raise ValidationError("no total\\n  in the answer")

def unsound(prompt, base_url, api_key):
    unread(prompt + "?", base_url, api_key)
    raise unread.__globals__["json"].JSONDecodeError("no total", "", 0)

def never(prompt):
    return ""

def uses_sdk():
    import an_sdk
    an_sdk.post()

def client(base_url):
    raise RuntimeError("set the OPENAI_API_KEY environment variable")

def lost(folder):
    (Path(folder) / "notes").read_text()

def second(prompt, metadata, base_url, api_key):
    return {1: call}[metadata["n"]](prompt, base_url, api_key)

def thing(prompt, base_url, api_key):
    return object()

def question(question):
    return ""

async def greedy(prompt, base_url, api_key):
    for _ in range(5):
        await asyncio.to_thread(call, prompt, base_url, api_key)

async def hangs(prompt, base_url, api_key):
    try:
        await asyncio.to_thread(call, prompt, base_url, api_key)
    except Exception:
        pass
    await asyncio.Event().wait()

async def swallows(prompt, base_url, api_key):
    for _ in range(2):  # the deadline, and the end of the instance
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
    await asyncio.Event().wait()

def blocks(prompt, base_url, api_key):
    call(prompt, base_url, api_key)
    RELEASED.wait(60)

RELEASED = threading.Event()
keys, refused = [], []
async def leaves(prompt, base_url, api_key):
    async def late():
        await asyncio.sleep(0)
        while len(keys) < 2:
            await asyncio.sleep(0.01)
        for url, key in ((base_url, keys[1][1]), (keys[1][0], api_key)):
            try:
                await asyncio.to_thread(call, "late", url, key)
            except Exception as error:
                refused.append(error.code)
    said = await asyncio.to_thread(call, prompt, base_url, api_key)
    keys.append((base_url, api_key))
    if len(keys) == 1:
        task = asyncio.create_task(late())
    else:
        while len(refused) < 2:
            await asyncio.sleep(0.01)
    return f"{said} {refused}"

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "file":
        text = call(rest[0] + sys.stdin.read() + Path("sub/task.txt").read_text())
        Path("out.txt").write_text(text + os.environ["OWN"])
        print("log"); print("warned", file=sys.stderr)
        raise SystemExit(7)
    if what == "sdk":
        uses_sdk()
    if what == "crash":
        raise SystemExit("the model " + call("said"))
    print(call(rest[0]), "\\n")
"""


async def one(keys: dict[str, Any], **more: Any) -> Trajectory:
    [trajectory] = (await played(keys, **more)).trajectories
    return trajectory


def ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return True
    return state == "Z"
