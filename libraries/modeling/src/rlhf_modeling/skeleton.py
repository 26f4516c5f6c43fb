"""Checks a model's files before it is loaded, from its config and the headers of its weights. The messages are the same
as in :mod:`rlhf_modeling.model`, which would detect the same problem later."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import ModelSpec
from rlhf.types import ExpertLayers
from rlhf_hub.adapter_folders import adapter_of
from rlhf_hub.hub import hub_name
from rlhf_hub.published import model_folder
from torch import nn

from rlhf_modeling.adapters import adaptable, matching, saved_modules
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.experts import balanced_routers
from rlhf_modeling.export_files import read_generation_config, try_export
from rlhf_modeling.images.architecture import has_vision, is_image_text, language_model
from rlhf_modeling.kernels import require_own
from rlhf_modeling.model import model_class, require_floats, require_weights, take_apart
from rlhf_modeling.pretrained import headers_of, quiet, read, read_config
from rlhf_modeling.router_replay import expert_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_model(config: TrainingConfig, spec: ModelSpec) -> None:
    """Refuse options that do not fit the model: adapters for a model without linear layers, names of modules that it
    lacks, options of a vision tower for a model without one, the experts' auxiliary loss for a model without experts,
    the project's own kernels for a model with other layers. Also refuse image-text models whose class is not a
    decoder-only body with a head (BLIP-2, Florence-2).

    Raises ModelError, ConfigError or CapabilityError. A model that transformers cannot build from its config alone is
    checked when it is loaded.
    """
    replayed_layers(config, spec)
    lora, image_text = config.lora, is_image_text(spec)
    options = spec.role.trained and bool(lora or config.aux_loss_coef or config.freeze_vision)
    own_kernels = config.kernels == "own"
    if not (options or image_text or own_kernels):
        return
    if (module := known_skeleton(spec.path, spec.trust_remote_code, spec.images)) is None:
        return
    if image_text:
        take_apart(module, "lm", spec)
    if own_kernels:
        require_own(module)
    if not options:
        return
    for name, used in (("freeze_vision", config.freeze_vision), ("lora.vision", lora is not None and lora.vision)):
        if used and not has_vision(module):
            raise ConfigError(
                f"trainer.{name}: {type(module).__name__} ({spec.path!r}, role {spec.role.name!r}) has no vision "
                "tower. Remove the option."
            )
    if lora is not None:
        head = module.get_output_embeddings()
        linear = [name for name, _ in adaptable(module, head if isinstance(head, nn.Module) else None, lora.vision)]
        layers = matching(linear, lora.targets, type(module).__name__)
        own_head = None if spec.role.head == "lm" else head
        saved_modules(module, lora.modules_to_save or (), own_head, layers)
    if config.aux_loss_coef:
        balanced_routers(module, config.aux_loss_coef)


def replayed_layers(config: TrainingConfig, spec: ModelSpec) -> ExpertLayers | None:
    """The layers whose experts a trainer replays. None if ``router_replay`` is off, or if the role is not a trained
    language model. Raises CapabilityError if the model is dense, has routers that cannot replay, or reads images."""
    if not (config.router_replay and spec.role.trained and spec.role.head == "lm"):
        return None
    if spec.images or is_image_text(spec):
        raise CapabilityError(
            f"trainer.router_replay supports only text models, but role {spec.role.name!r} has an image-text model: "
            "engines number the tokens of images differently. Remove the option."
        )
    try:
        module = skeleton(spec.path, spec.trust_remote_code)
    except Exception as cause:  # any exception: the config may have any content
        raise CapabilityError(
            f"trainer.router_replay: transformers cannot build {spec.path!r} from its config alone, so its routers are "
            f"not known ({type(cause).__name__}: {cause}). Remove the option."
        ) from cause
    return expert_layers(module)


def known_skeleton(path: str, trust_remote_code: bool = False, images: bool = False) -> PreTrainedModel | None:
    """:func:`skeleton`, or None if transformers cannot build it. Loading the model reports the error better."""
    try:
        return skeleton(path, trust_remote_code, images)
    except Exception:  # any exception: the config may have any content
        return None


@cache
def skeleton(path: str, trust_remote_code: bool = False, images: bool = False) -> PreTrainedModel:
    """The language model that ``config.json`` describes, on the meta device. Raises errors of transformers.

    Args:
        images: the run has images.
    """
    from transformers import AutoConfig

    place = model_folder(path, code=trust_remote_code)
    config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    with torch.device("meta"), quiet():
        auto = language_model(config, images)
        module: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    return module


def check_files(spec: ModelSpec) -> None:
    """Refuse a folder whose config is of another kind of model than the role, or whose weights are missing, incomplete
    or of other shapes than in the config, or whose configs could not be written with an export. Only the headers of
    weights are read.

    Names and shapes are compared if accelerate is installed (transformers needs it for a model without values) and the
    model's code is part of transformers. For a hub model that is not downloaded yet, only the config is checked.

    Raises ModelError.
    """
    config = read_config(spec)
    auto, from_lm = model_class(spec, config)
    if hub_name(spec.path) is not None and not Path(spec.path).expanduser().is_dir():
        return
    generation = None
    if spec.role.head == "lm":
        generation = read_generation_config(spec, model_folder(spec.path, code=spec.trust_remote_code))
    headers = read(spec, "model", headers_of)
    require_floats(spec, config, headers)
    if spec.trust_remote_code or importlib.util.find_spec("accelerate") is None:
        return
    if from_lm:
        # The checkpoint has no such head, so any size will do.
        config.num_labels = 1

    state = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}

    def load(place: str, **_: Any) -> Any:
        with torch.device("meta"):
            model = auto.from_config(config)
        return type(model).from_pretrained(  # with the class's own config, which may be a part of the folder's
            None,
            config=model.config,
            state_dict=state,
            device_map="meta",
            dtype=torch.float32,
            output_loading_info=True,
        )

    with quiet():
        module, info = read(spec, "model", load)
    require_weights(spec, type(module), info, from_lm, adapter_of(spec.path))
    if spec.role.trained:
        if generation is not None:
            module.generation_config = generation
        try_export(spec, module)
