"""What a model's memory depends on, read off its config: the weights are counted on the meta device, never loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError
from rlhf.plan.heap import LARGE
from rlhf.published import model_folder


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer; widths in elements per token."""

    parameters: int
    query: int
    """All query heads together."""
    key: int
    """All key heads together."""
    value: int
    heads: int
    """Query heads: attention probabilities per pair of tokens."""
    ffn: int
    """Width of the feed-forward layer; of a mixture of experts: of all experts that one token goes through."""
    gated: bool
    """gate, up and down matrices; else two matrices."""
    routed: int = 0
    """Copies of a token's hidden state that go to experts; 0: no experts."""
    normed: bool = False
    """Queries and keys have a norm of their own."""
    norms: int = 2
    """Norms of whole hidden states."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model without its values."""

    path: str
    architecture: str
    """``model_type`` of transformers."""
    parameters: int
    """Tied ones once."""
    hidden: int
    vocabulary: int
    outputs: int
    """Of the head: the vocabulary, or the outputs of a scalar or classes head."""
    tied: bool
    layers: tuple[LayerShape, ...]
    cache_elements: int
    """Elements of the key-value cache per token, over all layers."""
    cache_heads: int
    """Parts that the cache can be split into; a latent cache cannot."""
    fusable: bool
    """:mod:`rlhf.modeling.fused` knows its layers."""
    softcap: bool
    """Attention scores are soft-capped, so they exist as matrices."""
    linear: tuple[tuple[str, int, int], ...]
    """Where adapters go: (last part of the name, inputs + outputs summed over the layers with it, how many)."""
    small: int = 0
    """Parameters in tensors below 32 MiB in fp32 (:data:`rlhf.plan.heap.LARGE`)."""
    positions: int | None = None
    """Longest sequence that the model is made for, where its config says."""
    read: int = 0
    """Parameters of the whole model, where this is a part of one; else 0."""

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the head, of its own or shared with the embedding."""
        return self.outputs * self.hidden

    @property
    def widest(self) -> int:
        """Parameters of the largest part that is computed with at once: a layer, the embedding or the head."""
        return max([layer.parameters for layer in self.layers] + [self.embedding, self.head])

    def part(self, ranks: int) -> ModelShape:
        """What each of so many ranks holds that divide every layer among them (:attr:`Sharding.layer_ranks`): heads and
        feed-forward width. A layer's norms, a ten-thousandth of it, are counted as divided too."""
        if ranks == 1:
            return self
        layers = tuple(
            replace(
                layer,
                **{
                    name: -(-getattr(layer, name) // ranks)
                    for name in ("parameters", "query", "key", "value", "heads", "ffn")
                },
            )
            for layer in self.layers
        )
        outside = self.parameters - sum(layer.parameters for layer in self.layers)
        own = outside + sum(layer.parameters for layer in layers)
        return replace(self, layers=layers, parameters=own, small=min(self.small, own), read=self.parameters)

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Of low-rank adapters beside every linear layer, or beside those whose names end with one of ``targets``."""
        wanted = None if targets is None else set(targets)
        return rank * sum(size for name, size, _ in self.linear if wanted is None or name in wanted)


EXPECTED = "Expected a folder with a config.json in Hugging Face format, or a hub name."


@cache
def read_shape(path: str, head: str = "lm", trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model that ``config.json`` in the folder (or on the hub) describes; no weights are needed.

    Args:
        head: ``lm`` | ``scalar`` | ``classes:N``; what is not a language model keeps the body and gets a new head.

    Raises ModelError: no config, or one that transformers makes no causal language model of.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf.modeling.fused import LAYERS

    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"no config.json in {path}. {EXPECTED}")
    place = model_folder(path, code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as cause:  # anything: configs are other people's files
        raise ModelError(f"cannot plan with the model {path!r}: {type(cause).__name__}: {cause}\n{EXPECTED}") from cause
    text = config.get_text_config()
    layers = _decoder_layers(module, int(text.num_hidden_layers), path)
    vocabulary, hidden = int(text.vocab_size), int(text.hidden_size)
    shapes = tuple(_layer(layer, text, number) for number, layer in enumerate(layers))
    outputs = _outputs(head, vocabulary)
    total = sum(p.numel() for p in module.parameters())
    tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    if head != "lm":
        total += outputs * hidden - (0 if tied else _numel(module.get_output_embeddings()))
    kinds = getattr(text, "layer_types", None) or ["attention"] * len(shapes)
    return ModelShape(
        path,
        str(config.model_type),
        total,
        hidden,
        vocabulary,
        outputs,
        tied,
        shapes,
        sum(_cache(shape, kind, text) for shape, kind in zip(shapes, kinds, strict=True)),
        1 if _first(text, "kv_lora_rank") else max(1, shapes[0].key * shapes[0].heads // shapes[0].query),
        type(layers[0]).__name__ in LAYERS,
        bool(getattr(text, "attn_logit_softcapping", None)),
        _linear(module, layers),
        sum(p.numel() for p in module.parameters() if p.numel() * 4 < LARGE),
        getattr(text, "max_position_embeddings", None),
    )


def _outputs(head: str, vocabulary: int) -> int:
    if head == "lm":
        return vocabulary
    kind, _, count = head.partition(":")
    return int(count) if kind == "classes" else 1


def _numel(module: Any) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _decoder_layers(module: Any, count: int, path: str) -> list[Any]:
    """The longest list of ``count`` modules that is the text decoder's."""
    from torch import nn

    found = [m for _, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise ModelError(f"cannot plan with {type(module).__name__} ({path!r}): it has no list of {count} layers")
    return list(max(found, key=_numel))


def _first(config: Any, *names: str) -> int | None:
    """The first of these fields that is a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            return int(value)
    return None


def _layer(layer: Any, config: Any, number: int) -> LayerShape:
    hidden = int(config.hidden_size)
    heads = _first(config, "num_attention_heads") or 1
    key_heads = _first(config, "num_key_value_heads") or heads
    size = _first(config, "head_dim") or hidden // heads
    query, key, value = heads * size, key_heads * size, key_heads * size
    if _first(config, "kv_lora_rank"):  # latent attention computes with whole heads, and caches less
        size = (_first(config, "qk_nope_head_dim") or 0) + (_first(config, "qk_rope_head_dim") or 0)
        query, key, value = heads * size, heads * size, heads * (_first(config, "v_head_dim") or size)
    matrices = {n: p for n, p in layer.named_parameters() if p.ndim >= 2}
    feed = sum(p.numel() for n, p in matrices.items() if "attn" not in n and "attention" not in n)
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    ffn = _first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
    chosen = 0
    if experts and any("expert" in n for n in matrices):
        chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk") or 1
        one = _first(config, "moe_intermediate_size") or ffn
        shared = sum(p.shape[-1] for n, p in matrices.items() if "shared" in n and "down_proj" in n)
        gated = feed > 2.5 * experts * hidden * one
        ffn = chosen * one + int(shared)
    else:
        gated = feed > 2.5 * hidden * ffn
    normed = any("q_norm" in n for n, _ in layer.named_parameters())
    norms = sum("norm" in n and n.endswith("weight") and p.numel() == hidden for n, p in layer.named_parameters())
    total = sum(p.numel() for p in layer.parameters())
    return LayerShape(total, query, key, value, heads, ffn, gated, chosen, normed, max(1, norms))


def _cache(layer: LayerShape, kind: str, config: Any) -> int:
    """Elements per token; a layer without attention over all tokens (linear, recurrent) keeps none."""
    if "attention" not in kind or "linear" in kind:
        return 0
    latent = _first(config, "kv_lora_rank")
    if latent:
        return latent + (_first(config, "qk_rope_head_dim") or 0)
    return layer.key + layer.value


def _linear(module: Any, layers: Iterable[Any]) -> tuple[tuple[str, int, int], ...]:
    from torch import nn

    found: dict[str, tuple[int, int]] = {}
    for layer in layers:
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear):
                size, count = found.get(name.rpartition(".")[2], (0, 0))
                found[name.rpartition(".")[2]] = (size + part.in_features + part.out_features, count + 1)
    return tuple((name, size, count) for name, (size, count) in sorted(found.items()))
