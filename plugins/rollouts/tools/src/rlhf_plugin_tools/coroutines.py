"""``async def`` functions run on the event loop of rollouts and are cancelled at their deadlines."""

from __future__ import annotations

import asyncio

from rlhf_plugin_tools.functions import PythonFunction
from rlhf_plugin_tools.tool import Tool, ToolError, as_text, raised, too_slow


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
