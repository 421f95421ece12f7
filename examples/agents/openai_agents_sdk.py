"""An agent built with the OpenAI Agents SDK: `pip install openai-agents`.

It reads OPENAI_BASE_URL and OPENAI_API_KEY, so it calls the server that they name. Tracing is off,
because it sends prompts and replies to OpenAI.
"""

from __future__ import annotations

import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def spell(letter: str) -> str:
    """How often to write a letter."""
    return f"{letter}: four times"


set_tracing_disabled(True)
model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(max_retries=0))
agent = Agent("speller", instructions="Write the letter.", model=model, tools=[spell])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
