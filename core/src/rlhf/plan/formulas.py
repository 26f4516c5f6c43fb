"""The memory of one rank or engine: one pure function per quantity, in bytes; docs/plan.md explains and checks them.

Symbols: P parameters, N tokens of a micro-batch, L layers, H hidden size, Q, K, V widths of all query, key and value
heads, F feed-forward width, W vocabulary (or outputs of the head), b bytes of an element of matrix products (2 in bf16,
else 4). The residual stream is fp32 in either arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhf.interfaces.memory import Footprint, Sharding
from rlhf.plan.shape import LayerShape, ModelShape

FP32 = 4
MIB = 2**20

SHORT = {False: 160, True: 512}
"""{bf16: tokens}: sequences up to here keep their attention probabilities on a CPU
(:data:`rlhf.modeling.matmul_attention.LONGEST`)."""
CHURN = {"cpu": 0.3, "cuda": 0.1}
"""What the allocator holds beyond what lives, as a share of what comes and goes. CPU: measured, glibc keeps freed
blocks (docs/plan.md). GPU: an allowance."""
PROCESS = {"cpu": 450 * MIB, "cuda": 1024 * MIB}
"""A process before it holds a model. CPU: Python, torch and transformers after import, measured; GPU: context, kernels
and library workspaces on the device, an allowance."""
LIBRARIES = {"cpu": 40 * MIB, "cuda": 0}
"""What the libraries allocate at first use (measured); on a GPU it is in :data:`PROCESS`."""


def element(bf16: bool) -> int:
    """b."""
    return 2 if bf16 else FP32


# ------------------------------------------------------------------------------------------- state


def weights(parameters: int, sharding: Sharding) -> int:
    """P x bytes per weight / ranks that share a copy."""
    return int(parameters * sharding.weight_bytes / sharding.weight_ranks)


def gradients(trained: int, sharding: Sharding) -> int:
    """Trained parameters x bytes per gradient / ranks."""
    return int(trained * sharding.gradient_bytes / sharding.gradient_ranks)


def optimizer(trained: int, sharding: Sharding) -> int:
    """Trained parameters x (optimizer state + master weights + average) / ranks."""
    each = sharding.optimizer_bytes + sharding.master_bytes + sharding.average_bytes
    return int(trained * each / sharding.optimizer_ranks)


def gathered(shape: ModelShape, sharding: Sharding) -> int:
    """Weights of others that a rank holds while it computes: what the trainer keeps gathered, and the largest part."""
    if sharding.weight_ranks == 1 and not sharding.host_weights:
        return 0
    most = min(shape.parameters, sharding.gathered + shape.widest)
    return int(most * sharding.weight_bytes)


# ------------------------------------------------------------------------------------- activations


def layer_saved(
    layer: LayerShape, hidden: int, length: int, *, bf16: bool, fused: bool, device: str, softcap: bool = False
) -> int:
    """Bytes per token that one layer keeps for the backward pass.

    norms        each: input 4H, and normed 4H where not fused
    projections  inputs bH, one for q, k, v and one for gate, up; as many casts as matrices where not fused, in bf16
    q, k         before norm and rotary b(Q + K) where fused; of a norm of their own where not
    attention    q, k, v, output; fp32 inside on a CPU; for short sequences the probabilities too, heads x length;
                 soft-capped: two such matrices whatever the length, and keys and values of every query head
    o            its input bQ where attention's output is not in its precision and layout
    feed-forward gate, up, product: 3bF; 4bF where not fused; of experts in fp32, with each routed token in and out
    """
    b = element(bf16)
    norms = layer.norms * hidden * FP32 * (1 if fused else 2)
    into = 2 * hidden * b * (1 if fused or not bf16 else 2.5)
    heads = layer.query + layer.key
    if fused:
        before = heads * b
    else:
        before = heads * (2 * FP32 if not bf16 else FP32 + b) if layer.normed else 0
    qkv = layer.query + layer.key + layer.value
    if softcap:
        attention = (4 * layer.query + 2 * layer.heads * length) * FP32
    elif device == "cpu" and length <= SHORT[bf16] and layer.query % max(1, layer.heads) == 0:
        attention = (qkv + 2 * layer.query + layer.heads * length) * b
    elif device == "cpu":
        attention = (qkv + layer.query + layer.heads) * FP32 + (layer.query * b if bf16 else 0)
    else:
        attention = (qkv + layer.query) * b + layer.heads * FP32
    factor = (3 if fused else 4) if layer.gated else 2
    feed = layer.ffn * factor * b
    if layer.routed:
        feed = (layer.ffn * 4 + 2 * layer.routed * hidden) * FP32
    return int(norms + into + before + attention + feed)


def worst_length(longest: int, *, bf16: bool, device: str) -> int:
    """The length of sequences that costs most, up to the longest there may be."""
    return min(longest, SHORT[bf16]) if device == "cpu" else longest


def activations(
    shape: ModelShape, tokens: int, longest: int, sharding: Sharding, device: str, *, checkpointing: bool
) -> int:
    """What lives from forward to backward: N x the sum of :func:`layer_saved`; with gradient checkpointing the inputs
    of the layers, 4 N L H, and one layer."""
    per_layer = [_saved(shape, layer, longest, sharding, device) for layer in shape.layers]
    if checkpointing:
        return tokens * (len(per_layer) * shape.hidden * FP32 + max(per_layer))
    return tokens * sum(per_layer)


def _saved(shape: ModelShape, layer: LayerShape, longest: int, sharding: Sharding, device: str) -> int:
    length = longest if shape.softcap else worst_length(longest, bf16=sharding.bf16, device=device)
    fused = sharding.fused and shape.fusable
    return layer_saved(
        layer, shape.hidden, length, bf16=sharding.bf16, fused=fused, device=device, softcap=shape.softcap
    )


def casts(shape: ModelShape, sharding: Sharding) -> int:
    """Copies of the layers' matrices in the arithmetic's precision, while a pass runs; experts are not copied."""
    return int(sum(layer.parameters for layer in shape.layers if not layer.routed) * sharding.cast_bytes)


def layer_working(layer: LayerShape, hidden: int, tokens: int, longest: int, *, bf16: bool, device: str) -> int:
    """Largest temporaries of one layer, forward or backward: two hidden states, and feed-forward 4bF or attention."""
    b = element(bf16)
    length = worst_length(longest, bf16=bf16, device=device)
    scores = 2 * layer.heads * length * FP32 if device == "cpu" else 0
    attention = 2 * (layer.query + layer.key + layer.value) * b + layer.query * 2 * b + scores
    feed = 4 * layer.ffn * (FP32 if layer.routed else b)
    return int(tokens * (max(attention, feed) + 2 * hidden * FP32))


# --------------------------------------------------------------------------------- the head's peak


def logits(shape: ModelShape, tokens: int, sharding: Sharding) -> int:
    """One fp32 matrix of logits: min(N W, logits_chunk) x 4."""
    chunk = max(1, sharding.logits // shape.outputs)
    return min(tokens, chunk) * shape.outputs * FP32


def copies(outputs: Iterable[str], *, backward: bool) -> int:
    """How many such matrices exist at once. Counted: log-probs 2 forward, 4 with backward; entropy 4 and 5; both 4 and
    6. An output of a plugin's own: 2 more each, an allowance."""
    names = set(outputs)
    own = len(names - {"logprobs", "entropy", "values", "scores"})
    if backward:
        known = 6 if {"logprobs", "entropy"} <= names else 5 if "entropy" in names else 4
    else:
        known = 4 if "entropy" in names else 2
    return known + 2 * own


