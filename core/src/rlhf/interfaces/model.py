"""The model of a role: the input of a trainer, and the facts that the trainer reports once the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf.types import ExpertLayers, RoleSpec


@dataclass(frozen=True, slots=True)
class Precision:
    """The arithmetic of forward and backward."""

    bf16: bool
    note: str
    """The choice and its reason, for the run's log."""

    @property
    def name(self) -> str:
        return "bf16" if self.bf16 else "fp32"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model of a role and its settings, resolved from the run file's ``[policy]``, ``[critic]``, ... sections."""

    role: RoleSpec
    path: str
    dtype: str = "auto"
    """``auto`` | ``fp32`` | ``bf16``: precision of the forward and backward arithmetic."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    total_updates: int = 0
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    on_processor: Precision | None = None
    """Meaning of ``dtype = "auto"`` on a CPU in this run. It is measured once, so that ranks, roles and a resume agree.
    None: the process that holds the model measures it."""
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """``tcp://HOST:PORT`` for the rendezvous of the role's ranks; empty if there is one rank."""
    storage: str = "fp32"
    """``fp32`` | ``bf16``: number format of the weights. A trained role stored in ``bf16`` has fp32 masters in its
    optimizer. Computation with ``bf16`` weights is in bf16. A trainer without the capability ``storage:bf16`` gets
    ``fp32`` only."""
    images: bool = False
    """The run file says that the data has images (:attr:`rlhf.ops.batch.Batch.images_B`), so the model must read them.
    Otherwise an image-text model reads images unless it has a text-only form."""
    replaced: bool = False
    """The algorithm replaces the weights during the run (:class:`rlhf.types.Snapshot`)."""


ADAPTERS, PARTS = "adapters", "parts"
"""Streams of :meth:`rlhf.interfaces.SendsWeights.weights` of a role that trains adapters: only the tensors of the
adapters, or the model without its adapters followed by these."""
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the tensor names of adapters in PEFT: ``base_model.model.LAYER.lora_A.weight`` and ``lora_B``."""


@dataclass(frozen=True, slots=True)
class LowRankAdapters:
    """The adapters that a role trains, for a generator that computes with the base and the adapters: a layer computes
    with W + scaling x B A."""

    rank: int
    scaling: float
    layers: tuple[str, ...] = ()
    """Last parts of the names of the layers that have an adapter."""
    merged_only: str = ""
    """Why the trainer sends only the merged model; empty: it also sends :data:`ADAPTERS` and :data:`PARTS`."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a model's forward pass, counted from its sizes: two per weight that a token uses,
    and those of attention."""

    token: float
    """Operations of the layers for one token, without attention between tokens."""
    head: float
    """Operations of the output head for one token whose output is read."""
    pairs: tuple[tuple[int | None, float], ...] = ()
    """(window, operations): operations of attention for each pair of a token and a token that it attends to, itself
    included. A token attends to as many tokens as the window has; None: all before it."""
    trained: float = 1.0
    """Share of the weights that are trained. Only these have gradients of their own."""

    def of_update(self, lens: Iterable[int], outputs: int) -> float:
        """Operations of a forward and backward pass, without recomputed layers.

        Args:
            lens: tokens of each sequence.
            outputs: tokens whose output is read.
        """
        lens = list(lens)
        weights = self.token * sum(lens) + self.head * outputs
        attention = sum(operations * sum(_pairs(n, window) for n in lens) for window, operations in self.pairs)
        # Forward, gradient of the inputs, and gradient of the weights, which only trained weights have. Attention has
        # no weights: its backward pass computes the gradients of both factors of each product.
        return (2.0 + self.trained) * weights + 3.0 * attention


def _pairs(length: int, window: int | None) -> int:
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """Facts about a loaded model that the controller needs."""

    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends a text."""
    vocabulary: int = 0
    """Size of the vocabulary in tokens; 0: not known."""
    device: str = "cpu"
    dtype: str = "fp32"
    """``fp32`` | ``bf16``: the arithmetic of forward and backward."""
    precision: str = ""
    """The chosen arithmetic and the reason, for people."""
    views: tuple[str, ...] = ("live",)
    """The weights that the role can compute with and export: ``live``; ``ema`` if it keeps an average; ``base``, the
    model that training started from, if it trains adapters."""
    shares_prefixes: bool = False
    """The trainer computes a shared prefix of a micro-batch's sequences once. The controller puts units with shared
    prefixes into the same micro-batch."""
    token_budget: int = 2048
    """Tokens of a micro-batch if the run file does not set ``micro_tokens``: about the size at which this trainer is
    fast."""
    wants_token_share: bool = False
    """The trainer's micro-batches need the unit column ``weight/tokens``: tokens of the unit as a share of the tokens
    of the optimizer batch."""
    ranks_per_share: int = 1
    """Number of neighbouring ranks that compute the same units together (each rank a part of every layer, or of the
    tokens). A divisor of the number of the role's ranks."""
    device_name: str = ""
    """Name of the GPU, as its driver gives it; empty on a CPU."""
    flops: Flops | None = None
    """None: not known."""
    notes: tuple[str, ...] = ()
    """Remarks for people on how the model is computed. A run shows each once at its start."""
    trained_parameters: int = 0
    """Number of parameters that are trained, on all ranks; 0: none, or not known."""
    random_head: bool = False
    """The checkpoint has no head of the role's kind, so the outputs are random until the role is trained."""
    experts: ExpertLayers | None = None
    """The trainer routes tokens to recorded experts (token column ``experts``, :mod:`rlhf.ops.experts`) in these
    layers. None: it does not."""
