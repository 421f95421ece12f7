"""A real MCP server for tests: over stdio, or with `http` on a port that it prints."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> str:
    """Identify the process."""
    return str(os.getpid())


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("a secret detail")


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Return a text and an image."""
    return ["a text", Image(data=b"x", format="png")]


@server.tool()
async def crash() -> str:
    """End the server."""
    sys.stderr.write("out of memory\n")
    os._exit(3)


class Locked:
    """Lets only requests with the key in."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] == "http" and (b"authorization", b"Bearer key") not in scope["headers"]:
            await PlainTextResponse("who is there?", 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def serve() -> None:
    """Serve streamable HTTP on a free port."""
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[2])))
    listener.listen()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = Locked(server.streamable_http_app())
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


if __name__ == "__main__":
    if "http" in sys.argv:
        serve()
    else:
        server.run()
