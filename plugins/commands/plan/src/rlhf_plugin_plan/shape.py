"""What a model's memory depends on, read off its config: the weights are counted on the meta device, never loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError
from rlhf_hub.published import model_folder

from rlhf_plugin_plan.heap import LARGE
from rlhf_plugin_plan.layers import LayerShape, cached, first, layer_shape


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
    """:mod:`rlhf_modeling.fused` knows its layers."""
    softcap: bool
    """Attention scores are soft-capped, so they exist as matrices."""
    linear: tuple[tuple[str, int, int, int], ...]
    """Where adapters go: (last part of the name, inputs and outputs summed over all with it, how many)."""
    small: int = 0
    """Parameters in tensors below 32 MiB in fp32 (:data:`rlhf_plugin_plan.heap.LARGE`)."""
    positions: int | None = None
    """Longest sequence that the model is made for, where its config says."""
    projected: int = 0
    """Width of embedding and head, where it is not the layers'; else 0."""
    read: int = 0
    """Parameters of the whole model, where this is a part of one; else 0."""
    merged: int = 0
    """Parameters that are made of several tensors of an fp32 checkpoint each, such as experts, stacked while they are
    read; of a checkpoint in lower precision, of which nothing stays, 0."""
    unread: int = 0
    """Parameters of an fp32 checkpoint that nothing computes with while the model is loaded: an embedding that is not
    the head too."""
    matrices: int = 0
    """Parameters in matrices of the layers: of two dimensions, so without stacked experts."""
    matrix: int = 0
    """Parameters of the largest of these."""

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * (self.projected or self.hidden)

    @property
    def head(self) -> int:
        """Parameters of the head, of its own or shared with the embedding."""
        return self.outputs * (self.projected or self.hidden)

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
                    for name in ("parameters", "query", "key", "value", "heads", "ffn", "largest")
                },
            )
            for layer in self.layers
        )
        outside = self.parameters - sum(layer.parameters for layer in self.layers)
        own = outside + sum(layer.parameters for layer in layers)
        return replace(
            self,
            layers=layers,
            parameters=own,
            small=min(self.small, own),
            read=self.parameters,
            merged=self.merged // ranks,
            matrices=self.matrices // ranks,
        )

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Of low-rank adapters beside every linear layer, or beside those whose names end with one of ``targets``."""
        wanted = None if targets is None else set(targets)
        return rank * sum(i + o for name, i, o, _ in self.linear if wanted is None or name in wanted)


EXPECTED = "Expected a folder with a config.json in Hugging Face format, or a hub name."


@cache
def read_shape(path: str, head: str = "lm", trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model that ``config.json`` in the folder (or on the hub) describes; no weights are needed.

    Args:
        head: ``lm`` | ``scalar`` | ``classes:N``; what is not a language model keeps the body and gets a new head.

    Raises ModelError: no config, or one that transformers makes no causal language model of.
    """
    import torch
    from rlhf_modeling.fused import LAYERS
    from transformers import AutoConfig, AutoModelForCausalLM

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
    embedding, own_head = module.get_input_embeddings().weight, module.get_output_embeddings()
    tied = own_head is not None and own_head.weight is embedding
    hidden, (vocabulary, width) = int(text.hidden_size), embedding.shape
    shapes = tuple(layer_shape(layer, text) for layer in layers)
    in_fp32 = str(config.dtype or "float32").removeprefix("torch.") == "float32"  # as configs without it are meant
    matrices = [p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2]
    outputs = _outputs(head, int(vocabulary))
    total = sum(p.numel() for p in module.parameters())
    if head != "lm":
        total += outputs * width - (0 if tied else _numel(own_head)) + _biases(head, outputs, config)
    kinds = getattr(text, "layer_types", None) or ["attention"] * len(shapes)
    return ModelShape(
        path,
        str(config.model_type),
        int(total),
        hidden,
        int(vocabulary),
        outputs,
        tied,
        shapes,
        sum(cached(shape, kind, text) for shape, kind in zip(shapes, kinds, strict=True)),
        1 if first(text, "kv_lora_rank") else max(1, shapes[0].key * shapes[0].heads // shapes[0].query),
        type(layers[0]).__name__ in LAYERS,
        bool(getattr(text, "attn_logit_softcapping", None)),
        _linear(module, own_head),
        sum(p.numel() for p in module.parameters() if p.numel() * 4 < LARGE),
        getattr(text, "max_position_embeddings", None),
        int(width) if width != hidden else 0,
        merged=_merged(module) if in_fp32 else 0,
        unread=vocabulary * width if in_fp32 and not (tied and head == "lm") else 0,
        matrices=sum(matrices),
        matrix=max(matrices, default=0),
    )


def _merged(module: Any) -> int:
    """transformers says which of the module's tensors it puts together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    made = [c for c in get_model_conversion_mapping(module) if isinstance(c, WeightConverter)]
    ends = tuple(target for conversion in made for target in conversion.target_patterns)
    return sum(p.numel() for name, p in module.named_parameters() if name.endswith(ends)) if ends else 0


def _outputs(head: str, vocabulary: int) -> int:
    if head == "lm":
        return vocabulary
    kind, _, count = head.partition(":")
    return int(count) if kind == "classes" else 1


def _biases(head: str, outputs: int, config: Any) -> int:
    """A classifier of tokens that was saved as one has biases (:mod:`rlhf_modeling.model`)."""
    return outputs if any("TokenClassification" in name for name in config.architectures or ()) else 0


def _numel(module: Any) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _decoder_layers(module: Any, count: int, path: str) -> list[Any]:
    """The longest list of ``count`` modules that is the text decoder's."""
    from torch import nn

    found = [m for _, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise ModelError(f"cannot plan with {type(module).__name__} ({path!r}): it has no list of {count} layers")
    return list(max(found, key=_numel))


def _linear(module: Any, head: Any) -> tuple[tuple[str, int, int, int], ...]:
    from rlhf_modeling.adapters import adaptable

    found: dict[str, tuple[int, int, int]] = {}
    for name, layer in adaptable(module, head):
        last = name.rpartition(".")[2]
        inputs, outputs, count = found.get(last, (0, 0, 0))
        found[last] = inputs + layer.in_features, outputs + layer.out_features, count + 1
    return tuple((name, *found[name]) for name in sorted(found))
