"""What a trainer's rank and a generator's device hold: what ``rlhf plan`` asks of the classes, without a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a trainer lays one role's model over its ranks; the default is a whole fp32 copy on every rank.

    ``*_ranks``: the ranks that one copy is divided over. ``*_bytes``: bytes per parameter of the model, before that
    division. Optimizer, master weights and average are read for trained roles only.
    """

    weight_ranks: int = 1
    gradient_ranks: int = 1
    optimizer_ranks: int = 1
    """Of the optimizer's state, the master weights and the average."""
    layer_ranks: int = 1
    """The ranks that divide every layer among them and compute the same micro-batches; embedding and head are whole on
    each. They read the model whole in host memory, and a device gets its part."""
    weight_bytes: float = 4.0
    """The weights that layers compute with."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    """AdamW: two fp32 moments."""
    matrix_bytes: float | None = None
    """The same of the layers' matrices, where it is not :attr:`optimizer_bytes` (Muon: one fp32 momentum). Stacked
    experts are none."""
    step_bytes: float = 0.0
    """Bytes per parameter of those matrices: what the step makes of all of them at once, divided as the optimizer's
    state is."""
    step_matrices: int = 0
    """Copies of the largest of them that the step has beside, whole and in fp32."""
    master_bytes: float = 0.0
    """The optimizer's own fp32 weights, where ``weight_bytes`` are of lower precision."""
    average_bytes: float = 0.0
    """A moving average of the weights."""
    loading_ranks: int = 1
    """Ranks that the weights are divided over while the model is loaded; 1: every rank has all of them for a moment."""
    keeps_file: bool = False
    """The checkpoint's file stays mapped, as weights lie in it: beside those that were made of what it holds."""
    reads_whole: bool = False
    """Where they are divided then: in host memory every rank maps the whole file meanwhile."""
    making_bytes: float = 0.0
    """Bytes per trained parameter of what is there beside the weights while the trainer makes its buffers of them, and
    goes then."""
    second_ranks: int = 0
    """Ranks that a second copy of the weights is divided over; 0: there is none."""
    keeps_gradients: bool = False
    """Gradient buffers exist between steps too."""
    host_weights: bool = False
    """The weights live in host memory; layers are brought to the device one by one."""
    host_optimizer: bool = False
    """Optimizer state, master weights, average and gradients live in host memory."""
    offloads: bool = False
    """:meth:`Trainer.offload` moves optimizer state, master weights, average and gradients to host memory."""
    gathered: int = 0
    """Where the weights are divided: most parameters that are whole on a rank at once, beside the layer in use."""
    in_flight: int = 0
    """Where the weights are divided: parameters in copies beside those, on their way between ranks."""
    buffers: int = 0
    """Bytes of communication buffers on every rank, whatever the model's size."""
    bf16: bool = False
    """Arithmetic of forward and backward; else fp32."""
    flat: bool = False
    """Gradients and optimizer state are a few large buffers, not one tensor for each parameter."""
    shares_prefixes: bool = False
    """A prefix that sequences of a micro-batch have in common is computed once."""
    cast_bytes: float = 0.0
    """Bytes per parameter of copies in the arithmetic's precision that live from forward to backward (autocast)."""
    fused: bool = False
    """The layers' element-wise work is fused where :mod:`rlhf_modeling` knows how (on CPUs)."""
    logits: int = 2**24
    """Most logits that exist at once."""
    micro_tokens: int = 2048
    """``TrainerFacts.token_budget``."""
    adapter_rank: int = 0
    """Low-rank adapters are trained instead of the weights; 0: none."""
    adapter_targets: tuple[str, ...] | None = None
    """Ends of the names of the layers that have one; None: every linear layer but the head."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one engine of a generator holds; the default samples from the trainer's own module."""

    weight_bytes: float = 0.0
    """Bytes per parameter of a copy of the weights; 0: there is none."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_bytes: float = 2.0
    """Bytes per element of the key-value cache."""
    share: float | None = None
    """The part of the device's memory that the engine claims in all: weights, ``working`` and, with the rest, cache."""
    kv_space: int | None = None
    """Bytes per device reserved for the cache at the start. With neither, the cache grows with what is sampled."""
    rows: int = 256
    """Most samples drawn at once."""
    cache_tokens: int | None = None
    """Bound on rows x positions of a cache that grows."""
    prefill_tokens: int = 8192
    """Most prompt tokens of one forward pass."""
    working: int = 0
    """Bytes of everything else on the device: captured graphs, workspace."""
    own_head: bool = False
    """A head that is tied to the embedding is held beside it, packed for its kernel."""
    repeats_prompts: bool = False
    """A prompt of several samples is computed for each of them where they are asked for at once."""
    sleeps: bool = False
    """:meth:`Generator.sleep` gives weights and cache back."""
