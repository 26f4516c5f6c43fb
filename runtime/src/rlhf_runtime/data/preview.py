"""Rows as a model will see them, as plain values: tokens, trained tokens, ends of steps, and rows that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhf.types import Row
from rlhf.types.examples import Sequence as TokenSequence

from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.image_files import image_size
from rlhf_runtime.data.row_rules import check_prompt
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.tokenizer import decoder_of

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_EXAMPLES = 10
"""Largest number of rows that a summary names."""


def preview(data: TrainData, rows: int) -> dict[str, Any]:
    """The layout of every source, and its first ``rows`` rows.

    Returns JSON values: ``form``; ``answers``: whether training prompts have an answer that may be trained on;
    ``template`` (``chat`` | ``plain``); ``end_note``: a message on the template's end token, or empty; ``sources``,
    each with ``name``, ``path``, ``use`` (``train`` | ``eval``), ``rows``, ``layout`` (a sentence), ``columns``
    ({field: column}), ``unused`` (columns); ``shown``, each row with ``where`` (file and line), ``use``, ``status``
    (``ok`` | ``left out`` | ``refused``), ``why``, ``label`` and
    ``margin`` if it has them, and ``sequences`` (:func:`_sequence`).
    """
    decode = decoder_of(data.template.tokenizer)
    row_reports = [
        _row(data, use, source, source[index], decode)
        for use, sources in data.sources.items()
        for source in sources
        for index in range(min(rows, len(source)))
    ]
    return {
        "form": data.form,
        "answers": bool(data.answered),
        "template": "plain" if data.template.chat is None else "chat",
        "end_note": data.end_note,
        "sources": [_source(data, use, source) for use, sources in data.sources.items() for source in sources],
        "shown": row_reports,
    }


def survey(data: TrainData) -> dict[str, Any]:
    """Counts over all rows: for ``train`` and ``eval``, the number of rows that are used (``ok``), too long
    (``too_long``) and bad (``bad_rows``), the tokens of the longest row, and the first unused rows with the reason."""
    summary = {}
    for use, sources in data.sources.items():
        counts: Counter[str] = Counter()
        longest, examples = 0, list[str]()
        for source in sources:
            for index in range(len(source)):
                verdict = data.judge(source[index], use == "train" and source.name in data.answered)
                counts[verdict.kind or "ok"] += 1
                longest = max(longest, verdict.tokens)
                if verdict.kind and len(examples) < _EXAMPLES:
                    examples.append(f"{source.location(index)}: {verdict.text}")
        kinds = {kind: counts[kind] for kind in ("ok", "too_long", "bad_rows")}
        summary[use] = {**kinds, "longest": longest, "named": examples}
    return summary


def token_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that each token adds to the tokens before it. A character of several tokens belongs to the last one."""
    texts, done, pending = list[str](), list[int](), list[int]()
    for token in ids:
        pending.append(token)
        # Each token is decoded after the one before it, because some tokenizers drop the space of a first token.
        text_done = decode(done)
        text = decode([*done, *pending])[len(text_done) :]
        if text.endswith(_BROKEN) and len(pending) < 8:
            texts.append("")
            continue
        texts.append(text)
        done, pending = pending[-1:], []
    return texts


# ----------------------------------------------------------------------- sources, rows and sequences


def _source(data: TrainData, use: str, source: Source) -> dict[str, Any]:
    layout = source.layout
    assert layout is not None
    used = set(layout.columns.values())
    return {
        "name": source.name,
        "path": source.section.path,
        "use": use,
        "rows": len(source),
        "layout": str(layout) or "data.input_template",
        "columns": dict(layout.columns),
        "unused": [c for c in source.columns if c not in used],
    }


def _row(data: TrainData, use: str, source: Source, row: Row, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    answered = use == "train" and source.name in data.answered
    verdict = data.judge(row, answered)
    status = "ok" if not verdict.kind else "left out" if getattr(data.section, verdict.kind) == "drop" else "refused"
    values, sequences = dict[str, Any](), dict[str, TokenSequence]()
    if data.form == "prompts" and verdict.kind != "bad_rows":
        turn = data.template.encode_prompt(row)
        sequences["prompt"] = TokenSequence(turn.ids, [False] * len(turn.ids), images=turn.images)
        # The answer in the form in which algorithms with ``Needs.demonstration_share`` get it instead of samples. The
        # verdict on a prompt that is too long says nothing about the answer, so it may be malformed and is not shown.
        if answered and not check_prompt(len(turn.ids), data.section):
            prompt, answer = data.template.encode_answer(row)
            mask = [*(False for _ in prompt.ids), *(True for _ in answer.ids)]
            sequences["given answer"] = TokenSequence([*prompt.ids, *answer.ids], mask, images=prompt.images)
    elif verdict.example is not None:
        values = dict(verdict.example.values)
        names = ("chosen", "rejected") if len(verdict.example.sequences) > 1 else ("row",)
        sequences = {names[sequence.role]: sequence for sequence in verdict.example.sequences}
    steps = values.pop("steps", ())
    return {
        "where": source.location(row.index),
        "use": use,
        "status": status,
        "why": verdict.text if verdict.kind else "",
        **values,
        "sequences": [_sequence(name, sequence, decode, steps) for name, sequence in sequences.items()],
    }


def _sequence(
    name: str,
    sequence: TokenSequence,
    decode: Callable[[Sequence[int]], str],
    steps: Iterable[tuple[int, float]],
) -> dict[str, Any]:
    """``name``; ``tokens`` and ``trained``, counts; ``ids``; ``texts`` of the tokens; ``mask``: which are trained on;
    ``steps``: [[position of the token that ends a step, its label], ...]. The first token of an image has the text
        ``[image 64x64]``. Its other tokens have no text."""
    ids, texts, end = sequence.ids, list[str](), 0
    for image in sequence.images:
        width, height = image_size(image.data)
        texts += [*token_texts(ids[end : image.start], decode), f"[image {width}x{height}]"]
        texts += [""] * (image.tokens - 1)
        end = image.start + image.tokens
    texts += token_texts(ids[end:], decode)
    return {
        "name": name,
        "tokens": len(ids),
        "trained": sum(sequence.loss_mask[1:]),  # no output predicts the first token
        "ids": list(ids),
        "texts": texts,
        "mask": list(sequence.loss_mask),
        "steps": [[position, label] for position, label in sorted(steps)],
    }
