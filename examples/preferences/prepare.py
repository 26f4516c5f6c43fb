"""Rows with preferences, labels and steps from GSM8K, and a small untrained model to learn from them.

The output depends on the files and on --seed only. `baselines.json` has the accuracy of simple rules without a model on
all held-out rows: a reward model is useful only above that. A run evaluates fewer: it leaves out rows over its limits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_testing.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.gsm8k.prepare import cleaned, train_tokenizer
from examples.preferences import solutions, steps

FILES = {
    "train": "gsm8k_train.jsonl",
    "test": "gsm8k_test.jsonl",
    "graded": "gsm8k_model_solutions.jsonl",
}
SIZE = {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 3, "intermediate": 512, "std": 0.02}
"""2.0 M parameters with a vocabulary of 2,048, so that each run takes minutes on two cores."""
SMALL_SIZE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "std": 0.02}
SMALL_ROWS = 40
Row = Mapping[str, Any]
Rows = Sequence[Row]


def read(folder: Path, limit: int | None) -> dict[str, list[dict[str, Any]]]:
    """The first ``limit`` rows (None: all) of each file. Ends the program where a file is missing."""
    missing = [name for name in FILES.values() if not (folder / name).exists()]
    if missing:
        sys.exit(
            f"{', '.join(missing)} not found in {folder}. Give --data a folder that holds {', '.join(FILES.values())} "
            "(README.md says where they are published)"
        )
    rows = {}
    for key, name in FILES.items():
        with (folder / name).open(encoding="utf-8") as file:
            rows[key] = [json.loads(line) for line in itertools.islice(file, limit)]
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_split(folder: Path, rows: Iterable[Row], owner: Callable[[Row], str]) -> list[Row]:
    """Write `train.jsonl` and `held_out.jsonl`; rows with the same ``owner`` go to the same file. Returns the held-out
    rows."""
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        sides[solutions.held_out(owner(row))].append(row)
    for name, side in zip(("train", "held_out"), sides, strict=True):
        write(folder / f"{name}.jsonl", side)
    print(f"{folder}: {len(sides[0])} training and {len(sides[1])} held-out rows")
    return sides[1]


def graded(folder: Path, rows: Rows) -> dict[str, float]:
    """Pairs and labels of the graded solutions; returns their baselines."""
    pairs = write_split(folder / "pairs", solutions.pairs(rows), lambda row: row["question"])
    labels = write_split(folder / "labels", solutions.labels(rows), lambda row: row["question"])
    return {
        "pairs: the shorter solution is the right one": shorter(pairs),
        "labels: wrong solutions": mean(not row["label"] for row in labels),
    }


def stepwise(folder: Path, sources: Mapping[str, list[tuple[str, str]]], seed: int) -> dict[str, float]:
    """Steps of worked answers, for training and held out, and of the models' solutions. Returns the share of the more
    frequent label in the held-out files: the accuracy of always answering that label."""
    shares = {}
    for name, traces in sources.items():
        counts = steps.Counts()
        write(folder / f"{name}.jsonl", steps.rows(traces, seed, counts))
        print(f"{folder / name}.jsonl: {', '.join(f'{k} {v}' for k, v in asdict(counts).items())}")
        if name != "train":
            shares[f"steps, {name}: the larger label"] = max(counts.wrong, counts.steps - counts.wrong) / counts.steps
    return shares


def mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items)


def shorter(pairs: Rows) -> float:
    """Share of pairs whose chosen text has fewer characters; pairs of equal length count half."""
    lengths = [(len(pair["chosen"]), len(pair["rejected"])) for pair in pairs]
    return mean((a < b) + (a == b) / 2 for a, b in lengths)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for the rows and the untrained model")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help=f"folder with {', '.join(FILES.values())}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the steps that are corrupted")
    parser.add_argument("--small", action="store_true", help="a few rows, a model of one layer: to try the commands")
    arguments = parser.parse_args(words)
    output, size = arguments.output, SMALL_SIZE if arguments.small else SIZE
    data = read(arguments.data, SMALL_ROWS if arguments.small else None)
    for name in ("train", "test"):
        write(output / "gsm8k" / f"{name}.jsonl", cleaned(data[name]))
    train_tokenizer([text for row in cleaned(data["train"]) for text in row.values()], output / "gsm8k" / "model")
    tiny_model(output / "gsm8k" / "model", **size)
    worked = {name: [(row["question"], row["answer"]) for row in data[name]] for name in ("train", "test")}
    samples = [(row["question"], row[model]["solution"]) for row in data["graded"] for model in solutions.MODELS]
    answered = {"train": worked["train"], "worked": worked["test"], "solutions": samples}
    baselines = {
        **graded(output / "graded", data["graded"]),
        **stepwise(output / "steps", answered, arguments.seed),
    }
    (output / "baselines.json").write_text(json.dumps(baselines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
