"""Image-text models of transformers: which class loads them, and which of their modules read images."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from torch import nn

from rlhf_modeling.pretrained import read_config

NOT_HERE = (
    "cannot be computed with images here, causally and packed ({}). This applies to all models whose image tokens "
    "attend in both directions, such as Gemma 3"
)
"""Message about an unsupported model, with the reason."""


def auto_classes() -> Any:
    """transformers' table of classes. Its import takes seconds, so it is not imported with this module."""
    from transformers.models.auto import modeling_auto

    return modeling_auto


def reads_images(config: Any, images: bool) -> bool:
    """Whether the model is loaded with its vision tower. True if the run has ``images``, or if transformers has no
    language model without a vision tower for this config."""
    if config.get_text_config() is config or type(config) not in auto_classes().MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    return images or type(config) not in auto_classes().MODEL_FOR_CAUSAL_LM_MAPPING


def language_model(config: Any, images: bool) -> Any:
    """The auto class of transformers that loads the language model with this config; see :func:`reads_images`."""
    classes = auto_classes()
    return classes.AutoModelForImageTextToText if reads_images(config, images) else classes.AutoModelForCausalLM


def require_images(spec: ModelSpec, config: Any) -> None:
    """Raises ModelError if the run has images but the model with this config reads none, or reads them in an
    unsupported way."""
    if not spec.images:
        return
    advice = "Use an image-text model (Qwen2.5-VL, Qwen3-VL, SmolVLM, LLaVA, ...), or remove the images."
    name = ", ".join(config.architectures or ()) or config.model_type
    if not reads_images(config, True):
        raise ModelError(
            f"the data have images, but the model {spec.path!r} of role {spec.role.name!r} is a {name}, which reads "
            f"text only. {advice}"
        )
    if fault := _image_problem(config):
        raise ModelError(f"the data have images, but {name} ({spec.path!r}, role {spec.role.name!r}) {fault}. {advice}")


def _image_problem(config: Any) -> str:
    """Why an image-text model with this config cannot be computed with images. Empty if the config shows no reason."""
    kind, start = type(config), "cannot be computed with images here: "
    mappings = auto_classes().MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto_classes().MODEL_MAPPING
    classes = [mapping[kind] for mapping in mappings if kind in mapping]
    if not any(hasattr(cls, "get_image_features") for cls in classes):
        return start + "its class has no get_image_features, so no tokens of a sequence stand for an image"
    if not hasattr(config, "image_token_id"):
        return start + "its config names no image_token_id, the token that stands for an image"
    if attends_ahead(config):
        return NOT_HERE.format("transformers' mask lets an image token attend to later ones")
    return ""


def attends_ahead(config: Any) -> bool:
    """Whether an image-text model with this config lets one of four tokens, two of which belong to an image, attend to
    a later one. Classes with such masks create them in ``create_masks_for_generate``, which reads only the config."""
    make = getattr(auto_classes().MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], "create_masks_for_generate", None)
    parameters = set(inspect.signature(make).parameters) if make is not None else set()
    kinds = parameters & {"token_type_ids", "mm_token_type_ids"}
    if make is None or not kinds:
        return False
    config = deepcopy(config)
    config.get_text_config()._attn_implementation = "eager"  # it creates masks of numbers
    first = {"is_first_iteration": True} if "is_first_iteration" in parameters else {}
    kind_1T, position_1T = torch.tensor([[0, 1, 1, 0]]), torch.arange(4)[None]
    result = make(config, torch.zeros(1, 4, 1), None, None, position_1T, **dict.fromkeys(kinds, kind_1T), **first)
    masks = result.values() if isinstance(result, dict) else [result]
    return any(bool((mask_11TT[0, 0] == 0).triu(1).any()) for mask_11TT in masks if mask_11TT is not None)


def is_image_text(spec: ModelSpec) -> bool:
    """Whether the role's model is loaded with a vision tower. False if its config cannot be read; loading the model
    reports this."""
    try:
        config = read_config(spec)
    except ModelError:
        return False
    return reads_images(config, spec.images)


class Scored:
    """Loads the body of an image-text model with a linear head named ``score``, which transformers supports for few of
    them. The model is saved under a name like those of transformers' sequence-classification models."""

    @staticmethod
    def from_config(config: Any) -> Any:
        return _scored_class(config.__class__)._from_config(config)

    @staticmethod
    def from_pretrained(place: str, *, trust_remote_code: bool = False, config: Any = None, **options: Any) -> Any:
        from transformers import AutoConfig

        if config is None:
            labels = {"num_labels": options.pop("num_labels")}
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **labels)
        return _scored_class(config.__class__).from_pretrained(place, config=config, **options)


@cache
def _scored_class(config_class: type) -> Any:
    from transformers import conversion_mapping

    model_class: Any = auto_classes().MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    body: Any = auto_classes().MODEL_MAPPING[config_class]
    base: Any = next(c for c in model_class.__mro__ if c.__name__.endswith("PreTrainedModel"))

    def make(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.model = body(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self: Any, **inputs: Any) -> tuple[torch.Tensor]:
        """The outputs of the head at every token."""
        return (self.score(self.model(**inputs)[0]),)

    name = model_class.__name__.replace("ForConditionalGeneration", "") + "ForSequenceClassification"
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(model_class.__name__)
    if conversions is not None:  # transformers finds them by the name of the class
        conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, (base,), {"__init__": make, "forward": forward, "__module__": base.__module__})


def classifier(config: Any, images: bool) -> Any | None:
    """The loader of an image-text model with a scalar or classes head. None if transformers has one."""
    has_loader = type(config) in auto_classes().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return Scored if reads_images(config, images) and not has_loader else None


def has_vision(module: nn.Module) -> bool:
    """Whether a loaded model has a vision tower."""
    return hasattr(module, "get_image_features") or hasattr(getattr(module, "model", None), "get_image_features")


def vision_prefixes(module: Any) -> tuple[str, ...]:
    """Prefixes of the names of all modules of an image-text model outside its text model and head: vision tower and
    projector. Empty for a text model."""
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
