"""Reads the size of a model from ``config.json``. Parameters are counted on the meta device; no weights are loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError
from rlhf.interfaces.memory import ModelSize
from rlhf_hub.published import model_folder

from rlhf_cli.plan.layer_size import cached, first, layer_size
from rlhf_cli.plan.vision_size import vision_size

EXPECTED = "Expected a folder with a config.json in Hugging Face format, or a hub name."


@cache
def read_size(path: str, head: str = "lm", trust_remote_code: bool = False, images: bool = False) -> ModelSize:
    """The size of the model that ``config.json`` in the folder (or on the hub) describes.

    Args:
        head: ``lm`` | ``scalar`` | ``classes:N``. A model without language head keeps its body and gets a new head.
        images: the run has images.

    Raises ModelError if there is no config, transformers makes no language model of it, or its layers are not those of
    a decoder of text.
    """
    import torch
    from rlhf_modeling.images.architecture import language_model
    from transformers import AutoConfig

    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"no config.json in {path}. {EXPECTED}")
    place = model_folder(path, code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = language_model(config, images).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as cause:  # anything: configs are other people's files
        raise ModelError(f"cannot plan with the model {path!r}: {type(cause).__name__}: {cause}\n{EXPECTED}") from cause
    try:
        return _size(module, config, path, head, trust_remote_code, images)
    except ModelError:
        raise
    except Exception as cause:  # any exception: a class of transformers may have other layers, its config other fields
        raise ModelError(
            f"cannot plan with {type(module).__name__} ({path!r}): its sizes are not those of a decoder of text "
            f"({type(cause).__name__}: {cause}). A run may train it; measure its memory with a short one."
        ) from cause


def _size(module: Any, config: Any, path: str, head: str, trust_remote_code: bool, images: bool) -> ModelSize:
    from rlhf_modeling.images.architecture import has_vision, vision_parameters

    text = config.get_text_config()
    decoder = module.get_decoder() if has_vision(module) else module
    layers = _decoder_layers(decoder, int(text.num_hidden_layers), path)
    embedding, own_head = module.get_input_embeddings().weight, module.get_output_embeddings()
    tied = own_head is not None and own_head.weight is embedding
    vocabulary, width = embedding.shape
    # fields that differ between layers are refused by the config of the whole
    configs = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * len(layers)
    sizes = tuple(layer_size(layer, own) for layer, own in zip(layers, configs, strict=True))
    outputs = _outputs(head, int(vocabulary))
    total = sum(p.numel() for p in module.parameters())
    if head != "lm":
        total += outputs * width - (0 if tied else _numel(own_head)) + _biases(head, outputs, config)
    kinds = getattr(text, "layer_types", None) or ["attention"] * len(sizes)
    return ModelSize(
        path=path,
        architecture=str(config.model_type),
        parameters=int(total),
        hidden=int(text.hidden_size),
        vocabulary=int(vocabulary),
        outputs=outputs,
        tied=tied,
        embedding=int(vocabulary * width),
        head=int(outputs * width),
        layers=sizes,
        cache_elements=sum(cached(*layer) for layer in zip(sizes, kinds, configs, strict=True)),
        cache_heads=1 if first(text, "kv_lora_rank") else max(1, sizes[0].key * sizes[0].heads // sizes[0].query),
        layer_class=type(layers[0]).__name__,
        softcap=bool(getattr(text, "attn_logit_softcapping", None)),
        matrices=sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2),
        linear=_linear(module, own_head),
        vision=sum(module.get_parameter(name).numel() for name in vision_parameters(module)),
        tower=vision_size(module, config, path, trust_remote_code) if images and has_vision(module) else None,
    )


def _outputs(head: str, vocabulary: int) -> int:
    if head == "lm":
        return vocabulary
    kind, _, count = head.partition(":")
    return int(count) if kind == "classes" else 1


def _biases(head: str, outputs: int, config: Any) -> int:
    """A model that was saved as a token classifier has biases in its head (:mod:`rlhf_modeling.model`)."""
    return outputs if any("TokenClassification" in name for name in config.architectures or ()) else 0


def _numel(module: Any) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _decoder_layers(module: Any, count: int, path: str) -> list[Any]:
    """The layers of the text decoder: the largest list of ``count`` modules."""
    from torch import nn

    lists = [m for _, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(f"cannot plan with {type(module).__name__} ({path!r}): it has no list of {count} layers")
    return list(max(lists, key=_numel))


def _linear(module: Any, head: Any) -> tuple[tuple[str, int, int, int], ...]:
    from rlhf_modeling.adapters import adaptable

    shapes: dict[str, tuple[int, int, int]] = {}
    for name, layer in adaptable(module, head):
        last = name.rpartition(".")[2]
        inputs, outputs, count = shapes.get(last, (0, 0, 0))
        shapes[last] = inputs + layer.in_features, outputs + layer.out_features, count + 1
    return tuple((name, *shapes[name]) for name in sorted(shapes))
