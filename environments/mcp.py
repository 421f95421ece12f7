"""Tools of MCP servers, which are started as programs (stdio) or reached by streamable HTTP.

    environment:
      type: mcp
      servers:
        - {command: [python, server.py], env: {INDEX: pages.db}}
        - {url: "https://tools.example.com/mcp", headers: {Authorization: "Bearer ${TOKEN}"}}

Each rollout has sessions of its own, so a program is started for each. With `share: true` all
rollouts of the run use the same sessions. A session is opened and closed in a task of its own, so
that a server that crashes cancels nobody else. See docs/tools.md.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Self, TextIO, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from retrain import (
    ConfigError,
    ContextTask,
    Message,
    Prompt,
    ToolCall,
    ToolEnvironment,
    ToolError,
    ToolSpec,
    find_command,
    needing,
    owned_programs,
)

if TYPE_CHECKING:
    from mcp.client import Client

OF_THE_MODEL = frozenset({-32601, -32602})
"""JSON-RPC errors that the model can cause: no such method, invalid parameters."""
CONNECT_SECONDS = 30.0
"""How long a connection may take; a result is limited by `tool_seconds`."""
TRUST_SECONDS = 1.0
"""How long sessions that are shared count as alive: else each rollout would ask."""
MOST_LOG = 2**20
"""Bytes of a server's output that may be kept."""
TAIL = 1000
"""Characters of a server's last output in an error."""


_SERVER = ContextVar("_SERVER", default="")
"""The label of the server whose output a task reads."""
_printing: set[str] = set()


def _printed(record: logging.LogRecord) -> bool:
    """A filter: one warning for a server that prints, not the package's traceback per line."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, ValidationError):
        return True
    if (label := _SERVER.get()) not in _printing:
        _printing.add(label)
        logging.getLogger(__name__).warning(
            "the MCP server %s prints to stdout, which is for messages of the protocol: ignored "
            "%.80r. Print to stderr instead, for example with print(..., file=sys.stderr)",
            label,
            error.errors()[0]["input"],
        )
    return False


class Server(BaseModel):
    """A server: a program, or a URL."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    command: list[str] = Field([], description="The program and its arguments.")
    env: dict[str, str] = Field({}, repr=False, description="The program's variables.")
    url: str = Field("", repr=False, description="The URL of a server that runs.")
    headers: dict[str, str] = Field({}, repr=False, description="Of each request to the URL.")
    prefix: str = Field("", description="What the names of its tools begin with.")

    @model_validator(mode="before")
    @classmethod
    def _without_secrets(cls, given: Any) -> Any:
        """Check the strings here: an error of a single field would show its value."""
        if isinstance(given, Mapping):
            for key in given.keys() & {"env", "headers"}:
                texts = given[key].values() if isinstance(given[key], Mapping) else [None]
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError(f"{key}: expected a mapping of strings; quote other values")
        return given

    @model_validator(mode="after")
    def _either(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected either `command` (a program) or `url`")
        if self.command and self.headers:
            raise ValueError("`headers` is only for `url`; remove it")
        if self.url and self.env:
            raise ValueError("`env` is only for `command`; remove it")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {self.url!r}, expected http://... or https://...")
        return self

    @property
    def label(self) -> str:
        """The server in messages, without what may be secret."""
        return " ".join(self.command) or re.sub("//[^/@]*@", "//", self.url.partition("?")[0])


class Mcp(ToolEnvironment):
    """The model can call the tools of MCP servers; a reply without calls is the answer.

    Args:
        servers: Each has a `command` (with `env`) or a `url` (with `headers`), and optionally a
            `prefix` for its tool names.
        tools: The names of the tools that are offered; by default all.
        share: Use the same sessions for all rollouts, for servers that keep no state.
        max_turns: End the episode as truncated after this many turns; `rollout.max_turns` also
            applies.
        tool_seconds: The time limit of a call in seconds; a slower call returns an error.
        max_result_characters: The maximum length of a result; a longer one is truncated.
    """

    _worked: ClassVar[set[tuple[str, ...]]] = set()
    """The servers that offered their tools once: a later failure is an outage."""

    def __init__(
        self,
        *,
        servers: list[Server],
        tools: list[str] | None = None,
        share: bool = False,
        max_turns: int | None = None,
        tool_seconds: float = 60.0,
        max_result_characters: int = 10_000,
        base_dir: Path = Path(),
    ) -> None:
        super().__init__(
            max_turns=max_turns,
            tool_seconds=tool_seconds,
            max_result_characters=max_result_characters,
        )
        with needing("mcp"):
            import mcp.client.client  # noqa: F401 - not in mcp 1
        if not servers:
            raise ConfigError("environment.servers: got an empty list, expected servers")
        self.servers = [
            _located(server, base_dir, f"environment.servers.{index}")
            for index, server in enumerate(servers)
        ]
        self.allowed, self.share = tools, share
        self.used = False
        """Whether a rollout has called a tool of the sessions."""
        self.sessions: Sessions | None = None

    async def setup(self) -> None:
        """Connect. Raises ConfigError, which ends the run, if these servers never worked."""
        self.sessions = Sessions.shared(self.servers) if self.share else Sessions(self.servers)
        try:
            self._offer(await self.sessions.tools())
        except (ConnectionError, ValueError) as error:
            if self.sessions.names in self._worked:
                raise
            raise ConfigError(f"environment.servers: {error}") from error
        self._worked.add(self.sessions.names)

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        assert self.sessions is not None
        if self.used and not self.share:
            await self.sessions.close()
        self.used = False
        self._offer(await self.sessions.tools(trust=TRUST_SECONDS if self.share else 0.0))
        return await super().reset(prompt)

    async def close(self) -> None:
        sessions, self.sessions = self.sessions, None
        if sessions is not None:
            await sessions.release()

    def _offer(self, found: Mapping[str, tuple[Connection, ToolSpec]]) -> None:
        names = list(found) if self.allowed is None else self.allowed
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"environment.tools: got {missing[0]!r}, but the servers offer {', '.join(found)}"
            )
        self.offered = {name: found[name] for name in names}
        self.tools = [replace(tool, name=name) for name, (_, tool) in self.offered.items()]

    async def call(self, call: ToolCall) -> object:
        connection, tool = self.offered[call.name]
        self.used = True
        return await connection.call(tool.name, call.arguments)


