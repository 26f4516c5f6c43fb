"""Image-text models of transformers: which class loads them, and which of their modules read images."""

from __future__ import annotations

from functools import cache
from typing import Any

from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from rlhf_modeling.pretrained import read


def reads_images(config: Any, images: bool) -> bool:
    """Whether the model is loaded with its vision tower: the run has ``images``, or transformers has no language model
    without one for this config."""
    if config.get_text_config() is config or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    return images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def language_model(config: Any, images: bool) -> Any:
    """The auto class of transformers that loads the language model with this config; see :func:`reads_images`."""
    return AutoModelForImageTextToText if reads_images(config, images) else AutoModelForCausalLM


def require_images(spec: ModelSpec, config: Any) -> None:
    """Raises ModelError where the run has images and the model with this config reads none."""
    if spec.images and not reads_images(config, True):
        raise ModelError(
            f"the data have images, but the model {spec.path!r} of role {spec.role.name!r} is a "
            f"{', '.join(config.architectures or ()) or config.model_type}, which reads text only. Name an image-text "
            "model (Qwen2.5-VL, Qwen3-VL, SmolVLM, LLaVA, ...), or leave the images out."
        )


def is_image_text(spec: ModelSpec) -> bool:
    """Whether the role's model is loaded with a vision tower; False where its config cannot be read, which is reported
    when the model is loaded."""
    try:
        config = read(spec, "model", AutoConfig.from_pretrained)
    except ModelError:
        return False
    return reads_images(config, spec.images)


class Scored:
    """Loads the body of an image-text model with a linear head named ``score``, which transformers has for few of them.
    The model is saved under a name like those of transformers' sequence-classification models."""

    @staticmethod
    def from_config(config: Any) -> Any:
        return _scored_class(config.__class__)._from_config(config)

    @staticmethod
    def from_pretrained(place: str, *, trust_remote_code: bool, num_labels: int | None = None, **options: Any) -> Any:
        labels = {} if num_labels is None else {"num_labels": num_labels}
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **labels)
        return _scored_class(config.__class__).from_pretrained(place, config=config, **options)


@cache
def _scored_class(config_class: type) -> Any:
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    body: Any = MODEL_MAPPING[config_class]
    base: Any = next(c for c in whole.__mro__ if c.__name__.endswith("PreTrainedModel"))

    def make(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.model = body(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    name = whole.__name__.replace("ForConditionalGeneration", "") + "ForSequenceClassification"
    conversions = get_checkpoint_conversion_mapping(whole.__name__)
    if conversions is not None:  # transformers finds them by the name of the class
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, (base,), {"__init__": make, "__module__": base.__module__})


def classifier(config: Any, images: bool) -> Any | None:
    """The loader of an image-text model with a scalar or classes head; None: transformers has one."""
    known = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return Scored if reads_images(config, images) and not known else None


def has_vision(module: nn.Module) -> bool:
    """Whether a loaded model has a vision tower."""
    return hasattr(module, "get_image_features") or hasattr(getattr(module, "model", None), "get_image_features")


def vision_prefixes(module: Any) -> tuple[str, ...]:
    """Starts of the names of all modules of an image-text model that are neither in its text model nor its head: vision
    tower and projector. Empty for a text model."""
    if not has_vision(module):
        return ()
    text = module.get_decoder()
    body_name = next(name for name, child in module.named_children() if hasattr(child, "get_decoder"))
    body = module.get_submodule(body_name)
    return tuple(f"{body_name}.{name}." for name, child in body.named_children() if child is not text)


def vision_parameters(module: Any) -> list[str]:
    """Names of the parameters of the vision tower and the projector."""
    prefixes = vision_prefixes(module)
    return [name for name, _ in module.named_parameters() if prefixes and name.startswith(prefixes)]
