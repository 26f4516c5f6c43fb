"""Runs the trainer's module for sampling: packed prefill, and one-token steps over slots."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    from rlhf_modeling.loaded import LoadedModel
    from rlhf_modeling.router_replay import Routers
    from transformers import PreTrainedModel

PROMPT, STEPS = 12, 2
"""Number of tokens of the prompt and of the decoding steps that are compared with a single forward pass of all
tokens."""


class Decoder:
    """Holds a reference to a causal language model of transformers. The model is changed only inside
    :meth:`borrowed`."""

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
        self.routers: Routers | None = None
        """Set if the choices of experts are recorded."""
        self.choices_MLK: Tensor | None = None
        """Chosen experts of the tokens of the latest forward pass, int64."""
        self._windows = _windows(self.config)
        self._keep = "logits_to_keep" in inspect.signature(models[0].forward).parameters
        self.device = next(module.parameters()).device
        self.vocabulary = self.config.vocab_size
        self.positions = _positions(self.config)
        """Length of the longest sequence, and the config field with this limit."""

    def read_images(self, inputs: ImageInputs | None) -> None:
        """Allow prompts with images. ``inputs`` belong to the trainer's model."""
        self._images = inputs

    def require_images(self, i: int) -> None:
        """Raises ModelError if request ``i`` has images but the model does not read them."""
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
        attention = [c._attn_implementation_internal for c in self._configs]
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)
        try:
            # The public property would also change the parts of a config, such as a vision tower's.
            for c in self._configs:
                c._attn_implementation_internal = NAME
            with _evaluating(self.module), autocast:
                yield
        finally:
            for c, name in zip(self._configs, attention, strict=True):
                c._attn_implementation_internal = name

    def prefill(
        self, prompts: Sequence[IntArray], images: Sequence[tuple[Image, ...]] = ()
    ) -> tuple[Tensor, list[list[LayerKV]], list[int]]:
        """Compute the prompts as one packed row without padding. Returns the logits after each prompt [P, V]; for each
        prompt its keys and values by layer; for each prompt the position of the next token minus the prompt's length.

        Args:
            images: the images of each prompt; empty: no images.
        """
        lens = [len(p) for p in prompts]
        # A bytearray, because torch warns about memory that cannot be written.
        ids_N = torch.frombuffer(bytearray().join(prompts), dtype=torch.int32).to(self.device, torch.int64)
        position_N = torch.cat([torch.arange(n, device=self.device) for n in lens])
        last_P = torch.tensor(lens, device=self.device).cumsum(0) - 1
        route = PromptAttention(lens, self._windows)
        deltas = [0] * len(lens)
        if any(images) and self._images is not None:
            row = self._images.row(ids_N, position_N, lens, images)
            deltas = row.deltas
            with self._images.image_context(row):
                logits_PV = self._forward(route, row.arguments, last_P)
        else:
            logits_PV = self._forward(route, _row(ids_N, position_N), last_P)
        layers = [[x.split(lens) for x in kv] for kv in route.kv]
        return logits_PV, [[(k[p], v[p]) for k, v in layers] for p in range(len(prompts))], deltas

    def step(self, cache: SlotCache, token_S: Tensor, position_S: Tensor, delta_S: Tensor, length: int) -> Tensor:
        """Compute one token per row at its position (the largest of a live row is ``length - 1``). Returns logits [S,
        V].

        Args:
            delta_S: offset that the model adds to positions, because images have fewer positions than tokens.
        """
        route = StepAttention(cache, position_S, length, self._windows)
        return self._forward(route, _row(token_S, position_S + delta_S), None)

    def _forward(self, route: PackedAttention, arguments: dict[str, Tensor], keep_P: Tensor | None) -> Tensor:
        # Otherwise the logits of all tokens of the prompts exist at once.
        extra = {"logits_to_keep": keep_P} if keep_P is not None and self._keep else {}
        with attend_with(route), nullcontext() if self.routers is None else self.routers.recorded() as recorded:
            out = self.module(**arguments, use_cache=False, return_dict=True, **extra)
            self.choices_MLK = None if recorded is None else recorded()
        return out.logits[0] if keep_P is None or self._keep else out.logits[0, keep_P]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradient."""
    training = [m for m in module.modules() if m.training]
    try:
        for m in training:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


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
        raise ModelError("the generator 'transformers' needs a transformers PreTrainedModel; this module has none.")
    model, config = models[0], models[0].config.get_text_config()
    name, reason = type(model).__name__, ""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        reason = (
            f"has layers of type {', '.join(kinds)}, whose state is not a key-value cache of full or sliding attention"
        )
    elif any(m._is_stateful for m in models):
        reason = "keeps a recurrent state (state space, linear attention), not a key-value cache"
    elif getattr(models[0].config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "shares keys and values between layers"
    elif not all(m._supports_attention_backend for m in models):
        reason = "does not take its attention function from transformers' AttentionInterface"
    if reason:
        raise refusal(name, reason)


def refusal(name: str, reason: str) -> ModelError:
    """``name``: the model's class."""
    return ModelError(
        f"{name} {reason}; the generator 'transformers' cannot sample from it. Use another generator "
        '([generator] use = "vllm") or another model.'
    )