class Sessions:
    """One session with each server, opened when needed and closed in one task."""

    _shared: ClassVar[dict[tuple[object, ...], Sessions]] = {}

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.names = tuple(server.model_dump_json() for server in servers)
        self._key = asyncio.get_running_loop(), *self.names
        self._users = 0
        self._lock = asyncio.Lock()
        self._opened = ContextTask(partial(_connected, servers), "mcp sessions")
        self._found: dict[str, tuple[Connection, ToolSpec]] = {}
        self._asked = 0.0
        """When the servers listed the tools in `_found`."""

    @classmethod
    def shared(cls, servers: Sequence[Server]) -> Sessions:
        """The sessions that all environments with these servers share; each calls `release`."""
        made = cls(servers)
        sessions = cls._shared.setdefault(made._key, made)
        sessions._users += 1
        return sessions

    async def release(self) -> None:
        """Close the sessions, unless others use them too."""
        self._users -= 1
        if self._users <= 0:
            if self._shared.get(self._key) is self:
                del self._shared[self._key]
            await self.close()

    async def tools(self, trust: float = 0.0) -> dict[str, tuple[Connection, ToolSpec]]:
        """The tools of all servers by the names that the model sees; connects if needed.

        Sessions that were lost meanwhile are opened again; those that listed their tools less than
        `trust` seconds ago, without a failure since, are not asked. Raises ConnectionError if a
        server can't be reached, ValueError if two tools have one name.
        """
        clock = asyncio.get_running_loop().time
        async with self._lock:
            connections = self._opened.value
            failed = any(connection.failed for connection in connections or ())
            if connections and not failed and clock() - self._asked < trust:
                return self._found
            try:
                self._found = await _listed(connections or await self._opened.open())
            except ConnectionError:
                if not connections:
                    raise
                self._found = await _listed(await self._opened.open())
            self._asked = clock()
            return self._found

    async def close(self) -> None:
        """End the sessions and the programs."""
        async with self._lock:
            await self._opened.close()


async def _listed(connections: Sequence[Connection]) -> dict[str, tuple[Connection, ToolSpec]]:
    found: dict[str, tuple[Connection, ToolSpec]] = {}
    for connection in connections:
        for tool in await connection.tools():
            name = connection.server.prefix + tool.name
            if name in found:
                first = found[name][0].server.label
                raise ValueError(
                    f"two MCP servers have a tool {name!r} ({first}, {connection.server.label})"
                    ": set the `prefix` of one"
                )
            found[name] = connection, tool
    return found


