"""The text that a chat template puts around turns, and whether the template keeps earlier turns as they were."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.errors import DataError

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.image_parts import with_images
from rlhf_runtime.data.template_markers import mark


@dataclass(frozen=True, slots=True)
class Frame:
    """The text that a template puts around turns."""

    end: str
    """End token of an answer; empty if the template writes none."""
    before: str
    """Text from the end of an answer (after its end token) to the text of the user's next message."""
    after: str
    """Text from the end of the user's text to the start of the policy's answer."""


def frame(chat: ChatTemplate, images: int = 0) -> Frame:
    """The text that the template puts around an observation. Also checks that earlier turns do not change.

    Args:
        images: number of images before the text of the observation; their placeholders are in ``Frame.before``.

    Raises DataError: the template renders an earlier turn differently once another turn follows (Qwen3 removes its
    reasoning; only the last answer has an empty think block). The sampled tokens would then differ from the
    template's render.
    """
    shown = with_images(mark(2), images) if images else mark(2)
    user, after = {"role": "user", "content": mark(0)}, {"role": "user", "content": shown}
    prompt = chat.text([user], answer=True)
    for answer in (mark(1), f"<think>\n{mark(3)}\n</think>\n\n{mark(1)}"):
        text = chat.text([user, {"role": "assistant", "content": answer}, after], answer=True)
        if not text.startswith(prompt + answer) or mark(2) not in text:
            what = "drops its reasoning" if "think" in answer else "writes it otherwise"
            raise DataError(
                "the chat template rewrites history: once a message follows an answer, it "
                f"{what}. Rollouts of several turns keep the tokens that were sampled, so the model would be "
                "trained on a context that the template never shows it. Give the tokenizer a chat template that "
                'keeps earlier answers as they were, other data.template_kwargs, or use data.template = "plain".'
            )
        if answer == mark(1):
            before, _, rest = text[len(prompt + answer) :].partition(mark(2))
    return Frame(chat.end_token(before), before, rest)
