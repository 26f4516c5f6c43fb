"""An MCP server whose tools behave well and badly: ``python server_under_test.py MODE [FOLDER]``."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ANY_OBJECT = {"type": "object"}
FAR = {"type": "object", "properties": {"n": {"$ref": "http://127.0.0.1:9/schema.json"}}}

FROZEN = threading.Event()
"""Ends the call of ``freeze``, which blocks the whole server."""


def tool(name: str, schema=ANY_OBJECT, output=None) -> types.Tool:
    return types.Tool(name=name, description=f"Tool {name}.", input_schema=schema, output_schema=output)


TOOLS = {
    "good": [tool("double", NUMBER), tool("structured", ANY_OBJECT, NUMBER)],
    "bad": [
        *(tool(name) for name in ("die", "fail", "refuse", "silent", "picture", "slow", "freeze", "secret")),
        tool("lie", ANY_OBJECT, NUMBER),
        tool("omit", ANY_OBJECT, NUMBER),
        tool("far", FAR),
    ],
    "input": [tool("broken", {"type": "object", "properties": {"n": {"type": "integr"}}})],
    "output": [tool("broken", ANY_OBJECT, {"type": "object", "required": "n"})],
}


def listing(mode: str, folder: str = ""):
    """What lists the tools of a mode, in two pages. In mode ``changing`` they are others after each start."""
    if mode == "changing":
        starts = len(list(Path(folder).iterdir()))
        (Path(folder) / f"start{starts}").touch()
        tools = [tool("die"), tool(f"tool{starts}")]
    else:
        tools = TOOLS[mode]

    async def list_tools(_, params) -> types.ListToolsResult:
        first = not params or params.cursor is None
        return types.ListToolsResult(tools=tools[:1] if first else tools[1:], next_cursor="rest" if first else None)

    return list_tools


def text(answer: str, **fields) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=answer)], **fields)


async def call_tool(_, params) -> types.CallToolResult:
    match params.name:
        case "double":
            return text(str(2 * params.arguments["n"]))
        case "structured":
            return types.CallToolResult(content=[], structured_content={"n": 3})
        case "die":
            print("about to die", file=sys.stderr, flush=True)
            os._exit(3)
        case "fail":
            return text("no such city", is_error=True)
        case "refuse":
            raise ValueError("a bug of the server")
        case "silent":
            return types.CallToolResult(content=[], is_error=True)
        case "picture":
            return types.CallToolResult(content=[types.ImageContent(type="image", data="", mime_type="image/png")])
        case "slow":
            await asyncio.sleep(600)
        case "freeze":
            FROZEN.wait(60)
        case "secret":
            return text(os.environ.get("TOOL_KEY", "none"))
        case "lie":
            return text("x", structured_content={"n": "three"})
    return text("x")


def server(*mode: str) -> Server:
    return Server("under test", on_list_tools=listing(*mode), on_call_tool=call_tool)


async def main() -> None:
    instance = server(*sys.argv[1:])
    async with stdio_server() as (reader, write):
        await instance.run(reader, write, instance.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
