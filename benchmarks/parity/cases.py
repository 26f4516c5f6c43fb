"""Training data and settings of both sides: hyperparameters, rows and the cases. Standard library only: both Python
environments import it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, ROWS = 20, 6
"""Optimizer steps, and rows (pairs) of each: one device, one micro-batch, no accumulation."""
MAX_TOKENS = 64
TRAINING: dict[str, Any] = {
    "lr": 3e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "schedule": "constant",
}
"""AdamW in fp32, under the names of our run file; a case may override values."""
BETA = 0.1
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=.,:? "


@dataclass(frozen=True)
class Case:
    """One training run of each side."""

    name: str
    form: str
    """Form of the rows: ``demonstrations``, ``pairs``, ``margins`` (pairs with a margin), ``labels``."""
    trainer: str
    """TRL's: ``sft``, ``dpo``, ``kto``, ``reward``, ``cpo``, ``orpo``."""
    trl: dict[str, Any] = field(default_factory=dict)
    """Options of its config."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Sections of our run file other than ``run``, ``policy``, ``data`` and ``trainer``."""
    training: dict[str, Any] = field(default_factory=dict)
    """Overrides of :data:`TRAINING`."""

    @property
    def head(self) -> str:
        """Head of the model: ``lm``, or ``scalar`` for a reward model."""
        return "scalar" if self.trainer == "reward" else "lm"

    @property
    def batch_size(self) -> int:
        """Rows of a step as the file of :func:`rows` has them: KTO makes two of a pair."""
        return ROWS // 2 if self.trainer == "kto" and self.form == "pairs" else ROWS


def _dpo(name: str, trl: dict[str, Any], options: dict[str, Any], beta: float = BETA, **training: Any) -> Case:
    return Case(
        f"dpo-{name}",
        "pairs",
        "dpo",
        {"beta": beta, **trl},
        {"algorithm": {"use": "dpo", "loss": {"beta": beta, **options}}},
        training,
    )


def _dpo_type(name: str, beta: float = BETA, lr: float | None = None, **options: Any) -> Case:
    """A loss type whose options have equal names on both sides."""
    training = {} if lr is None else {"lr": lr}
    return _dpo(name, {"loss_type": [name], **options}, {"loss_type": name, **options}, beta, **training)


def _loss(name: str, form: str, trainer: str, trl: dict[str, Any], algorithm: str, **loss_options: Any) -> Case:
    return Case(name, form, trainer, trl, {"algorithm": {"use": algorithm, "loss": loss_options}})


def _reward(name: str, trl: dict[str, Any] | None = None, **options: Any) -> Case:
    form = "margins" if "data" in options else "pairs"
    return Case(name, form, "reward", trl or {}, {"algorithm": "reward_model", **options}, {"lr": 1e-3})


def _cpo(
    name: str,
    trl: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    beta: float = BETA,
    **shared: Any,
) -> Case:
    shared = {"beta": beta, **shared}
    return _loss(name, "pairs", "cpo", {**shared, **(trl or {})}, "cpo", **shared, **(options or {}))


