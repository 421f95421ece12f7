"""A search tool and its rewards for configs/cookbook/tools_qwen3.yaml and mcp_qwen3.yaml.

The variable SEARCH_URL is the address of your search service. It answers GET requests that
have the query parameters `q` and `k` with a JSON list of strings.
"""

from __future__ import annotations

import os

import httpx

from retrain import Trajectory, reward


async def search(query: str) -> list[str]:
    """Search Wikipedia. Returns the three best matching passages.

    Args:
        query: A few keywords.
    """
    async with httpx.AsyncClient(timeout=10) as client:
        reply = await client.get(os.environ["SEARCH_URL"], params={"q": query, "k": 3})
        passages: list[str] = reply.raise_for_status().json()
        return passages


@reward
def answered(completion: str, answer: list[str], longest: int = 100) -> float:
    """1 for a short reply that contains one of the accepted answers."""
    found = any(one.lower() in completion.lower() for one in answer)
    return float(found and len(completion) <= longest)


@reward
def searched(trajectory: Trajectory) -> float:
    """1 if a tool was called and most calls succeeded."""
    return float(trajectory.info["tool_calls"] > 2 * trajectory.info["tool_errors"])