def head_forward(shape: ModelShape, tokens: int, sharding: Sharding, outputs: Iterable[str]) -> int:
    """Copies of the logits, and the selected hidden states twice."""
    return copies(outputs, backward=False) * logits(shape, tokens, sharding) + 2 * tokens * shape.hidden * FP32


def head_backward(shape: ModelShape, tokens: int, sharding: Sharding, outputs: Iterable[str]) -> int:
    """The same with the backward pass, and, where there are several chunks, the head's gradient that they add up."""
    several = tokens > max(1, sharding.logits // shape.outputs)
    peak = copies(outputs, backward=True) * logits(shape, tokens, sharding) + 2 * tokens * shape.hidden * FP32
    return peak + (shape.head * FP32 if several else 0)


# --------------------------------------------------------------------------------------- generator


def engine_weights(shape: ModelShape, footprint: Footprint) -> int:
    """P x bytes per weight / (tensor x pipeline parallel)."""
    return int(shape.parameters * footprint.weight_bytes / (footprint.tensor_parallel * footprint.pipeline_parallel))


def cache_per_token(shape: ModelShape, footprint: Footprint) -> float:
    """Bytes per token and device: elements of keys and values over all layers x bytes / parallel parts; heads are not
    split further than there are."""
    parts = min(footprint.tensor_parallel, shape.cache_heads) * footprint.pipeline_parallel
    return shape.cache_elements * footprint.kv_bytes / parts


def cache_grown(shape: ModelShape, footprint: Footprint, samples: int, longest: int) -> int:
    """Of a cache that grows with need: rows x longest sequence, and a layer that is copied as it grows."""
    tokens = min(footprint.rows, samples) * longest
    if footprint.cache_tokens is not None:
        tokens = min(tokens, footprint.cache_tokens)
    return int(tokens * cache_per_token(shape, footprint) * (1 + 1 / max(1, len(shape.layers))))


def sampling_working(
    shape: ModelShape, footprint: Footprint, samples: int, prompts: int, longest: int, *, bf16: bool, device: str
) -> int:
    """The larger of a prefill pass, with the keys and values it makes, and of a decoding step: four fp32 matrices of
    rows x vocabulary.

    Args:
        prompts: tokens of all distinct prompts.
    """
    rows = min(footprint.rows, samples)
    layer = max(shape.layers, key=lambda x: x.parameters)
    tokens = min(footprint.prefill_tokens, prompts)
    prefill = layer_working(layer, shape.hidden, tokens, longest, bf16=bf16, device=device)
    prefill += int(tokens * shape.cache_elements * footprint.kv_bytes)
    return max(prefill, 4 * rows * shape.vocabulary * FP32)


def allocator(coming_and_going: int, device: str) -> int:
    """:data:`CHURN` x what is allocated and freed again in a phase."""
    return int(CHURN[device] * coming_and_going)
