"""One sample behind the endpoint: its conversations, its answers, and repeated requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, get_args

from rlhf.errors import DataError
from rlhf.interfaces import RolloutContext
from rlhf.types import Turn

from rlhf_endpoint.chat_request import ApiError, ChatChoice, ChatRequest
from rlhf_endpoint.tree import Message, Node, Reason, Tree, context_of, has_reasoning, text_of

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class Session:
    """Answers the requests of one sample, one after the other.

    Errors of the run, as opposed to errors of a request, are kept in :attr:`broken` and end the sample.
    """

    def __init__(self, ctx: RolloutContext) -> None:
        self.ctx = ctx
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.out_of_tokens = False
        """Whether a request was refused because its context left no room for an answer."""
        self.sequences: list[str] = []
        """For each new sequence except the first, the reason why it was started."""
        self.answers: dict[str, Message] = {}
        """{number in the ids of the answer's parts: answer}."""
        self._reasons = Counter(dict.fromkeys(get_args(Reason), 0))
        self._calls = Counter({"calls_unknown": 0, "calls_unreadable": 0})
        self._tree, self._number = Tree(), 0
        self._lock = asyncio.Lock()
        self._answer_tasks: dict[str, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run_once(self, key: str | None, retry: bool, body: bytes, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of ``work``. A repeated request gets the result of the first one, which continues if its client
        disconnects.

        Args:
            key: the request's idempotency key.
            retry: whether the client marks the request as repeated.
        """
        name = f"key {key}" if key else f"body {hashlib.sha256(body).hexdigest()}"
        # Without key or mark, an equal body is a new request: a program may want several samples of one conversation.
        task = self._answer_tasks.get(name) if key or retry else None
        # A request that failed is tried again.
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.ensure_future(work())
            self._answer_tasks[name] = task
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def answer(self, request: ChatRequest) -> list[ChatChoice]:
        """Sample the answers to a conversation. Raises ApiError."""
        async with self._lock:  # a sample's turns are generated one at a time
            try:
                node, context, messages, begins = self._place(request)
            except DataError as error:
                raise ApiError(400, str(error), "messages", "invalid_messages") from error
            choices = []
            for _ in range(request.choices):
                turns = context_of(node, context)
                length = sum(len(t.ids) for t in turns)
                if length >= self.ctx.max_tokens:
                    self.out_of_tokens = True
                    # clients check the beginning of this message, in OpenAI's wording
                    limit = f"This model's maximum context length is {self.ctx.max_tokens} tokens"
                    detail = f"{limit}. However, the conversation has {length}, which leaves no room for an answer"
                    raise ApiError(400, detail, "messages", "context_length_exceeded")
                turn = await self.ctx.generate(turns, request.sampling, self._number)
                self._number += 1
                if begins is not None:
                    self._begins(*begins)
                # Each further choice starts a sequence, because a sequence has one answer after each context.
                begins = "again", "another answer to the same request"
                message = self._message(turn, request)
                self._tree.add(node, context, turn, messages, message, request.tools)
                choices.append(ChatChoice(turn, message, length))
            return choices

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, during which the requests arrive. Raises the error of the run that ends the
        sample."""
        ending = asyncio.ensure_future(work)
        try:
            futures: set[asyncio.Future[Any]] = {ending, self.broken}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                self.broken.result()
            return await ending
        finally:
            ending.cancel()

    async def close(self) -> list[Turn]:
        """Wait for active generation, and return all turns."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ctx.report("sequences", len(self.sequences) + 1)
        for reason, count in self._reasons.items():
            self.ctx.report(f"sequences/{reason}", count)
        for name, count in self._calls.items():
            self.ctx.report(name, count)
        return self._tree.turns()

    async def cancel(self) -> None:
        """Stop all work on requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _place(self, request: ChatRequest) -> tuple[Node | None, Turn, list[Message], tuple[Reason, str] | None]:
        """The answer that the request continues, if its tokens can be kept; the tokens after it; all messages, with
        known ones as they were sampled; and the reason why the request starts another sequence, if it does."""
        node, length = self._tree.find(request.messages, request.tools)
        begins: tuple[Reason, str] | None = None
        if node is not None:
            following = request.messages[length:]
            context = self.ctx.encode_following(node.context, node.answer, following, request.tools, node.turn)
            if context is not None:
                if not node.is_last:
                    reason, detail = self._difference(request)
                    begins = reason, f"another sequence continues from the same answer: {detail}"
                return node, context, [*node.context, node.answer, *following], begins
            reasoning = has_reasoning([*node.context, node.answer])
            begins = "reasoning" if reasoning else "template", "the chat template rewrites earlier messages"
        if self._number:
            begins = begins or self._difference(request)
        return None, self.ctx.encode_messages(request.messages, request.tools), [*request.messages], begins

    def _difference(self, request: ChatRequest) -> tuple[Reason, str]:
        return self._tree.difference(request.messages, request.tools)

    def _begins(self, reason: Reason, detail: str) -> None:
        self.sequences.append(detail)
        self._reasons[reason] += 1
        _LOG.debug("sample %s begins sequence %d: %s", self.ctx.index, len(self.sequences) + 1, detail)

    def _message(self, turn: Turn, request: ChatRequest) -> dict[str, Any]:
        """A turn as a message. Calls that the request excludes stay text, which ends before a stop string."""
        message = self.ctx.parse_answer(turn, request.tools)
        if not request.parallel and (calls := message.get("tool_calls")):
            message = {**message, "tool_calls": calls[:1]}
        self._count_calls(message, request)
        if not request.calls and message.get("tool_calls"):
            message = {"role": "assistant", "content": turn.text}
        content = text_of(message["content"])
        cuts = [index for stop in request.stop if (index := content.find(stop)) >= 0]
        return {**message, "content": content[: min(cuts)]} if cuts else message

    def _count_calls(self, message: Message, request: ChatRequest) -> None:
        """Count a message's calls by tool. Names invented by the policy share one count, so that they do not become
        names of metrics."""
        offered = [f"calls/{tool['function']['name']}" for tool in request.tools]
        self._calls.update(dict.fromkeys(offered, 0))
        for call in (message.get("tool_calls") or []) if request.calls else []:
            name = f"calls/{call['function']['name']}"
            self._calls[name if name in offered else "calls_unknown"] += 1
        if request.calls and self.ctx.has_unread_call(message):
            self._calls["calls_unreadable"] += 1

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError) and not self.broken.done():
            self.broken.set_exception(error)
