"""The processor of an image-text model: the tokens of an image, and its pixels."""

from __future__ import annotations

from typing import Any

from rlhf.errors import ModelError

from rlhf_hub.published import model_folder, settings_of


def reads_images(path: str) -> bool:
    """Whether a model, a folder or a hub name, has a part that reads images. Raises ModelError: no config.json."""
    return "vision_config" in settings_of(path, "images")


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
    from transformers.models.auto import video_processing_auto
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or video_processing_auto.AutoVideoProcessor is NoVideos:
        return
    check = ProcessorMixin.check_argument_for_proper_class

    def check_argument(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else check(self, name, argument)

    video_processing_auto.AutoVideoProcessor = NoVideos  # where processors look it up
    ProcessorMixin.check_argument_for_proper_class = check_argument


class NoVideos(dict[str, Any]):
    """Stands in a processor for the part that reads videos, which needs torchvision. Written as an empty table."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoVideos:
        return cls()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ModelError("videos need torchvision, which is not installed")
