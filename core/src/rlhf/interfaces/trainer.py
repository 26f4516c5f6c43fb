"""Trainers: one rank of a role's model and, if the role is trained, its optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.errors import CapabilityError
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.memory import ModelSize, TrainerMemory, TrainerWork, whole_copy
from rlhf.interfaces.model import ModelSpec, Precision, TrainerFacts
from rlhf.types import Head

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.ops.batch import Batch
    from rlhf.ops.heads import OutputHead
    from rlhf.weights.bucket import Bucket


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """One optimizer step. ``skipped`` names the reason (non-finite gradient) or is empty."""

    grad_norm: float
    lr: float
    skipped: str = ""


Sums = dict[str, tuple[float, float]]
"""{metric: (sum, count)}. Sums and counts are added over micro-batches and ranks; the driver divides."""


class Trainer(Component):
    """SPMD: the driver calls the same method on every rank, each with its own share of units.

    Gradients are summed, not averaged, over micro-batches and ranks: the weights in the batch already contain the
    global normaliser. Every rank gets the same number of micro-batches, none of them empty. A trainer may communicate
    inside any method except ``facts`` and ``coverage``.

    With several ranks, ``forward``, ``accumulate`` and ``update`` return the rank's own values (equal on ranks that get
    the same share, ``TrainerFacts.ranks_per_share``). ``apply`` returns the same value on all ranks. ``weights`` yields
    whole tensors on rank 0; other ranks take part and may yield nothing. ``export`` and ``save`` write to a folder that
    all ranks see.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``export:module`` (a generator in this process may sample from the module), ``export:tensors``, ``lend:head``
    (:class:`LendsHead`), ``ranks:many``, ``ema``, ``bf16``, ``storage:bf16`` (:attr:`ModelSpec.storage`),
    ``images`` (:attr:`rlhf.ops.batch.Batch.images_B`), ..."""
    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that lower memory, the cheapest in speed first. ``rlhf plan`` tries them if a run does not fit."""

    layout: ClassVar[frozenset[str]] = frozenset()
    """Options that may change on resume (sharding, offload, timeouts). :meth:`load` must accept a checkpoint that was
    saved with other values of them."""

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Options that a run may change between two steps (:meth:`change`)."""

    learning: ClassVar[frozenset[str]] = frozenset()
    """Training-only options. They are refused in the section of a role that is not trained."""

    @classmethod
    def precision_on_processor(cls) -> Precision:
        """Meaning of ``dtype = "auto"`` on the CPU of this machine. A run calls this once and passes the result to
        every rank (``ModelSpec.on_processor``)."""
        return Precision(False, "fp32 on cpu: the trainer offers no other arithmetic there")

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        """Before anything starts, refuse options that the constructor would refuse, raising the constructor's own
        message, as far as this is known without loading a model.

        Args:
            spec: ``total_updates`` and ``rendezvous`` may be unknown yet.
            device: ``cpu`` | ``cuda``, the kind of device of the ranks, if they run on this machine; None: the ranks'
                machines are not known.

        Raises CapabilityError or ConfigError.
        """

    @classmethod
    def check_files(cls, spec: ModelSpec) -> None:
        """Before anything starts, refuse a model whose files the constructor would refuse, as far as this is known
        without reading weights. Called when a run starts, not by ``rlhf plan``. Raises ModelError."""

    @classmethod
    def memory(cls, config: Any, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str) -> TrainerMemory:
        """The memory that one rank of this role would need, for ``rlhf plan``. Nothing is loaded or started.

        The default is a whole fp32 copy of the model on every rank, with AdamW if the role is trained.

        Args:
            spec: ``world_size`` is the number of ranks; ``role.trained`` says whether there is an optimizer.
            size: of the role's model.
            work: what the role computes.
            device: ``cpu`` | ``cuda``, where the rank would run.
        """
        again = spec.gradient_checkpointing
        return whole_copy(size, work, trained=spec.role.trained, checkpointing=again, ranks=spec.world_size)

    spec: ModelSpec
    progress: Callable[[int, int], None] | None = None
    """Called after each micro-batch with (micro-batches computed, micro-batches of the call). A run sets it on trainers
    in its own process and shows the numbers on a terminal. A trainer need not call it."""

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None: ...

    def use_view(self, view: str) -> None:
        """Use the weights of ``view`` in place of ``live`` in every method and in the module itself, until
        ``use_view("live")``. An evaluation calls this to measure the weights that will be exported; nothing is trained
        or saved in between. Every rank calls it. A trainer with other views than ``live`` overrides it."""
        if view != "live":
            raise CapabilityError(
                f"trainer {self.name!r} cannot compute with its view {view!r} in place of the live one"
            )

    def facts(self) -> TrainerFacts:
        """Called on rank 0 after the model is loaded."""
        return TrainerFacts()

    def coverage(self) -> dict[str, list[str]]:
        """Names of trained parameters that a step did not train, the same on every rank: ``without_gradient`` (no
        gradient, or all zero) and ``unchanged``. They are determined at the first step that is not skipped, and again
        at each later step as long as no parameter got a gradient. Empty before that, or if not known."""
        return {}

    @abstractmethod
    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        """Outputs of each micro-batch, without gradient, fp32 on CPU: token outputs [N, ...] (zero where masked),
        ``scores`` [B]. ``view``: ``live`` | ``ema`` | ``base`` (adapters off)."""

    @abstractmethod
    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        """Forward and backward over the micro-batches. Gradients accumulate until :meth:`apply` or
        :meth:`zero_grad`."""

    @abstractmethod
    def apply(self) -> ApplyResult:
        """Clip the gradients, step the optimizer and the schedule, update the EMA, zero the gradients. A non-finite
        gradient skips the step on every rank."""

    def change(self, config: Any) -> None:
        """Use ``config`` from now on. It differs from the current config in :attr:`changeable` options only. Called on
        every rank, between two steps."""
        self.config = config

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard accumulated gradients."""

    def skip_updates(self, count: int) -> None:
        """Advance the learning-rate schedule by ``count`` planned optimizer steps that are not taken, because the batch
        is empty or too small for all of them."""

    def update(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> tuple[Sums, ApplyResult]:
        """One optimizer step: accumulate, then apply."""
        sums = self.accumulate(micros, loss, coef, live)
        return sums, self.apply()

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        """The sums of :meth:`accumulate`, without training and without dropout. The default accumulates gradients and
        discards them. Override it if the model has dropout, or to avoid the cost of gradients."""
        sums = self.accumulate(micros, loss, coef, live)
        self.zero_grad()
        return sums

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by parameter name (after :meth:`accumulate`, before :meth:`apply`). The caller adds the
        results of all ranks. A trainer that has already reduced them returns them on rank 0, and an empty dict on the
        other ranks."""

    @abstractmethod
    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face parameter name, whole tensor), in a fixed order and in the stored number format.

        Every rank calls it. Rank 0 yields; the other ranks take part and may yield nothing.

        Args:
            view: one of :attr:`TrainerFacts.views`.
            every_rank: every rank must yield all tensors, on its own device.
        """

    def buckets(self, view: str = "live", limit: int = 2**28, every_rank: bool = False) -> Iterator[Bucket]:
        """Yield :meth:`weights` in buckets, with the fingerprint of every tensor. The tensors share memory with the
        model.

        Args:
            limit: bytes of one bucket. A larger tensor has a bucket to itself.
        """
        from rlhf.weights.bucket import buckets

        self._sent: dict[str, str] = {}
        return buckets(self.weights(view, every_rank), limit, self._sent)

    def sent(self) -> dict[str, str]:
        """{tensor name: fingerprint} of all tensors that the last :meth:`buckets` yielded, on rank 0, after it ended.
        The receivers' fingerprints must equal these."""
        return self._sent

    def load_buckets(self, buckets: Sequence[Bucket]) -> None:
        """:meth:`load_weights` with the buckets of a whole model."""
        self.load_weights((name, tensor) for bucket in buckets for name, tensor in bucket.tensors)

    def offload(self) -> None:
        """Free device memory for a generator that shares the device: move optimizer state and gradients to the host
        until :meth:`reload`, and release unused memory. Also called on roles that are not trained."""

    def reload(self) -> None:
        """Undo :meth:`offload`."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite the model's weights (``Snapshot``)."""

    @abstractmethod
    def export(self, path: Path, view: str = "live") -> None:
        """Write the model and tokenizer in Hugging Face format (safetensors), which transformers can load."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule, EMA and the state of dropout's RNG into the folder ``path``, without
        pickle."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore exactly the state that :meth:`save` wrote."""


class LendsHead(ABC):
    """The methods of a trainer with the capability ``lend:head``: ``class Mine(LendsHead, Trainer)``. They give the
    output head of one role to another role, for its computations (:class:`rlhf.types.Lent`)."""

    @abstractmethod
    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        """Yield the whole output head of a language model that is not trained, once. Every rank calls it; rank 0
        yields. It may share memory with the model.

        Args:
            view: ``base`` where the model that is not trained is the base of a role that trains adapters. That role may
                train its head as well: its training must not change what was lent.
        """

    @abstractmethod
    def borrow_head(self, role: str, head: OutputHead) -> None:
        """Set ``constants[role]`` of heads that name ``role`` in ``Head.lent`` to ``head``, on this trainer's
        device."""
