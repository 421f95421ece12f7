"""A LangChain agent: `pip install langchain langchain-openai`.

It reads OPENAI_BASE_URL and OPENAI_API_KEY, so it calls the server that they name.
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def spell(letter: str) -> str:
    """How often to write a letter."""
    return f"{letter}: four times"


agent = create_agent(ChatOpenAI(model="policy", max_retries=0), tools=[spell])
state = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(state["messages"][-1].text)
