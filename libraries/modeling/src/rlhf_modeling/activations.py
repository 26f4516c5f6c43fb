"""Memory of one forward and backward pass: activations of the layers, temporaries, logits. For ``rlhf plan``.

Symbols: N tokens of a micro-batch, H hidden size, Q, K, V widths of all query, key and value heads, F feed-forward
width, b bytes of an element in matrix products (2 in bf16, else 4). The residual stream is fp32 in either arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rlhf.interfaces.memory import FP32, LayerSize, ModelSize

from rlhf_modeling.fused import LAYERS
from rlhf_modeling.matmul_attention import LONGEST


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a trainer computes one micro-batch. The default is fp32 without adapters."""

    tokens: int = 2048
    """Tokens that a rank computes. A prefix that sequences share counts once."""
    accumulated_tokens: int | None = None
    """Number of tokens if a step has several micro-batches; 0: every step has a single micro-batch; None:
    ``tokens``."""
    longest: int = 2048
    """Tokens of the longest sequence."""
    repeats: float = 1.0
    """Ratio of the tokens of all sequences to the computed tokens; above 1 if sequences share prefixes."""
    device: str = "cpu"
    bf16: bool = False
    casts: bool = False
    """Autocast keeps bf16 copies of the weights from forward to backward."""
    head_copies: int = 0
    """Bytes per weight for copies of the head in each micro-batch: 4 for an fp32 copy of a head stored in bf16, 2 for a
    bf16 copy (``head_fp32 = "sums"``)."""
    rounded_head: bool = False
    """``head_fp32 = "sums"``: the gradient of the logits is rounded to bf16."""
    fused: bool = False
    """The layers' element-wise operations are fused if :mod:`rlhf_modeling.fused` supports the layers."""
    logits: int = 2**24
    """Maximum number of logits that exist at once in a pass with a backward pass."""
    forward_logits: int = 2**24
    """The same without one."""
    checkpointing: bool = False
    offloads: bool = False
    """With ``checkpointing``, on a GPU: the inputs of the layers are in host memory."""
    adapters: int = 0
    """Rank of the adapters; 0: the weights are trained."""
    parts: int = 1
    """Number of ranks that divide the tokens of a micro-batch. ``tokens`` counts those of one rank."""
    image_tokens: int = 0
    """Number of the ``tokens`` that are placeholders of images."""
    trains_vision: bool = False
    """The vision tower and projector get gradients."""
    pixels: int = 0
    """Bytes of pixels in host memory."""

    @property
    def element(self) -> int:
        """b."""
        return 2 if self.bf16 else FP32

    @property
    def short(self) -> int:
        """Tokens of the sequences that cost most on a CPU: the longest ones whose attention probabilities are kept."""
        return min(self.longest, LONGEST[torch.bfloat16 if self.bf16 else torch.float32])


def layer_saved(layer: LayerSize, size: ModelSize, a: Arithmetic) -> float:
    """Bytes per computed token that one layer keeps for the backward pass.

    norms         each: input 4H, and the normed 4H where not fused and trained
    projections   inputs bH, one for q, k, v and one for gate, up; in bf16 also casts, where not fused
    q, k          before the norm and rotary embedding: b(Q + K) where fused; where not, only if they have a norm
    attention     q, k, v and output; on a CPU also the probabilities, which short sequences keep;
                  in fp32 on a GPU keys and values repeated for every query head;
                  soft-capped: two score matrices, and keys and values repeated for every query head
    feed-forward  gate, up, product: 3bF; 4bF where not fused; experts in fp32, with each routed token in and out
    """
    b, frozen, on_cpu = a.element, bool(a.adapters), a.device == "cpu"
    fused = a.fused and size.layer_class in LAYERS
    norms = layer.norms * size.hidden * FP32 * (1 if fused or frozen else 2)
    inputs = 2 * size.hidden * b * (1 if fused or not a.bf16 else 2.5)
    heads = layer.query + layer.key
    queries_keys = heads * b if fused else heads * (FP32 + (0 if frozen else b)) * layer.normed
    qkv = layer.query + a.repeats * keys_and_values(layer, a)
    if size.softcap:
        attention = (2 * (1 + a.repeats) * layer.query + 2 * layer.heads * a.longest) * FP32
    elif on_cpu:
        attention = (qkv + layer.query + layer.heads * a.short) * b
    else:
        attention = (qkv + layer.query) * b + layer.heads * FP32
    if layer.routed:
        feed = layer.ffn * 4 * FP32 + 2 * layer.routed * size.hidden * FP32
    else:
        feed = layer.ffn * b * ((3 if fused else 4) if layer.gated else 2)
    return norms + inputs + queries_keys + attention + feed


