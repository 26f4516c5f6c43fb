"""The tools of an MCP server. Imports the ``mcp`` package, which only runs with such servers need."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import mcp
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from mcp import types
from mcp.client.stdio import stdio_client
from pydantic import TypeAdapter
from referencing import Registry
from referencing.exceptions import Unresolvable
from rlhf.errors import ConfigError, RolloutError
from rlhf.supervisor import supervised

from rlhf_plugin_tools.options import McpServer
from rlhf_plugin_tools.output import Output
from rlhf_plugin_tools.tool import LONGEST_ERROR, Tool, ToolError, as_text, invalid_arguments, schema_of, too_slow

START_DEADLINE = 60.0
"""Maximum seconds for a server to start and to list its tools."""
ALIVE_DEADLINE = 10.0
"""Seconds in which a server must list its tools after a call took too long. Otherwise it counts as dead."""

CLOSE_DEADLINE = 10.0
"""Seconds that closing a connection may take before it is abandoned."""

_ENCODER: TypeAdapter[Any] = TypeAdapter(Any)
"""Writes JSON as ``mcp`` does."""


class Server:
    """A connection to a server. A separate task holds it, because ``mcp`` requires that the task that opened a
    connection also closes it. If the server has died, the next call of :meth:`connect` restarts it."""

    def __init__(self, name: str, config: McpServer) -> None:
        self.label, self.config = f"MCP server {name!r}", config
        self.tools: list[types.Tool] | None = None
        """Its tools, after the first :meth:`connect`."""
        self._alive, self._connecting = False, asyncio.Lock()
        self._client: mcp.Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._output: Output | None = None
        self._stop = asyncio.Event()

    async def connect(self) -> mcp.Client:
        """Connect if there is no connection, and list the tools. Raises RolloutError, or ConfigError if a variable of
        ``env`` is not set."""
        async with self._connecting:
            if not self._alive:
                await self._start()
            assert self._client is not None
            return self._client

    async def _start(self) -> None:
        missing = [name for name in self.config.env if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{self.label}: env names {', '.join(missing)}, which is not set. Export it, or remove it from env."
            )
        self._stop, self._client, self._output = asyncio.Event(), None, None
        ready: asyncio.Future[list[types.Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(START_DEADLINE):
                tools = await ready
            if self.tools is not None and tools != self.tools:
                raise RolloutError(f"{self.label} was started again and now lists other tools than before")
        except TimeoutError:
            tail = self._tail()
            await self.close()
            raise RolloutError(f"{self.label} did not list its tools in {START_DEADLINE:g} s{tail}") from None
        except BaseException:
            await self.close()
            raise
        self.tools, self._alive = tools, True

    async def close(self) -> None:
        self._alive = False
        self._stop.set()
        if self._task is not None and not self._task.done():
            if self._client is not None:
                await asyncio.wait({self._task}, timeout=CLOSE_DEADLINE)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_DEADLINE)

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> types.CallToolResult:
        """The result of a call. Raises ToolError, or RolloutError if the server no longer answers."""
        client = await self.connect()
        try:
            async with asyncio.timeout(timeout) as limit:
                return await client.call_tool(name, arguments)
        except TimeoutError:
            if limit.expired() and not await _answers(client):
                doing = f"did not answer a call of {name!r} in {timeout:g} s, and nothing else after it"
                raise await self._died(client, doing) from None
            raise too_slow(name, timeout) from None
        except mcp.MCPError as error:
            # `mcp` also reports a closed connection, an unknown session and an HTTP status like 502 in this way
            if not await _answers(client):
                closed = error.code == types.CONNECTION_CLOSED
                doing = "closed its connection" if closed else f"stopped answering ({error.message[:LONGEST_ERROR]})"
                raise await self._died(client, f"{doing} during a call of {name!r}") from None
            raise ToolError(f"{name!r}: {error.message}") from None
        except RuntimeError as error:
            if self._client is not client or not self._alive:  # closed meanwhile, for another sample
                raise RolloutError(f"{self.label} closed its connection during a call of {name!r}") from None
            # raised by `mcp` for a result that violates the tool's output schema
            first = str(error).partition("\n")[0]
            raise ToolError(f"{self.label} breaks its own declaration of {name!r}: {first}") from None
        except Exception as error:
            raise await self._died(client, f"failed during a call of {name!r}: {_first(error)}") from None

    async def _died(self, client: mcp.Client, doing: str) -> RolloutError:
        owns_client = self._client is client and self._alive  # another sample may have closed it, or started it again
        error = RolloutError(f"{self.label} {doing}{self._tail() if owns_client else ''}")
        if owns_client:
            await self.close()
        return error

    def _tail(self) -> str:
        return "" if self._output is None else self._output.tail()

    async def _hold(self, ready: asyncio.Future[list[types.Tool]]) -> None:
        try:
            async with mcp.Client(self._transport()) as client:
                tools, cursor = list[types.Tool](), None
                while cursor != "":
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor or ""
                self._client = client
                if not ready.done():
                    ready.set_result(tools)
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(RolloutError(f"{self.label} cannot be used: {_first(error)}{self._tail()}"))
            self._alive = False
        finally:
            if self._output is not None:
                self._output.close()

    def _transport(self) -> Any:
        if self.config.url is not None:
            return self.config.url
        program, *arguments = supervised(self.config.command)
        env = {name: os.environ[name] for name in self.config.env}
        self._output = Output()
        return stdio_client(
            mcp.StdioServerParameters(command=program, args=arguments, env=env), errlog=self._output.stream
        )


async def _answers(client: mcp.Client) -> bool:
    """Whether the server still lists its tools."""
    try:
        async with asyncio.timeout(ALIVE_DEADLINE):
            await client.list_tools(cache_mode="bypass")
    except Exception:
        return False
    return True


def _first(error: BaseException) -> str:
    """The first cause in nested groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


