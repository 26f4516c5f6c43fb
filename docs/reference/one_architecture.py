"""One architecture, small and random, through every trainer and sampler and through transformers alone.

    python docs/reference/one_architecture.py CONFIG.json

``CONFIG.json`` is the ``config.json`` of a model on the hub. A small random model of the same proportions is made
(:mod:`tests.support.small_config`). Its log-probs and gradients are compared with those of transformers alone. Then
``rlhf train`` makes a dry run and one step with each trainer and sampler. The command prints the line of
``architectures.md`` and the reasons of what is refused. It ends with 1 where numbers are wrong or something fails
without a reason in words, with 2 where no small model can be made of the config.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from architecture_page import COLUMNS, heading, line, reasons
from architecture_runs import PARTS, first_line, in_process, run_parts
from rlhf.errors import ConfigError, RlhfError
from rlhf.interfaces import ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_sft import NLL
from transformers import AutoModelForCausalLM, __version__
from transformers.utils import logging

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for tests.support
from tests.support.small_config import published_fields, small_config
from tests.support.tiny_architectures import causal_types, random_model, tiny_architecture
from tests.support.tiny_sizes import NOT_BUILT, VARIANTS

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


def build(folder: Path, name: str, published: bool) -> dict[str, Any]:
    """Make the model of a type or a variant. Returns ``proportions``: ``published``, or ``set`` where the sizes are
    those of :mod:`tests.support.tiny_sizes`: for variants, and for types that cannot be small in proportion."""
    if published and name not in VARIANTS:
        try:
            random_model(folder, small_config(published_fields(name)))
            return {"proportions": "published"}
        except NotImplementedError:
            raise
        except Exception:  # any exception: sizes may depend on each other in any way
            shutil.rmtree(folder, ignore_errors=True)
    tiny_architecture(folder, name)
    return {"proportions": "set"}


def measure(name: str, folder: Path, published: bool = False) -> dict[str, Any]:
    """A row of the table, for a type of transformers or a variant of one. See :func:`compare`.

    Args:
        published: at the proportions of the published model; else at the smallest sizes.
    """
    row: dict[str, Any] = {"name": name}
    try:
        row |= build(folder, name, published)
    except Exception as error:
        return row | failed("not built", error)
    return row | compare(folder, ATTENTION.get(name, "eager"))


def compare(folder: Path, attention: str = "eager") -> dict[str, Any]:
    """``layout``, and the differences from transformers alone by what is tried; or ``failed``: what ended it."""
    row: dict[str, Any] = {}
    try:
        model = reference(folder, attention)
        row["size"] = size(model)
        cases = batches()
        with torch.no_grad():
            expected = {k: torch.cat([logprobs(model, ids) for ids in v]) for k, v in cases.items()}
            ids = cases["alone"][0]
            row["context"] = (logprobs(model, [ids[0] + 1, *ids[1:]]) - logprobs(model, ids)).abs().max().item()
        if not all(e.isfinite().all() for e in expected.values()):
            raise ArithmeticError("the small model's log-probs are not finite")
    except Exception as error:
        return row | failed("not built", error)
    try:
        trainer = trainer_of(folder)
        row["layout"] = getattr(trainer.loaded_model, "layout", "shared")
        for case, sequences in cases.items():
            batch = batch_of(sequences)
            [outputs] = trainer.forward([batch], ["logprobs"])
            row[case] = (outputs["logprobs"][batch.tok["loss_mask"]] - expected[case]).abs().max().item()
        row["noisy"] = getattr(trainer.loaded_model, "noisy", False)
        if not row["noisy"]:  # else a note says that gradients depend on what is drawn
            mixed = cases["long"] + cases["shared"]
            row["gradient"] = gradient_difference(trainer, model, mixed)
            if model.supports_gradient_checkpointing:
                row["recomputed"] = gradient_difference(trainer_of(folder, True), model, mixed)
    except RlhfError as error:
        return row | failed("refused", error)
    except Exception as error:
        return row | failed("raw", error)
    right = all(row[k] < CLOSE for k in (*cases, "gradient", "recomputed") if k in row)
    return row | {"verdict": "right" if right else "WRONG"}


def failed(verdict: str, error: Exception) -> dict[str, Any]:
    words = f"{type(error).__name__}: {first_line(error)}"
    return {"verdict": verdict, "failed": words, "trace": traceback.format_exc(limit=-6)}


def size(model: Any) -> str:
    """The sizes of a small model, in words."""
    config = model.config.get_text_config().to_dict()
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    words = [f"{name} {config[name]}" for name in names if isinstance(config.get(name), int)]
    return ", ".join([*words, f"{model.num_parameters() / 1e6:.2g} million parameters"])


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
    reference_grads = {n: p.grad for n, p in model.named_parameters()}
    difference, size = 0.0, 0.0
    for name, p in trainer.module.named_parameters():
        want = torch.zeros_like(p) if reference_grads[name] is None else reference_grads[name]
        difference += ((0.0 if p.grad is None else p.grad) - want).square().sum().item()
        size += want.square().sum().item()
    return float((difference / size) ** 0.5)


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config of the hub's form. Raises ConfigError where it is none, or of no causal language model."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read as JSON ({first_line(error)}). Name the config.json of a model on the hub."
        ) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{str(path)!r} has no text in model_type. Name the config.json of a model on the hub.")
    if kind not in causal_types():
        raise ConfigError(
            f"{str(path)!r}: model_type {kind!r} is no causal language model of transformers {__version__}. Models "
            "with code of their own, encoders and newer types cannot be probed; a newer transformers may have it."
        )
    if kind in NOT_BUILT:
        raise ConfigError(f"{str(path)!r}: model_type {kind!r}: {NOT_BUILT[kind]}")
    return fields


def probe(name: str, folder: Path, parts: list[str], limit: float) -> dict[str, Any]:
    """The row of a type or a variant, with the runs of ``parts``."""
    return with_runs({"name": name} | in_process(lambda: measure(name, folder, True), limit), folder, parts, limit)


def probe_config(path: Path, folder: Path, parts: list[str], limit: float) -> dict[str, Any]:
    """The row of a config file. Raises ConfigError where no small model can be made of it."""
    fields = read_config(path)
    try:
        random_model(folder, small_config(fields))
    except Exception as error:  # any exception: the config may have any content
        raise ConfigError(
            f"{str(path)!r}: transformers makes no small {fields['model_type']!r} of it ({type(error).__name__}: "
            f"{first_line(error)}). Compare its fields with those of a published model of the type."
        ) from None
    row = {"name": fields["model_type"], "proportions": "published"}
    return with_runs(row | in_process(lambda: compare(folder), limit), folder, parts, limit)


def with_runs(row: dict[str, Any], folder: Path, parts: list[str], limit: float) -> dict[str, Any]:
    if row["verdict"] == "not built":
        return row
    return row | {"runs": run_parts(folder, parts, limit)}


def prepare() -> None:
    """Quiet, on one thread, and with everything imported that the processes of single models need."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where it is installed, warns that it guesses


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"trainers and samplers; default {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, help="where the small model is kept; it must not exist")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one trainer or sampler")
    options = parser.parse_args(words)
    parts = [part.strip() for part in options.parts.split(",")]
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts: not known: {', '.join(unknown)}. Known: {', '.join(PARTS)}")
    if options.folder is not None and options.folder.exists():
        parser.error(f"--folder {str(options.folder)!r} exists: name another one, or delete it")
    prepare()
    with tempfile.TemporaryDirectory(prefix="rlhf-architectures-") as place:
        try:
            row = probe_config(options.config, options.folder or Path(place) / "model", parts, options.limit)
        except ConfigError as error:
            sys.stderr.write(f"one_architecture: {error}\n")
            return 2
    sys.stdout.write("\n".join([row.get("size", ""), heading(COLUMNS), line(row), *reasons(row)]).strip() + "\n")
    return int(bad(row))


def bad(row: dict[str, Any]) -> bool:
    """Whether something is wrong here, as opposed to refused."""
    return any(r["verdict"] in ("WRONG", "raw") for r in (row, *row.get("runs", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
