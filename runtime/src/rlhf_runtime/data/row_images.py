"""The images of rows and observations: their positions in messages and texts, and their part in a source's
fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from rlhf.errors import DataError
from rlhf.types import Image, Turn
from rlhf.types.examples import Sequence as TokenSequence

from rlhf_runtime.data.conversions import conversation
from rlhf_runtime.data.image_files import data_url, image_file, image_path, may_be_image
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.messages import PLACE, as_shown, image_of, is_image, places, with_images
from rlhf_runtime.data.row_fields import Cells
from rlhf_runtime.data.sources import ONE_IMAGE, Source
from rlhf_runtime.data.tokenizer import decoder_of

NO_IMAGES = "the policy is a text-only model"
COMMON_MARK = "<image>"
"""The placeholder of an image in data sets for several models (LLaVA's, ShareGPT4V, verl's)."""
MARKED = object()
"""Stands for the image of a placeholder in a text."""


class RowImages:
    """Finds the images of rows and puts their tokens in place.

    Args:
        tokens: the tokens of images, or a text that says why the run cannot have images.
        limit: largest number of images of a sequence.

    The methods raise DataError: an image cannot be read, there are too many, or the run cannot have images.
    """

    def __init__(self, tokenizer: Any, tokens: ImageTokens | str, limit: int) -> None:
        self.tokens = tokens if isinstance(tokens, ImageTokens) and limit else None
        """Makes the tokens of images; None if the run cannot have images."""
        self._reason = tokens if isinstance(tokens, str) else f"data.max_images = {limit}"
        self.limit = 0 if self.tokens is None else limit
        """Largest number of images of a sequence; 0 if the run cannot have images."""
        self._decode = decoder_of(tokenizer, special_tokens=False)
        mark = None
        if isinstance(tokens, ImageTokens) and tokens.placeholder >= 0:
            mark = tokenizer.convert_ids_to_tokens(tokens.placeholder)
        self._mark: str | None = mark
        """The placeholder as text."""

    def of_row(self, cells: Cells) -> list[bytes]:
        """The files in the row's column of images, whose placeholders are in the text."""
        return self._check_count(self._files(self._column(cells), cells))

    def of_messages(
        self, messages: Sequence[Mapping[str, Any]], cells: Cells
    ) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Messages of a row (:meth:`Cells.messages`) as chat templates read them, and the files of their images.

        The images of the row's column are assigned, in order, to the places that contain no image: parts of messages,
        and placeholders in texts. In a row without such places, every :data:`COMMON_MARK` outside answers is a place.
        If there are no places at all, the images come before the text of the first user message.
        """
        images: list[Any] = []
        conversation = [self._read(message, images) for message in messages]
        column = self._column(cells)
        if column and not images:
            conversation = [
                self._read(message if message["role"] == "assistant" else _with_parts(message, COMMON_MARK), images)
                for message in messages
            ]
        free = [n for n, image in enumerate(images) if image is None or image is MARKED]
        user = next((i for i, m in enumerate(conversation) if m["role"] == "user"), None)
        if column and not free and user is not None:
            position = places(conversation[:user])
            conversation[user] = {
                **conversation[user],
                "content": with_images(conversation[user]["content"], len(column)),
            }
            images[position:position] = column
        elif len(free) == len(column):
            for n, image in zip(free, column, strict=True):
                images[n] = image
        elif None in images:
            raise DataError(
                f"{images.count(None)} image parts (or {COMMON_MARK!r} in texts) of the messages hold no image, but "
                f"{cells.name('images')} holds {len(column)} images; the two numbers must be equal"
            )
        else:  # :meth:`ImageTokens.place` will say how a placeholder is spelt
            images = [*(image for image in images if image is not MARKED), *column]
        return conversation, self._check_count(self._files(images, cells))

    def files(self, images: Sequence[Any]) -> list[bytes]:
        """Files of images that an environment or a program gives: bytes or ``data:`` URLs."""
        if images:
            self._require()
        return [_numbered(n, image, None) for n, image in enumerate(images)]

    def marked(self, text: str) -> bool:
        """Whether a text contains the placeholder of an image."""
        return self._mark is not None and self._mark in text

    def in_parts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of :meth:`of_messages`, with a part for each placeholder in their texts."""
        return [dict(m) if self._mark is None else _with_parts(m, self._mark) for m in messages]

    def places_in(self, answer: str | Sequence[Mapping[str, Any]]) -> int:
        """Number of places for images in an answer (a text, or messages of a row) that contain no image."""
        images: list[Any] = []
        for message in [{"content": answer}] if isinstance(answer, str) else answer:
            self._read(message, images)
        return sum(image is None or image is MARKED for image in images)

    def placeholders(self, ids: Sequence[int]) -> int:
        """Number of placeholders among the tokens of a text."""
        return 0 if self.tokens is None else ids.count(self.tokens.placeholder)

    def marks(self, count: int) -> str:
        """The placeholders of ``count`` images in plain text."""
        return (self._mark or "") * count

    def turn(
        self, ids: Sequence[int], images: Sequence[bytes] = (), messages: tuple[tuple[str, str], ...] = ()
    ) -> Turn:
        """A turn that is not sampled. Its tokens have a placeholder for each image.

        Args:
            messages: its messages, as :func:`rlhf_runtime.data.messages.as_people_read` returns them.
        """
        all_ids, _, turn_images = self._place(ids, images, ())
        return Turn(all_ids, sampled=False, text=self._decode(ids), images=turn_images, messages=messages)

    def sequence(self, ids: Sequence[int], mask: Sequence[bool], images: Sequence[bytes]) -> TokenSequence:
        """A sequence of tokens with a placeholder for each image."""
        all_ids, all_mask, all_images = self._place(ids, images, mask)
        return TokenSequence(all_ids, all_mask, images=all_images)

    def _place(
        self, ids: Sequence[int], images: Sequence[bytes], mask: Sequence[bool]
    ) -> tuple[Sequence[int], list[bool], tuple[Image, ...]]:
        return (ids, list(mask), ()) if self.tokens is None else self.tokens.place(ids, images, mask)

    def _read(self, message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
        """A message as chat templates read it. The image of each place is appended to ``images``: None for a part that
        contains none, :data:`MARKED` for a placeholder in a text."""
        parts = list[Any]()
        result = as_shown(message, parts)
        content = result["content"]
        rest = iter(parts)
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = "" if part == PLACE else part["text"] or ""
            marks = text.count(self._mark) if self._mark is not None else 0
            images += [next(rest)] if part == PLACE else [MARKED] * marks
        return result

    def _column(self, cells: Cells) -> list[Any]:
        """The values in the row's column of images. In a run without images the column ``image`` may contain other
        texts, which are ignored."""
        values = cells.images()
        other = self.tokens is None and cells.layout.columns.get("images") == ONE_IMAGE
        return [v for v in values if may_be_image(v)] if other else values

    def _files(self, values: Sequence[Any], cells: Cells) -> list[bytes]:
        if values:
            self._require()
        return [_numbered(n, value, cells.layout.folder) for n, value in enumerate(values)]

    def _require(self) -> None:
        if self.tokens is None:
            raise DataError(f"there are images, but {self._reason}. Remove the images, or use an image-text model")

    def _check_count(self, files: list[bytes]) -> list[bytes]:
        if len(files) > self.limit:
            raise DataError(f"the row has {len(files)} images, over data.max_images = {self.limit}")
        return files


def _with_parts(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message with a part for each ``mark`` in its texts."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not any(mark in part["text"] for part in parts if not is_image(part)):
        return {**message}
    result: list[Mapping[str, Any]] = []
    for part in parts:
        if is_image(part):
            result.append(part)
            continue
        for number, text in enumerate(part["text"].split(mark)):
            result += [PLACE] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": result}


def with_urls(messages: Sequence[Mapping[str, Any]], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Messages in the form of the OpenAI chat API, with their images as ``data:`` URLs."""
    rest = iter(images)

    def with_urls(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            {"type": "image_url", "image_url": {"url": data_url(next(rest))}} if part == PLACE else part
            for part in content
        ]

    return [{**m, "content": with_urls(m["content"])} if "content" in m else dict(m) for m in messages]


def _numbered(number: int, value: Any, folder: Any) -> bytes:
    try:
        return image_file(value, folder)
    except DataError as error:
        raise DataError(f"image {number}: {error}") from None


FIELDS = ("images", "messages", "prompt", "chosen", "rejected", "response")
"""Fields of rows that may name images."""


def image_folder(source: Source) -> Path | None:
    """The folder of a source's file; None for a name on the hub, whose rows contain the images."""
    path = Path(source.section.path).expanduser()
    if not path.exists():
        return None
    return path if path.is_dir() else path.parent


def has_images(source: Source) -> bool:
    """Whether the source has a column of images, or the messages of any row have an image. Without such a column every
    row is read."""
    columns = source.layout.columns if source.layout is not None else {}
    if "images" in columns:
        return True
    values = (value for field in FIELDS if field in columns for value in source.values(columns[field]))
    return any(True for value in values for _ in _image_parts(value))


def with_image_files(source: Source, columns: Mapping[str, str]) -> str:
    """The fingerprint of a source with the bytes of the image files that its rows name.

    Args:
        columns: {field: column} of its layout.
    """
    folder = image_folder(source)
    if folder is None:
        return source.fingerprint
    hashes: dict[str, str] = {}
    digest = hashlib.sha256(source.fingerprint.encode())
    for field in FIELDS:
        for value in source.values(columns[field]) if field in columns else ():
            for path in _paths(value, field == "images"):
                if path not in hashes:
                    hashes[path] = _content_hash(folder / Path(path).expanduser())
                digest.update(hashes[path].encode())
    return digest.hexdigest() if hashes else source.fingerprint


def _content_hash(file: Path) -> str:
    """A hash of a file's bytes; empty if it cannot be read, which is reported when the row is used."""
    try:
        with file.open("rb") as content:
            return xxhash.xxh3_128(content.read()).hexdigest()
    except (OSError, ValueError):
        return ""


def _paths(value: Any, images: bool) -> Iterator[str]:
    """The paths of images in a value of a column."""
    if images:
        for item in value if isinstance(value, list) else [value]:
            if path := image_path(item):
                yield path
    else:
        yield from filter(None, (image_path(image_of(part)) for part in _image_parts(value)))


def _image_parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """The image parts of messages, or of one message. Other values have none."""
    value = conversation(value)
    for message in value if isinstance(value, list) else [value]:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in content if is_image(part)) if isinstance(content, list) else ()
