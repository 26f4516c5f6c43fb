"""Trainers: hold one role's model and, where it is trained, its optimizer, on one rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.types import Head, RoleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.ops.batch import Batch


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
    rank: int = 0
    world_size: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """One optimizer step. ``skipped`` names the reason (non-finite gradient) or is empty."""

    grad_norm: float
    lr: float
    skipped: str = ""


Sums = dict[str, tuple[float, float]]
"""{metric: (sum, count)}: adds over micro-batches and ranks; the driver divides."""


class Trainer(Component):
    """SPMD: the driver calls the same method on every rank, each with its own share of units.

    Gradients ADD over micro-batches and ranks: the weights in the batch already hold the global normaliser.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``export:module`` (a generator in this process may sample from the module), ``export:tensors``,
    ``ranks:many``, ``ema``, ``bf16``, ..."""

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None: ...

    @property
    def views(self) -> tuple[str, ...]:
        """The weights that this role can compute with and export: ``live``, and ``ema`` where an average is kept."""
        return ("live",)

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

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget accumulated gradients."""

    def update(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> tuple[Sums, ApplyResult]:
        """One optimizer step: accumulate, then apply."""
        sums = self.accumulate(micros, loss, coef, live)
        return sums, self.apply()

    def token_budget(self) -> int:
        """Tokens of a micro-batch at which this trainer is fast, where the run file names no ``micro_tokens``."""
        return 2048

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        """The sums of :meth:`accumulate` without training; override where they come cheaper without gradients."""
        sums = self.accumulate(micros, loss, coef, live)
        self.zero_grad()
        return sums

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by parameter name (after :meth:`accumulate`, before :meth:`apply`)."""

    @abstractmethod
    def weights(self, view: str = "live") -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face parameter name, tensor), in a fixed order."""

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
