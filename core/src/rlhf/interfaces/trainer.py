"""Trainers: hold one role's model and, where it is trained, its optimizer, on one rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.errors import CapabilityError
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.memory import ModelSize, TrainerMemory, TrainerWork, whole_copy
from rlhf.types import Head, RoleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.ops.batch import Batch
    from rlhf.ops.heads import OutputHead
    from rlhf.weights.bucket import Bucket


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
    """Which model a role holds and how: the run file's ``[policy]``, ``[critic]``, ... sections, resolved."""

    role: RoleSpec
    path: str
    dtype: str = "auto"
    """``auto`` | ``fp32`` | ``bf16``: precision of the forward and backward arithmetic; weights stay fp32."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    total_updates: int = 0
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    on_processor: Precision | None = None
    """What ``dtype = "auto"`` means on a CPU in this run: measured once, so that ranks, roles and a resume agree. None:
    measured by the process that holds the model."""
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """``tcp://HOST:PORT`` where the ranks of this role meet; empty where there is one."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """One optimizer step. ``skipped`` names the reason (non-finite gradient) or is empty."""

    grad_norm: float
    lr: float
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What the controller asks of a loaded model, wherever it lives."""

    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends a text."""
    vocabulary: int = 0
    """Token ids are below it; 0: not known."""
    device: str = "cpu"
    dtype: str = "fp32"
    """``fp32`` | ``bf16``: the arithmetic of forward and backward."""
    precision: str = ""
    """Which arithmetic was chosen and why, for people."""
    views: tuple[str, ...] = ("live",)
    shares_prefixes: bool = False
    """Sequences of a micro-batch that begin with the same ids compute these once; units are dispatched accordingly."""
    token_budget: int = 2048
    """Tokens of a micro-batch where the run file names no ``micro_tokens``: about as many as make this trainer fast."""
    wants_token_share: bool = False
    """Its micro-batches carry the unit column ``weight/tokens``: tokens of the unit as a share of the optimizer
    batch's."""
    ranks_per_share: int = 1
    """So many neighbouring ranks compute the same share of units together (each a part of every layer); a divisor of
    the role's ranks."""
    notes: tuple[str, ...] = ()
    """What a person should know of how the model is computed; a run shows each once, at its start."""


Sums = dict[str, tuple[float, float]]
"""{metric: (sum, count)}: adds over micro-batches and ranks; the driver divides."""


