"""Which architectures of transformers are trained rightly, and how: ``python docs/architectures.py``.

Every type that is a causal language model is made tiny and random (:mod:`rlhf.testing.tiny_architectures`), loaded as
the trained role of a trainer, and compared with transformers alone: the same weights in a module of their own, its own
attention (``eager``), one sequence at a time, no cache.

    python docs/architectures.py                        # all types and variants
    python docs/architectures.py --only lfm2,mamba2 -v   # some of them, with their errors
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import RlhfError
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch, SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.testing.tiny_architectures import VARIANTS, causal_types, tiny_architecture
from rlhf.types import LossOutput, Reduce, RoleSpec
from rlhf_plugin_local.config import TorchTrainerConfig
from rlhf_plugin_local.trainer import TorchTrainer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

CLOSE = 1e-3
"""Largest difference of log-probs, in nats, and of gradients, relative, that is taken for rounding."""
SHORT, LONG = (7, 3, 6, 8), (30, 45, 21, 30)
"""Lengths within and beyond the window of the tiny models."""
FRONTS = ((14, (20, 31, 26)), (5, (8, 7)), (30, (40, 33)))
"""(tokens in common, lengths of the sequences)."""


class Nll(Loss):
    name = "nll"

    def outputs(self):
        return ("logprobs",)

    def reduce(self):
        return {"nll": Reduce("token_mean")}

    def __call__(self, x):
        return LossOutput({"nll": -x["logprobs"]})


# ------------------------------------------------------------------------------------------ one model


def batches() -> dict[str, list[list[int]]]:
    """Sequences of token ids that are computed together, by what is tried."""
    g = torch.Generator().manual_seed(1)

    def draw(length: int) -> list[int]:
        return torch.randint(3, 90, (length,), generator=g).tolist()

    fronts = [(draw(common), lengths) for common, lengths in FRONTS]
    shared = [front + draw(length - len(front)) for front, lengths in fronts for length in lengths]
    short, long = [draw(n) for n in SHORT], [draw(n) for n in LONG]
    return {"alone": long[1:2], "packed": short, "long": long, "shared": shared}


def batch_of(sequences: list[list[int]]) -> Batch:
    units = [UnitData([SequenceData(ids, {"loss_mask": [i > 0 for i in range(len(ids))]})]) for ids in sequences]
    return weigh(pack(units), Nll().reduce())


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """[T - 1] of a sequence's tokens after the first."""
    ids_T = torch.tensor(ids)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A row of the table: ``layout``, and the differences by what is tried; or ``failed``: what ended it."""
    row: dict[str, Any] = {"name": name}
    try:
        tiny_architecture(folder, name)
        model = reference(folder)
        tried = batches()
        with torch.no_grad():
            expected = {k: torch.cat([logprobs(model, ids) for ids in v]) for k, v in tried.items()}
            ids = tried["alone"][0]
            row["context"] = (logprobs(model, [ids[0] + 1, *ids[1:]]) - logprobs(model, ids)).abs().max().item()
        if not all(e.isfinite().all() for e in expected.values()):
            raise ArithmeticError("the tiny model's log-probs are not finite")
    except Exception as error:
        return row | {"verdict": "not built", "failed": first_line(error), "trace": traceback.format_exc()}
    try:
        spec = ModelSpec(RoleSpec("policy", "lm", True), str(folder), "fp32")
        trainer = TorchTrainer(TorchTrainerConfig(lr=1e-3, device="cpu"), spec)
        row["layout"] = getattr(trainer.loaded, "layout", "shared")
        for what, sequences in tried.items():
            batch = batch_of(sequences)
            [got] = trainer.forward([batch], ["logprobs"])
            row[what] = (got["logprobs"][batch.tok["loss_mask"]] - expected[what]).abs().max().item()
        row["gradient"] = gradient_difference(trainer, model, tried["long"] + tried["shared"])
    except RlhfError as error:
        return row | {"verdict": "refused", "failed": first_line(error), "trace": traceback.format_exc()}
    except Exception as error:
        return row | {"verdict": "raw", "failed": first_line(error), "trace": traceback.format_exc()}
    right = all(row[k] < CLOSE for k in (*tried, "gradient"))
    return row | {"verdict": "right" if right else "WRONG"}


def gradient_difference(trainer: TorchTrainer, model: Any, sequences: list[list[int]]) -> float:
    """|ours - transformers' alone| / |transformers' alone|, in training mode, over all parameters."""
    trainer.accumulate([batch_of(sequences)], Nll(), {}, {})
    model.train()
    for module in model.modules():  # nothing random is trained on
        for name in [n for n in vars(module) if "jitter" in n]:
            setattr(module, name, 0.0)
    tokens = sum(len(ids) - 1 for ids in sequences)
    for ids in sequences:
        (-logprobs(model, ids).sum() / tokens).backward()
    theirs = {n: p.grad for n, p in model.named_parameters()}
    apart, size = 0.0, 0.0
    for name, p in trainer.module.named_parameters():
        want = torch.zeros_like(p) if theirs[name] is None else theirs[name]
        apart += ((0.0 if p.grad is None else p.grad) - want).square().sum().item()
        size += want.square().sum().item()
    return float((apart / size) ** 0.5)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# ------------------------------------------------------------------------------------------- all models


def run(name: str, limit: float) -> dict[str, Any]:
    """:func:`measure` in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-architectures-"))
    process = context.Process(target=_child, args=(name, folder))
    process.start()
    process.join(limit)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    try:
        return json.loads((folder / "row.json").read_text())
    except OSError:
        how = f"took more than {limit:g} seconds" if late else f"its process ended with {process.exitcode}"
        return {"name": name, "verdict": "raw", "failed": how}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(name: str, folder: Path) -> None:
    row = measure(name, folder / "model")
    (folder / "row.part").write_text(json.dumps(row))
    (folder / "row.part").rename(folder / "row.json")


def line(row: dict[str, Any]) -> str:
    figures = [f"{k} {row[k]:.1e}" for k in ("alone", "packed", "long", "shared", "gradient", "context") if k in row]
    words = [f"{row['name']:36} {row['verdict']:9} {row.get('layout', '-'):7}", *figures, row.get("failed", "")]
    return "  ".join(words).rstrip()


def summary(rows: list[dict[str, Any]]) -> str:
    out = []
    for verdict in ("right", "WRONG", "refused", "raw", "not built"):
        names = [row["name"] for row in rows if row["verdict"] == verdict]
        out.append(f"{verdict} ({len(names)}): {'; '.join(names)}")
    blind = [row["name"] for row in rows if row.get("context", 1.0) < 10 * CLOSE]
    return "\n".join([*out, f"log-probs hardly depend on the context ({len(blind)}): {'; '.join(blind)}"])


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of types or variants, separated by commas")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one of them")
    parser.add_argument("-v", action="store_true", dest="verbose", help="tracebacks of what failed")
    options = parser.parse_args()
    known = [*causal_types(), *VARIANTS]
    names = [n.strip() for n in options.only.split(",")] if options.only else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}. Known: {', '.join(known)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where it is installed, warns that it guesses
    with tempfile.TemporaryDirectory() as folder:  # what is imported on the way is then imported for all
        measure("llama", Path(folder))
    rows = []
    for name in names:
        rows.append(run(name, options.limit))
        say(line(rows[-1]))
        if options.verbose and "trace" in rows[-1]:
            say(rows[-1]["trace"])
    say(summary(rows))
    sys.exit(any(row["verdict"] in ("WRONG", "raw") for row in rows))


if __name__ == "__main__":
    main()
