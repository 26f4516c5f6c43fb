"""GRPO, DPO, SFT and a reward model of a pretrained chat model on real rows, ours against TRL's, in alternation:
`python benchmarks/real.py --model FOLDER --data FOLDER`.

Before anything is timed, both sides must turn the rows into the same tokens and compute the same gradients of GRPO and
SFT. The first loss and gradient norm of every process are compared too. A difference ends the benchmark.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import report
from run import HERE, circumstances, execute, gate, parsed, parser_of
from settings import write

ROOT = HERE.parent
TARGETS = {"grpo-natural": 5.0, "dpo": 6.0, "sft": 4.0, "reward": 4.0}
"""The project's target: throughput of ours divided by TRL's."""
GRADIENTS = 1e-4
"""Largest distance of the gradients, relative to their norm. transformers' own fp32 log-probs of this model are up to
5e-4 off those in fp64."""
FIRST = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of the first loss and of the first gradient norm."""
ROWS = 8
LONGEST = 256
"""Tokens of a sequence; longer rows are left out."""
SETTINGS: dict[str, Any] = {
    "PROMPTS": 8,
    "SAMPLES": 8,
    "MAX_NEW_TOKENS": 32,
    "ROWS": ROWS,
    "LONGEST": LONGEST,
    "REWARD": "sum",
    "OURS": {"data": {"template": "plain"}},
}
"""Prompts are rendered with the chat template beforehand, so that both sides get the same text."""


# --------------------------------------------------------------------------------------------- the files of the arms


