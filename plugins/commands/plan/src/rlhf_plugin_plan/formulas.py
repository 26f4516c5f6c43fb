"""The memory of one rank or engine: one pure function per quantity, in bytes; docs/plan.md explains and checks them.

Symbols: P parameters, N tokens of a micro-batch, L layers, H hidden size, Q, K, V widths of all query, key and value
heads, F feed-forward width, W vocabulary (or outputs of the head), b bytes of an element of matrix products (2 in bf16,
else 4). The residual stream is fp32 in either arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.interfaces.memory import Sharding

from rlhf_plugin_plan.adapters import adapter_holes, adapters_of
from rlhf_plugin_plan.heap import Size, tensors, total
from rlhf_plugin_plan.layers import LayerShape
from rlhf_plugin_plan.shape import ModelShape

FP32 = 4
MIB = 2**20

SHORT = {False: 160, True: 512}
"""{bf16: tokens}: sequences up to here keep their attention probabilities on a CPU
(:data:`rlhf_modeling.matmul_attention.LONGEST`)."""
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
    """P x bytes per weight / ranks that share a copy, of each copy."""
    copies = 1 / sharding.weight_ranks + (1 / sharding.second_ranks if sharding.second_ranks else 0)
    return int(parameters * sharding.weight_bytes * copies)


def gradients(trained: int, sharding: Sharding) -> int:
    """Trained parameters x bytes per gradient / ranks."""
    return int(trained * sharding.gradient_bytes / sharding.gradient_ranks)


def file_kept(shape: ModelShape, sharding: Sharding) -> int:
    """4 x parameters that were put together from several of the checkpoint's tensors (experts). Weights are views of
    the mapped file, so all of it stays resident as long as one of them is; experts, stacked, are beside it."""
    return shape.merged * FP32 if sharding.keeps_file else 0


def file_unread(shape: ModelShape, sharding: Sharding) -> int:
    """4 x parameters of the mapped file that are not in memory before the model computes: those of an embedding that is
    not the head too, whose language model computes once while it is loaded."""
    return shape.unread * FP32 if sharding.keeps_file else 0


def optimizer(trained: int, sharding: Sharding, matrices: int = 0) -> int:
    """Trained parameters x (optimizer state + master weights + average) / ranks.

    Args:
        matrices: those of the trained parameters whose state is of ``matrix_bytes``.
    """
    each = sharding.optimizer_bytes + sharding.master_bytes + sharding.average_bytes
    less = 0.0 if sharding.matrix_bytes is None else sharding.optimizer_bytes - sharding.matrix_bytes
    return int((trained * each - matrices * less) / sharding.optimizer_ranks)


def step(shape: ModelShape, sharding: Sharding, matrices: int) -> Size:
    """What an optimizer of matrices makes in its step: of all of the rank's at once, x ``step_bytes`` / ranks, and
    ``step_matrices`` whole ones, 4 x the largest."""
    all_of, whole = matrices * sharding.step_bytes / sharding.optimizer_ranks, shape.matrix * FP32
    return total([tensors(all_of, all_of), tensors(sharding.step_matrices * whole, whole)])


def gathered(shape: ModelShape, sharding: Sharding, *, ahead: bool = True) -> Size:
    """Weights of others that a rank holds while it computes: what the trainer keeps gathered, and the largest part; and
    copies of what is on its way, where weights are gathered ``ahead`` of their use: not in the first pass."""
    if sharding.weight_ranks == 1 and not sharding.host_weights:
        return Size()
    most = min(shape.parameters, sharding.gathered + shape.widest)
    coming = sharding.in_flight if ahead and sharding.weight_ranks > 1 else 0
    return Size(int((most + coming) * sharding.weight_bytes), int(min(most, shape.small) * sharding.weight_bytes))


# ------------------------------------------------------------------------------------- activations


def layer_saved(
    layer: LayerShape,
    hidden: int,
    length: int,
    *,
    bf16: bool,
    fused: bool,
    device: str,
    softcap: bool = False,
    repeats: float = 1.0,
    adapters: Sequence[int] = (),
) -> list[tuple[float, float]]:
    """[(bytes per computed token, those of one tensor among them)] that one layer keeps for the backward pass.

    norms        each: input 4H, and normed 4H where not fused and trained
    projections  inputs bH, one for q, k, v and one for gate, up; as many casts as matrices where not fused, in bf16
    q, k         before norm and rotary b(Q + K) where fused; of a norm of their own where not
    attention    q, k, v, output; fp32 inside on a CPU; for short sequences the probabilities too, heads x length;
                 soft-capped: two such matrices whatever the length, and keys and values of every query head
    feed-forward gate, up, product: 3bF; 4bF where not fused; of experts in fp32, with each routed token in and out
    adapters     the inner output of each, bR; matrices and norms are not trained then. Inputs of linear layers without
                 an adapter are counted, and not kept

    Args:
        length: of the sequences.
        adapters: the rank of each adapter of the layer; none: its weights are trained.
        repeats: tokens of the sequences for each computed one. A prefix that sequences share is computed once, but
            its keys and values are gathered for each of them; the output of long ones is laid out anew, bQ.
    """
    b = element(bf16)
    frozen = bool(adapters)
    norms = layer.norms * hidden * FP32 * (1 if fused or frozen else 2)
    into = 2 * hidden * b * (1 if fused or not bf16 else 2.5)
    heads = layer.query + layer.key
    if fused:
        before = heads * b
    else:
        before = heads * (FP32 + (0 if frozen else b)) if layer.normed else 0
    qkv = layer.query + repeats * (layer.key + layer.value)
    scores, each = 0.0, b
    if softcap:
        attention, scores, each = 2 * (1 + repeats) * layer.query, 2 * layer.heads * length, FP32
    elif device == "cpu" and length <= SHORT[bf16] and layer.query % max(1, layer.heads) == 0:
        attention, scores = qkv + layer.query, layer.heads * length
    elif device == "cpu":
        attention, each = qkv + layer.query + layer.heads + (layer.query * b / FP32 if repeats > 1 else 0), FP32
    else:
        attention = qkv + layer.query + layer.heads * FP32 / b
    factor = (3 if fused else 4) if layer.gated else 2
    feed = [(layer.ffn * factor * b, layer.ffn * b)]
    if layer.routed:
        feed = [
            (layer.ffn * 4 * FP32, layer.ffn * FP32),
            (2 * layer.routed * hidden * FP32, layer.routed * hidden * FP32),
        ]
    return [
        (norms, hidden * FP32),
        (into, hidden * b),
        (before, layer.query * b),
        (attention * each, layer.query * each),
        (scores * each, layer.heads * length * each),
        *feed,
        *((rank * b, rank * b) for rank in adapters),
    ]


def worst_length(longest: int, *, bf16: bool, device: str) -> int:
    """The length of sequences that costs most, up to the longest there may be."""
    return min(longest, SHORT[bf16]) if device == "cpu" else longest


def layer_kept(
    shape: ModelShape, layer: LayerShape, tokens: int, longest: int, sharding: Sharding, device: str, repeats: float
) -> Size:
    """N x the sum of :func:`layer_saved`."""
    length = longest if shape.softcap else worst_length(longest, bf16=sharding.bf16, device=device)
    saved = layer_saved(
        layer,
        shape.hidden,
        length,
        bf16=sharding.bf16,
        fused=sharding.fused and shape.fusable,
        device=device,
        softcap=shape.softcap,
        repeats=repeats,
        adapters=adapters_of(shape, sharding),
    )
    kept = total(tensors(tokens * each, tokens * tensor) for each, tensor in saved)
    if not sharding.adapter_rank or device != "cpu" or (sharding.fused and shape.fusable):
        return kept
    holes = adapter_holes(shape, tokens, sharding, element(sharding.bf16))
    return total([kept, Size(holes, holes)])


def activations(
    shape: ModelShape,
    tokens: int,
    longest: int,
    sharding: Sharding,
    device: str,
    *,
    checkpointing: bool,
    repeats: float = 1.0,
) -> Size:
    """What lives from forward to backward: of every layer :func:`layer_kept`, with gradient checkpointing its input
    4NH only; and 8NH of the last norm."""
    hidden = tensors(tokens * shape.hidden * FP32, tokens * shape.hidden * FP32)
    last = [hidden, hidden]
    if checkpointing:
        return total([hidden] * len(shape.layers) + last)
    kept = [layer_kept(shape, layer, tokens, longest, sharding, device, repeats) for layer in shape.layers]
    return total(kept + last)


def casts(shape: ModelShape, sharding: Sharding) -> Size:
    """Copies of the layers' matrices in the arithmetic's precision, while a pass runs; experts are not copied."""
    plain = [layer for layer in shape.layers if not layer.routed]
    matrix = max([layer.ffn * shape.hidden for layer in plain], default=0)
    return tensors(sum(layer.parameters for layer in plain) * sharding.cast_bytes, matrix * sharding.cast_bytes)


def layer_working(layer: LayerShape, hidden: int, tokens: int, longest: int, *, bf16: bool, device: str) -> Size:
    """Largest temporaries of one layer, forward or backward: two hidden states, and feed-forward 4bF or attention."""
    b = element(bf16)
    length = worst_length(longest, bf16=bf16, device=device)
    scores = 2 * layer.heads * length * FP32 if device == "cpu" else 0
    attention = 2 * (layer.query + layer.key + layer.value) * b + layer.query * 2 * b + scores
    each = layer.ffn * (FP32 if layer.routed else b)
    wide = (attention, max(layer.query * b, scores // 2)) if attention > 4 * each else (4 * each, each)
    narrow = tensors(tokens * 2 * hidden * FP32, tokens * hidden * FP32)
    return total([tensors(tokens * wide[0], tokens * wide[1]), narrow])


def weight_gradient(shape: ModelShape, sharding: Sharding) -> Size:
    """4 x the largest tensor of any layer: a micro-batch's gradient of it, before it is added to what is there. The
    matrices of all experts are one tensor, and whatever experts its tokens go through, its gradient is of all of them
    (``grouped_mm`` of transformers). With adapters there is none, theirs are small."""
    largest = 0 if sharding.adapter_rank else max(layer.largest for layer in shape.layers) * FP32
    return tensors(largest, largest)