_APO = {"loss_type": "apo_zero_unpaired"}
CASES: tuple[Case, ...] = (
    Case("sft", "demonstrations", "sft", {}, {"algorithm": "sft"}),
    _loss("sft-dft", "demonstrations", "sft", {"loss_type": "dft"}, "sft", use="dft"),
    _loss("sft-smoothed", "demonstrations", "sft", {"label_smoothing_factor": 0.1}, "sft", label_smoothing=0.1),
    Case(
        "sft-linear",
        "demonstrations",
        "sft",
        {},
        {"algorithm": "sft"},
        {"schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.25, "betas": (0.9, 0.95)},
    ),
    *map(_dpo_type, ("sigmoid", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")),
    *map(_dpo_type, ("sft", "sigmoid_norm")),
    _dpo_type("hinge", beta=0.02),  # at 0.1 it is 0 before the last step
    _dpo_type("discopop", lr=2e-3),
    _dpo_type("robust", lr=1e-3, label_smoothing=0.1),
    *(_dpo_type(name, label_smoothing=0.1) for name in ("exo_pair", "aot", "aot_unpaired")),
    _dpo(
        "weighted",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    *(
        _dpo(name, {"f_divergence_type": name}, {"f_divergence": name}, lr=3e-4)
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    _dpo("ld", {"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
    _dpo("wpo", {"use_weighting": True}, {"wpo": True}, lr=1e-3),
    Case(
        "dpo-precomputed",
        "pairs",
        "dpo",
        {"beta": BETA, "precompute_ref_log_probs": True},
        {"algorithm": {"use": "dpo", "loss": {"beta": BETA}}, "reference": {"precompute": True}},
    ),
    _loss("kto", "labels", "kto", {"beta": BETA}, "kto", beta=BETA),
    _loss(
        "kto-weights",
        "labels",
        "kto",
        {"beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        "kto",
        beta=BETA,
        desirable_weight=1.3,
        undesirable_weight=0.7,
    ),
    _loss("kto-apo", "labels", "kto", {**_APO, "beta": BETA}, "kto", **_APO, beta=BETA),
    _loss("kto-pairs", "pairs", "kto", {"beta": BETA}, "kto_pair", beta=BETA),
    _reward("reward"),
    _reward("reward-margin", data={"margin": "margin"}),
    _reward(
        "reward-center",
        {"center_rewards_coefficient": 0.1},
        algorithm={"use": "reward_model", "loss": {"center_coef": 0.1}},
    ),
    _cpo("cpo"),
    _cpo("cpo-hinge", beta=0.02, loss_type="hinge"),
    _cpo("cpo-ipo", loss_type="ipo"),
    _cpo("cpo-smoothed", label_smoothing=0.1),
    _cpo("cpo-simpo", {"simpo_gamma": 0.5}, {"gamma": 0.5}, beta=2.0, loss_type="simpo"),
    _cpo("cpo-alphapo", {"simpo_gamma": 0.1}, {"gamma": 0.1}, beta=2.0, loss_type="simpo", alpha=0.25),
    _loss(
        "simpo",
        "pairs",
        "cpo",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        "simpo",
        beta=2.0,
        gamma=0.5,
    ),
    _loss("orpo", "pairs", "orpo", {"beta": BETA}, "orpo", beta=BETA, nll_on="all"),
)


def alphabet() -> list[str]:
    """Tokens of the tokenizer: one per character."""
    return list(ALPHABET)


def rows(form: str) -> list[dict[str, Any]]:
    """STEPS x ROWS rows in their order of training, plain text; the same on every machine.

    The rows can be learned, so that a wrong gradient changes later losses: better answers are mostly from the first
    half of the alphabet, worse ones from the second.
    """
    draw = random.Random(f"parity {form}")

    def text(low: int, high: int, share: float = 0.5) -> str:
        """Random text, ``share`` of it from the alphabet's first half. Only ``random()`` is used: its values are the
        same in every version of Python."""
        half = len(ALPHABET) // 2
        count = low + int(draw.random() * (high - low + 1))
        return "".join(ALPHABET[int(draw.random() * half) + half * (draw.random() >= share)] for _ in range(count))

    result: list[dict[str, Any]] = []
    for number in range(STEPS * ROWS):
        prompt, better, worse = text(4, 16), text(3, 40, 0.9), text(3, 40, 0.1)
        if form == "demonstrations":
            result.append({"prompt": prompt, "completion": better})
        elif form == "labels":
            label = number % ROWS in (0, 3, 4) or (number % ROWS != 1 and draw.random() < 0.3)  # both in every batch
            result.append({"prompt": prompt, "completion": better if label else worse, "label": label})
        else:
            margin = {"margin": round(2 * draw.random() - 0.5, 3)} if form == "margins" else {}
            result.append({"prompt": prompt, "chosen": better, "rejected": worse, **margin})
    return result


def unpaired(pairs: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """Pairs as rows with labels: for each batch its chosen answers, then its rejected ones.

    TRL unpairs a thousand pairs at a time, so that its first batches would hold chosen answers only.
    """
    sides = (("chosen", True), ("rejected", False))
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": label}
        for start in range(0, len(pairs), batch_size)
        for side, label in sides
        for pair in pairs[start : start + batch_size]
    ]


def digest(steps: Iterable[Iterable[Iterable[tuple[list[int], int | None]]]]) -> str:
    """SHA-256 of the data that a side trained on: for each step its rows, for each row its sequences (a pair: chosen,
    then rejected), for each sequence the token ids and the number of them before the first trained one (None for a
    scalar head, which has no trained tokens)."""
    plain = [[[[list(ids), start] for ids, start in row] for row in step] for step in steps]
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
