"""The tokenizers of the rows: byte pairs in GPT-2's alphabet with a fixed list of merges, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from row_cases import MERGES, SPECIAL, TOKENIZERS


def make(folder: Path) -> None:
    """``FOLDER/NAME`` for each name of :data:`row_cases.TOKENIZERS`."""
    for name in TOKENIZERS:
        _tokenizer(name).save_pretrained(str(folder / name))


def _tokenizer(name: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if name == "spaced":
        return _spaced()
    merges = [(first, second) for first, second in (merge.split() for merge in MERGES)]
    if name != "merging":
        merges = [merge for merge in merges if merge != (":", "Ġ4")]  # no word of GPT-2's has it
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = list(dict.fromkeys([*SPECIAL, *alphabet, *(a + b for a, b in merges)]))
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name != "merging")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    begin = {}
    if name == "beginning":
        begin = {"bos_token": "<begin>"}
        backend.post_processor = processors.TemplateProcessing(
            single="<begin> $A", special_tokens=[("<begin>", SPECIAL.index("<begin>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        **begin,
    )


def _spaced() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [
        (first, second) for first, second in (merge.replace("Ġ", "▁").split() for merge in MERGES if "Ċ" not in merge)
    ]
    texts = list(dict.fromkeys([*SPECIAL, "\n", "▁", *map(chr, range(33, 127)), *(a + b for a, b in merges)]))
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
