"""Rows from which nothing can be learnt: refused with file and line, or left out and counted."""

from __future__ import annotations

import copy
import json

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
LABELS = [{"prompt": "p", "response": "r", "label": True}, {"prompt": "p", "response": "r", "label": False}]
STEPS = {"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]}


@pytest.mark.parametrize(
    ("form", "good", "bad", "message"),
    [
        ("pairs", [PAIR], {**PAIR, "rejected": "good"}, "the chosen and the rejected answer have the same tokens"),
        ("pairs", [PAIR], {**PAIR, "rejected": ""}, "column 'rejected': the answer is empty"),
        ("pairs", [PAIR], {**PAIR, "chosen": " \n"}, "column 'chosen': the answer is empty"),
        ("pairs", [PAIR], {"prompt": "p", "chosen": "x"}, "no column 'rejected'; columns present: prompt, chosen"),
        ("prompts", [{"prompt": "p"}], {"prompt": "half: \ud83d"}, "'\\ud83d' (after "),
        ("demonstrations", [{"prompt": "p", "response": "r"}], {"prompt": "p", "response": "\ude00 x"},
         "is half of a character (an unpaired surrogate), which is not valid text"),
        ("demonstrations", [{"prompt": "p", "response": "r"}], {"prompt": "p", "response": ""},
         "column 'response': the answer is empty"),
        ("demonstrations", [{"prompt": "p", "response": "r"}], {"prompt": "p", "response": None},
         "column 'response': must be text, got NoneType"),
        ("demonstrations", [{"text": "ab"}], {"text": ""}, "the row is empty"),
        ("labels", LABELS, {**LABELS[0], "response": ""}, "column 'response': the answer is empty"),
        ("steps", [STEPS], {**STEPS, "labels": [1]},
         "2 steps in column 'completions', but 1 labels in column 'labels'"),
        ("steps", [STEPS], {**STEPS, "completions": [], "labels": []},
         "column 'completions': must be a list of step texts, got list []"),
        ("steps", [STEPS], {**STEPS, "completions": "a"}, "must be a list of step texts, got str 'a'"),
        ("steps", [STEPS], {**STEPS, "completions": ["a", 3]}, "column 'completions', step 2: must be text, got int 3"),
        ("steps", [STEPS], {**STEPS, "labels": None},
         "column 'labels': must be a list with a label for each step, got NoneType"),
        ("steps", [STEPS], {**STEPS, "labels": [1, None]},
         "column 'labels', step 2: a label must be true or false, '+' or"),
        ("steps", [STEPS], {**STEPS, "labels": [1, 1.5]}, "a number from 0 to 1, got float 1.5"),
        ("steps", [STEPS], {**STEPS, "labels": [1, -1]}, "a number from 0 to 1, got int -1"),
        ("steps", [STEPS], {**STEPS, "completions": ["a", "b\nc"]}, r"step 2 contains data.step_separator = '\n'"),
        ("steps", [STEPS], {**STEPS, "completions": ["a", "b\nc"]},
         "'b\\nc'. Set data.step_separator to a text that no step contains"),
        ("steps", [STEPS], {**STEPS, "completions": [" ", "b"]},
         r"step 1 has no text before data.step_separator = '\n'"),
        ("prompts", [{"prompt": "p"}], {"prompt": ""}, "the prompt is empty"),
        ("prompts", [{"prompt": "p"}], {"prompt": 7}, "must be text, got int '7'"),
        ("prompts", [{"prompt": "p", "image": None}], {"prompt": "p", "image": "a.png"},
         "there are images, but the policy is a text-only model"),
        ("demonstrations", [{"prompt": "p", "response": "r", "system": None}],
         {"prompt": "p", "response": "r", "system": ["s"]}, "column 'system': must be text, got list"),
        ("demonstrations", [{"instruction": "p", "output": "r", "history": []}],
         {"instruction": "p", "output": "r", "history": [["a", "b"]]}, "a history, whose turns need a chat template"),
        ("prompts", [{"prompt": "p"}], {"prompt": [USER]}, "Messages need a chat template, and none is used"),
    ],
)  # fmt: skip
def test_refused_or_left_out_and_counted(refusal, chars, form, good, bad, message):
    assert message in refusal(chars, form, good, bad)


def test_rows_that_are_left_out_are_noted_and_counted_over_a_resume(load, chars):
    rows = [PAIR, {**PAIR, "rejected": "good"}]
    data = load(chars, "pairs", rows, bad_rows="drop")
    assert data.check(1) == ""
    note = data.check(2)
    assert note.startswith("1 of the first 2 training rows are left out (1 with nothing to learn or malformed)")
    assert "rows.jsonl, line 2: the chosen and the rejected answer have the same" in note
    data.take(3)  # into the third pass
    resumed = load(chars, "pairs", rows, bad_rows="drop")
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert resumed.bad_rows == data.bad_rows == 2
    assert [r.index for r in resumed.take(3)] == [r.index for r in data.take(3)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([USER, {"role": "assistant", "content": " "}], "message 1 (assistant): the answer is empty"),
        ([USER], "a conversation must end with the assistant's answer"),
        ([USER, BOT, USER], "must end with the assistant's answer, got the roles user, assistant, user"),
        ([USER, {**BOT, "content": "yo<eos>\n"}],
         "message 1 (assistant): the answer contains the end token '<eos>', which ends a sample"),
        ([USER, {**BOT, "reasoning_content": "so<eos>"}],
         "message 1 (assistant): the answer contains the end token '<eos>', which ends a sample"),
        ([USER, {"role": "assistant", "content": None}], "content must be text, got 'None'"),
        ([USER, {**BOT, "tool_calls": [{"function": {"arguments": {}}}]}, BOT], "message 1: a tool call must be {id,"),
        ([{"from": "human", "value": "hi"}, BOT], "a turn must be {from, value}"),
        ([USER, {"from": "gpt", "value": "yo"}], "message 1: content must be text, got 'None'"),
    ],
)  # fmt: skip
def test_conversations(refusal, chat, bad, message):
    assert message in refusal(chat, "demonstrations", [{"messages": [USER, BOT]}], {"messages": bad})


