"""The model of a role: what a trainer is told about it, and what the trainer tells when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.types import RoleSpec


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
    """``fp32`` | ``bf16``: number format of the weights. A trained role that is stored in ``bf16`` has fp32 masters in
    its optimizer. Weights in ``bf16`` are computed with in bf16. A trainer without the capability ``storage:bf16`` gets
    ``fp32`` only."""
    images: bool = False
    """The run file says that the data have images (:attr:`rlhf.ops.batch.Batch.images_B`), so the model must read them.
    Where it does not say so, the model reads them if it is an image-text model, unless it has a form for text alone."""
    replaced: bool = False
    """The algorithm replaces the weights in the course of the run (:class:`rlhf.types.Snapshot`)."""


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
    """The weights that the role can compute with and export: ``live``; ``ema`` if an average is kept; ``base`` if
    adapters are trained and can be switched off."""
    shares_prefixes: bool = False
    """The trainer computes ids that sequences of a micro-batch share at their start once. The controller puts units
    with shared prefixes into the same micro-batch."""
    token_budget: int = 2048
    """Tokens of a micro-batch if the run file sets no ``micro_tokens``: about the size at which this trainer is
    fast."""
    wants_token_share: bool = False
    """The trainer's micro-batches need the unit column ``weight/tokens``: tokens of the unit as a share of the tokens
    of the optimizer batch."""
    ranks_per_share: int = 1
    """Number of neighbouring ranks that compute the same units together (each rank a part of every layer, or of the
    tokens). Divides the number of the role's ranks."""
    notes: tuple[str, ...] = ()
    """Remarks for people on how the model is computed. A run shows each one once, at its start."""