def keys_and_values(layer: LayerSize, a: Arithmetic) -> float:
    """Elements per token that the attention kernel receives."""
    repeated = a.device != "cpu" and not a.bf16 and layer.key
    return (layer.key + layer.value) * (layer.query / layer.key if repeated else 1)


def activations(size: ModelSize, a: Arithmetic) -> int:
    """Bytes of activations that live from forward to backward. With gradient checkpointing only the inputs of the
    layers; two of them if they are in host memory."""
    last = 2 * size.hidden * FP32
    if a.checkpointing:
        return a.tokens * ((2 if a.offloads else len(size.layers)) * size.hidden * FP32 + last)
    return int(a.tokens * (sum(layer_saved(layer, size, a) for layer in size.layers) + last))


def largest_layer(size: ModelSize, a: Arithmetic) -> int:
    """Activations of the layer that keeps the most."""
    return int(a.tokens * max(layer_saved(layer, size, a) for layer in size.layers))


def recomputed(size: ModelSize, a: Arithmetic) -> int:
    """Activations of one layer, which gradient checkpointing recomputes in the backward pass."""
    return largest_layer(size, a) if a.checkpointing else 0


def casts(size: ModelSize, a: Arithmetic) -> int:
    """Bytes of the bf16 copies of the layers' matrices during a pass, including the vision tower's if the run has
    images. Experts are not copied."""
    if not a.casts:
        return 0
    vision = size.vision if size.tower is not None else 0
    return 2 * (vision + sum(layer.parameters for layer in size.layers if not layer.routed))


def layer_working(layer: LayerSize, size: ModelSize, a: Arithmetic) -> int:
    """Largest temporaries of one layer: two hidden states, and four feed-forward widths or the attention."""
    b = a.element
    scores = 2 * layer.heads * a.short * FP32 if a.device == "cpu" else 0
    attention = 2 * (layer.query + keys_and_values(layer, a)) * b + 2 * layer.query * b + scores
    feed = 4 * layer.ffn * (FP32 if layer.routed else b)
    return int(a.tokens * (max(attention, feed) + 2 * size.hidden * FP32))


def widest_working(size: ModelSize, a: Arithmetic) -> int:
    """Maximum of :func:`layer_working` over the layers."""
    return max(layer_working(layer, size, a) for layer in size.layers)


def weight_gradient(size: ModelSize, a: Arithmetic) -> int:
    """The fp32 gradient of the largest tensor, before it is accumulated. All experts are one tensor."""
    return 0 if a.adapters else max(layer.largest for layer in size.layers) * FP32


# --------------------------------------------------------------------------------------------- head


def copies(outputs: Iterable[str], *, backward: bool, device: str, tempered: bool = True) -> int:
    """Number of fp32 matrices of logits that exist at once. Log-probs need 2 forward and 4 with backward, entropy 4 and
    5, both 4 and 6. On a CPU log-probs alone need 1, or 2 if the logits are divided by a temperature. Each output of a
    plugin adds 2, an allowance. Hidden states and top-1 accuracy need none."""
    names = set(outputs) - {"hidden", "top1"}
    if not names:
        return 0
    if names == {"logprobs"} and device == "cpu":
        return 1 + tempered
    further_heads = len(names - {"logprobs", "entropy", "values", "scores"})
    if backward:
        count = 6 if {"logprobs", "entropy"} <= names else 5 if "entropy" in names else 4
    else:
        count = 4 if "entropy" in names else 2
    return count + 2 * further_heads


def head_working(size: ModelSize, a: Arithmetic, outputs: Iterable[str], *, backward: bool) -> int:
    """Copies of one chunk of logits, and the selected hidden states twice. With several chunks also the head's
    accumulated gradient. Also copies of the head in other precisions."""
    chunk = max(1, (a.logits if backward else a.forward_logits) // size.outputs)
    gradient = size.head * FP32 if backward and a.tokens > chunk else 0
    logits = min(a.tokens, chunk) * size.outputs * FP32
    rounded = logits // 2 if backward and a.rounded_head else 0
    selected = 2 * a.tokens * size.hidden * FP32
    return (
        copies(outputs, backward=backward, device=a.device) * logits
        + rounded
        + selected
        + gradient
        + size.head * a.head_copies
    )
