"""An MCP server for configs/mcp.yaml, with the tool of calculator.py."""

from calculator import calc
from mcp.server import MCPServer

server = MCPServer("calculator", log_level="WARNING")
server.tool()(calc)

if __name__ == "__main__":
    server.run()
