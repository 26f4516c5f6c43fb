"""Programs of ranks: every rank of a group runs the methods ``case_NAME`` of one class, in the same order.

::

    class MyCases(RankCases):
        module = "my_plugin.trainer"

        def case_norm(self):
            return self.steps(make(self.here()), [0])[0][1]

    if __name__ == "__main__":
        MyCases.main()

A case with parameters runs once for each combination of their :meth:`RankCases.values`; its name is ``NAME-VALUE``.
Tests (:mod:`tests.support.rank_tests`) read its return value, which is JSON, by this name. Tensors are in files.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf_testing.suite_losses import TokenLoss
from safetensors.torch import save_file
from torch import Tensor

from tests.support.rank_batches import batch, shares, spec

PREFIX = "case_"


class RankCases:
    """One rank of a group, and the cases that it runs."""

    module: str = ""
    """The module of the trainer, which is imported once for all ranks."""
    share: int = 1
    """Ranks that get the same micro-batches."""

    def __init__(self, rank: int, ranks: int, port: str, folder: Path) -> None:
        self.rank, self.ranks, self.port, self.folder = rank, ranks, port, folder

    @classmethod
    def prepare(cls, folder: Path) -> None:
        """Make the models and checkpoints that cases read, before the ranks start."""

    @classmethod
    def values(cls, parameter: str, case: str) -> Iterable[str]:
        """The values of a case's parameter."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, case: str) -> list[str]:
        """The names of a case's parameters."""
        return list(inspect.signature(getattr(cls, PREFIX + case)).parameters)[1:]

    @classmethod
    def arguments(cls, case: str) -> list[dict[str, str]]:
        """The arguments of each run of a case."""
        names = cls.parameters(case)
        rows = itertools.product(*(cls.values(name, case) for name in names))
        return [dict(zip(names, row, strict=True)) for row in rows]

    @classmethod
    def names(cls) -> dict[str, tuple[str, dict[str, str]]]:
        """{name: (case, arguments)} in the order of the runs: those of a subclass come before those of its bases."""
        cases = [name.removeprefix(PREFIX) for base in cls.__mro__ for name in vars(base) if name.startswith(PREFIX)]
        return {
            "-".join([case, *arguments.values()]): (case, arguments)
            for case in dict.fromkeys(cases)
            for arguments in cls.arguments(case)
        }

    @classmethod
    def main(cls) -> None:
        """``python SCRIPT RANK RANKS PORT FOLDER NAME ...``: run these cases. Ends this process."""
        rank, ranks, port, folder, *names = sys.argv[1:]
        instance, cases, results = cls(int(rank), int(ranks), port, Path(folder)), cls.names(), {}
        assert cases.keys() >= {*names}, f"there are no cases {sorted({*names} - cases.keys())}"
        for name, (case, arguments) in cases.items():
            if name in names:
                start = time.process_time()
                results[name] = getattr(instance, PREFIX + case)(**arguments)
                sys.stdout.write(f"{name} {time.process_time() - start:.1f} s of processor\n")
                sys.stdout.flush()
        (instance.folder / f"rank-{rank}.json").write_text(json.dumps(results))
        os._exit(0)  # a case may have broken the process group, and a normal exit could hang

    # ------------------------------------------------------------------------------ for the cases

    def here(self, **options: Any) -> ModelSpec:
        """The model of this rank; options of :func:`~tests.support.rank_batches.spec`."""
        return spec(self.folder, self.rank, self.ranks, self.port, **options)

    def mine(self, number: int, loss: Loss | None = None, units: int = 7, budget: int = 40) -> list[Batch]:
        """This rank's micro-batches of an optimizer batch."""
        return shares(batch(number, loss, units), self.ranks // self.share, budget)[self.rank // self.share]

    def steps(self, of: Any, numbers: Iterable[int], loss: Loss | None = None) -> list[list[Any]]:
        """Update with the batches of these numbers: [loss on this rank, norm, rate, reason of a skip] of each step."""
        loss, done = loss or TokenLoss(), []
        for number in numbers:
            sums, result = of.update(self.mine(number, loss), loss, {}, {})
            done.append([sums["loss"][0], result.grad_norm, result.lr, result.skipped])
        return done

    def first_gradients(self, of: Any, name: str, micros: Sequence[Batch], loss: Loss) -> list[str]:
        """Rank 0 keeps the gradients of these micro-batches as ``gradients-NAME``. Returns this rank's names."""
        of.accumulate(micros, loss, {}, {})
        gradients = of.gradients()
        self.keep(f"gradients-{name}", gradients)
        of.zero_grad()
        return sorted(gradients)

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Rank 0 writes the tensors to ``NAME.safetensors``."""
        if self.rank == 0:
            save_file(
                {k: v.detach().contiguous().cpu() for k, v in tensors.items()}, self.folder / f"{name}.safetensors"
            )


def held(trainer: Any, view: str = "live") -> dict[str, Tensor]:
    """Copies of the whole weights, on every rank."""
    return {name: value.detach().clone() for name, value in trainer.weights(view, every_rank=True)}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def farthest(a: Sequence[Mapping[str, Tensor]], b: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest difference of two log-probs."""
    return max(float((x["logprobs"] - y["logprobs"]).abs().max()) for x, y in zip(a, b, strict=True))
