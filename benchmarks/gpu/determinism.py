"""Two steps in bf16 from the same weights, twice: whether the bits are the same, in the default mode and with
``trainer.deterministic``, and whether the steps change every tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import shapes
import torch
from parts import Part, Section
from torch import Tensor
from trained import nll, policy_spec, rows, trainer_class

LENGTHS, SMALL_LENGTHS = (700, 2500, 33, 860), (40, 300, 7)
STEPS = 2


def run(section: Section) -> None:
    model = shapes.make_06b(section.shared, section.small)
    # The deterministic mode is first, because cuBLAS reads its setting at the first product of a process.
    for name, deterministic in (("deterministic", True), ("", False)):
        run_it = partial(check, section, model, deterministic)
        section.part(", ".join(filter(None, ("the same steps twice", name))), run_it, seconds=15)


def check(section: Section, model: Path, deterministic: bool, part: Part) -> None:
    first = steps(section, model, deterministic, part)
    second = steps(section, model, deterministic, part)
    different = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    part.figures |= {"tensors": len(first), "tensors that differ": len(different), "names": different[:10]}
    if deterministic or section.device == "cpu":
        part.holds("all tensors are equal, bit for bit", not different)


def steps(section: Section, model: Path, deterministic: bool, part: Part) -> dict[str, Tensor]:
    """Copies of the weights after the steps."""
    chosen, loss = trainer_class("torch"), nll()
    config = chosen.Config(device=section.device, lr=1e-4, deterministic=deterministic)
    trainer = chosen(config, policy_spec(model))
    batch = rows(SMALL_LENGTHS if section.small else LENGTHS, shapes.vocabulary(section.small), loss)
    for _ in range(STEPS):
        _, applied = trainer.update([batch, batch], loss, {}, {})
        part.holds("the step was taken", not applied.skipped)
    untouched = {problem: names for problem, names in trainer.coverage().items() if names}
    part.figures |= {"gradient norm": applied.grad_norm, "not trained": untouched}
    part.holds("the steps change every tensor", bool(trainer.coverage()) and not untouched)
    return {name: tensor.clone() for name, tensor in trainer.weights()}
