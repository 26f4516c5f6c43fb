"""Images in messages: content parts of chat messages, with the images that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError, shown

_TEXTS = (None, "text", "input_text", "output_text")
PLACE = {"type": "image"}
"""An image in a message, as chat templates read it."""
Parts = list[dict[str, Any]]


def read_content(content: Any, where: str) -> str | Parts:
    """The content of a message: text, or parts of which at least one is an image. :func:`take_images` reads the images.

    Args:
        where: names the message in errors.

    Raises DataError: the content is neither text nor a list of parts of text and images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: Parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if is_image(part):
            parts.append(dict(part))
        elif isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(_text(part), str):
            parts.append({"type": "text", "text": _text(part)})
        else:
            raise DataError(
                f"{where}: content must be text or a list of {{type: text, text}} and {{type: image}} parts, got "
                f"{shown(part)}"
            )
    return parts if any(map(is_image, parts)) else text_of(parts)


def _text(part: Mapping[str, Any]) -> Any:
    return part.get("text", part.get("value"))  # LLaMA-Factory: {type: text, value}


def take_images(content: str | Parts, images: list[Any]) -> str | Parts:
    """Content of :func:`read_content` as chat templates read it: an image is :data:`PLACE`. ``images`` gets the image
    of each part, in order; None for a part that holds none."""
    if not isinstance(content, list):
        return content
    images += [image_of(part) for part in content if is_image(part)]
    return [dict(PLACE) if is_image(part) else part for part in content]


def is_image(part: Any) -> bool:
    """Whether a part of content says that it is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def text_of(content: Any) -> str:
    """The text of content that :func:`take_images` returned; parts of text are joined by line breaks."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def with_text(content: str | Parts, text: str) -> str | Parts:
    """Content with more text after it."""
    if not isinstance(content, list):
        return content + text
    *before, last = content
    if last == PLACE:
        return [*content, {"type": "text", "text": text.lstrip()}]
    return [*before, {**last, "text": last["text"] + text}]


def with_images(content: str | Parts, count: int) -> Parts:
    """Content after ``count`` images."""
    text = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return [*(dict(PLACE) for _ in range(count)), *text]


def places(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of images in messages."""
    return sum(m["content"].count(PLACE) for m in messages if isinstance(m.get("content"), list))


def image_of(part: Mapping[str, Any]) -> Any:
    """The image that a part holds, in one of the forms that programs write; None if it holds none."""
    for key in ("image", "image_url", "url", "path", "base64", "bytes", "value"):
        value = part.get(key)
        if value is not None:
            value = value.get("url") if key == "image_url" and isinstance(value, Mapping) else value
            if key == "base64" and isinstance(value, str) and not value.startswith("data:"):
                return f"data:image;base64,{value}"
            return value
    return None
