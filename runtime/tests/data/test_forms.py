"""Labels, steps and margins: what rows of these forms become, and the values that are refused."""

from __future__ import annotations

import csv

import pytest
from rlhf.errors import DataError
from rlhf.steps import StepEnds
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.tokenizer import decoder_of

from runtime.tests.data.template_cases import trained

USER = [{"role": "user", "content": "1+1=?"}]


@pytest.mark.parametrize(
    ("value", "label"),
    [(True, True), (False, False), (1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("0", False),
     ("+", True), ("-", False)],
)  # fmt: skip
def test_labels(read, chars, value, label):
    rows = [{"prompt": "ab", "response": "cd", "label": value}, {"prompt": "ab", "response": "c", "label": not label}]
    _, (example, _) = read(chars, "labels", rows)
    assert example.values == {"label": label}
    assert type(example.values["label"]) is bool
    assert trained(chars, example.sequences[0]) == "cd<eos>"
    assert len(example.sequences[0].ids) == 5


def test_labels_of_conversations(read, chat):
    answer = [{"role": "assistant", "content": "2"}]
    _, (first, _) = read(chat, "labels", [{"prompt": USER, "response": answer, "label": v} for v in (True, False)])
    rows = [{"m": [*USER, *answer], "good": v} for v in (0, 1)]
    _, (second, _) = read(chat, "labels", rows, messages="m", label="good")
    assert first.sequences == second.sequences
    assert (first.values, second.values) == ({"label": True}, {"label": False})
    assert trained(chat, first.sequences[0]) == "2<eos>"


@pytest.mark.parametrize("value", [2, -1, 0.5, "yes", "", None, [True]])
def test_values_that_are_no_label_are_refused(read, chars, value):
    rows = [{"prompt": "ab", "response": "cd", "label": value}]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: column 'label': a label must be true or false, 1 or 0"):
        read(chars, "labels", rows)


def test_labels_in_a_csv(tmp_path, chars):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "response", "ok"], ["a", "b", "True"], ["c", "d", "0"]])
    section = DataSection(train=(SourceSection(path=str(path)),), shuffle=False, label="ok")
    data = TrainData(section, chars, "labels", 0)
    assert [e.values["label"] for e in data.examples(data.take(2))] == [True, False]


def test_margins(read, chars):
    rows = [{"prompt": "p", "chosen": "g", "rejected": "bb", "by": m} for m in (1.5, -2, "0.25")]
    assert [e.values for e in read(chars, "pairs", rows, margin="by")[1]] == [
        {"margin": 1.5}, {"margin": -2.0}, {"margin": 0.25}
    ]  # fmt: skip
    assert [e.values for e in read(chars, "pairs", rows)[1]] == [{}, {}, {}]  # only where named
    for value in ("much", None, True, "inf", 10**400):
        with pytest.raises(DataError, match="line 1: column 'by': a margin must be a finite number, got"):
            read(chars, "pairs", [{**rows[0], "by": value}], margin="by")
    with pytest.raises(DataError, match=r"has no column 'margin'.*--data\.margin"):
        read(chars, "pairs", rows, margin="margin")


# --------------------------------------------------------------------------------------------- steps


def test_steps_end_at_their_separators(read, chars):
    rows = [{"prompt": "Q\n", "completions": ["ab", "c", "def"], "labels": [True, 0, "+"]}]
    _, (example,) = read(chars, "steps", rows)
    (sequence,) = example.sequences
    assert chars.decode(sequence.ids) == "Q\nab\nc\ndef\n"  # characters: nothing follows the last separator
    assert example.values == {"steps": [(4, 1.0), (6, 0.0), (10, 1.0)]}
    assert trained(chars, sequence) == "ab\nc\ndef\n"


def test_soft_labels(read, chars):
    rows = [{"prompt": "Q", "s": ["a", "b", "c", "d"], "p": [0.25, 1, 0.0, 1.0]}]
    _, (example,) = read(chars, "steps", rows, steps="s", step_labels="p", step_separator="##")
    assert chars.decode(example.sequences[0].ids) == "Qa##b##c##d##"
    assert example.values["steps"] == [(3, 0.25), (6, 1.0), (9, 0.0), (12, 1.0)]


def test_steps_of_a_chat_stand_where_the_policy_answers(read, chat):
    rows = [{"prompt": USER, "completions": ["one", "two"], "labels": [1, 0]}]
    _, (example,) = read(chat, "steps", rows, system="Count.")
    (sequence,) = example.sequences
    assert chat.decode(sequence.ids) == "<|system|>Count.<eos><|user|>1+1=?<eos><|assistant|>one\ntwo\n"
    assert trained(chat, sequence) == "one\ntwo\n"
    assert [chat.decode(sequence.ids[position]) for position, _ in example.values["steps"]] == ["\n", "\n"]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|im_start|>", "er", ". "])
def test_positions_in_training_rows_are_those_found_in_the_tokens_alone(read, bpe, separator):
    """Merges cross the separator's edges here (`4\\n`, `.\\n`); and a plain statement finds the same tokens."""
    texts = ["Q: 2+2", "A: 4", "The answer is 42.", "x y z"]
    rows = [{"prompt": "user\n", "completions": texts, "labels": [0, 1, 0, 1]}]
    if separator == "er":
        texts[2] = "42."  # a separator inside of a step is refused
    _, (example,) = read(bpe, "steps", rows, step_separator=separator)
    (sequence,) = example.sequences
    first = sequence.loss_mask.index(True)
    decode = decoder_of(bpe)
    ends = StepEnds(decode, separator)(sequence.ids[first:])
    assert [first + i for i in ends] == [position for position, _ in example.values["steps"]]
    own_ids = sequence.ids[first:]
    assert decode(own_ids) == "".join(t + separator for t in texts)
    plain = [
        i for i in range(len(own_ids))
        if decode(own_ids[: i + 1]).count(separator) > decode(own_ids[:i]).count(separator)
    ]  # fmt: skip
    assert ends == plain


def test_two_separators_end_one_step():
    table = {0: "a", 1: "\n", 2: "\n\n", 3: " ", 4: "b\nc", 5: "\nd\ne\n"}
    ends = StepEnds(lambda ids: "".join(table[i] for i in ids), "\n")
    assert ends([0, 1, 1, 0, 1]) == [1, 4]
    assert ends([1, 0, 2, 3, 1, 0]) == [2]  # blank at the start, blank lines, and an open step at the end
    assert ends([4, 1]) == [0, 1]  # the rest of a token belongs to the next step
    assert ends([0, 5]) == [1, 1, 1]
    assert ends([]) == []
    with pytest.raises(ValueError, match="the separator of steps is empty"):
        StepEnds(str, "")


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_each_step_is_decoded_by_itself(separator):
    """Else the cost of a long solution grows with the square of its length."""
    table, lengths = {0: "a", 1: ".\n\n"}, []

    def decode(ids):
        lengths.append(len(ids))
        return "".join(table[i] for i in ids)

    assert StepEnds(decode, separator)([0, 0, 1] * 100) == [3 * n + 2 for n in range(100)]
    assert max(lengths) == 3


def test_a_separator_over_several_tokens_and_bytes():
    data = "Да\n ки\n нет ки\n".encode()

    def decode(ids):
        return bytes(list(ids)).decode(errors="replace")

    ends = StepEnds(decode, "ки")(list(data))
    cut = [data[: i + 1].decode(errors="ignore") for i in ends]
    assert cut == ["Да\n ки", "Да\n ки\n нет ки"]
