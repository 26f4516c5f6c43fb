"""The rollout: an answer, the results of its tool calls, the next answer, and so on until an answer calls no tool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlhf.errors import ConfigError, DataError, RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Sampling, Turn

from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_plugin_tools.options import ToolsConfig
from rlhf_plugin_tools.toolbox import Toolbox

_LOG = logging.getLogger(__name__)
UNREADABLE = "Error: a tool call could not be read. Write it whole, in the form that was described, with valid values."
UNREADABLE_FORMS: tuple[dict[str, Any], ...] = (
    {"role": "tool", "content": UNREADABLE},
    {"role": "tool", "content": UNREADABLE, "tool_call_id": "nocall000"},
    {"role": "user", "content": UNREADABLE},
)
"""The forms of this message. Mistral's chat templates refuse a result without an id of 9 letters and digits, that of
gpt-oss refuses a result if no call precedes it."""


class ToolsRollout(Rollout):
    """The row's prompt with the descriptions of the tools, followed by sampled turns and the results of the tools that
    they call, until

    * an answer calls no tool,
    * ``max_turns`` turns are sampled (calls in the last one are not executed),
    * a sampled turn is cut at its token budget: its ``finish`` is ``length``, or
    * results leave no room for an answer: they are left out, and the turn before them gets ``finish = "length"``.

    Sampled tokens are never decoded and encoded again. If results change how the chat template writes earlier messages,
    the next turn begins a new sequence (``Turn.fresh``).

    A failed call (unknown tool, invalid arguments, an error, a timeout) has the error message as its result, which the
    policy reads. If a worker process or a server fails, the sample fails (RolloutError). Every sample reports the
    number of calls of each tool and the number of errors.
    """

    name = "tools"
    needs_messages = needs_tools = True
    Config = ToolsConfig
    layout = frozenset({"mcp.*.url", "timeout"})

    def __init__(self, config: ToolsConfig | None = None) -> None:
        super().__init__(config)
        self.observes = self.config.max_turns > 1
        self._functions: dict[FunctionSource, PythonFunction] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._toolbox: asyncio.Task[Toolbox] | None = None

    def check(self) -> None:
        _LOG.info("rollout 'tools': %s", ", ".join(tool["function"]["name"] for tool in self.tools()))

    def tools(self) -> list[dict[str, Any]]:
        """The tools and servers are started, because servers describe their tools themselves."""

        async def start() -> list[dict[str, Any]]:
            toolbox = self._new()
            await toolbox.start()
            await toolbox.close()
            return toolbox.schemas

        try:
            with ThreadPoolExecutor(1) as thread:  # this thread may have a running event loop, as in a notebook
                return thread.submit(asyncio.run, start()).result()
        except RolloutError as error:
            raise ConfigError(f"rollout 'tools': {error}") from None

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        toolbox = await self._started()
        tools, messages = toolbox.schemas, ctx.prompt_messages(row)
        turns = [ctx.encode_messages(messages, tools)]
        counts = toolbox.counts()
        for number in range(self.config.max_turns):
            turn = await ctx.generate(list(turns), _within_budget(ctx.sampling, _room(turns, ctx)), number)
            turns.append(turn)
            if turn.finish == "length" or number + 1 == self.config.max_turns:
                break
            answer = ctx.parse_answer(turn, tools)
            results = await toolbox.answer(answer.get("tool_calls") or [], counts)
            if ctx.has_unread_call(answer):
                counts["calls_unreadable"] += 1
                results.append(_unreadable(ctx, messages, answer, results, tools))
            if not results:
                break
            following = ctx.encode_following(messages, answer, results, tools)
            messages = [*messages, answer, *results]
            if following is None:
                following = replace(ctx.encode_messages(messages, tools), fresh=True)
            if _room([*turns, following], ctx) < 1:
                turn.finish = "length"
                counts["no_room"] = 1
                break
            turns.append(following)
        for name, count in counts.items():
            ctx.report(name, count)
        return turns

    async def _started(self) -> Toolbox:
        """The tools on this event loop. They are started by the first sample and closed when the loop ends."""
        # a run has one event loop, but the conformance suite starts one for each sample
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._toolbox = asyncio.get_running_loop(), None
        if self._toolbox is None or (self._toolbox.done() and self._toolbox.exception() is not None):
            self._toolbox = asyncio.create_task(self._start())
        return await asyncio.shield(self._toolbox)  # it goes on for other samples if this one is cancelled

    async def _start(self) -> Toolbox:
        toolbox = self._new()
        await toolbox.start()
        self._closing = asyncio.create_task(_close_at_the_end(toolbox))
        return toolbox

    def _new(self) -> Toolbox:
        if self._functions is None:
            sources = FunctionSource.of_all(self.config.functions)
            self._functions = {source: PythonFunction(source) for source in sources}
        return Toolbox(self.config, self._functions)


async def _close_at_the_end(toolbox: Toolbox) -> None:
    """Wait for the end of the event loop, which cancels its tasks, and close the tools."""
    try:
        await asyncio.Event().wait()
    finally:
        await toolbox.close()


def _unreadable(
    ctx: RolloutContext,
    messages: Sequence[dict[str, Any]],
    answer: dict[str, Any],
    results: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The first of :data:`UNREADABLE_FORMS` that the chat template accepts after the results of the other calls."""
    for message in UNREADABLE_FORMS[:-1]:
        with contextlib.suppress(DataError):
            ctx.encode_following(messages, answer, [*results, message], tools)
            return message
    return UNREADABLE_FORMS[-1]


def _room(turns: Sequence[Turn], ctx: RolloutContext) -> int:
    """Number of tokens that may still follow in the last sequence of ``turns``."""
    start = max((n for n, turn in enumerate(turns) if turn.fresh), default=0)
    return ctx.max_tokens - sum(len(turn.ids) for turn in turns[start:])


def _within_budget(sampling: Sampling, left: int) -> Sampling:
    if left < 1:
        raise RolloutError(
            f"the prompt with the descriptions of the tools leaves no room for an answer: {1 - left} tokens too many. "
            "Raise data.max_tokens, or offer fewer tools."
        )
    return sampling if sampling.max_new_tokens <= left else replace(sampling, max_new_tokens=left)
