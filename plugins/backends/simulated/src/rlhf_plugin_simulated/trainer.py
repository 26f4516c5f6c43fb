"""The trainer ``simulated``: counts optimizer steps and takes time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from rlhf.errors import CapabilityError
from rlhf.interfaces import (
    ApplyResult,
    ComponentConfig,
    Loss,
    ModelSpec,
    SendsWeights,
    Sums,
    TakesWeights,
    Trainer,
    TrainerFacts,
)
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.types import Head
from torch import Tensor

STATE = "simulated.json"


class SimulatedTrainerConfig(ComponentConfig):
    seconds: Annotated[float, Field(ge=0)] = 1.0
    """Seconds of an optimizer step."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Simulated seconds per second."""


class SimulatedTrainer(SendsWeights, TakesWeights, Trainer):
    """Its weights are one number: the number of optimizer steps so far. Outputs are zero, and the norm of each gradient
    is one, so that every step counts as an update."""

    name = "simulated"
    Config = SimulatedTrainerConfig

    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None:
        self.config: SimulatedTrainerConfig = self.Config() if config is None else config  # type: ignore[assignment]
        self.spec = spec
        self.steps = 0

    def facts(self) -> TrainerFacts:
        return TrainerFacts(eos_token_ids=(1,), vocabulary=32)

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        _check_view(view)
        heads = [resolve_head(output) for output in outputs]
        sizes = {"last_token": "sequences"}
        return [{h.name: torch.zeros(getattr(m, sizes.get(h.over, "tokens"))) for h in heads} for m in micros]

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        return {"loss": (0.0, 0.0)}

    def apply(self) -> ApplyResult:
        time.sleep(self.config.seconds / self.config.speed)
        self.steps += 1
        return ApplyResult(grad_norm=1.0, lr=0.0)

    def zero_grad(self) -> None:
        """Does nothing, because there are no gradients."""

    def gradients(self) -> dict[str, Tensor]:
        return {"steps": torch.zeros(1)}

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        _check_view(view)
        yield "steps", torch.tensor([float(self.steps)])

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.steps = int(dict(weights)["steps"])

    def export(self, path: Path, view: str = "live") -> None:
        """Write the number of optimizer steps into the folder, because there is no model."""
        _check_view(view)
        self.save(path)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / STATE).write_text(json.dumps({"steps": self.steps}), encoding="utf-8")
        (path / "config.json").write_text("{}", encoding="utf-8")

    def load(self, path: Path) -> None:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        self.steps = state["steps"]


def _check_view(view: str) -> None:
    if view != "live":
        raise CapabilityError(f"trainer 'simulated' has no view {view!r}; it has 'live'")
