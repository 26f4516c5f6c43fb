"""One tool of an MCP server: its arguments are checked against the schema that the server declares."""

from __future__ import annotations

import json
from typing import Any

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from mcp import types
from referencing import Registry
from referencing.exceptions import Unresolvable
from rlhf.errors import ConfigError, RolloutError

from rlhf_plugin_tools.mcp_server import Server
from rlhf_plugin_tools.tool import LONGEST_ERROR, Tool, ToolError, as_text, invalid_arguments, schema_of


class McpTool(Tool):
    """A tool of an MCP server. Raises ConfigError where a schema that the server declares is no JSON schema."""

    def __init__(self, server: Server, listed: types.Tool) -> None:
        self.name, self.source, self._server = listed.name, server.label, server
        for direction, schema in (("input", listed.input_schema), ("output", listed.output_schema)):
            if schema is None:
                continue
            try:
                validator_for(schema).check_schema(schema)
            except SchemaError as error:
                raise ConfigError(
                    f"{server.label} declares an {direction} schema of {listed.name!r} that is no JSON schema: "
                    f"{error.json_path}: {error.message}. Correct the server, or leave the tool out with "
                    "`tools` in the server's table."
                ) from None
        self._input = validator_for(listed.input_schema)(listed.input_schema, registry=Registry())
        self.schema = schema_of(listed.name, listed.description or "", listed.input_schema)

    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        result = await self._server.call(self.name, self._validated(arguments), timeout)
        parts = []
        for part in result.content:
            if not isinstance(part, types.TextContent):
                raise ToolError(f"{self.name!r} returned content of type {part.type!r}; only text can be shown to you")
            parts.append(part.text)
        text = "\n".join(parts)
        if result.is_error:
            raise ToolError(text[:LONGEST_ERROR] or f"{self.name!r} failed and does not say why")
        return as_text(self.name, text if parts else result.structured_content, longest)

    def _validated(self, arguments: str) -> dict[str, Any]:
        try:
            keywords = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise invalid_arguments(self.name, [((), f"not JSON: {error}")]) from None
        try:
            problem = best_match(self._input.iter_errors(keywords))
        except Unresolvable as error:
            raise RolloutError(
                f"{self.source} declares an input schema of {self.name!r} that refers to what is not in it: {error}"
            ) from None
        if problem is not None:
            raise invalid_arguments(self.name, [(problem.absolute_path, problem.message)])
        assert isinstance(keywords, dict)  # `mcp` accepts no other schema
        return keywords


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
