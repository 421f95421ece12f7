"""A smolagents agent: `pip install 'smolagents[openai]'`.

The prompt templates are empty because the default prompt takes 3,000 tokens of the tiny model,
whose context is 1,024.
"""

from __future__ import annotations

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


@tool
def spell(letter: str) -> str:
    """How often to write a letter.

    Args:
        letter: The letter.
    """
    return f"{letter}: four times"


model = OpenAIModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(
    [spell], model, prompt_templates=EMPTY_PROMPT_TEMPLATES, max_steps=1, verbosity_level=0
)
print(agent.run(sys.argv[1]))
