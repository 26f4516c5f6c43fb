"""Training data as a run uses it: what fits, what is dropped and counted, exact resume, clear errors."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.preview import preview


@pytest.fixture
def write(tmp_path):
    def make(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return SourceSection(path=str(path))

    return make


def prompts(n):
    return [{"prompt": "x" * (i + 1), "answer": str(i), "meta": {"i": [i]}} for i in range(n)]


def test_all_columns_reach_the_row(load, chars):
    data = load(chars, "prompts", prompts(3))
    assert data.take(2)[1].columns == {"prompt": "xx", "answer": "1", "meta": {"i": [1]}}
    assert data.row("rows", 2)["answer"] == "2"
    assert (data.rows_per_epoch, data.epoch) == (3, 2 / 3)


def test_long_rows_are_refused_with_file_and_line(load, chars):
    with pytest.raises(
        DataError, match=r"rows\.jsonl, line 4: the prompt has 4 tokens, over data\.max_prompt_tokens = 3"
    ):
        load(chars, "prompts", prompts(5), max_prompt_tokens=3).take(5)


def test_long_rows_are_dropped_counted_and_resumed_over(load, chars):
    def fresh():
        return load(chars, "prompts", prompts(10), shuffle=True, max_prompt_tokens=4, too_long="drop")

    data = fresh()
    rows = data.take(12)
    assert len(rows) == 12
    assert all(len(r["prompt"]) <= 4 for r in rows)
    assert data.dropped >= 12
    state = json.loads(json.dumps(data.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert (resumed.dropped, resumed.epoch) == (data.dropped, data.epoch)
    assert [r.index for r in resumed.take(9)] == [r.index for r in data.take(9)]


def test_sources_keep_their_probabilities_among_the_rows_that_are_used(write, chars):
    """Most rows of the first source are too long."""
    files = [write(f"{name}.jsonl", prompts(10)) for name in ("long", "all")]

    def fresh(limit=3):
        train = tuple(f.model_copy(update={"probability": 0.5}) for f in files)
        train = (train[0], train[1].model_copy(update={"max_rows": 3}))
        return TrainData(DataSection(train=train, max_prompt_tokens=limit, too_long="drop"), chars, "prompts", 0)

    data = fresh()
    rows = data.take(400)
    assert abs(sum(row.source == "long" for row in rows) - 200) < 40
    assert data.dropped > 400
    data.check(100)
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert [(r.source, r.index) for r in resumed.take(50)] == [(r.source, r.index) for r in data.take(50)]


@pytest.mark.parametrize("method", [TrainData.take, TrainData.check])
def test_a_source_with_a_probability_and_no_usable_row_is_an_error(write, chars, method):
    files = (write("a.jsonl", [{"prompt": "xx"}] * 3), write("b.jsonl", [{"prompt": "x"}] * 3))
    train = tuple(f.model_copy(update={"probability": 0.5}) for f in files)
    data = TrainData(DataSection(train=train, max_prompt_tokens=1, too_long="drop"), chars, "prompts", 0)
    with pytest.raises(DataError, match=r"6 consecutive rows of 'a' .*no row of 'a' is left to train on"):
        method(data, 30)


def answered(section, tokenizer):
    return TrainData(section, tokenizer, "prompts", 0, answers=True)


def test_a_preview_shows_a_prompt_that_is_too_long_whatever_its_answer_is(write, chars):
    source = write("a.jsonl", [{"prompt": "abcdef", "response": ""}])
    [row] = preview(answered(DataSection(train=(source,), max_tokens=4), chars), 1)["shown"]
    assert row["why"] == "the prompt has 6 tokens; data.max_tokens = 4 leaves no room to answer"
    assert [sequence["name"] for sequence in row["sequences"]] == ["prompt"]


def test_prompts_with_answers_are_read_as_both(write, chars, chat):
    rows = [{"question": "ab", "answer": "cde"}]
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cde"}]
    for tokenizer, source in ((chars, rows), (chat, rows), (chat, [{"messages": talk}])):
        data = answered(DataSection(train=(write("a.jsonl", source),)), tokenizer)
        [row] = data.take(1)
        prompt, answer = data.template.encode_answer(row)
        sequence = data.template.encode_demonstration(row).sequences[0]
        assert prompt == data.template.encode_prompt(row)
        assert list(answer.ids) == [i for i, mask in zip(sequence.ids, sequence.loss_mask, strict=True) if mask]
        assert answer.ids[-1] in data.template.end_token_ids
        assert (answer.text, answer.is_demonstration, answer.finish) == ("cde", True, "stop")
        assert sequence.ids[: len(prompt.ids + answer.ids)] == prompt.ids + answer.ids


def test_prompts_that_need_answers_are_refused_without(write, chars):
    with pytest.raises(DataError, match=r"(?s)no column 'response'.*learns from the answers of some rows"):
        answered(DataSection(train=(write("a.jsonl", [{"prompt": "x"}]),)), chars)
    with pytest.raises(DataError, match=r"texts to continue, but no prompts"):
        answered(DataSection(train=(write("t.jsonl", [{"text": "x"}]),)), chars)
    rows = [
        {"prompt": "ab", "response": "cd"},
        {"prompt": "ab", "response": " "},
        {"prompt": "ab", "response": "cdefg"},
    ]
    section = DataSection(train=(write("b.jsonl", rows),), eval=(write("c.jsonl", [{"prompt": "x"}]),), shuffle=False)
    data = answered(section, chars)
    assert len(data.eval_rows()) == 1, "held-out rows are only answered"
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: column 'response': the answer is empty"):
        data.take(3)
    drops = section.model_copy(update={"bad_rows": "drop", "too_long": "drop", "max_tokens": 6})
    data = answered(drops, chars)
    assert [r.index for r in data.take(2)] == [0, 0]
    assert (data.bad_rows, data.dropped) == (1, 1)


@pytest.mark.parametrize("method", [TrainData.take, TrainData.check])  # the check ends before models are loaded
@pytest.mark.parametrize(
    ("form", "row", "section", "last"),
    [
        ("prompts", {"prompt": "xx"}, {"max_prompt_tokens": 1, "too_long": "drop"}, "the prompt has 2 tokens"),
        (
            "pairs",
            {"prompt": "p", "chosen": "good", "rejected": "good"},
            {"bad_rows": "drop"},
            "the chosen and the rej",
        ),
    ],
)
def test_data_without_a_usable_row_is_an_error(load, chars, method, form, row, section, last):
    with pytest.raises(DataError, match=rf"no row is left to train on\. The last one: {last}"):
        method(load(chars, form, [row] * 3, **section), 1)


def test_demonstrations_are_limited_by_the_whole_row(load, chars):
    data = load(chars, "demonstrations", [{"prompt": "ab", "response": "c" * n} for n in (1, 5, 9)], max_tokens=8)
    examples = data.examples(data.take(2))
    assert [len(e.sequences[0].ids) for e in examples] == [4, 8]
    assert [sum(e.sequences[0].loss_mask) for e in examples] == [2, 6]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: the row has 12 tokens, over data\.max_tokens = 8"):
        data.take(1)


def test_missing_columns_are_named_with_those_present_for_all_sources(write, chars):
    section = DataSection(
        train=(write("a.jsonl", [{"promt": "x", "response": "y"}]),), eval=(write("b.jsonl", [{"prompt": "x"}]),)
    )
    with pytest.raises(DataError) as error:
        TrainData(section, chars, "demonstrations", 0)
    message = str(error.value)
    assert "a.jsonl) has no column 'prompt'; columns present: promt, response. Did you mean 'promt'?" in message
    assert "Name the right one with --data.prompt." in message
    assert "data.eval 'b'" in message
    assert "has no column 'response'; columns present: prompt. Name the right one with --data.response." in message


def test_missing_required_columns_are_refused(load, chars, chat):
    rows = [{"text": "x"}]
    load(chars, "demonstrations", rows, response="text", loss_on="all").take(1)
    load(chars, "prompts", rows, input_template="{text}").take(1)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = load(chat, "demonstrations", [{"m": talk}], messages="m")
    assert len(data.examples(data.take(1))) == 1
    assert data.template.encode_prompt(data.row("rows", 0)).text == "a"  # for evaluation by rollouts
    with pytest.raises(DataError, match="has no column 'prompt' or 'chosen' or 'rejected'"):
        load(chat, "pairs", rows)


def test_eval_rows_are_complete_in_order_and_their_own(write, chars):
    """A training and an evaluation source may have one name; their rows are never mixed up."""
    train = write("a.jsonl", [{"prompt": "t", "response": "train"}])
    held_out = [{"prompt": "e" * (i + 1), "response": "eval"} for i in range(4)]
    path = write("held.jsonl", held_out).path
    section = DataSection(
        train=(train,), eval=(SourceSection(path=path, name="a"),), max_prompt_tokens=3, too_long="drop", shuffle=False
    )
    data = TrainData(section, chars, "demonstrations", 0)
    batch = data.take(1)
    rows = data.eval_rows()
    assert [r["prompt"] for r in rows] == ["e", "ee", "eee"]
    assert (data.eval_dropped, data.dropped) == (1, 0)
    data.take(1)
    assert data.template.decode(data.examples(rows)[0].sequences[0].ids) == "eeval"
    assert data.template.encode_prompt(batch[0]).text == "t"
    assert data.template.encode_prompt(rows[0]).text == "e"


def test_each_source_gives_its_first_usable_rows_to_an_evaluation(write, chars):
    rows = {name: [{"prompt": f"{name}{i}", "response": "x" * (9 if i == 0 else 1)} for i in range(4)] for name in "ab"}
    files = tuple(write(f"{name}.jsonl", column) for name, column in rows.items())
    section = DataSection(train=files[:1], eval=files, max_tokens=8, too_long="drop")
    data = TrainData(section, chars, "demonstrations", 0)
    assert [row["prompt"] for row in data.eval_rows(2)] == ["a1", "a2", "b1", "b2"]
    assert [row["prompt"] for row in data.eval_rows()] == ["a1", "a2", "a3", "b1", "b2", "b3"]
