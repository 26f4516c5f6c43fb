"""A tiny random model of any architecture of transformers that is a causal language model.

The defaults of a type's config are shrunk by the names of its fields. Lists with an entry for each layer keep one layer
of every kind, so each kind of layer of a hybrid model occurs. What this
cannot know stands in :mod:`tests.support.tiny_sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_sizes import NOT_BUILT, OMIT, OVERRIDES, SIZES, VARIANTS, WINDOW

BY_NAME = {name: size for size, names in SIZES for name in names.split()}
UNSET = {
    "head_dim", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group",
    "sliding_window", "num_key_value_heads",
}  # fmt: skip
"""Fields that get their size even where their default is None."""
LAYERS = [
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth",
]  # fmt: skip
PARTS = {"attn_config", "ffn_config"}
"""Tables of a config that are part of it, beside the configs that its class names."""
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 1, "sep_token_id": 1}
"""Ids of special tokens; other fields that end in ``_token_id`` become 2."""


def causal_types() -> list[str]:
    """Every type of transformers with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> Any:
    """The config of a type, or of one of :data:`~tests.support.tiny_sizes.VARIANTS`, shrunk.

    Raises NotImplementedError with the reason, where no tiny language model of the type can be made.
    """
    from transformers import AutoConfig

    kind, extra = VARIANTS.get(name, (name, {}))
    if kind in NOT_BUILT:
        raise NotImplementedError(NOT_BUILT[kind])
    fixed = {**OVERRIDES.get(kind, {}), **extra}
    fields = merge(shrink(AutoConfig.for_model(kind)), fixed)
    return AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not OMIT})


def merge(fields: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with those of ``over``; nested tables are merged too."""
    out = dict(fields)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return out


def shrink(config: Any) -> dict[str, Any]:
    """The fields of a config that are to be smaller, for its class."""
    fields = config if isinstance(config, dict) else config.to_dict()
    subs = set(getattr(config, "sub_configs", None) or ()) | PARTS & set(fields)
    out: dict[str, Any] = {}
    for key, value in fields.items():
        if key in subs:
            sub = getattr(config, key, value)
            if sub is not None and not isinstance(sub, str):
                out[key] = shrink(sub)
                kind = getattr(sub, "model_type", None)
                if kind:
                    out[key]["model_type"] = kind
        elif isinstance(value, bool):
            continue
        elif key in BY_NAME and (isinstance(value, int) or (value is None and key in UNSET)):
            out[key] = BY_NAME[key]
        elif key.endswith("_token_id"):
            out[key] = TOKENS.get(key, 2)
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            out[key] = 0.0
    out.update(_layers(fields))
    if "num_key_value_heads" in out and fields["num_key_value_heads"] == fields.get("num_attention_heads"):
        out["num_key_value_heads"] = out.get("num_attention_heads", 4)
    if "use_sliding_window" in fields:
        out |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        out.pop("layer_types", None)
    if "is_decoder" in fields:
        out["is_decoder"] = True
    return out


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer layers: one of every kind, and at least two."""
    counts = [key for key in LAYERS if isinstance(fields.get(key), int)]
    if not counts:
        return {}
    count = fields[counts[0]]
    lists = {
        key: value
        for key, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == count > 3 and not _numbered(value)
    }
    if not lists:
        return dict.fromkeys(counts, 2)
    chosen: dict[str, int] = {}
    for layer in range(count):
        chosen.setdefault(repr([value[layer] for value in lists.values()]), layer)
    layers = sorted(chosen.values())[:6]
    for layer in range(count):  # at least two
        if len(layers) < 2 and layer not in layers:
            layers.append(layer)
    layers.sort()
    return {key: [value[layer] for layer in layers] for key, value in lists.items()} | dict.fromkeys(
        counts, len(layers)
    )


def _numbered(values: Sequence[Any]) -> bool:
    """Whether these values are layer numbers, rather than one value for each layer."""
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values) and len(set(values)) == len(values)


def tiny_architecture(path: str | Path, name: str, seed: int = 0) -> Path:
    """Save a random model of type ``name`` (or of a variant). See :func:`random_model`."""
    return random_model(path, tiny_config(name), seed)


def random_model(path: str | Path, config: Any, seed: int = 0) -> Path:
    """Save a random causal language model with the tokenizer of :mod:`rlhf_testing.tiny`.

    Its weights are large, so that log-probs depend visibly on every token before them. Returns ``path``.
    """
    import torch
    from rlhf_testing.tiny import tiny_tokenizer
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in parameters(model):
                draw(parameter)
    model.save_pretrained(str(path))
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(path))  # the config of the whole, where the model is a part, as in checkpoints
    return tiny_tokenizer(path)


def parameters(model: Any) -> Iterator[Any]:
    """The parameters in the order of their names, so that equal seeds give equal weights."""
    for _, parameter in sorted(model.named_parameters()):
        yield parameter


def draw(parameter: Any) -> None:
    """Draw a new random matrix with a gain somewhat above one, or change a vector by a small random amount."""
    import torch

    if parameter.ndim < 2:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    else:
        parameter.normal_(0.0, 0.25 * (32 / max(32, parameter.shape[-1])) ** 0.5)
