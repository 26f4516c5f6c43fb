"""The common part of the scripts that run one rank: ``python SCRIPT RANK RANKS PORT FOLDER [CASE ...] [-CASE ...]``.

A case is a function. Tests read its return value (JSON) by the name of the case; tensors are in files. All ranks run
the same cases in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import Loss, ModelSpec
from rlhf_testing.suite_losses import TokenLoss
from safetensors.torch import save_file
from zero_cases import spec

RANK, RANKS, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])

Cases = dict[str, Callable[[], Any]]


def adder(cases: Cases) -> Callable[[str], Callable[[Callable[[], Any]], Callable[[], Any]]]:
    """A decorator that adds a case under a name."""

    def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def add(function: Callable[[], Any]) -> Callable[[], Any]:
            cases[name] = function
            return function

        return add

    return case


def here(**options: Any) -> ModelSpec:
    return spec(FOLDER, RANK, RANKS, PORT, **options)


def keep(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    if RANK == 0:
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, FOLDER / f"{name}.safetensors")


def stepper(mine: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``steps(trainer, numbers, loss)`` updates with the micro-batches of ``mine(number, loss)``. It returns [loss on
    this rank, norm, rate, reason of a skip] of each step."""

    def steps(of: Any, numbers: Any, loss: Loss | None = None) -> list[Any]:
        done = []
        for number in numbers:
            sums, result = of.update(mine(number, loss or TokenLoss()), loss or TokenLoss(), {}, {})
            done.append([sums["loss"][0], result.grad_norm, result.lr, result.skipped])
        return done

    return steps


def held(of: Any, view: str = "live") -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.weights(view)}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def run(cases: Cases) -> None:
    """Run every case, or those whose names start with a word of the command line; ``-CASE`` leaves one out. Ends this
    process."""
    only = tuple(word for word in sys.argv[5:] if not word.startswith("-"))
    left_out = {word[1:] for word in sys.argv[5:] if word.startswith("-")}
    assert left_out <= cases.keys(), left_out - cases.keys()
    results = {}
    for name, function in cases.items():
        if name in left_out or (only and not name.startswith(only)):
            continue
        start = time.process_time()
        results[name] = function()
        print(name, f"{time.process_time() - start:.1f} s of processor", flush=True)
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # a case may have broken the process group, and a normal exit could hang
