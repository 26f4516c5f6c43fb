"""Reads the size of a model from ``config.json``. Parameters are counted on the meta device; no weights are loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError
from rlhf.interfaces.memory import LayerSize, ModelSize, VisionSize
from rlhf_hub.published import model_folder

EXPECTED = "Expected a folder with a config.json in Hugging Face format, or a hub name."
KEYS = ("k_proj", "key_proj", "key", "k")
"""Names of the matrix that computes keys."""
FUSED = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "qkv", "W_pack")
"""Names of a single matrix that computes queries, keys and values."""
LARGE = 2048
"""Height and width of the image, in pixels. Most processors shrink larger images."""


@cache
def read_size(path: str, head: str = "lm", trust_remote_code: bool = False, images: bool = False) -> ModelSize:
    """The size of the model that ``config.json`` in the folder (or on the hub) describes.

    Args:
        head: ``lm`` | ``scalar`` | ``classes:N``. A model without language head keeps its body and gets a new head.
        images: the run has images.

    Raises ModelError if there is no config, transformers cannot build a language model from it, or its layers are not
    those of a text decoder.
    """
    import torch
    from rlhf_modeling.images.architecture import language_model
    from transformers import AutoConfig

    place = model_folder(path, code=trust_remote_code)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise ModelError(f"no config.json in {path}. {EXPECTED}")
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = language_model(config, images).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as cause:  # any exception, because configs are foreign files
        raise ModelError(f"cannot plan with the model {path!r}: {type(cause).__name__}: {cause}\n{EXPECTED}") from cause
    try:
        return _size(module, config, path, head, trust_remote_code, images)
    except ModelError:
        raise
    except Exception as cause:  # any exception: a class of transformers may have other layers, its config other fields
        raise ModelError(
            f"cannot plan with {type(module).__name__} ({path!r}): its sizes are not those of a text decoder "
            f"({type(cause).__name__}: {cause}). A run may train it; measure its memory with a short run."
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
    sizes = tuple(layer_size(layer, layer_config) for layer, layer_config in zip(layers, configs, strict=True))
    outputs = _outputs(head, int(vocabulary))
    total = sum(p.numel() for p in module.parameters())
    if head != "lm":
        total += outputs * width - (0 if tied else _numel(own_head)) + _biases(outputs, config)
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


def _biases(outputs: int, config: Any) -> int:
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


def layer_size(layer: Any, config: Any) -> LayerSize:
    """The size of a layer. ``layer``: the module. ``config``: config of the text model."""
    hidden = int(config.hidden_size)
    matrices = {n: p for n, p in layer.named_parameters() if p.ndim >= 2}
    heads = first(config, "num_attention_heads") or 1
    key_heads = first(config, "num_key_value_heads") or heads
    size = first(config, "head_dim") or hidden // heads
    query = heads * size
    key = value = _key_width(matrices, hidden, query) or key_heads * size
    if first(config, "kv_lora_rank"):  # latent attention computes with whole heads, but caches less
        size = (first(config, "qk_nope_head_dim") or 0) + (first(config, "qk_rope_head_dim") or 0)
        query, key, value = heads * size, heads * size, heads * (first(config, "v_head_dim") or size)
    feed = sum(p.numel() for n, p in matrices.items() if "attn" not in n and "attention" not in n)
    experts = first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ffn = first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
    active = 0
    if experts and any("expert" in n for n in matrices):
        active = first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 1
        width = first(config, "moe_intermediate_size") or ffn
        shared = sum(p.shape[-1] for n, p in matrices.items() if "shared" in n and "down_proj" in n)
        # A gated network has three matrices of this size, another one has two.
        gated = feed > 2.5 * experts * hidden * width
        ffn = active * width + int(shared)
    else:
        gated = feed > 2.5 * hidden * ffn
    normed = any("q_norm" in n for n, _ in layer.named_parameters())
    norms = sum("norm" in n and n.endswith("weight") and p.numel() == hidden for n, p in layer.named_parameters())
    total = sum(p.numel() for p in layer.parameters())
    largest = max(p.numel() for p in layer.parameters())
    return LayerSize(total, query, key, value, heads, ffn, gated, active, normed, max(1, norms), largest)


def _key_width(matrices: dict[str, Any], hidden: int, query: int) -> int | None:
    """Width of the keys, from the matrix that computes them (perhaps with queries and values); None: the layer has no
    such matrix."""
    for name, matrix in matrices.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        outputs = matrix.numel() // hidden
        if matrix.ndim == 2 and last in KEYS:
            return int(outputs)
        if matrix.ndim == 2 and last in FUSED and outputs > query:
            return int(outputs - query) // 2
    return None


def cached(layer: LayerSize, kind: str, config: Any) -> int:
    """Elements of the key-value cache per token. Linear and recurrent layers have none."""
    if "attention" not in kind or "linear" in kind:
        return 0
    latent = first(config, "kv_lora_rank")
    if latent:
        return latent + (first(config, "qk_rope_head_dim") or 0)
    return layer.key + layer.value


def first(config: Any, *names: str) -> int | None:
    """The first of these fields that is a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            return int(value)
    return None


def vision_size(module: Any, config: Any, path: str, trust_remote_code: bool) -> VisionSize | None:
    """The size of the vision part. None if it has no list of layers, or no convolution that reads patches: its
    activations are then not counted.

    Args:
        module: the model on the meta device.
        config: config of the model.

    Raises ModelError, as the run would, if the folder has no image processor.
    """
    from rlhf_modeling.images.architecture import vision_prefixes
    from torch import nn

    vision = getattr(config, "vision_config", None)
    width = first(vision, "embed_dim", "hidden_size")
    prefixes = vision_prefixes(module)
    parts = [(name, m) for name, m in module.named_modules() if name.startswith(prefixes)]
    lists = [(name, m) for name, m in parts if isinstance(m, nn.ModuleList)]
    reads = [m for _, m in parts if isinstance(m, nn.Conv2d | nn.Conv3d) and m.out_channels == width]
    if width is None or not lists or not reads:
        return None
    name, layers = max(lists, key=lambda entry: len(entry[1]))
    feed = [m for name, m in layers[0].named_modules() if isinstance(m, nn.Linear) and "att" not in name]
    projector = [m for n, m in parts if isinstance(m, nn.Linear) and not n.startswith(f"{name}.")]
    pixels = reads[0].weight[0].numel()
    patches, tokens = _of_a_large_image(path, trust_remote_code, pixels)
    return VisionSize(
        layers=len(layers),
        hidden=width,
        ffn=feed[0].out_features if feed else 4 * width,
        gated=len(feed) > 2,
        projector=sum(m.in_features + m.out_features for m in projector),
        pixels=pixels,
        patches=patches,
        tokens=tokens,
    )


def _of_a_large_image(path: str, trust_remote_code: bool, pixels: int) -> tuple[int, int]:
    """(patches, tokens)."""
    from PIL import Image
    from rlhf_hub.processors import load_processor

    processor = load_processor(path, trust_remote_code)
    try:
        blank = Image.new("RGB", (LARGE, LARGE))
        inputs = processor(images=[blank], text=[processor.image_token], add_special_tokens=False, return_tensors="pt")
        return inputs["pixel_values"].numel() // pixels, inputs["input_ids"].numel()
    except Exception as error:  # of many kinds, because the processor may be foreign code
        raise ModelError(
            f"cannot plan with images for {path!r}: its processor fails with an image of {LARGE}x{LARGE} pixels "
            f"({type(error).__name__}: {error})"
        ) from error
