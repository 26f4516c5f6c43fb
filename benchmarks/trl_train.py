"""Time whole training steps of TRL on the same work: its trainers for GRPO, SFT, DPO and reward models, as a user would
run them on a CPU.

Gradient checkpointing, which TRL turns on by default, is off: it saves memory and costs time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from settings import (
    ANSWERS,
    BETAS,
    DEVICE,
    EPS,
    LEARNING_RATE,
    LONG_PROMPT,
    LONGEST,
    MAX_GRAD_NORM,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROWS,
    SAMPLES,
    THREADS,
    WEIGHT_DECAY,
    Clock,
    arm_arguments,
    reward,
    write,
)


def common(precision: str, steps: int, output: str, parts: int = 1) -> dict[str, Any]:
    """Options of both trainers."""
    return {
        "output_dir": output,
        "max_steps": steps,
        "use_cpu": DEVICE == "cpu",
        "bf16": precision == "bf16",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": parts,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def load(path: Path, scores: bool = False) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_pretrained(str(path), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(str(path))


def grpo_trainer(model: Any, tokenizer: Any, prompts: list[str], options: dict[str, Any], forced: bool) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [reward(p, c) for p, c in zip(prompts, completions, strict=True)]

    config = GRPOConfig(
        **options,
        per_device_train_batch_size=PROMPTS * SAMPLES // options["gradient_accumulation_steps"],
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW_TOKENS,
        generation_kwargs={"min_new_tokens": MAX_NEW_TOKENS} if forced else None,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        temperature=1.0,
    )
    dataset = Dataset.from_list([{"prompt": p} for p in prompts])
    return GRPOTrainer(model, score, args=config, train_dataset=dataset, processing_class=tokenizer)


def sft_trainer(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**options, per_device_train_batch_size=ROWS, max_length=LONGEST + 8)
    return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def dpo_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], options: dict[str, Any], cached: bool = False
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    longest = max(LONGEST, LONG_PROMPT + ANSWERS[1]) + 8
    config = DPOConfig(**options, per_device_train_batch_size=ROWS, max_length=longest, precompute_ref_log_probs=cached)
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def reward_trainer(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(**options, per_device_train_batch_size=ROWS, max_length=LONGEST + 8)
    return RewardTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def make(workload: str, work: Path, options: dict[str, Any]) -> Any:
    """The trainer of one workload."""
    if workload == "reward":
        return reward_trainer(*load(work / "scalar", scores=True), lines(work / "pairs.jsonl"), options)
    natural = workload == "grpo-natural"
    model, tokenizer = load(work / ("ending" if natural else "model"))
    if workload == "sft":
        return sft_trainer(model, tokenizer, lines(work / "rows-1.jsonl"), options)
    if workload.startswith("dpo"):
        rows = lines(work / ("pairs-prompts.jsonl" if workload == "dpo-prompts" else "pairs.jsonl"))
        return dpo_trainer(model, tokenizer, rows, options, cached=workload == "dpo-cached")
    prompts = [row["prompt"] for row in lines(work / "prompts.jsonl")]
    return grpo_trainer(model, tokenizer, prompts, options, forced=not natural)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    arguments = arm_arguments(__doc__)
    torch.set_num_threads(THREADS)
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as folder:
        options = common(arguments.precision, arguments.warmup + arguments.steps, folder, arguments.parts)
        trainer = make(arguments.workload, arguments.work, options)
        clock, seen = Clock(arguments.warmup), [0]

        class Tick(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                # completion tokens of this step (GRPO: mean length x samples), or tokens seen so far (the others)
                metrics = trainer._metrics["train"]
                if arguments.workload.startswith("grpo"):
                    clock.step(round(metrics["completions/mean_length"][-1] * PROMPTS * SAMPLES))
                else:
                    total = metrics["num_tokens"][-1]
                    clock.step(int(total - seen[0]))
                    seen[0] = total

        trainer.add_callback(Tick())
        trainer.train()
        first = next(entry for entry in trainer.state.log_history if "loss" in entry)
        result = clock.result() | {"first": {name: first[name] for name in ("loss", "grad_norm")}}
    write(arguments.result, result)


if __name__ == "__main__":
    main()
