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
    """Whether a model (a folder or a hub name) has a part that reads images. False if it has no readable config."""
    try:
        return "vision_config" in json.loads((Path(model_folder(path)) / "config.json").read_text())
    except (OSError, ValueError):  # loading the model will report it
        return False


def open_image(data: bytes) -> Any:
    """The ``PIL.Image`` in RGB of an image file's content. Trainers and engines pass it to a processor.

    Raises ModelError if Pillow cannot read it as an image.
    """
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # of many kinds: Pillow's errors, its decoders' errors, too many pixels
        raise ModelError(f"an image of {len(data)} bytes cannot be read: {error}") from error


def load_processor(path: str, trust_remote_code: bool = False) -> Any:
    """The processor of an image-text model's folder or hub name, with its tokenizer and image processor.

    Raises ModelError if there is none, or if transformers cannot load it.
    """
    from transformers import AutoProcessor, ProcessorMixin

    build_without_torchvision()
    place = model_folder(path, code=trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds of errors, which all mean that there is no usable processor
        raise ModelError(f"cannot load the processor of {path}: {type(error).__name__}: {error}") from error
    if not isinstance(processor, ProcessorMixin):  # transformers returns a tokenizer if there is nothing else
        files = "processor_config.json or preprocessor_config.json"
        raise ModelError(
            f"{path} has no image processor. Copy {files} to the model's folder (`processor.save_pretrained(folder)`)."
        )
    return processor


def build_without_torchvision() -> None:
    """Let transformers build processors in this process if torchvision is missing.

    Processors of Qwen-VL and SmolVLM have a part for videos, which needs torchvision, and cannot be built without it.
    Here they are built with a :class:`NoVideos` instead. Images are read without torchvision. Does nothing if
    torchvision is installed.
    """
    from transformers import ProcessorMixin
    from transformers.utils import is_torchvision_available

    # by its full name, because transformers.models.auto hides it without torchvision
    video_processing_auto: Any = import_module("transformers.models.auto.video_processing_auto")

    if is_torchvision_available() or video_processing_auto.AutoVideoProcessor is NoVideos:
        return
    mixin: Any = ProcessorMixin
    check = mixin.check_argument_for_proper_class

    def check_argument(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else check(self, name, argument)

    video_processing_auto.AutoVideoProcessor = NoVideos  # where processors find it
    mixin.check_argument_for_proper_class = check_argument


class NoVideos(dict[str, Any]):
    """Replaces the part of a processor that reads videos, which needs torchvision. Written as an empty table."""

    class valid_kwargs:  # transformers' name
        """The options of the processor, whose names vLLM reads; there are none."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()
    size: ClassVar = {"shortest_edge": 2**12, "longest_edge": 2**20}
    """Numbers of pixels, from which vLLM computes the maximum number of tokens of a video, even if videos are not
    allowed."""
    temporal_patch_size = 2

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoVideos:
        return cls()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ModelError("videos need torchvision, which is not installed")