def test_only_answers_that_are_trained_on_must_not_be_empty(load, chat):
    talk = [USER, {"role": "assistant", "content": " "}, USER, BOT]
    assert len(load(chat, "demonstrations", [{"messages": talk}]).take(1)) == 1
    with pytest.raises(DataError, match=r"message 1 \(assistant\): the answer is empty"):
        load(chat, "demonstrations", [{"messages": talk}], loss_on="assistant").take(1)


def test_equal_answers_are_judged_by_their_tokens(load, chat):
    """A template may trim what differs."""
    trims = copy.deepcopy(chat)
    trims.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    pair = {"prompt": "p", "chosen": "yo", "rejected": "yo "}
    load(chat, "pairs", [pair]).take(1)
    with pytest.raises(DataError, match="have the same tokens, so there is no preference"):
        load(trims, "pairs", [pair]).take(1)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("demonstrations", {"prompt": "p" * 8, "response": "r"}),
        ("pairs", {"prompt": "p" * 8, "chosen": "a", "rejected": "b"}),
        ("steps", {"prompt": "p" * 8, "completions": ["a"], "labels": [1]}),
        ("prompts", {"prompt": "p" * 8}),
    ],
)
def test_a_prompt_that_leaves_no_room_for_the_answer(load, chars, form, row):
    message = r"line 1: the prompt has 8 tokens; data\.max_tokens = 8 leaves no room to answer\. Shorten the row"
    with pytest.raises(DataError, match=message):
        load(chars, form, [row], max_tokens=8).take(1)
    short = {**row, "prompt": "p"}
    data = load(chars, form, [row, short], max_tokens=8, too_long="drop")
    assert [r.index for r in data.take(2)] == [1, 1]
    assert (data.dropped, data.bad_rows) == (2, 0)


