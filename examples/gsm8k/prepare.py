"""GSM8K as this example uses it: the rows, a tokenizer trained on them, and a small untrained model.

The data is real and nothing is pre-trained, so the example runs without a model hub. The calculator marks
(`<<48/2=24>>`) are removed: they are for a tool that this model does not have.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_testing.tiny import EOS, PAD, tiny_model

VOCABULARY = 2048
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
FILES = {"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"}
SIZE = {"hidden": 256, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate": 704, "std": 0.02}
SMALL_SIZE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 352, "std": 0.02}
SMALL_VOCABULARY, SMALL_ROW = 1024, 280
"""With --small: tokens, and characters of the longest row."""


def read(data: str, split: str) -> list[dict[str, str]]:
    """Rows with `question` and `answer`, from `gsm8k_<split>.jsonl` in a folder or from `openai/gsm8k` on the hub."""
    if data == "hub":
        from datasets import load_dataset

        return [dict(row) for row in load_dataset("openai/gsm8k", "main", split=split)]
    path = Path(data) / FILES[split]
    if not path.exists():
        sys.exit(
            f"{path} does not exist. Give --data a folder that holds {' and '.join(FILES.values())} (columns question, "
            "answer), or `--data hub` to download openai/gsm8k"
        )
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def cleaned(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"question": r["question"], "answer": CALCULATOR_MARK.sub("", r["answer"])} for r in rows]


def train_tokenizer(texts: list[str], path: Path, vocabulary: int = VOCABULARY) -> None:
    """Byte-level BPE in which every digit is a token, so that a number has the same tokens everywhere."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(str(path))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for train.jsonl, test.jsonl and model/")
    parser.add_argument("--data", required=True, metavar="DIR|hub", help="folder with the two files, or `hub`")
    parser.add_argument("--small", action="store_true", help="short rows and a smaller model: to try the commands")
    arguments = parser.parse_args(words)
    output, small = arguments.output, arguments.small
    output.mkdir(parents=True, exist_ok=True)
    rows = {split: cleaned(read(arguments.data, split)) for split in FILES}
    if small:
        rows = {
            split: [r for r in split_rows if sum(map(len, r.values())) <= SMALL_ROW]
            for split, split_rows in rows.items()
        }
    for split, split_rows in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows)
        (output / f"{split}.jsonl").write_text(text, encoding="utf-8")
    texts = [text for row in rows["train"] for text in row.values()]
    train_tokenizer(texts, output / "model", SMALL_VOCABULARY if small else VOCABULARY)
    tiny_model(output / "model", **(SMALL_SIZE if small else SIZE))
    print(f"{len(rows['train'])} training and {len(rows['test'])} held-out rows, tokenizer and model in {output}")


if __name__ == "__main__":
    main()
