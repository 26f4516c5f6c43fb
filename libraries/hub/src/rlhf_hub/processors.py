"""The processor of an image-text model: the tokens of an image, and its pixels."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from rlhf.errors import ModelError

from rlhf_hub.published import model_folder


def reads_images(path: str) -> bool:
    """Whether a model, a folder or a hub name, has a part that reads images; False where it has no readable config."""
    try:
        return "vision_config" in json.loads((Path(model_folder(path)) / "config.json").read_text())
    except (OSError, ValueError):  # loading the model will say it
        return False


def open_image(data: bytes) -> Any:
    """The ``PIL.Image`` in RGB of an image file's content, as trainers and engines give it to a processor.

    Raises ModelError: it is no image that Pillow reads.
    """
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # of many kinds: Pillow's own, those of its decoders, too many pixels
        raise ModelError(f"an image of {len(data)} bytes cannot be read: {error}") from error


def load_processor(path: str, trust_remote_code: bool = False) -> Any:
    """The processor of an image-text model's folder or hub name, with its tokenizer and image processor.

    Raises ModelError: there is none, or transformers cannot load it.
    """
    from transformers import AutoProcessor, ProcessorMixin

    build_without_torchvision()
    place = model_folder(path, code=trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, all meaning: there is no usable processor
        raise ModelError(f"cannot load the processor of {path}: {type(error).__name__}: {error}") from error
    if not isinstance(processor, ProcessorMixin):  # transformers returns a tokenizer where there is nothing else
        files = "processor_config.json or preprocessor_config.json"
        raise ModelError(
            f"{path} holds no processor of images. Copy {files} beside the model (`processor.save_pretrained(folder)`)."
        )
    return processor


def build_without_torchvision() -> None:
    """Let transformers build processors in this process where torchvision is missing.

    Processors of Qwen-VL and SmolVLM have a part for videos, which needs torchvision, and are not built without it.
    Here they are built with a :class:`NoVideos` in its place. Images are read without torchvision. Does nothing where
    torchvision is installed.
    """
    from transformers import ProcessorMixin
    from transformers.utils import is_torchvision_available

    # by its whole name: without torchvision transformers.models.auto hides it
    video_processing_auto: Any = import_module("transformers.models.auto.video_processing_auto")

    if is_torchvision_available() or video_processing_auto.AutoVideoProcessor is NoVideos:
        return
    mixin: Any = ProcessorMixin
    check = mixin.check_argument_for_proper_class

    def check_argument(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else check(self, name, argument)

    video_processing_auto.AutoVideoProcessor = NoVideos  # where processors look it up
    mixin.check_argument_for_proper_class = check_argument


class NoVideos(dict[str, Any]):
    """Stands in a processor for the part that reads videos, which needs torchvision. Written as an empty table."""

    class valid_kwargs:  # transformers' name
        """The options of the processor, whose names vLLM reads: none."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()
    size: ClassVar = {"shortest_edge": 2**12, "longest_edge": 2**20}
    """Pixels, of which vLLM computes the most tokens of a video, also where videos are not allowed."""
    temporal_patch_size = 2

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoVideos:
        return cls()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ModelError("videos need torchvision, which is not installed")
