"""Losses and gradients of TRL's own GRPOTrainer._compute_loss on random tokens, one micro-batch on one device.

    .venv-peers/bin/python benchmarks/parity/trl_policy.py

writes trl-1.16.0-policy.json; tests/test_parity_policy.py compares our losses with it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from trl import GRPOTrainer

RECORDED = Path(__file__).resolve().parent / "trl-1.16.0-policy.json"
LENGTHS = (5, 3, 6, 1)
SEEDS = (0, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "delta": {"delta": 1.5},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.4},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},  # with the whole ratio of trainer and generator as its correction
    "top-entropy": {"top_entropy_quantile": 0.4},
    "stale": {"off_policy_mask_threshold": 0.05},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "unbiased-kl": {"beta": 0.3},
}


def trainer(options: dict[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor) -> SimpleNamespace:
    """The attributes of a trainer that ``_compute_loss`` reads, with fixed outputs in place of a model."""
    identity = lambda x, *rest, **keywords: x  # noqa: E731
    me = SimpleNamespace(
        loss_type="dapo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=max(LENGTHS),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=identity, reduce=identity, pad_across_processes=identity),
    )
    vars(me).update({k: v for k, v in options.items() if k not in ("delta", "use_bias_correction_kl")})
    me.args = SimpleNamespace(
        delta=options.get("delta"),
        use_bias_correction_kl=options.get("use_bias_correction_kl", True),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    me._get_per_token_logps_and_entropies = lambda *args, **keywords: (logprobs, entropies, None)
    me.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(me, *args)
    me.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    me.get_gamma_weights = GRPOTrainer.get_gamma_weights
    return me


def run(options: dict[str, Any], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
    draw = {name: torch.randn(mask.shape, generator=generator) for name in ("now", "old", "ref", "gen", "entropy")}
    logprobs = (-1.5 + 0.3 * draw["now"]).requires_grad_()
    columns = {
        "old_logprobs": logprobs.detach() + 0.25 * draw["old"],
        "ref_logprobs": logprobs.detach() + 0.5 * draw["ref"],
        "gen_logprobs": logprobs.detach() + 0.1 * draw["gen"],
    }
    entropies, advantages = draw["entropy"].abs(), torch.randn(len(LENGTHS), generator=generator)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": columns["old_logprobs"],
        "ref_per_token_logps": columns["ref_logprobs"],
        "sampling_per_token_logps": columns["gen_logprobs"],
    }
    if options.get("loss_type") == "vespo":
        ratio = (columns["old_logprobs"] - columns["gen_logprobs"]).exp()
        inputs["importance_sampling_ratio"] = torch.where(mask, ratio, 1.0)
    loss = GRPOTrainer._compute_loss(trainer(options, logprobs, entropies), SimpleNamespace(training=True), inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    tokens = {"logprobs": logprobs.detach(), **columns, "entropy": entropies, "gradient": gradient}
    return {
        "loss": float(loss.detach()),
        "advantages": advantages.tolist(),
        **{name: [row[:n].tolist() for row, n in zip(values, LENGTHS, strict=True)] for name, values in tokens.items()},
    }


def main() -> None:
    cases = {name: [run(options, seed) for seed in SEEDS] for name, options in CASES.items()}
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    content = {
        "command": "python benchmarks/parity/trl_policy.py",
        "versions": versions,
        "options": CASES,
        "cases": cases,
    }
    RECORDED.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
