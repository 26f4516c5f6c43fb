"""Prompts with images: the input that vLLM's processor computes from each image, at the image's place in the run's
tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from rlhf.errors import ModelError
from rlhf.types import Image
from rlhf.types.arrays import IntArray
from rlhf_hub.processors import open_image

MAX_IMAGES = 64
"""Number of images whose pixels are kept. Consecutive requests of a group have the same images."""


class ImagePrompts:
    """Creates vLLM's input from tokens and images.

    vLLM would search the whole prompt for placeholders and expand each of them. It cannot distinguish an image's token
    from an equal token that the policy sampled, and it expands tokens that are already expanded. Therefore vLLM gets
    each image separately, in its short form. Its tokens for the image must equal the run's tokens. Then the run's own
    tokens are the prompt.

    Args:
        renderer: vLLM's renderer.
    """

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._inputs: OrderedDict[tuple[bytes, bytes], Any] = OrderedDict()

    def prompt(self, ids: IntArray, images: Sequence[Image], weights: str, salt: str | None) -> Any:
        """vLLM's ``MultiModalInput``.

        Args:
            ids: the trainer's token ids, with images expanded.
            weights: names the weights. An image's features are cached under its content and this name.

        Raises ModelError if vLLM's tokens of an image differ from the run's.
        """
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        items, hashes, places = [], [], []
        for number, image in enumerate(images):
            piece = self._image_input(image)
            run_ids = list(ids[image.start : image.start + image.tokens])
            if piece["prompt_token_ids"] != run_ids:
                raise ModelError(
                    f"vLLM expands image {number} of a request to {_excerpt(piece['prompt_token_ids'])}, but the run "
                    f"has {_excerpt(run_ids)} from position {image.start} on. The processor's files in the model's "
                    "folder are not those that the run read, or vLLM expands images of this model differently: sample "
                    "with --generator.use transformers."
                )
            [item], [place] = piece["mm_kwargs"]["image"], piece["mm_placeholders"]["image"]
            items.append(item)
            hashes.append(f"{piece['mm_hashes']['image'][0]}-{weights}")
            places.append(replace(place, offset=image.start + place.offset))
        kwargs = MultiModalKwargsItems({"image": items})
        return mm_input(list(ids), kwargs, {"image": hashes}, {"image": places}, cache_salt=salt)

    def _image_input(self, image: Image) -> Any:
        """vLLM's input of the image and its short form."""
        mark = sha256(image.data).digest()
        key = (mark, image.short.tobytes())
        if key not in self._inputs:
            prompt = {
                "prompt_token_ids": list(image.short),
                "multi_modal_data": {"image": [open_image(image.data)]},
                "multi_modal_uuids": {"image": [mark.hex()]},
            }
            [self._inputs[key]] = self._renderer.render_cmpl([prompt])
            if len(self._inputs) > MAX_IMAGES:
                self._inputs.popitem(last=False)
        self._inputs.move_to_end(key)
        return self._inputs[key]


def _excerpt(ids: Sequence[int]) -> str:
    text = ", ".join(map(str, ids[:6]))
    return f"{len(ids)} tokens ({text}{', ...' if len(ids) > 6 else ''})"
