"""Runs the trainer's module for sampling: packed prefill, and one-token steps over slots."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from rlhf.types import Image
from rlhf.types.arrays import IntArray
from rlhf_modeling.attention import PackedAttention, attend_with
from rlhf_modeling.images.architecture import has_vision
from rlhf_modeling.images.row import ImageInputs
from rlhf_modeling.probe_rows import short_lengths
from rlhf_modeling.stored import in_fp32
from torch import Tensor, nn

from rlhf_plugin_local.kv_cache import LayerKV, SlotCache
from rlhf_plugin_local.sampling_attention import NAME, PromptAttention, StepAttention, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoder:
    """A reference to a causal language model of transformers. The model is changed inside :meth:`borrowed` only."""

    def __init__(self, module: nn.Module) -> None:
        from transformers import PreTrainedModel

        register_attention()
        self.module = module
        self.dtype: torch.dtype | None = None
        """Dtype of autocast; None: the module runs without autocast."""
        models = [m for m in module.modules() if isinstance(m, PreTrainedModel)]
        _check(models)
        self.config = models[0].config.get_text_config()
        if has_vision(models[0]):  # a vision tower keeps its attention
            models = [models[0], *(m for m in models[0].get_decoder().modules() if isinstance(m, PreTrainedModel))]
        self._configs = list({id(m.config): m.config for m in models}.values())
        self._images: ImageInputs | None = None
        self._windows = _windows(self.config)
        self._keep = "logits_to_keep" in inspect.signature(models[0].forward).parameters
        self.device = next(module.parameters()).device
        self.layers = self.config.num_hidden_layers
        self.vocabulary = self.config.vocab_size
        self.positions = _positions(self.config)
        """Longest sequence, and the config field with this limit."""

    def read_images(self, inputs: ImageInputs | None) -> None:
        """Prompts may have images, whose ``inputs`` the trainer's model has."""
        self._images = inputs

    def require_images(self, i: int) -> None:
        """Raises ModelError where request ``i`` has images and the model reads none."""
        if self._images is None:
            raise ModelError(
                f"request {i} has images, but {type(self.module).__name__} reads text only here. Use an image-text "
                "model, through a trainer with the capability 'images'."
            )

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context with evaluation mode, this generator's attention and no gradient. The module is restored
        afterwards, also after an error.

        The context must not be open during a ``yield`` to a consumer, who would see the module in this state.
        """
        training = [m for m in self.module.modules() if m.training]
        attention = [c._attn_implementation_internal for c in self._configs]
        try:
            for m in training:
                m.training = False
            for c in self._configs:
                c._attn_implementation_internal = NAME
            with torch.no_grad(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                yield
        finally:
            for m in training:
                m.training = True
            for c, name in zip(self._configs, attention, strict=True):
                c._attn_implementation_internal = name

    def prefill(
        self, prompts: Sequence[IntArray], images: Sequence[tuple[Image, ...]] = ()
    ) -> tuple[Tensor, list[list[LayerKV]], list[int]]:
        """Compute the prompts as one packed row without padding. Returns the logits after each prompt [P, V], per
        prompt its keys and values by layer, and per prompt the difference between the position of the token that
        follows and the prompt's length.

        Args:
            images: the images of each prompt; empty: there are none.
        """
        lens = [len(p) for p in prompts]
        ids_N = torch.frombuffer(bytearray().join(prompts), dtype=torch.int32).to(self.device, torch.int64)
        position_N = torch.cat([torch.arange(n, device=self.device) for n in lens])
        last_P = torch.tensor(lens, device=self.device).cumsum(0) - 1
        route = PromptAttention(lens, self._windows)
        deltas = [0] * len(lens)
        if any(images) and self._images is not None:
            row = self._images.row(ids_N, position_N, lens, images)
            deltas = row.deltas
            with self._images.placed(row):
                logits_PV = self._forward(route, row.arguments, last_P)
        else:
            logits_PV = self._forward(route, _row(ids_N, position_N), last_P)
        layers = [[x.split(lens) for x in route.kv[i]] for i in range(self.layers)]
        return logits_PV, [[(k[p], v[p]) for k, v in layers] for p in range(len(prompts))], deltas

    def step(self, cache: SlotCache, token_S: Tensor, position_S: Tensor, delta_S: Tensor, length: int) -> Tensor:
        """Compute one token per row at its position (the largest of a live row is ``length - 1``). Returns logits
        [S, V].

        Args:
            delta_S: what the model adds to positions, because images have fewer positions than tokens.
        """
        route = StepAttention(cache, position_S, length, self._windows)
        return self._forward(route, _row(token_S, position_S + delta_S), None)

    def _forward(self, route: PackedAttention, arguments: dict[str, Tensor], keep_P: Tensor | None) -> Tensor:
        extra = {"logits_to_keep": keep_P} if keep_P is not None and self._keep else {}
        with attend_with(route):
            out = self.module(**arguments, use_cache=False, return_dict=True, **extra)
        return out.logits[0] if keep_P is None or self._keep else out.logits[0, keep_P]


def _row(ids_N: Tensor, position_N: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids_N[None], "position_ids": position_N[None]}


def check_model(module: PreTrainedModel) -> tuple[int | None, str]:
    """Longest sequence of the model (loaded or on the meta device), and the config field with this limit. Raises
    ModelError if this generator cannot sample from the model."""
    _check([module])
    return _positions(module.config.get_text_config())


def _check(models: list[PreTrainedModel]) -> None:
    """Refuse models that the slot cache would compute wrongly."""
    if not models:
        raise ModelError("the generator 'transformers' samples from a transformers PreTrainedModel; got none.")
    model, config = models[0], models[0].config.get_text_config()
    name, why = type(model).__name__, ""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        why = (
            f"has layers of type {', '.join(kinds)}, whose state is not a key-value cache of full or sliding attention"
        )
    elif any(m._is_stateful for m in models):
        why = "keeps a recurrent state (state space, linear attention), not a key-value cache"
    elif getattr(models[0].config, "is_encoder_decoder", False):
        why = "is an encoder-decoder"
    elif getattr(config, "num_kv_shared_layers", 0):
        why = "shares keys and values between layers"
    elif not all(m._supports_attention_backend for m in models):
        why = "does not take its attention function from transformers' AttentionInterface"
    if why:
        raise refusal(name, why)


def refusal(name: str, why: str) -> ModelError:
    """``name``: the model's class."""
    return ModelError(
        f"{name} {why}; the generator 'transformers' cannot sample from it. Use another generator "
        '([generator] use = "vllm") or another model.'
    )


