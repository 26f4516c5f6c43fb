"""Pixels of images, as the processor in the model's folder computes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from rlhf.errors import ModelError, TrainingError
from rlhf.types import Image
from rlhf_hub.processors import open_image
from torch import Tensor
from torch.nn import functional as F

CACHE_BYTES = 2**30
"""Bytes of pixels in the cache. Old log-probs, a reference and the update read the same images one after another."""

Pixels = dict[str, Tensor]
"""A processor's output for one image, by the names of the model's arguments. The first dimension of each tensor counts
images, or parts of them."""
OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""A processor's outputs for the text beside the image."""


class PixelReader:
    """Pixels by the content of the image file. A thread computes the pixels of the next micro-batch.

    Args:
        processor: a processor of transformers. Its image processor alone would lack options that the processor sets.
        names: names of the model's inputs.
    """

    def __init__(self, processor: Any, names: frozenset[str]) -> None:
        self.processor, self.names = processor, names - OF_TEXT
        self._futures: OrderedDict[bytes, Future[Pixels]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "rlhf-pixels")

    def start(self, images: Iterable[Image]) -> None:
        """Compute the pixels of ``images`` in the background."""
        for image in images:
            if image.data not in self._futures:
                self._futures[image.data] = self._thread.submit(self._read, image.data)

    def collect(self, images: Sequence[Image]) -> list[Pixels]:
        """The pixels of each image, on the CPU. Raises TrainingError if a file is not an image."""
        self.start(images)
        pixels = []
        for image in images:
            self._futures.move_to_end(image.data)
            pixels.append(self._futures[image.data].result())
        self._forget()
        return pixels

    def _read(self, data: bytes) -> Pixels:
        try:
            picture = open_image(data)
        except ModelError as cause:
            raise TrainingError(str(cause)) from cause
        outputs = self.processor(images=[picture], text=[self.processor.image_token], return_tensors="pt")
        return {name: values for name, values in outputs.items() if name in self.names}

    def _forget(self) -> None:
        """Drop the least recently used images beyond :data:`CACHE_BYTES`."""
        done = {data: future for data, future in self._futures.items() if future.done() and not future.exception()}
        total = sum(_bytes(future.result()) for future in done.values())
        for data, future in done.items():
            if total <= CACHE_BYTES:
                return
            total -= _bytes(future.result())
            del self._futures[data]


def joined(pixels: Sequence[Pixels], device: torch.device) -> Pixels:
    """The arguments for several images. Tensors of images with different sizes are padded with zeros. A processor may
    leave out a tensor for some images, such as the parts of an image that it does not divide."""
    names = dict.fromkeys(name for values in pixels for name in values)
    return {name: _concatenated([values[name] for values in pixels if name in values]).to(device) for name in names}


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].ndim)]
    padded = []
    for part in parts:
        lacking = [size - length for size, length in zip(sizes, part.shape[1:], strict=True)]
        padded.append(F.pad(part, [n for count in reversed(lacking) for n in (0, count)]) if any(lacking) else part)
    return torch.cat(padded)


def _bytes(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
