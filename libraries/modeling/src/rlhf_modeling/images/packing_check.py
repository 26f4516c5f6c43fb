"""When a model is loaded, compares packed rows with images with transformers' forward pass of one sequence.

The reference uses the model's own forward pass and mask. Models whose image tokens attend in both directions (Gemma 3)
differ from packed attention, which is causal.
"""

from __future__ import annotations

import inspect

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import Image
from rlhf_hub.processors import load_processor
from torch import Tensor

from rlhf_modeling.images.architecture import has_vision
from rlhf_modeling.images.pixels import joined
from rlhf_modeling.images.row import ImageInputs
from rlhf_modeling.loaded import LoadedModel


def attach_images(model: LoadedModel, spec: ModelSpec) -> None:
    """Set :attr:`LoadedModel.images` if the model reads images and its folder has an image processor."""
    model.images, model.no_images = None, "reads text only"
    if not has_vision(model.module):
        if model.image_text:
            model.no_images = "was loaded without its vision tower: set data.max_images to load the tower too"
        return
    try:
        processor = load_processor(spec.path, spec.trust_remote_code)
    except ModelError as cause:
        model.no_images = f"has no image processor ({cause})"
        return
    model.images = ImageInputs(model.module, model.body, processor)


def image_sequence(model: LoadedModel, rows: list[Tensor]) -> tuple[Tensor, tuple[Image, ...]]:
    """int64 [T]: text, an image, text."""
    assert model.images is not None
    blank_T, image = model.images.blank
    front_T, back_T = rows[0], rows[2]
    ids_T = torch.cat([front_T, blank_T.to(front_T.device), back_T])
    return ids_T, (image.moved(len(front_T)),)


def own_statement(model: LoadedModel, ids_T: Tensor, images: tuple[Image, ...]) -> Tensor:
    """fp32 [T, H]: the output of the model's own forward pass for a sequence with images."""
    inputs = model.images
    assert inputs is not None
    kind_1T = (ids_T == inputs.token).int()[None]
    parameters = set(inspect.signature(model.body.forward).parameters) & {"mm_token_type_ids", "token_type_ids"}
    pixels = joined(inputs.pixels.collect(images), ids_T.device)
    out = model.body(input_ids=ids_T[None], use_cache=False, **pixels, **dict.fromkeys(parameters, kind_1T))
    hidden_TH: Tensor = out.last_hidden_state[0]
    return hidden_TH.float()


def packed_with_text(
    model: LoadedModel, rows: list[Tensor], ids_T: Tensor, images: tuple[Image, ...]
) -> tuple[Tensor, Tensor]:
    """fp32 [T, H], twice: a sequence with images occurs twice among sequences of text."""
    sequences = [rows[1], ids_T, rows[3], ids_T]
    lens = [len(s) for s in sequences]
    position_N = torch.cat([torch.arange(n, device=ids_T.device) for n in lens])
    hidden_NH = model.hidden(torch.cat(sequences), position_N, lens, ((), images, (), images)).float()
    parts = hidden_NH.split(lens)
    return parts[1], parts[3]