def require_agreement(module: PreTrainedModel) -> None:
    """Raises ModelError if a prompt's logits differ from those of the module's own forward pass. For models that
    trainers do not pack, so that their modules keep their own attention."""
    ids = array("i", [i % module.config.get_text_config().vocab_size for i in range(11, 25)])
    with short_lengths(module):
        decoder = Decoder(module)
        with decoder.borrowed(), in_fp32(module):
            got_V = decoder.prefill([ids])[0][0]
        with torch.no_grad(), in_fp32(module):
            want_V = module(input_ids=torch.tensor([list(ids)], device=decoder.device), use_cache=False).logits[0, -1]
    if not torch.allclose(got_V, want_V, rtol=1e-3, atol=1e-3):
        raise refusal(type(module).__name__, "gives other log-probs with the attention of this generator")


def _windows(config: Any) -> dict[int, int]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    return {i: window for i, kind in enumerate(kinds) if kind == "sliding_attention" and window}


def _positions(config: Any) -> tuple[int | None, str]:
    """Rotary embeddings of type longrope change for every row of a batch when one row passes the original length.
    Samples would depend on their neighbours, so the original length is the limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original:
        return original, "original_max_position_embeddings (longrope)"
    return getattr(config, "max_position_embeddings", None), "max_position_embeddings"
