"""All tools of a run on one event loop: starts them and executes the calls of an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError, did_you_mean

from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_plugin_tools.options import ToolsConfig
from rlhf_plugin_tools.tool import LONGEST_ERROR, Tool, ToolError, as_text, raised, too_slow
from rlhf_plugin_tools.workers import PlainFunction, Workers

if TYPE_CHECKING:
    from rlhf_plugin_tools.mcp_server import Server


class Toolbox:
    """The tools of ``config``, by name. Call :meth:`start` first."""

    def __init__(self, config: ToolsConfig, functions: Mapping[FunctionSource, PythonFunction]) -> None:
        self._config = config
        self._functions = [AsyncFunction(f) for f in functions.values() if f.is_async]
        plain = {source: f for source, f in functions.items() if not f.is_async}
        self._workers = Workers(list(plain), config.max_result)
        self._plain = [PlainFunction(f, self._workers) for f in plain.values()]
        self._servers: list[Server] = []
        self._slots = asyncio.Semaphore(config.parallel)
        self.tools: dict[str, Tool] = {}

    def counts(self) -> Counter[str]:
        """The counts of a sample, all 0. :meth:`answer` increments them. All unknown tool names share one count, so
        that the policy cannot create names of metrics."""
        of_tools = [f"{kind}/{name}" for name in self.tools for kind in ("calls", "errors")]
        return Counter(dict.fromkeys([*of_tools, "calls_unknown", "calls_unreadable", "no_room"], 0))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    async def start(self) -> None:
        """Start a worker and the servers. Raises RolloutError if one cannot start, ConfigError if two tools have the
        same name or a server's declaration is not allowed."""
        try:
            if self._plain:
                await self._workers.start()
            tools: list[Tool] = [*self._functions, *self._plain]
            for name, server_config in self._config.mcp.items():
                tools += await self._tools_of(name, server_config)
            for tool in tools:
                other = self.tools.setdefault(tool.name, tool)
                if other is not tool:
                    raise ConfigError(
                        f"rollout 'tools': {other.source} and {tool.source} both have a tool {tool.name!r}. Rename "
                        "one, or exclude one with `tools` in the server's table."
                    )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._workers.close()
        await asyncio.gather(*(server.close() for server in self._servers))

    async def answer(
        self, calls: Sequence[Mapping[str, Any]], counts: Counter[str] | None = None
    ) -> list[dict[str, Any]]:
        """Execute the calls of one answer. Returns a message with the result of each call, in order. Raises
        RolloutError if a worker or server failed; the other calls are then stopped."""
        counts = self.counts() if counts is None else counts
        tasks = [asyncio.ensure_future(self._result(call["function"], counts)) for call in calls]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]

    async def _result(self, function: Mapping[str, Any], counts: Counter[str]) -> str:
        name = function["name"]
        try:
            tool = self.tools.get(name)
            counts["calls_unknown" if tool is None else f"calls/{name}"] += 1
            if tool is None:
                names = shorten(", ".join(self.tools), LONGEST_ERROR // 2, placeholder=" and more")
                raise ToolError(f"there is no tool {name!r}. Tools: {names}.{did_you_mean(name, self.tools)}")
            async with self._slots:
                return await tool.call(function["arguments"], self._config.timeout, self._config.max_result)
        except ToolError as error:
            if name in self.tools:
                counts[f"errors/{name}"] += 1
            return f"Error: {error}"

    async def _tools_of(self, name: str, config: Any) -> list[Tool]:
        try:
            from rlhf_plugin_tools.mcp_server import McpTool, Server
        except ImportError as error:
            raise ConfigError(
                f"[rollout.mcp.{name}] needs the packages mcp 2.x and jsonschema ({error}). Install them: "
                "pip install 'mcp>=2,<3' jsonschema."
            ) from None
        server = Server(name, config)
        self._servers.append(server)
        await server.connect()
        tools = server.tools or []
        names = [tool.name for tool in tools]
        if unknown := [tool_name for tool_name in config.tools if tool_name not in names]:
            raise ConfigError(
                f"[rollout.mcp.{name}] tools names {', '.join(unknown)}; the server has {', '.join(names) or 'none'}."
            )
        return [McpTool(server, tool) for tool in tools if not config.tools or tool.name in config.tools]


class AsyncFunction(Tool):
    """An ``async def`` function."""

    def __init__(self, function: PythonFunction) -> None:
        self.name, self.schema, self.source = function.name, function.schema, function.label
        self._function = function

    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        keywords = self._function.validated(arguments)
        try:
            async with asyncio.timeout(timeout) as limit:
                value = await self._function.function(**keywords)
        except TimeoutError as error:
            if limit.expired():
                raise too_slow(self.name, timeout) from None
            raise raised(self.name, error) from None
        except ToolError:
            raise
        except Exception as error:
            raise raised(self.name, error) from None
        return as_text(self.name, value, longest)