class Connection:
    """An open session with a server."""

    client: Client

    def __init__(self, server: Server, log: IO[str]) -> None:
        """`log` gets what the program writes to stderr."""
        self.server, self.log = server, log
        self.failed = False
        """Whether a request failed since the tools were listed."""
        self.status = 0
        """Of the last HTTP answer that was an error."""

    async def connect(self, stack: AsyncExitStack) -> None:
        """Open the session; `stack` closes it. Raises ConnectionError."""
        from mcp.client import Client

        server = self.server
        try:
            transport = await (self._http(stack) if server.url else self._program(stack))
            self.client = await stack.enter_async_context(Client(transport))
        except Exception as error:
            raise self._fault("can't be used", error) from error

    async def _program(self, stack: AsyncExitStack) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        owned = await stack.enter_async_context(owned_programs())
        program, *arguments = self.server.command
        env = {**self.server.env, **owned}
        _SERVER.set(self.server.label)
        logging.getLogger("mcp.client.stdio").addFilter(_printed)
        parameters = StdioServerParameters(command=program, args=arguments, env=env)
        return stdio_client(parameters, errlog=cast(TextIO, self.log))

    async def _http(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def seen(response: httpx2.Response) -> None:
            if response.status_code >= 400:
                self.status = response.status_code

        client = httpx2.AsyncClient(
            headers=self.server.headers,
            timeout=httpx2.Timeout(CONNECT_SECONDS, read=None),
            event_hooks={"response": [seen]},
        )
        await stack.enter_async_context(client)
        return streamable_http_client(self.server.url, http_client=client)

    async def tools(self) -> list[ToolSpec]:
        """Its tools; raises ConnectionError."""
        found: list[ToolSpec] = []
        cursor: str | None = None
        if os.fstat(self.log.fileno()).st_size > MOST_LOG:
            os.ftruncate(self.log.fileno(), 0)
        try:
            while True:
                page = await self.client.list_tools(cursor=cursor, cache_mode="bypass")
                found += [ToolSpec(t.name, t.description or "", t.input_schema) for t in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    self.failed = False
                    return found
        except Exception as error:
            raise self._fault("did not list its tools", error) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result.

        Raises ToolError for an error that the tool reports, ConnectionError for any of the server.
        """
        from mcp import MCPError

        try:
            result = await self.client.call_tool(name, dict(arguments))
        except Exception as error:
            if isinstance(error, MCPError) and error.code in OF_THE_MODEL:
                raise ToolError(error.message) from None
            raise self._fault(f"failed in a call of {name}", error) from error
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise ToolError(text)
        if not result.content and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        return text

    def _fault(self, what: str, error: BaseException) -> ConnectionError:
        """The error of a server, with what it printed last."""
        self.failed = True
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = str(error).replace(self.server.url or self.server.label, self.server.label)
        parts = [f"{type(error).__name__}: {text}"]
        if self.status:
            parts.append(f"HTTP {self.status}")
        size = os.fstat(self.log.fileno()).st_size
        printed = os.pread(self.log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")
        if printed.strip():
            parts.append(f"its last output: {printed.strip()}")
        elif "Connection closed" in str(error) and self.server.command:
            parts.append("it ended without any output; does the script call run()?")
        if self.status == 404 and not urlsplit(self.server.url).path.strip("/"):
            parts.append("the URL has no path; most servers expect /mcp at its end")
        return ConnectionError(f"the MCP server {self.server.label} {what}: {'; '.join(parts)}")


@asynccontextmanager
async def _connected(servers: Sequence[Server]) -> AsyncIterator[list[Connection]]:
    """Open sessions with all servers; raises ConnectionError."""
    async with AsyncExitStack() as stack:
        connections = []
        for server in servers:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - as a context
            fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)  # so that it can be cut while it grows
            connections.append(Connection(server, log))
            await connections[-1].connect(stack)
        yield connections


def _located(given: Server | Mapping[str, Any], base_dir: Path, where: str) -> Server:
    """The server with the path of its program; raises ConfigError."""
    try:
        server = Server.model_validate(given)  # a mapping if Python code made the environment
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, (where, *found['loc'])))}: "
            + found["msg"].removeprefix("Value error, ")
            for found in error.errors()
        ]
        raise ConfigError(*problems) from None
    command = server.command and find_command(server.command, base_dir, f"{where}.command")
    return server.model_copy(update={"command": command})


def _text(block: Any) -> str:
    """A part of a result as text; what is none is named."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[resource: {block.uri}]"
    return f"[{block.type}: not supported]"
