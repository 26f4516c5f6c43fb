"""Conversations in the form of the OpenAI chat API as tokens, and what follows a sampled answer in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.messages import Messages
from rlhf_runtime.data.text_tokens import TextTokens

Tools = Sequence[Mapping[str, Any]]


class ChatMessages:
    """Encodes conversations with a chat template.

    Args:
        ends: texts of the tokens that end an answer.

    Messages are those of :func:`rlhf_runtime.data.messages.as_template_reads`. The methods raise DataError for messages
    that the template refuses.
    """

    def __init__(self, chat: ChatTemplate, tokens: TextTokens, ends: Sequence[str]) -> None:
        self._chat, self._tokens, self._ends = chat, tokens, tuple(end for end in ends if end)

    def encode(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """A whole conversation, which the policy can answer."""
        return self._tokens.ids(self._chat.text(messages, answer=True, tools=tools))

    def encode_following(self, asked: Messages, new: Messages, tools: Tools, closed: bool) -> list[int] | None:
        """What the template writes after an answer. The tokens up to its end are kept as they are.

        Args:
            asked: the messages up to the answer, which is the last one.
            new: the messages after it.
            closed: whether the sampled answer ended with its end token. If not, the tokens begin with it.

        Returns: None if the template writes ``asked`` otherwise once other messages follow, so that the tokens so far
            are not what the template would show the policy.
        """
        opened = self._chat.text(asked[:-1], answer=True, tools=tools)
        answered = self._chat.text(asked, answer=False, tools=tools)
        whole = self._chat.text([*asked, *new], answer=True, tools=tools)
        if not answered.startswith(opened) or not whole.startswith(answered):
            return None
        written = answered[len(opened) :].rstrip()  # a line break may follow the end token
        end = max((e for e in self._ends if written.endswith(e)), key=len, default="")
        added = whole[len(opened) + len(written) - len(end) :] if end else whole[len(answered) :]
        if not end:  # some templates write the end token only once another message follows
            end = max((e for e in self._ends if added.lstrip().startswith(e)), key=len, default="")
        if not closed or not end:
            return self._tokens.ids(added) if end else self._tokens.ids_after(answered, added)
        return self._tokens.ids_after(end, added.partition(end)[2])
