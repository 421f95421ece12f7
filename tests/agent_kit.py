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
from retrain.types import Completion, Group, Prompt, StopReason

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
