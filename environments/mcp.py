"""Tools of MCP servers, which are started as programs (stdio) or reached by streamable HTTP.

    environment:
      type: mcp
      servers:
        - {command: [python, server.py], env: {INDEX: pages.db}}
        - {url: "https://tools.example.com/mcp", headers: {Authorization: "Bearer ${TOKEN}"}}
      tools: [search, fetch]

Each rollout has sessions of its own, so a program is started for each; with `share: true` all
rollouts of the run use the same ones. See docs/tools.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from retrain import (
    ConfigError,
    Message,
    Prompt,
    ToolCall,
    ToolEnvironment,
    ToolError,
    ToolSpec,
    find_command,
    install_command,
)

if TYPE_CHECKING:
    from mcp.client import Client

T = TypeVar("T")
