"""A trainer over several ranks: sums gradients over ranks for one optimizer step, and reads and writes its state.

A subclass divides the model, and defines how gradients are reduced, discarded and applied. The rest is common.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ApplyResult, Loss, Sums, TrainerFacts
from rlhf.ops.batch import Batch
from rlhf.types import Head
from rlhf.weights.fingerprint import fingerprint
from torch import Tensor

from rlhf_modeling.optimizer import set_rates
from rlhf_modeling.rate_schedule import RateSchedule
from rlhf_modeling.sharded import checkpoint
from rlhf_modeling.sharded.ema import ShardedCopy
from rlhf_modeling.sharded.optimizer import DividedOrthogonalAdamW
from rlhf_modeling.sharded.partition import Partition, scale
from rlhf_modeling.sharded.process_group import first_text, largest, total
from rlhf_modeling.sharded.weights import ShardedWeights


class ShardedTrainer(ShardedWeights):
    schedule: RateSchedule
    """The schedule of a trained role."""

    def facts(self) -> TrainerFacts:
        facts, parts = super().facts(), self.config.sequence_parallel
        return replace(facts, ranks_per_share=parts, token_budget=parts * facts.token_budget)

    def elements(self, name: str) -> int:
        return self.tensors.shapes[name].numel()

    # ------------------------------------------------------------------------------------- forward

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        with self._guard("forward"):
            return super().forward(micros, outputs, view)

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        with self._guard("accumulate"):
            return super().accumulate(micros, loss, coef, live)

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        with self._guard("evaluate"):
            return super().evaluate(micros, loss, coef, live)

    def _compute_together(self, divided: bool) -> None:
        """Make the ranks compute the vision tower together and call divided layers equally often. Raises
        CapabilityError if that is not possible for a model with images."""
        model = self.loaded_model
        if self.spec.world_size == 1:
            return
        if model.layout == "alone" or model.rope is not None:
            model.images = None
            model.no_images = (
                "is computed in a separate call for each sequence length, which is not possible with images on "
                f"{self.spec.world_size} ranks. Use one rank (trainer 'torch'), or another model"
            )
            if self.spec.images:
                raise CapabilityError(f"{type(model.module).__name__} {model.no_images}.")
            model.maximum = self._maximum if divided else None
        elif model.images is not None:
            # Ranks without an image compute a blank one if any rank has images, because a vision tower that is divided,
            # or whose gradients are reduced, needs every rank.
            model.maximum = self._maximum

    def _maximum(self, number: int) -> int:
        return int(largest(torch.tensor([int(number)], device=self.device))[0])

    def _to_backward(self, total: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """The loss for a rank's backward pass. Every rank must call every backward pass. A rank whose loss is not
        finite uses a loss of zero, computed from the outputs ``values``."""
        if self._bad_loss or not total.requires_grad:
            return torch.stack([(v * 0.0).sum() for v in values.values()]).sum()
        return total

    # ---------------------------------------------------------------------------------------- step

    def prepare_steps(self) -> None:
        """Make what a trained role's steps and views need beside the optimizer :attr:`base`. A subclass calls this
        method at the end of its constructor."""
        if not self.spec.role.trained:
            return
        self.schedule = RateSchedule(self.config, self.spec.total_updates)
        if isinstance(self.base, DividedOrthogonalAdamW):
            self.base.bind(self.partition, self.tensors.shapes, self.split)
        if self.keeps_first_weights:
            self.first = ShardedCopy(self.partition)
        if self.config.ema_decay is not None:
            self.average = ShardedCopy(self.partition)

    def apply(self) -> ApplyResult:
        self._require_trained("apply")
        factor = self.schedule.factor(self.updates)
        norm, skipped = 0.0, ""
        if self._micros:
            with self._guard("apply"):
                norm, skipped = self._step(factor)
        self.updates += 1
        self.skipped += bool(skipped)
        self._bad_loss, self._micros = "", 0
        return ApplyResult(norm, self.config.lr * factor, skipped)

    def _step(self, factor: float) -> tuple[float, str]:
        assert self.base is not None
        norm, skipped = self._finish_gradients()
        if skipped:
            self._discard()
            return norm, skipped
        coverage = Coverage(self.partition, list(self.parameters), self.device) if self._without_coverage else None
        set_rates(self.base, self.config, factor)
        self._take_step()
        if coverage is not None:
            self._coverage = coverage.after()
        if self.average is not None and self.config.ema_decay is not None:
            self.average.update(self.config.ema_decay)
        return norm, ""

    def _finish_gradients(self) -> tuple[float, str]:
        """Reduce and clip the gradients. Returns (global norm before clipping, reason to skip the step), the same on
        every rank."""
        self._reduce()
        indices = range(len(self.partition.flats))
        local = sum(self.split.squares(self.partition, i) for i in indices)
        facts = torch.tensor([local, float(bool(self._bad_loss))], dtype=torch.float64, device=self.device)
        squares, bad = total(facts).tolist()
        # Replicas hold the same elements, and each has counted them.
        norm = math.sqrt(squares / self.split.topology.replicas if self.partition.replicated else squares)
        if bad:
            return norm, first_text(self._bad_loss)
        if not math.isfinite(norm):
            return norm, f"non-finite gradient (norm {norm})"
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            parts = [g for i in indices for g in self.partition.gradients(i)]
            scale(parts, self.config.max_grad_norm / (norm + 1e-6))
        return norm, ""

    @abstractmethod
    def _reduce(self) -> None:
        """Complete the sums of gradients over ranks; a second call does nothing."""

    @abstractmethod
    def _take_step(self) -> None:
        """Step with the reduced gradients, then discard them."""

    @abstractmethod
    def _discard(self) -> None:
        """Forget the gradients, reduced or not, finite or not."""

    def zero_grad(self) -> None:
        self._bad_loss, self._micros = "", 0
        if self.spec.role.trained:
            self._discard()

    def gradients(self) -> dict[str, Tensor]:
        """Sums over ranks, whole on rank 0, one parameter at a time; zeros for parameters without a gradient."""
        gradients = {}
        with self._guard("gradients"):
            if self.spec.role.trained and self._micros:
                self._reduce()
            pieces = {
                p.name: (p, g) for i in range(len(self.partition.flats)) for p, g in self.partition.piece_gradients(i)
            }
            for name in self.parameters:
                gradient = self._collected(name, pieces.get(name))
                if self.spec.rank == 0:
                    gradients[name] = gradient.cpu()
        return gradients

    # --------------------------------------------------------------------------------------- state

    def division(self) -> dict[str, Any]:
        """How the model is divided, for the facts of a checkpoint. A run that resumes may divide it otherwise."""
        return {}

    def save(self, path: Path) -> None:
        with self._guard("save"):
            checkpoint.save(self, self.division(), Path(path))

    def load(self, path: Path) -> None:
        with self._guard("load"):
            checkpoint.load(self, Path(path))


class Coverage:
    """Which parameters the first step reached, over all ranks. Constructed before the step and read after it.
    ``names``: all trained parameters, in the order of the report."""

    def __init__(self, partition: Partition, names: Sequence[str], device: torch.device) -> None:
        self.partition, self.names, self.device = partition, list(names), device
        self._row = {name: n for n, name in enumerate(self.names)}
        self._reached = [False] * len(self.names)
        for index in range(len(partition.flats)):
            for piece, gradient in partition.piece_gradients(index):
                self._reached[self._row[piece.name]] |= bool(gradient.any())
        self._old_fingerprints = self._fingerprints()

    def after(self) -> dict[str, list[str]]:
        """``without_gradient`` and ``unchanged``. Every rank must call this method and gets the same result."""
        change_flags = [False] * len(self.names)
        for name, mark in self._fingerprints().items():
            change_flags[self._row[name]] = mark != self._old_fingerprints[name]
        flags = torch.tensor([self._reached, change_flags], dtype=torch.int32, device=self.device)
        reached, moved = largest(flags).tolist()
        return {
            "without_gradient": [n for n, flag in zip(self.names, reached, strict=True) if not flag],
            "unchanged": [n for n, flag in zip(self.names, moved, strict=True) if not flag],
        }

    def _fingerprints(self) -> dict[str, str]:
        return {
            piece.name: fingerprint(flat.data[piece.offset : piece.offset + piece.numel])
            for flat in self.partition.flats
            for piece in flat.pieces
        }
