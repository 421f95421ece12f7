"""An agent with the openai SDK: it looks a name up, answers, and lets a second prompt check it.

It does not use `retrain`: configs/agent.yaml trains the model that it calls. The model is so
tiny that a name, a number and a verdict are one character each.
"""

from __future__ import annotations

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

NUMBERS = {"a": "7", "b": "3", "c": "9", "d": "5"}
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none", max_retries=0)
"""One for all calls: a client opens a connection pool and loads certificates, which takes 30 ms."""


async def solve(prompt: str, base_url: str, api_key: str, model: str) -> str:
    """The name that the model looked up, the number that it answered, and the verdict on it."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    async def say(messages: list[ChatCompletionMessageParam]) -> str:
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content or ""

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    name = await say(messages)
    messages.append({"role": "assistant", "content": name})
    messages.append({"role": "user", "content": look_up(name)})
    number = await say(messages)
    verdict = await say(
        [
            {"role": "system", "content": "y or n"},
            {"role": "user", "content": f"{prompt}{number}"},
        ]
    )
    return name + number + verdict


def look_up(name: str) -> str:
    """The tool."""
    return NUMBERS.get(name.strip(), "?")
