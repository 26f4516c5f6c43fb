"""`rlhf plan` compared with the measured peak of the same run: `python benchmarks/plan.py MODEL --pairs FILE`.

Every case is one process of `rlhf train` on a CPU. All of its rows are in each step, so each step has the longest rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.loading import load_source
from rlhf_runtime.data.source_layouts import recognise
from settings import THREADS

MIB = 2**20
REWARD = "def score(prompt, completion, row):\n    return len(set(completion)) / 100\n"
"""It differs between the samples of a prompt: groups of equal rewards are not computed."""
SAMPLED = ["--reward", "file:reward.py:score", "--data", "prompts.jsonl"]
PAIRS = ["--data", "pairs.jsonl", "--data.batch_size", "8"]
CASES = {
    "GRPO, 4 prompts x 8 samples of 16 tokens": [
        *["--algo", "grpo", *SAMPLED, "--data.batch_size", "4", "--data.train.0.max_rows", "4"],
        *["--sampling.samples_per_prompt", "8", "--sampling.max_new_tokens", "16"],
    ],
    "GRPO, 8 prompts x 8 samples of 32 tokens": [
        *["--algo", "grpo", *SAMPLED, "--data.batch_size", "8"],
        *["--sampling.samples_per_prompt", "8", "--sampling.max_new_tokens", "32"],
    ],
    "the same with adapters of rank 16": [
        *["--algo", "grpo", *SAMPLED, "--data.batch_size", "8", "--trainer.lora.rank", "16"],
        *["--sampling.samples_per_prompt", "8", "--sampling.max_new_tokens", "32"],
    ],
    "PPO with a critic, 8 prompts x 4 samples of 32 tokens": [
        *["--algo", "ppo", *SAMPLED, "--data.batch_size", "8", "--algorithm.kl.coef", "0.05"],
        *["--sampling.samples_per_prompt", "4", "--sampling.max_new_tokens", "32"],
    ],
    "DPO, 8 pairs": ["--algo", "dpo", *PAIRS],
    "DPO, 8 pairs, gradient checkpointing": ["--algo", "dpo", *PAIRS, "--policy.gradient_checkpointing"],
    "SFT, 8 rows": ["--algo", "sft", "--data", "rows.jsonl", "--data.batch_size", "8"],
    "SFT, 8 rows, weights stored in bf16": [
        *["--algo", "sft", "--data", "rows.jsonl", "--data.batch_size", "8"],
        *["--policy.dtype", "bf16", "--policy.storage", "bf16"],
    ],
    "reward model, 8 pairs": ["--algo", "reward_model", *PAIRS],
}


def write_rows(pairs: Path, folder: Path, count: int) -> None:
    """The first ``count`` pairs as pairs, their first questions as prompts, and their better answers as rows."""
    source = load_source(SourceSection(path=str(pairs), max_rows=count))
    layout = recognise("pairs", source.columns, source.read(0), chat=True)
    rows = [source.read(n) for n in range(len(source))]
    values = [layout.read(row) for row in rows]
    questions = [text(v.get("prompt", v["chosen"]), 0) for v in values]  # a conversation has its prompt
    answers = [text(v["chosen"], -1) for v in values]
    tables = {
        "pairs": rows,
        "prompts": [{"prompt": question} for question in questions],
        "rows": [{"prompt": q, "response": a} for q, a in zip(questions, answers, strict=True)],
    }
    (folder / "reward.py").write_text(REWARD)
    for name, table in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def text(value: str | Sequence[Mapping[str, str]], number: int) -> str:
    """A text, or that of a conversation's message ``number`` without its system message."""
    if isinstance(value, str):
        return value
    return [message["content"] for message in value if message["role"] != "system"][number]


def planned(flags: list[str], folder: Path) -> int:
    """The largest phase in bytes."""
    answer = subprocess.run(["rlhf", "plan", *flags, "--json", "--device", "cpu"], cwd=folder, stdout=subprocess.PIPE)
    plan = json.loads(answer.stdout)
    return max(phase["total"] for group in plan["groups"] for phase in group["phases"].values())


def measured(flags: list[str], folder: Path, steps: int) -> int:
    """The peak of the process's resident memory in bytes."""
    with (folder / "log.txt").open("w") as log:
        run = subprocess.Popen(["rlhf", "train", *flags, "--steps", str(steps)], cwd=folder, stdout=log, stderr=log)
        _, status, usage = os.wait4(run.pid, 0)
    if status:
        sys.exit(f"rlhf train {' '.join(flags)} ended with an error:\n{(folder / 'log.txt').read_text()}")
    return usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=Path, required=True, help="a file of pairs that rlhf reads")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[*map(str, range(len(CASES)))], help="default: all")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    print("| run | plan, MiB | peak, MiB | plan / peak |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(options.pairs, folder, 8)
        for number, (case, case_flags) in enumerate(CASES.items()):
            if options.cases and str(number) not in options.cases:
                continue
            flags = ["--model", str(options.model.resolve()), "--run.threads", str(THREADS), "--policy.dtype", "fp32"]
            flags += [*case_flags, "--output", f"run-{number}"]
            plan, peak = planned(flags, folder), measured(flags, folder, options.steps)
            print(f"| {case} | {plan / MIB:.0f} | {peak / MIB:.0f} | {plan / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
