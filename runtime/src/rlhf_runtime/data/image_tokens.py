"""The tokens that stand for images, as written by the processor in the model's folder."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from rlhf.errors import DataError, ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import Image
from rlhf_hub.processors import load_processor, reads_images
from rlhf_hub.published import settings_of

from rlhf_runtime.data.image_files import image_size

_KEYS = ("image_token_id", "image_token_index")
COMPARED = ((64, 64), (640, 480), (1500, 2000))
"""Widths and heights of images for which two processors must write the same tokens."""


class ImageTokens:
    """Replaces the placeholder of each image by the tokens that the model's processor writes.

    The number of tokens depends on the size of the image. The processor is loaded when the first image comes.

    Args:
        model: the policy: a folder or hub name of an image-text model.
    """

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        self.model, self._trusted = model, trust_remote_code
        settings = settings_of(model, "images")
        self.placeholder: int = next((settings[k] for k in _KEYS if isinstance(settings.get(k), int)), -1)
        """The token of an image in tokenised text; -1: not known."""
        self.of_size = lru_cache(4096)(self._tokens_of)
        """The tokens of an image of this width and height."""

    def place(
        self, ids: Sequence[int], images: Sequence[bytes], mask: Sequence[bool] = ()
    ) -> tuple[Sequence[int], list[bool], tuple[Image, ...]]:
        """Tokens, mask and images of a text.

        Args:
            ids: its tokens, with one placeholder for each image.
            images: contents of image files.
            mask: which tokens are trained on. Image tokens never are.

        Raises DataError: the numbers of placeholders and images differ, or the processor refuses an image.
        """
        positions = [i for i, token in enumerate(ids) if token == self.placeholder] if self.placeholder in ids else []
        if len(positions) != len(images):
            raise DataError(
                f"{_plural(len(positions), 'placeholder')} for images in the text, but {_plural(len(images), 'image')}"
                f"; each image needs one placeholder{self._spelt()}"
            )
        if not images:
            return ids, list(mask), ()
        new_ids, new_mask, new_images, end = array.array("i"), list[bool](), list[Image](), 0
        for position, data in zip(positions, images, strict=True):
            tokens = self.of_size(*image_size(data))
            new_ids += array.array("i", ids[end:position])
            new_images.append(Image(data, len(new_ids), len(tokens), [self.placeholder]))
            new_ids += array.array("i", tokens)
            new_mask += [*mask[end:position], *(False for _ in tokens)]
            end = position + 1
        new_ids += array.array("i", ids[end:])
        return new_ids, [*new_mask, *mask[end:]] if mask else [], tuple(new_images)

    @property
    def text(self) -> str:
        """The placeholder as text."""
        return str(self._processor.image_token)

    def _spelt(self) -> str:
        if self.placeholder < 0:
            return ". The model's config.json defines no placeholder"
        return f", which is {self.text!r} in plain text and a part {{type: image}} in messages"

    @cached_property
    def _processor(self) -> Any:
        processor = load_processor(self.model, self._trusted)
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or processor.tokenizer.convert_tokens_to_ids(token) != self.placeholder:
            raise DataError(
                f"images cannot be encoded for {self.model}: its processor marks an image with {token!r}, but "
                f"its config.json with token {self.placeholder}"
            )
        image_ids, between = (_processed(processor, text, 64, 64) for text in (token, f"a{token}b"))
        front, after = (processor.tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("a", "b"))
        if between != (*front, *image_ids, *after):
            raise DataError(
                f"images cannot be encoded for {self.model}: the tokens that its processor writes for an image depend "
                "on the surrounding text"
            )
        return processor

    def _tokens_of(self, width: int, height: int) -> tuple[int, ...]:
        """The tokens of an image of this size."""
        return _processed(self._processor, self._processor.image_token, width, height)


def image_tokens(model: str, trust_remote_code: bool = False) -> ImageTokens | str:
    """The tokens of images for a model, or a text that says why the model can have no images."""
    if not reads_images(model):
        return f"the policy {model} is a text-only model"
    return ImageTokens(model, trust_remote_code)


def check_image_tokens(policy: ImageTokens, specs: Iterable[ModelSpec]) -> None:
    """Refuse a role whose processor writes other image tokens than the policy's, because roles get the policy's tokens.

    Raises ModelError naming the role.
    """
    for spec in specs:
        if spec.path == policy.model:
            continue
        role_tokens = ImageTokens(spec.path, spec.trust_remote_code)
        for width, height in COMPARED:
            policy_ids, role_ids = (tokens.of_size(width, height) for tokens in (policy, role_tokens))
            if policy_ids != role_ids:
                raise ModelError(
                    f"role {spec.role.name!r} ({spec.path}) reads an image of {width}x{height} pixels as "
                    f"{len(role_ids)} tokens, which differ from the {len(policy_ids)} tokens of the policy "
                    f"({policy.model}). Every role reads the policy's tokens, so its processor must be of the same "
                    "family and have the same settings."
                )


def _processed(processor: Any, text: str, width: int, height: int) -> tuple[int, ...]:
    """The tokens of a text with one image, as the processor writes them."""
    import PIL.Image

    blank = PIL.Image.new("RGB", (width, height))
    try:
        encoding = processor(images=[blank], text=[text], add_special_tokens=False)
    except Exception as error:  # of many classes: a side that is too short, an image that is too thin
        raise DataError(
            f"the model's processor refuses an image of {width}x{height} pixels: {type(error).__name__}: {error}"
        ) from None
    return tuple(int(i) for i in encoding["input_ids"][0])


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
