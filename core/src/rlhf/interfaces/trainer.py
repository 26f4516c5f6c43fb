"""Trainers: one rank of a role's model and, if the role is trained, its optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.interfaces.component import Ability, Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.model import ModelSpec, TrainerFacts
from rlhf.interfaces.preflight import TrainerPreflight
from rlhf.types import Head

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.ops.batch import Batch
    from rlhf.ops.heads import OutputHead
    from rlhf.weights.bucket import Bucket


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Result of one optimizer step. ``skipped`` is the reason for a skipped step (non-finite gradient), or empty."""

    grad_norm: float
    lr: float
    skipped: str = ""


Sums = dict[str, tuple[float, float]]
"""{metric: (sum, count)}. Sums and counts are added over micro-batches and ranks; the driver divides."""


class Trainer(TrainerPreflight, Component):
    """SPMD: the driver calls the same method on every rank, each with its own share of units.

    Optional features are base classes, from which the trainer also derives: :class:`SharesModule`,
    :class:`SendsWeights`, :class:`TakesWeights`, :class:`Offloads`, :class:`HasViews`, :class:`LendsHead`,
    :class:`RestartsOptimizer`. A run that samples from the policy needs one of the first two::

        class MyTrainer(SharesModule, SendsWeights, Trainer): ...

    Gradients are summed, not averaged, over micro-batches and ranks: the weights in the batch already contain the
    global normaliser. Every rank gets the same number of micro-batches, none of them empty. A trainer may communicate
    inside any method except ``facts`` and ``coverage``.

    With several ranks, ``forward``, ``accumulate`` and ``update`` return the rank's own values (equal on ranks that get
    the same share, ``TrainerFacts.ranks_per_share``). ``apply`` returns the same value on all ranks.
    ``SendsWeights.weights`` yields whole tensors on rank 0; other ranks take part and may yield nothing. ``export`` and
    ``save`` write to a folder that all ranks see.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``ranks:many``, ``ema``, ``bf16``, ``storage:bf16`` (:attr:`ModelSpec.storage`), ``images``
    (:attr:`rlhf.ops.batch.Batch.images_B`), ..."""

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Options that a run may change between two steps (:meth:`change`)."""

    training_options: ClassVar[frozenset[str]] = frozenset()
    """Training-only options. They are refused in the section of a role that is not trained."""

    spec: ModelSpec
    progress: Callable[[int, int], None] | None = None
    """Called after each micro-batch with (micro-batches computed, micro-batches of the call). A run sets it on trainers
    in its own process and shows the numbers on a terminal. A trainer need not call it."""

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None: ...

    def facts(self) -> TrainerFacts:
        """Called on rank 0 after the model is loaded."""
        return TrainerFacts()

    def coverage(self) -> dict[str, list[str]]:
        """Names of trained parameters that a step did not train, the same on every rank: ``without_gradient`` (no
        gradient, or all zero) and ``unchanged``. They are determined at the first step that is not skipped. If no
        parameter got a gradient, they are determined again at the next step. Empty before that, or if not known."""
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
        """Advance the learning-rate schedule by ``count`` planned optimizer steps that are not executed, because the
        batch is empty or too small for all of them."""

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
    def export(self, path: Path, view: str = "live") -> None:
        """Write the model and tokenizer in Hugging Face format (safetensors), which transformers can load."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule, EMA and the state of dropout's RNG into the folder ``path``, without
        pickle."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore exactly the state that :meth:`save` wrote, also if options in :attr:`layout` had other values."""


class SharesModule(Ability):
    """A generator in the same process may sample from the trainer's module
    (:class:`rlhf.interfaces.generator.TakesModule`)."""

    module: Any
    """The live model, a ``torch.nn.Module`` of transformers."""


