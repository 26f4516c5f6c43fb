"""Time whole training steps of TRL on the same work: its trainers for GRPO, SFT, DPO and reward models, as a user would
run them on a CPU, and with more of its options (``Options``) on a GPU.

Gradient checkpointing, which TRL turns on by default, is off: it saves memory and costs time.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
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
    Ended,
    arm_arguments,
    reward,
    write,
)

Options = dict[str, Any]
"""Fields of TRL's configs."""


def common(precision: str, steps: int, output: str, parts: int = 1) -> Options:
    """Options of all trainers."""
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


def load(path: Path, scores: bool = False, attention: str | None = None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_pretrained(str(path), dtype=torch.float32, attn_implementation=attention)
    return model, AutoTokenizer.from_pretrained(str(path))


def grpo_trainer(model: Any, tokenizer: Any, prompts: list[str], options: Options, forced: bool) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [reward(p, c) for p, c in zip(prompts, completions, strict=True)]

    length = {"ignore_eos": True} if options.get("use_vllm") else {"min_new_tokens": MAX_NEW_TOKENS}
    config = GRPOConfig(
        **options,
        per_device_train_batch_size=PROMPTS * SAMPLES // options["gradient_accumulation_steps"],
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW_TOKENS,
        generation_kwargs=length if forced else None,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        temperature=1.0,
    )
    dataset = Dataset.from_list([{"prompt": p} for p in prompts])
    return GRPOTrainer(model, score, args=config, train_dataset=dataset, processing_class=tokenizer)


def sft_trainer(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: Options) -> Any:
    """With ``packing`` all rows of a step are one, as they are where shorter rows of packed ones make a batch: TRL's
    collator joins them."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    count = 1 if options.get("packing") else ROWS
    length = (LONGEST + 8) * ROWS // count
    config = SFTConfig(**options, per_device_train_batch_size=count, max_length=length)
    return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def dpo_trainer(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: Options, cached: bool = False) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    longest = max(LONGEST, LONG_PROMPT + ANSWERS[1]) + 8
    config = DPOConfig(**options, per_device_train_batch_size=ROWS, max_length=longest, precompute_ref_log_probs=cached)
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def reward_trainer(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: Options) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(**options, per_device_train_batch_size=ROWS, max_length=LONGEST + 8)
    return RewardTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def make(workload: str, work: Path, options: Options, attention: str | None = None) -> Any:
    """The trainer of one workload."""
    if workload == "reward":
        return reward_trainer(*load(work / "scalar", scores=True), lines(work / "pairs.jsonl"), options)
    natural = workload == "grpo-natural"
    model, tokenizer = load(work / ("ending" if natural else "model"), attention=attention)
    if workload == "sft":
        return sft_trainer(model, tokenizer, lines(work / "rows-1.jsonl"), options)
    if workload.startswith("dpo"):
        rows = lines(work / ("pairs-prompts.jsonl" if workload == "dpo-prompts" else "pairs.jsonl"))
        return dpo_trainer(model, tokenizer, rows, options, cached=workload == "dpo-cached")
    prompts = [row["prompt"] for row in lines(work / "prompts.jsonl")]
    return grpo_trainer(model, tokenizer, prompts, options, forced=not natural)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flash() -> str:
    """The name of FlashAttention for transformers: of a package, or of the kernel that torch has (FlashAttention-2)."""
    import transformers.utils as about
    from transformers import AttentionInterface

    for version in (3, 2):
        if getattr(about, f"is_flash_attn_{version}_available")():
            return f"flash_attention_{version}"
    AttentionInterface.register("varlen_of_torch", flash_of_torch)  # transformers loads what is named "flash"
    return "varlen_of_torch"


def flash_of_torch(module: Any, q_BHTD: Any, k_BKTD: Any, v_BKTD: Any, mask: Any, **options: Any) -> tuple[Any, None]:
    """Attention of one row of packed sequences, whose boundaries TRL's collator gives. [B, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).to(v_BKTD.dtype) for x in (q_BHTD, k_BKTD, v_BKTD))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ends, longest = options["cu_seq_lens_q"], options["max_length_q"]
    out = varlen_attn(
        *(q.contiguous(), k, v, ends, ends, longest, longest), scale=options["scaling"], window_size=(-1, 0)
    )
    return out[None], None


def keep_engine(eager: bool) -> None:
    """A trainer with vLLM takes over the engine of the one before, and sends its weights to it before it samples. TRL
    has no option for an engine that is not compiled."""
    from trl.generation import vllm_generation

    if DEVICE == "cpu":  # an engine there packs its weights when it starts, and TRL's sync finds no parameters any more
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = lambda layer, **_: setattr(
            layer, "cpu_linear", torch.nn.functional.linear
        )
    start, engines = vllm_generation.LLM, []

    def engine(**options: Any) -> Any:
        if not engines:
            engines.append(start(**options, enforce_eager=eager))
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # TRL set them; the next trainer would be a rank of several
            os.environ.pop(name, None)
        return engines[0]

    vllm_generation.LLM = engine


def measure(
    workload: str,
    precision: str,
    work: Path,
    clock: Clock,
    steps: int,
    parts: int = 1,
    options: Options | None = None,
    attention: str | None = None,
) -> dict[str, Any]:
    """Make steps, as many as the clock lets it make, and at most ``steps``.

    Args:
        attention: of transformers; ``flash``: see :func:`flash`.
    """
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as folder:
        fields = common(precision, steps, folder, parts) | (options or {})
        trainer = make(workload, work, fields, flash() if attention == "flash" else attention)
        total = 0

        class Tick(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                # completion tokens of this step (GRPO: mean length x samples), or tokens seen so far (the others)
                nonlocal total
                metrics = trainer._metrics["train"]
                if workload.startswith("grpo"):
                    clock.step(round(metrics["completions/mean_length"][-1] * PROMPTS * SAMPLES))
                else:
                    start, total = total, metrics["num_tokens"][-1]
                    clock.step(int(total - start))

        trainer.add_callback(Tick())
        with suppress(Ended):
            clock.begin()
            trainer.train()
        trainer.accelerator.free_memory()  # it keeps the model and the optimizer of every trainer
        first = next(entry for entry in trainer.state.log_history if "loss" in entry)
        return clock.result() | {"first": {name: first[name] for name in ("loss", "grad_norm")}}


def main() -> None:
    arguments = arm_arguments(__doc__)
    torch.set_num_threads(THREADS)
    clock, steps = Clock(arguments.warmup), arguments.warmup + arguments.steps
    result = measure(arguments.workload, arguments.precision, arguments.work, clock, steps, arguments.parts)
    write(arguments.result, result)


if __name__ == "__main__":
    main()
