"""One architecture, tiny and random, through a trainer and through transformers alone."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import RlhfError
from rlhf.interfaces import ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_plugin_local.config import TorchTrainerConfig
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_plugin_sft.nll import NLL
from rlhf_testing.tiny_architectures import tiny_architecture
from transformers import AutoModelForCausalLM

CLOSE = 1e-3
"""Largest difference of log-probs, in nats, and of gradients, relative, that is taken for rounding."""
SHORT, LONG = (7, 3, 6, 8), (30, 45, 21, 30)
"""Lengths within and beyond the window of the tiny models."""
FRONTS = ((14, (20, 31, 26)), (5, (8, 7)), (30, (40, 33)))
"""(tokens in common, lengths of the sequences)."""

ATTENTION = {"falcon with alibi": "sdpa"}
"""Where transformers' ``eager`` is wrong: it adds alibi twice."""


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
    return weigh(pack(units), NLL().reduce())


def reference(folder: Path, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """[T - 1] of a sequence's tokens after the first."""
    ids_T = torch.tensor(ids)
    with torch.no_grad():  # a dynamic rotary embedding keeps the frequencies of the longest sequence; this resets them
        model(input_ids=ids_T[None, :1], use_cache=False)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A row of the table: ``layout``, and the differences by what is tried; or ``failed``: what ended it."""
    row: dict[str, Any] = {"name": name}
    try:
        tiny_architecture(folder, name)
        model = reference(folder, ATTENTION.get(name, "eager"))
        tried = batches()
        with torch.no_grad():
            expected = {k: torch.cat([logprobs(model, ids) for ids in v]) for k, v in tried.items()}
            ids = tried["alone"][0]
            row["context"] = (logprobs(model, [ids[0] + 1, *ids[1:]]) - logprobs(model, ids)).abs().max().item()
        if not all(e.isfinite().all() for e in expected.values()):
            raise ArithmeticError("the tiny model's log-probs are not finite")
    except Exception as error:
        return row | {"verdict": "not built", "failed": first_line(error), "trace": traceback.format_exc(limit=-6)}
    try:
        trainer = trainer_of(folder)
        row["layout"] = getattr(trainer.loaded, "layout", "shared")
        for what, sequences in tried.items():
            batch = batch_of(sequences)
            [got] = trainer.forward([batch], ["logprobs"])
            row[what] = (got["logprobs"][batch.tok["loss_mask"]] - expected[what]).abs().max().item()
        row["noisy"] = getattr(trainer.loaded, "noisy", False)
        if not row["noisy"]:  # else a note says that gradients depend on what is drawn
            mixed = tried["long"] + tried["shared"]
            row["gradient"] = gradient_difference(trainer, model, mixed)
            if model.supports_gradient_checkpointing:
                row["recomputed"] = gradient_difference(trainer_of(folder, True), model, mixed)
    except RlhfError as error:
        return row | {"verdict": "refused", "failed": first_line(error), "trace": traceback.format_exc(limit=-6)}
    except Exception as error:
        return row | {"verdict": "raw", "failed": first_line(error), "trace": traceback.format_exc(limit=-6)}
    right = all(row[k] < CLOSE for k in (*tried, "gradient", "recomputed") if k in row)
    return row | {"verdict": "right" if right else "WRONG"}


def trainer_of(folder: Path, recompute: bool = False) -> TorchTrainer:
    """The trainer, after the checks of a run's start.

    Args:
        recompute: layers are computed again in the backward pass.
    """
    spec = ModelSpec(RoleSpec("policy", "lm", True), str(folder), "fp32", gradient_checkpointing=recompute)
    config = TorchTrainerConfig(lr=1e-3, device="cpu")
    TorchTrainer.check_files(spec)
    TorchTrainer.check(config, spec, "cpu")
    return TorchTrainer(config, spec)


def gradient_difference(trainer: TorchTrainer, model: Any, sequences: list[list[int]]) -> float:
    """|ours - transformers' alone| / |transformers' alone|, in training mode, over all parameters."""
    trainer.accumulate([batch_of(sequences)], NLL(), {}, {})
    model.zero_grad()
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
