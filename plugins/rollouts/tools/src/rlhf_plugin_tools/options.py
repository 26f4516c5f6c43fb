"""The options of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig


class McpServer(ComponentConfig):
    """A server of tools by the Model Context Protocol: a command or an address."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that is started by the run and talks over its standard input and output."""
    url: str | None = None
    """Address of a running server (streamable HTTP)."""
    env: tuple[str, ...] = ()
    """Names of environment variables that a started server gets. If absent, it gets PATH, HOME and a few more."""
    tools: tuple[str, ...] = ()
    """Names of its tools that the policy may call. If empty: all."""

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("set either command or url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} must begin with http:// or https://")
        if self.url is not None and self.env:
            raise ValueError("env is for a server that the run starts; remove it, or set command instead of url")
        return self


class ToolsConfig(ComponentConfig):
    functions: tuple[str, ...] = ()
    """Python functions, as ``file:PATH.py:NAME``, with type hints and a docstring. ``def`` functions are called in
    worker processes that are killed at the timeout, ``async def`` functions on the event loop."""
    mcp: Mapping[str, McpServer] = Field(default_factory=dict)
    """MCP servers by a name of your choice."""
    max_turns: Annotated[int, Field(gt=0)] = 8
    """Maximum number of sampled turns. Calls in the last of them are not executed."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one call."""
    max_result: Annotated[int, Field(gt=0)] = 10_000
    """Largest number of characters of one result. A longer result is cut, with a note to the policy."""
    parallel: Annotated[int, Field(gt=0)] = 4
    """Largest number of concurrent calls over all samples, and of worker processes. With 1, the calls of one answer are
    executed in order."""

    @model_validator(mode="after")
    def _some_tool(self) -> ToolsConfig:
        if not self.functions and not self.mcp:
            raise ValueError(
                'no tools are configured: set functions = ["file:PATH.py:NAME"] or a table [rollout.mcp.NAME]'
            )
        if len(set(self.functions)) != len(self.functions):
            raise ValueError("functions names the same function twice")
        return self