def test_each_reason_has_its_own_policy(load, chars):
    rows = [PAIR, {**PAIR, "rejected": "good"}, {**PAIR, "chosen": "x" * 50}]
    with pytest.raises(DataError, match="line 3: the row has 52 tokens"):
        load(chars, "pairs", rows, max_tokens=20, bad_rows="drop").take(3)
    with pytest.raises(DataError, match="line 2: the chosen and the rejected"):
        load(chars, "pairs", rows, max_tokens=20, too_long="drop").take(3)
    data = load(chars, "pairs", rows, max_tokens=20, too_long="drop", bad_rows="drop")
    assert [r.index for r in data.take(3)] == [0, 0, 0]
    assert (data.bad_rows, data.dropped) == (2, 2)


def test_evaluation_rows_are_counted_apart(load, chars, tmp_path):
    eval_file = tmp_path / "held.jsonl"
    eval_file.write_text("".join(json.dumps(r) + "\n" for r in (PAIR, {**PAIR, "rejected": "good"}, PAIR)))
    data = load(chars, "pairs", [PAIR], eval=(SourceSection(path=str(eval_file)),), bad_rows="drop")
    assert [r.index for r in data.eval_rows()] == [0, 2]
    assert (data.eval_bad_rows, data.eval_dropped, data.bad_rows) == (1, 0, 0)
    assert [len(part) for part in data.every_example(2)] == [1, 2]


@pytest.mark.parametrize(
    ("change", "counts"),
    [({"rejected": "good"}, "0 are too long and 2 are bad"), ({"chosen": "x" * 99}, "2 are too long and 0 are bad")],
)
def test_an_evaluation_without_a_row_is_refused(load, chars, tmp_path, change, counts):
    """Else a run would train on without ever evaluating."""
    eval_file = tmp_path / "held.jsonl"
    eval_file.write_text((json.dumps({**PAIR, **change}) + "\n") * 2)
    eval_ = (SourceSection(path=str(eval_file)),)
    data = load(chars, "pairs", [PAIR], eval=eval_, bad_rows="drop", too_long="drop", max_tokens=50)
    with pytest.raises(DataError, match=f"no row of data.eval is left to evaluate on: {counts}.*The last one: the "):
        data.eval_rows()


# -------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("value", "counts"), [(True, "3 rows are labelled true and 0 false"), (0, "0 rows are labelled true and 3 false")]
)
def test_labels_of_one_kind_are_refused_at_the_start(load, chars, value, counts):
    rows = [{**LABELS[0], "label": value}] * 3
    with pytest.raises(DataError) as error:
        load(chars, "labels", rows)
    assert counts in str(error.value)
    assert "Learning from labels needs both; is 'label' the right column?" in str(error.value)


def test_words_as_labels_are_not_advised_to_be_dropped(load, chars):
    with pytest.raises(DataError, match=r"got str 'good'\. No value of the column is a label: write true or false"):
        load(chars, "labels", [{**LABELS[0], "label": "good"}, {**LABELS[0], "label": "bad"}])


def test_labels_of_both_kinds_may_come_from_two_sources(load, chars, tmp_path):
    for name, row in zip("ab", LABELS, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = tuple(SourceSection(path=str(tmp_path / f"{name}.jsonl")) for name in "ab")
    TrainData(DataSection(train=sources), chars, "labels", 0)
    TrainData(DataSection(train=sources, eval=sources[:1]), chars, "labels", 0)  # held-out rows may be of one kind
    with pytest.raises(DataError, match="labels of one kind only"):
        TrainData(DataSection(train=sources[:1]), chars, "labels", 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_every_label_is_looked_at_before_the_run(load, chars, kind):
    rows = [{"prompt": "p", "response": "r", "label": v} for v in (1, 0, 2, 1)]
    with pytest.raises(
        DataError, match=r"(line 3|row 2): column 'label': a label must be .* got int 2\. Correct it, or set"
    ):
        load(chars, "labels", rows, kind)
    data = load(chars, "labels", rows, kind, bad_rows="drop")
    assert [r["label"] for r in data.take(3)] == [1, 0, 1]
    assert data.bad_rows == 1
    (source,) = data.section.train
    few = data.section.model_copy(update={"train": (source.model_copy(update={"max_rows": 1}),)})
    with pytest.raises(DataError, match="1 rows are labelled true and 0 false"):
        TrainData(few, chars, "labels", 0)