class Trainer(Component):
    """SPMD: the driver calls the same method on every rank, each with its own share of units.

    Gradients ADD over micro-batches and ranks: the weights in the batch already hold the global normaliser. Every rank
    gets equally many micro-batches, none of them empty; a trainer may communicate inside any method but ``facts`` and
    ``coverage``. With several ranks ``forward``, ``accumulate`` and ``update`` return
    the rank's own values (the same on ranks that are given one share, ``TrainerFacts.ranks_per_share``), ``apply`` the
    same on all; ``weights`` yields whole tensors on rank 0 (other ranks take part
    and may yield nothing), ``export`` and ``save`` write to a folder that all ranks see.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``export:module`` (a generator in this process may sample from the module), ``export:tensors``, ``lend:head``
    (:meth:`lend_head` and :meth:`borrow_head`), ``ranks:many``, ``ema``, ``bf16``, ..."""
    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that lower memory, the cheapest in speed first: what ``rlhf plan`` tries where a run does not fit."""

    layout: ClassVar[frozenset[str]] = frozenset()
    """Options that say how the same sums are split, where tensors lie and how long is waited: a run is resumed with
    others of them, as :meth:`load` can."""

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Options that a run may change between two steps (:meth:`change`)."""

    learning: ClassVar[frozenset[str]] = frozenset()
    """Options that only a trained role reads: refused in the own section of one that is not trained."""

    @classmethod
    def device_here(cls) -> str:
        """``cpu`` | ``cuda``: the kind of device on which this machine would run the trainer. Loads no model."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def precision_on_processor(cls) -> Precision:
        """What ``dtype = "auto"`` means on the CPU of this machine. A run asks once and tells every rank
        (``ModelSpec.on_processor``)."""
        return Precision(False, "fp32 on cpu: the trainer offers no other arithmetic there")

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        """Refuse before anything starts what the constructor would refuse, with the message of the constructor, as far
        as that is known without loading a model.

        Args:
            spec: ``total_updates`` and ``rendezvous`` may be unknown yet.
            device: ``cpu`` | ``cuda``, the kind that the machine of the ranks offers, where that is this machine; None:
                the ranks' machines are not known.

        Raises CapabilityError or ConfigError.
        """

    @classmethod
    def check_files(cls, spec: ModelSpec) -> None:
        """Refuse before anything starts a model whose files the constructor would refuse, as far as it shows without
        reading weights. Asked where the run is started, not where it is only planned. Raises ModelError."""

    @classmethod
    def memory(cls, config: Any, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str) -> TrainerMemory:
        """The memory that one rank of this role would need, for ``rlhf plan``. Nothing is loaded or started.

        The default is a whole fp32 copy of the model on every rank, with AdamW where the role is trained.

        Args:
            spec: ``world_size`` is the number of ranks; ``role.trained`` says whether there is an optimizer.
            size: of the role's model.
            work: what the role computes.
            device: ``cpu`` | ``cuda``, where the rank would run.
        """
        again = spec.gradient_checkpointing
        return whole_copy(size, work, trained=spec.role.trained, checkpointing=again, ranks=spec.world_size)

    spec: ModelSpec

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None: ...

    @property
    def views(self) -> tuple[str, ...]:
        """The weights that this role can compute with and export: ``live``, ``ema`` where an average is kept, ``base``
        where adapters are trained and can be switched off."""
        return ("live",)

    def use_view(self, view: str) -> None:
        """Compute with ``view`` wherever ``live`` is named, in every method and in the module itself, until
        ``use_view("live")``. An evaluation uses it to measure the weights that will be exported; nothing is trained or
        saved in between. Every rank calls it. A trainer with other views than ``live`` overrides it."""
        if view != "live":
            raise CapabilityError(
                f"trainer {self.name!r} cannot compute with its view {view!r} in place of the live one"
            )

    def facts(self) -> TrainerFacts:
        """Asked of rank 0 once the model is loaded."""
        return TrainerFacts(views=self.views)

    def coverage(self) -> dict[str, list[str]]:
        """After the first step that was not skipped: parameter names under ``without_gradient`` (none, or all zero) and
        ``unchanged``, the same on every rank; anew after each step while no parameter got a gradient. Empty before, or
        where it is not known."""
        return {}

    @abstractmethod
    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        """Outputs per micro-batch, without gradient, fp32 on CPU: token outputs [N, ...] (zero where masked),
        ``scores`` [B]. ``view``: ``live`` | ``ema`` | ``base`` (adapters off)."""

    @abstractmethod
    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        """Forward and backward over the micro-batches; gradients add up until :meth:`apply` or :meth:`zero_grad`."""

    @abstractmethod
    def apply(self) -> ApplyResult:
        """Clip, step, schedule, EMA, zero the gradients. A non-finite gradient skips the step on every rank."""

    def change(self, config: Any) -> None:
        """Go on with ``config``, which differs from the present one in :attr:`changeable` options only. Called on every
        rank, between two steps."""
        self.config = config

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget accumulated gradients."""

    def skip_updates(self, count: int) -> None:
        """So many optimizer steps that the run had planned are not taken, as there was nothing to learn from, or too
        little for all of them: the learning rate goes on as if they had been."""

    def update(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> tuple[Sums, ApplyResult]:
        """One optimizer step: accumulate, then apply."""
        sums = self.accumulate(micros, loss, coef, live)
        return sums, self.apply()

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        """The sums of :meth:`accumulate` without training, of the model as it is used: without dropout. This default is
        for models that have none; override it there, and where the sums come cheaper without gradients."""
        sums = self.accumulate(micros, loss, coef, live)
        self.zero_grad()
        return sums

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by parameter name (after :meth:`accumulate`, before :meth:`apply`). Over ranks they
        add: a trainer that reduces them returns them on rank 0 and an empty dict elsewhere."""

    @abstractmethod
    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face parameter name, whole tensor), in a fixed order.

        Every rank calls it. Rank 0 yields; the other ranks take part and may yield nothing.

        Args:
            view: one of :attr:`views`.
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
        """{tensor name: fingerprint} of the last :meth:`buckets` once it ended, on rank 0: what must have arrived."""
        return self._sent

    def load_buckets(self, buckets: Sequence[Bucket]) -> None:
        """:meth:`load_weights` of a whole model that came in buckets."""
        self.load_weights((name, tensor) for bucket in buckets for name, tensor in bucket.tensors)

    def lend_head(self) -> Iterator[OutputHead]:
        """The output head of a language model that is not trained, once and whole, for another role to compute with
        (:class:`rlhf.types.Lent`). Every rank calls it; rank 0 yields. It may share memory with the model."""
        raise CapabilityError(f"trainer {self.name!r} lacks the capability 'lend:head'")

    def borrow_head(self, role: str, head: OutputHead) -> None:
        """From now on ``constants[role]`` of heads that name ``role`` in ``Head.lent`` is ``head``, on this trainer's
        device."""
        raise CapabilityError(f"trainer {self.name!r} lacks the capability 'lend:head'")

    def offload(self) -> None:
        """For a generator that shares the device: optimizer state, gradients and memory that nothing uses leave it
        until :meth:`reload`. Called on roles that are not trained too."""

    def reload(self) -> None:
        """Undo :meth:`offload`."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite the model's weights (``Snapshot``)."""

    @abstractmethod
    def export(self, path: Path, view: str = "live") -> None:
        """Hugging Face format with tokenizer, safetensors; loads with transformers."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Weights, optimizer, schedule, EMA, dropout RNG into the folder ``path``: no pickle."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore :meth:`save` exactly."""
