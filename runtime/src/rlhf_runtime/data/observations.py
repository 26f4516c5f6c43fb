"""Observations of an environment as tokens, with the text that a chat template writes around a user message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.errors import DataError
from rlhf.types import Turn

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.messages import with_images
from rlhf_runtime.data.row_images import RowImages
from rlhf_runtime.data.text_tokens import ANCHORS, TextTokens
from rlhf_runtime.data.written_parts import mark

SPACE = " \n "
"""White space around a text that shows whether the template removes it."""


class Observations:
    """Encodes observations.

    Args:
        chat: the chat template; None: observations are plain text.
        as_sampled: whether earlier turns stay as they were sampled, so that the template's render of them may change.
    """

    def __init__(self, chat: ChatTemplate | None, tokens: TextTokens, images: RowImages, as_sampled: bool) -> None:
        self._chat, self._tokens, self._images, self._as_sampled = chat, tokens, images, as_sampled
        self._frames: dict[int, _Frame] = {}

    def encode(self, text: str, closed: bool = True, images: Sequence[bytes] = ()) -> Turn:
        """The tokens of an observation, as the chat template writes a user message after an answer.

        Args:
            closed: whether the sampled turn before it ended with its end token. If not, the observation begins with
                the end token, so that the answer is closed before the next message.
            images: contents of image files. They come before the text, unless it has their placeholders.

        Raises DataError: the template rewrites history (:meth:`check`), there are images and the run cannot have any,
        or an image cannot be read.
        """
        images = self._images.files(images)
        added = 0 if self._images.marked(text) else len(images)
        if self._chat is None:
            return self._images.turn(self._tokens.ids_after(ANCHORS[0], self._images.marks(added) + text), images)
        frame = self._frame(self._chat, added)
        body = text.lstrip() if frame.trims_start else text
        body = body.rstrip() if frame.trims_end else body
        front = frame.prefix.partition(frame.end)[2] if closed and frame.end else frame.prefix
        turn_text = f"{front}{body}{frame.suffix}"
        ids = self._tokens.ids_after(frame.end, turn_text) if closed else self._tokens.ids(turn_text)
        return self._images.turn(ids, images, (("user", text),))

    def check(self) -> None:
        """Raises DataError if observations cannot be encoded. Called before a run with several turns starts."""
        if self._chat is not None:
            self._frame(self._chat, 0)

    def _frame(self, chat: ChatTemplate, images: int) -> _Frame:
        """The text around an observation. Images come before its text, and their placeholders are in ``_Frame.prefix``.

        Raises DataError: the template renders an earlier turn differently once another turn follows (Qwen3 removes its
        reasoning; only the last answer has an empty think block). The sampled tokens would then differ from the
        template's render.
        """
        if images in self._frames:
            return self._frames[images]
        text_with_space = f"{SPACE}{mark(2)}{SPACE}"
        content = with_images(text_with_space, images) if images else text_with_space
        user, after = {"role": "user", "content": mark(0)}, {"role": "user", "content": content}
        prompt = chat.text([user], answer=True)
        # The second answer shows whether the template keeps reasoning in earlier answers. The frame is that of the
        # first.
        for answer in (mark(1), f"<think>\n{mark(3)}\n</think>\n\n{mark(1)}"):
            text = chat.text([user, {"role": "assistant", "content": answer}, after], answer=True)
            _, answer_mark, following = text.rpartition(mark(1))
            is_kept = self._as_sampled or text.startswith(prompt + answer)
            if not (is_kept and answer_mark and mark(2) in following):
                change = "drops its reasoning" if "think" in answer else "writes it differently"
                raise DataError(
                    "the chat template rewrites history: once a message follows an answer, it "
                    f"{change}. Rollouts of several turns keep the tokens that were sampled, so the model would be "
                    "trained on a context that the template never writes. Use a chat template that keeps earlier "
                    "answers unchanged, change data.template_kwargs, or accept that context with "
                    'data.earlier_answers = "sampled".'
                )
            if answer == mark(1):
                front, _, rest = following.partition(mark(2))
        trims_start, front = not front.endswith(SPACE), front.removesuffix(SPACE)
        end = chat.ends.token_in(front)  # or the token that opens the user message, if the template ends no answer
        self._frames[images] = _Frame(
            end if end.endswith(chat.ends.tokens) else "",
            front,
            rest.removeprefix(SPACE),
            trims_start,
            not rest.startswith(SPACE),
        )
        return self._frames[images]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text that a template puts around turns."""

    end: str
    """The text that ends an answer before another message; empty if the template writes no end token there."""
    prefix: str
    """Text from the end of an answer's text to the text of the user's next message. It begins with :attr:`end`."""
    suffix: str
    """Text from the end of the user's text to the start of the policy's answer."""
    trims_start: bool
    """Whether the template removes white space before the user's text (Llama 3, Gemma)."""
    trims_end: bool
    """Whether the template removes white space after the user's text."""