def opened(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


class Maker:
    """Makes the files that all arms share: the model under the names that they know, with a head of scores too, and
    rows as text."""

    def __init__(self, model: Path, data: Path, work: Path) -> None:
        from transformers import AutoTokenizer

        self.model, self.data, self.work = model.resolve(), data, work
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))

    def make(self) -> None:
        for name in ("model", "ending", "lm"):
            (self.work / name).symlink_to(self.model, target_is_directory=True)
        self._scores()
        draw = random.Random(0)
        sums = [f"What is {draw.randrange(10, 100)} + {draw.randrange(10, 100)}?" for _ in range(1024)]
        prompts = [{"prompt": self._prompt(question)} for question in sums]
        tables = {"prompts": prompts, "rows-1": list(self._rows()), "pairs": list(self._pairs())}
        for name, rows in tables.items():
            (self.work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._gate(tables)

    def _scores(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.manual_seed(0)
        auto = AutoModelForSequenceClassification
        model = auto.from_pretrained(str(self.model), num_labels=1, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(self.model))
        # transformers scores the last token that is no padding: with the end token as padding, the one before the end.
        tokenizer.pad_token = tokenizer.unk_token
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(str(self.work / "scalar"))
        tokenizer.save_pretrained(str(self.work / "scalar"))

    def _prompt(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _fits(self, row: dict[str, str]) -> bool:
        answers = [text for name, text in row.items() if name != "prompt"]
        return max(len(self._ids(row["prompt"] + answer)) for answer in answers) < LONGEST

    def _rows(self) -> Iterator[dict[str, str]]:
        rows = opened(self.data / "gsm8k_train.jsonl")
        pairs = ({"prompt": self._prompt(r["question"]), "completion": r["answer"].strip()} for r in rows)
        return islice(filter(self._fits, pairs), ROWS)

    def _pairs(self) -> Iterator[dict[str, str]]:
        """Dialogues of one question."""
        from rlhf.errors import DataError
        from rlhf_runtime.data.conversions import dialogues

        def short() -> Iterator[dict[str, str]]:
            for row in opened(self.data / "hh_harmless_pairs.jsonl.gz"):
                with suppress(DataError):  # the two dialogues have no common prompt
                    pair = dialogues(row, True)
                    if len(pair["prompt"]) == 1 and pair["chosen"] and pair["rejected"]:
                        answers = {name: pair[name] for name in ("chosen", "rejected")}
                        yield {"prompt": self._prompt(pair["prompt"][0]["content"]), **answers}

        return islice(filter(self._fits, short()), ROWS)

    def _gate(self, tables: dict[str, list[dict[str, str]]]) -> None:
        """The batches whose gradients are compared, and the cases of rows."""
        rows = tables["rows-1"]
        answers = [self._ids(row["completion"])[: 4 + 3 * number] for number, row in enumerate(rows[:4])]
        groups = [
            {"prompt": self._ids(row["prompt"]), "answers": answers, "rewards": [0.0, 1.0, 1.0, 0.0]}
            for row in tables["prompts"][:2]
        ]
        demonstrations = [{"prompt": self._ids(r["prompt"]), "answer": self._ids(r["completion"])} for r in rows[:4]]
        (self.work / "gate.json").write_text(json.dumps({"grpo": groups, "sft": demonstrations}))
        cases = {
            "grpo-natural": ("sft", "demonstrations", [p | {"completion": "1"} for p in tables["prompts"][:ROWS]]),
            "sft": ("sft", "demonstrations", rows),
            "dpo": ("dpo", "pairs", tables["pairs"]),
            "reward": ("reward", "pairs", tables["pairs"]),
        }
        plain = {"tokenizer": "lm", "max_tokens": LONGEST + 8, "ours": {"template": "plain"}}
        fields = [plain | dict(zip(("trainer", "form", "rows"), c, strict=True), name=n) for n, c in cases.items()]
        (self.work / "row_cases.json").write_text(json.dumps(fields))


# --------------------------------------------------------------------------------------------- gates and steps


def our_rows(work: Path, workloads: list[str]) -> dict[str, list[dict[str, Any]]]:
    """{workload: its rows as ours tokenises them}."""
    os.environ["PARITY_ROWS"] = str(work / "row_cases.json")  # read where the cases are imported
    sys.path.append(str(HERE / "parity"))
    from ours_rows import encoded
    from row_cases import CASES

    return {case.name: encoded(case, work) for case in CASES if case.name in workloads}


def same_rows(trl: str, work: Path, workloads: list[str]) -> None:
    """Ends the benchmark if the two sides make other tokens, or train on other tokens, of the same rows."""
    rows, result = our_rows(work, workloads), work / "trl-rows.json"
    execute(trl, "parity/trl_rows.py", "--work", str(work), "--result", str(result), "--cases", *workloads)
    trl_cases = json.loads(result.read_text())["cases"]
    for workload in workloads:
        rlhf_rows, trl_rows = rows[workload], trl_cases[workload]
        for number, (rlhf_row, trl_row) in enumerate(zip(rlhf_rows, trl_rows, strict=True)):
            if rlhf_row != trl_row:
                sys.exit(
                    f"{workload}, row {number}: ours is {rlhf_row}, TRL's {trl_row}: nothing is timed, as the rows "
                    "differ"
                )
        print(f"tokens of ours and TRL, {workload}: the same in {len(rlhf_rows)} rows", flush=True)


def check_first(arm: str, rlhf: dict[str, Any], trl: dict[str, Any]) -> None:
    """Ends the benchmark if loss or gradient norm of the first step differ, or the tokens of a step. GRPO is left out:
    its samples differ."""
    workload, precision = arm.split("/")
    if workload.startswith("grpo"):
        return
    if set(rlhf["tokens"]) != set(trl["tokens"]):
        sys.exit(f"{arm}: ours trained on {rlhf['tokens']} tokens a step, TRL on {trl['tokens']}")
    for name, value in trl["first"].items():
        difference = abs(rlhf["first"][name] - value) / abs(value)
        print(f"first {name} of ours and TRL, {arm}: {rlhf['first'][name]:.6f} and {value:.6f}", flush=True)
        if not difference <= FIRST[precision]:
            sys.exit(
                f"{arm}: the first {name} differs by {difference:.1e}, more than {FIRST[precision]:g}: no equal work"
            )


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    trl, start, load = str(arguments.trl_python), time.time(), os.getloadavg()[0]
    Maker(arguments.model, arguments.data, work).make()
    same_rows(trl, work, arguments.workloads)
    distances = gate(trl, work, GRADIENTS)
    limit = json.loads(execute(sys.executable, "ours_limit.py"))
    print(f"matrix products: {limit['fp32'] / 1e9:.0f} GFLOP/s fp32, {limit['bf16'] / 1e9:.0f} bf16", flush=True)
    arms: dict[str, report.Runs] = {}
    options = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--work", str(work)]
    for repeat in range(arguments.repeats):
        for workload in arguments.workloads:
            for side, python in (("ours", sys.executable), ("trl", trl)):
                arm, result = f"{workload}/{arguments.precision}", work / "result.json"
                execute(python, f"{side}_train.py", workload, arguments.precision, *options, "--result", str(result))
                latest = json.loads(result.read_text())
                arms.setdefault(f"{arm}/{side}", []).append(latest)
                print(
                    f"{time.time() - start:5.0f} s  {arm}/{side}, repeat {repeat + 1}: "
                    f"{report.median(latest['seconds']):.2f} s/step, {report.throughput([latest]):.0f} tokens/s, "
                    f"peak {latest['peak_mib']:.0f} MiB",
                    flush=True,
                )
            check_first(arm, *(arms[f"{arm}/{side}"][-1] for side in ("ours", "trl")))
    return {
        **circumstances(arguments, load),
        "gradient_distance": distances,
        "limit": limit,
        **tabled(arms, arguments.precision, limit),
        "arms": arms,
        "seconds": time.time() - start,
    }


def tabled(arms: dict[str, report.Runs], precision: str, limit: dict[str, float]) -> dict[str, Any]:
    """What ``report.tables`` shows."""
    rlhf_arms = {arm.removesuffix("/ours"): runs for arm, runs in arms.items() if arm.endswith("/ours")}
    return {
        "comparison": report.comparison(arms, {(name, precision): target for name, target in TARGETS.items()}),
        "phases": {arm: report.phases(runs, limit[precision]) for arm, runs in rlhf_arms.items()},
        "scaling": [],
    }


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], list(TARGETS), f"{date.today().isoformat()}-real")
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a chat model, such as SmolLM2-135M-Instruct"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the rows of HH and GSM8K")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.set_defaults(repeats=1, steps=2, warmup=1)
    arguments = parsed(parser)
    os.environ["BENCH_SETTINGS"] = json.dumps(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    file = HERE / "results" / f"{arguments.name}.json"
    write(file, result)
    print(f"\n{report.tables(result)}\n\n{file} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
