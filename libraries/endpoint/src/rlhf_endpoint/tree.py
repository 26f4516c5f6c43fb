"""The conversations of a sample: a tree whose nodes are sampled answers, each after the messages before it.

Requests hold whole conversations, as the client keeps them. A node is found by the meaning of messages: arguments of
calls are compared as parsed JSON, parts of content as one text, reasoning only if the client sends it back, and unknown
fields not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf.types import Turn
from rlhf.types.images import joined_images

Message = Mapping[str, Any]
Reason = Literal["conversation", "rewritten", "tools", "reasoning", "template", "again"]
"""Why a request starts a sequence: its first message differs; a later message differs; its tools differ; the client or
the template changes or omits reasoning; the template rewrites earlier messages otherwise; the conversation is asked
again from an earlier message."""


@dataclass(slots=True)
class Branch:
    """A sequence of the trajectory: context, answer, context, answer, ..."""

    turns: list[Turn]
    latest: int = 0
    """Number of its last answer among all answers of the sample."""


@dataclass(frozen=True, slots=True)
class Node:
    """A sampled answer."""

    branch: Branch
    end: int
    """Number of the branch's turns up to and including the answer."""
    context: Sequence[Message]
    answer: Message
    tools: Sequence[Message]

    @property
    def turn(self) -> Turn:
        return self.branch.turns[self.end - 1]

    @property
    def is_last(self) -> bool:
        return self.end == len(self.branch.turns)


class Tree:
    """The answers of a sample so far."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, list[Node]] = {}
        self._branches: list[Branch] = []
        self._answers = 0

    def find(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Node | None, int]:
        """The last answer whose conversation is a prefix of ``messages``, and the length of this prefix."""
        match: tuple[Node | None, int] = None, 0
        for end, digest in enumerate(_digests(messages, tools), 1):
            # The newest first: the same answer may have been sampled several times.
            for node in reversed(self._nodes.get(digest, ())):
                if _same_reasoning([*node.context, node.answer], messages):
                    match = node, end
                    break
        return match

    def add(
        self, node: Node | None, context: Turn, turn: Turn, messages: Sequence[Message], answer: Message, tools: Any
    ) -> None:
        """Add a sampled answer.

        Args:
            node: the answer that it continues; None: it starts a conversation.
            context: the tokens after that answer.
        """
        if node is not None and node.is_last:
            branch = node.branch
            branch.turns += [context, turn]
        else:
            branch = Branch([*context_of(node, context), turn])
            self._branches.append(branch)
        self._answers += 1
        branch.latest = self._answers
        leaf = Node(branch, len(branch.turns), list(messages), answer, list(tools))
        *_, digest = _digests([*messages, answer], tools)
        self._nodes.setdefault(digest, []).append(leaf)

    def turns(self) -> list[Turn]:
        """The trajectory. The branch with the latest answer comes last, and every branch except the first is fresh."""
        turns: list[Turn] = []
        for branch in sorted(self._branches, key=lambda b: b.latest):
            first, *rest = branch.turns
            turns += [replace(first, fresh=bool(turns)), *rest]
        return turns

    def difference(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Reason, str]:
        """Compare ``messages`` with the conversation that has the longest common prefix. Returns the kind and a
        description of the first difference."""
        best = -1
        closest: tuple[Reason, str] = "conversation", "no answer was sampled before"
        for node in (node for nodes in self._nodes.values() for node in nodes):
            history = [*node.context, node.answer]
            pairs = enumerate(zip(history, messages, strict=False))
            index = next((i for i, (a, b) in pairs if _key(a) != _key(b)), None)
            candidate: tuple[Reason, str]
            if index is not None:
                role, field = messages[index].get("role"), _field(history[index], messages[index])
                detail = f"message {index} ({role}) differs in {field}"
                candidate = "rewritten" if index else "conversation", detail
            else:
                index = min(len(history), len(messages))
                if _json(node.tools) != _json(tools):
                    candidate = "tools", "the tools differ"
                elif not _same_reasoning(history, messages):
                    candidate = "reasoning", "the reasoning that the agent sends back differs"
                elif len(messages) > len(history):  # it continues this answer
                    continue
                else:
                    candidate = "again", f"it ends after message {index - 1}"
            if index > best:
                best, closest = index, candidate
        return closest


def context_of(node: Node | None, context: Turn) -> list[Turn]:
    """The context of an answer, from the start of its sequence. If the node already has a next answer, its tokens are
    only context, because each sampled turn is trained on in its first branch."""
    if node is None:
        return [context]
    turns = node.branch.turns[: node.end]
    if node.is_last:
        return [*turns, context]
    parts = [*turns, context]
    ids = array("i", b"".join(t.ids for t in parts))
    images = joined_images((len(t.ids), t.images) for t in parts)
    return [Turn(ids, sampled=False, text="".join(t.text for t in parts), images=images)]


def has_reasoning(messages: Sequence[Message]) -> bool:
    return any(_reasoning(message) for message in messages)


def text_of(content: Any) -> str:
    """Content as one text."""
    if isinstance(content, list):
        return "\n".join(str(p.get("text", "")) if isinstance(p, Mapping) else str(p) for p in content)
    return "" if content is None else str(content)


def _images(content: Any) -> list[str]:
    """The images in content, in order, as the client wrote them: the parts that have no text."""
    sources = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
            value = part.get("image_url") or part.get("image") or part
            sources.append(str(value.get("url") or _json(value)) if isinstance(value, Mapping) else str(value))
    return sources


def _digests(messages: Sequence[Message], tools: Sequence[Message]) -> list[bytes]:
    """For each message a digest of it and everything before it."""
    digest, digests = hashlib.sha256(_json(list(tools)).encode()), []
    for message in messages:
        digest.update(_json(_key(message)).encode())
        digests.append(digest.digest())
    return digests


def _key(message: Message) -> dict[str, Any]:
    """The meaning of a message, without its reasoning."""
    role = message.get("role")
    key: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content")).strip(),
    }
    if images := _images(message.get("content")):
        key["images"] = images
    if (calls := message.get("tool_calls")) and isinstance(calls, list):  # others are refused when they are encoded
        key["calls"] = [_call(call) for call in calls]
    if role != "assistant" and message.get("name"):
        key["name"] = message["name"]
    return key


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [function.get("name"), arguments or {}]


def _same_reasoning(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether all reasoning that the client sends back equals the sampled reasoning. Most clients send none."""
    return all(
        _reasoning(message) in ("", _reasoning(reference))
        for reference, message in zip(history, messages, strict=False)
        if message.get("role") == "assistant"
    )


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or message.get("reasoning") or "").strip()


def _field(reference: Message, message: Message) -> str:
    a, b = _key(reference), _key(message)
    field = next(f for f in ("role", "content", "images", "calls", "name") if a.get(f) != b.get(f))
    x, y = str(a.get(field)), str(b.get(field))
    index = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    start = max(0, index - 10)
    return f"{field}: {y[start : index + 30]!r} in place of {x[start : index + 30]!r}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