def require_agreement(module: nn.Module, model: LoadedModel | None) -> None:
    """Raises ModelError if the logits of a prompt and of two tokens after it differ from one forward pass of the whole
    sequence, as computed by the trainer or by the module itself."""
    name = type(module).__name__
    with _evaluating(module), short_lengths(module), in_fp32(module):
        decoder = Decoder(module)
        ids = array("i", [i % decoder.vocabulary for i in range(11, 11 + PROMPT + STEPS)])
        try:
            with decoder.borrowed():
                got_TV = _stepwise(decoder, ids)
            want_TV = _forward_pass(module, model, torch.tensor(ids, device=decoder.device))[-len(got_TV) :]
        except ModelError:
            raise
        except Exception as cause:  # any exception: the model's code is not ours
            raise refusal(name, f"cannot be computed token by token here ({type(cause).__name__}: {cause})") from cause
    if not torch.allclose(got_TV, want_TV, rtol=1e-3, atol=1e-3, equal_nan=True):  # NaN is reported while sampling
        raise refusal(name, "computes different log-probs with the attention of this generator")


def _stepwise(decoder: Decoder, ids: IntArray) -> Tensor:
    """Logits [1 + STEPS, V] after a prompt and after each of the tokens that follow."""
    logits_PV, [prompt], [delta] = decoder.prefill([ids[:PROMPT]])
    cache = SlotCache()
    cache.reserve(prompt, 1, len(ids), 0)
    cache.write_prompt([0], prompt)
    rows, delta_S = [logits_PV], torch.tensor([delta], device=decoder.device)
    for position in range(PROMPT, len(ids)):
        token_S, position_S = (torch.tensor([value], device=decoder.device) for value in (ids[position], position))
        rows.append(decoder.step(cache, token_S, position_S, delta_S, position + 1))
    return torch.cat(rows)


def _forward_pass(module: nn.Module, model: LoadedModel | None, ids_T: Tensor) -> Tensor:
    """Logits [T, V] in one forward pass."""
    if model is None:
        logits_TV: Tensor = module(input_ids=ids_T[None], use_cache=False).logits[0]
        return logits_TV
    position_T = torch.arange(len(ids_T), device=ids_T.device)
    return model.logits_of(fp32=True)(model.hidden(ids_T, position_T, [len(ids_T)]))


def _windows(config: Any) -> dict[int, int]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    return {i: window for i, kind in enumerate(kinds) if kind == "sliding_attention" and window}


def _positions(config: Any) -> tuple[int | None, str]:
    """Longest sequence and its config field. Rotary embeddings of type longrope change for every row of a batch when
    one row exceeds the original length. Samples would depend on the other rows, so the original length is the limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original:
        return original, "original_max_position_embeddings (longrope)"
    return getattr(config, "max_position_embeddings", None), "max_position_embeddings"