class SendsWeights(Ability):
    """The trainer can send its weights to generators that hold a copy
    (:class:`rlhf.interfaces.generator.TakesTensors`), and to other roles (``Snapshot.source``)."""

    spec: ModelSpec

    @abstractmethod
    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face parameter name, whole tensor), in a fixed order and in the stored number format.

        Every rank calls it. Rank 0 yields; the other ranks take part and may yield nothing. The tensors keep their
        values until the next step or :meth:`HasViews.use_view`, also those of another view than ``live``.

        Args:
            view: one of :attr:`TrainerFacts.views`. If ``Trainer.adapters`` says that they can be sent, also
                :data:`~rlhf.interfaces.model.ADAPTERS` and :data:`~rlhf.interfaces.model.PARTS`, which are of the
                current view (:meth:`HasViews.use_view`).
            every_rank: every rank must yield all tensors, on its own device.
        """

    def buckets(self, view: str = "live", limit: int = 2**28, every_rank: bool = False) -> Iterator[Bucket]:
        """Yield :meth:`weights` in buckets, with the fingerprint of every tensor. The tensors share memory with the
        model.

        Args:
            limit: largest size of a bucket in bytes. A larger tensor gets its own bucket.
        """
        from rlhf.weights.bucket import buckets

        self._sent_fingerprints: dict[str, str] = {}
        return buckets(self.weights(view, every_rank), limit, self._sent_fingerprints)

    def sent_fingerprints(self) -> dict[str, str]:
        """{tensor name: fingerprint} of all tensors that the last :meth:`buckets` yielded. Call it on rank 0, after
        that iterator is exhausted. The receivers' fingerprints must equal these."""
        return self._sent_fingerprints


class TakesWeights(Ability):
    """The model's weights can be replaced by the weights of another role (``Snapshot``)."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite the model's weights. The names are those of :meth:`SendsWeights.weights`."""

    def load_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Call :meth:`load_weights` with the tensors of a whole model, in buckets."""
        self.load_weights((name, tensor) for bucket in buckets for name, tensor in bucket.tensors)


class Offloads(Ability):
    """Device memory can be freed while the trainer does not learn."""

    @abstractmethod
    def offload(self) -> None:
        """Free device memory for a generator that shares the device: move optimizer state and gradients to the host
        until :meth:`reload`, and release unused memory. Also called on roles that are not trained."""

    @abstractmethod
    def reload(self) -> None:
        """Undo :meth:`offload`."""


class HasViews(Ability):
    """The trainer has other weights than the live ones, such as an EMA, and can be evaluated with them
    (:attr:`TrainerFacts.views`)."""

    current_view: str = "live"
    """The view that replaces ``live`` (:meth:`use_view`)."""

    @abstractmethod
    def use_view(self, view: str) -> None:
        """Use the weights of ``view`` in place of ``live`` in every method and in the module itself, until
        ``use_view("live")``. An evaluation calls this to measure the weights that will be exported. A generator in the
        same process calls it to sample from ``base``. Nothing is trained or saved in between. Every rank calls it."""


class LendsHead(Ability):
    """The trainer can lend its output head to another role, and compute with the head of another role
    (:class:`rlhf.types.Lent`)."""

    @abstractmethod
    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        """Yield once the whole output head of a language model that is not trained. Every rank calls it; rank 0 yields.
        The head may share memory with the model.

        Args:
            view: ``base`` if the frozen model is the base of a role that trains adapters. That role may train its head
                too; this must not change the lent head.
        """

    @abstractmethod
    def borrow_head(self, role: str, head: OutputHead) -> None:
        """Set ``constants[role]`` to ``head``, on this trainer's device, in all heads that name ``role`` in
        ``Head.lenders``."""


class RestartsOptimizer(Ability):
    """The optimizer can be reset without changing the weights, for callers other than a run."""

    per_step: ClassVar[frozenset[str]] = frozenset()
    """Further options that such a caller may change between two steps, in addition to :attr:`Trainer.changeable`
    (:meth:`Trainer.change`)."""

    @abstractmethod
    def restart_optimizer(self) -> None:
        """Reset the optimizer and the schedule to their state before the first step. Every rank calls it."""
