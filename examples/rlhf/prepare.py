"""Pairs of HH as messages, short enough for the model and the time at hand: `train.jsonl` and `held_out.jsonl`.

Every stage reads the same two files: `chosen` is what fine-tuning imitates, the pair is for the reward model and DPO,
and `prompt` is for PPO and GRPO. The output depends on the data, the limits and the model's chat template only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import DataError
from rlhf_runtime.data.conversions import dialogues

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.preferences.solutions import held_out

FILE = "hh_harmless_pairs.jsonl.gz"
HUB, FOLDER = "Anthropic/hh-rlhf", "harmless-base"


def read(data: str) -> list[dict[str, str]]:
    """Rows with `chosen` and `rejected`, from FILE in a folder or from the hub."""
    if data == "hub":
        from datasets import load_dataset

        return [dict(row) for row in load_dataset(HUB, data_dir=FOLDER, split="train")]
    path = Path(data) / FILE
    if not path.exists():
        sys.exit(
            f"{path} does not exist. Give --data a folder that holds {FILE} (columns chosen, rejected; "
            f"`{FOLDER}` of {HUB}), or `--data hub` to download it"
        )
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pairs(
    rows: Iterable[Mapping[str, str]], tokenizer: Any, longest_prompt: int, longest_answer: int, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Rows with `prompt` (messages), `chosen` and `rejected`. The others are counted in ``left_out`` by the reason."""
    for row in rows:
        try:
            pair = dialogues(row, True)
        except DataError:
            left_out["no common prompt"] += 1
            continue
        answers = pair["chosen"], pair["rejected"]
        if not all(answers) or not all(message["content"] for message in pair["prompt"]):
            left_out["empty message"] += 1
        elif answers[0] == answers[1]:
            left_out["equal answers"] += 1
        elif len(tokenizer.encode(_rendered(tokenizer, pair["prompt"]), add_special_tokens=False)) > longest_prompt:
            left_out["long prompt"] += 1
        elif max(len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers) >= longest_answer:
            left_out["long answer"] += 1  # with its end token
        else:
            yield {name: pair[name] for name in ("prompt", "chosen", "rejected")}


def _rendered(tokenizer: Any, prompt: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for the two files")
    parser.add_argument("--data", required=True, metavar="DIR|hub", help=f"folder with {FILE}, or `hub`")
    parser.add_argument("--model", required=True, help="whose tokens are counted: a folder or a hub name")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="longest prompt, with the chat template")
    parser.add_argument("--answer-tokens", type=int, default=96, help="longest answer, with its end token")
    parser.add_argument("--rows", type=int, help="only the first rows of the data")
    arguments = parser.parse_args(words)
    from transformers import AutoTokenizer

    rows = read(arguments.data)[: arguments.rows]
    left_out = Counter[str]()
    sides: tuple[list[str], list[str]] = ([], [])
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    for pair in pairs(rows, tokenizer, arguments.prompt_tokens, arguments.answer_tokens, left_out):
        # Dialogues with the same first message belong to one side.
        sides[held_out(pair["prompt"][0]["content"])].append(json.dumps(pair, ensure_ascii=False))
    if not all(sides):
        sys.exit(f"no rows are left for training or none to hold out: left out {dict(left_out)} of {len(rows)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, side in zip(("train", "held_out"), sides, strict=True):
        (arguments.output / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    print(f"{arguments.output}: {len(sides[0])} training and {len(sides[1])} held-out pairs of {len(rows)} rows")
    print(f"left out: {dict(left_out)}")


if __name__ == "__main__":
    main()