class McpTool(Tool):
    """A tool of an MCP server. Raises ConfigError if a schema that the server declares is not a JSON schema."""

    def __init__(self, server: Server, tool: types.Tool) -> None:
        self.name, self.source, self._server = tool.name, server.label, server
        for direction, schema in (("input", tool.input_schema), ("output", tool.output_schema)):
            if schema is None:
                continue
            try:
                validator_for(schema).check_schema(schema)
            except SchemaError as error:
                raise ConfigError(
                    f"{server.label} declares an {direction} schema of {tool.name!r} that is not a JSON schema: "
                    f"{error.json_path}: {error.message}. Correct the server, or exclude the tool with `tools` in the "
                    "server's table."
                ) from None
        self._input = validator_for(tool.input_schema)(tool.input_schema, registry=Registry())
        self.schema = schema_of(tool.name, tool.description or "", tool.input_schema)

    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        result = await self._server.call(self.name, self._validated(arguments), timeout)
        parts = []
        for part in result.content:
            if not isinstance(part, types.TextContent):
                raise ToolError(f"{self.name!r} returned content of type {part.type!r}; only text can be shown to you")
            parts.append(part.text)
        text = "\n".join(parts)
        if result.is_error:
            raise ToolError(text or f"{self.name!r} failed and does not say why")
        return as_text(self.name, text if parts else result.structured_content, longest)

    def _validated(self, arguments: str) -> dict[str, Any]:
        try:
            keywords = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise invalid_arguments(self.name, [((), f"not JSON: {error}")]) from None
        try:  # `mcp` ends the connection, with the calls of all samples, if it cannot write a message
            _ENCODER.dump_json(keywords)
        except ValueError as error:  # half of a surrogate pair, or lists in lists in lists
            raise invalid_arguments(self.name, [((), f"they cannot be sent: {error}")]) from None
        try:
            problem = best_match(self._input.iter_errors(keywords))
        except Unresolvable as error:
            raise RolloutError(
                f"{self.source} declares an input schema of {self.name!r} that refers to something outside it: {error}"
            ) from None
        if problem is not None:
            raise invalid_arguments(self.name, [(problem.absolute_path, problem.message)])
        assert isinstance(keywords, dict)  # `mcp` accepts no other schema
        return keywords


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
