"""Given answers: where they stand, what they may look like, what is left out."""

import json
from collections import Counter

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.dataset_answers import DatasetAnswers


def answers(tmp_path, tokenizer, rows, columns=(), **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = (SourceSection(path=str(path)),)
    section = DataSection(train=sources, eval=sources, **options)
    data = TrainData(section, tokenizer, "prompts", 0)
    return DatasetAnswers(data.sources["eval"], columns, data.template, section)


def message_of(content, role="assistant"):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "columns", "texts"),
    [
        ({"response": "a"}, (), ["a"]),
        ({"completions": ["a", "b", "a"]}, (), ["a", "b", "a"]),
        ({"response": [message_of("a")]}, (), ["a"]),
        ({"responses": [[message_of("a")], "b"]}, (), ["a", "b"]),
        ({"chosen": "c", "rejected": "r", "response": "x"}, ("chosen", "rejected"), ["c", "r"]),
        ({"answer": "4", "mine": ["3", "4"]}, ("mine",), ["3", "4"]),
    ],
)
def test_where_answers_are_found(tmp_path, chars, chat, row, columns, texts):
    for tokenizer in (chars, chat):
        source = answers(tmp_path, tokenizer, [{"prompt": "1+1=", **row}], columns)
        left_out = Counter()
        group = source.group(0, left_out)
        assert [t.answer for t in group.trajectories] == texts
        assert [t.index for t in group.trajectories] == [(0, n) for n in range(len(texts))]
        assert not left_out
        for t in group.trajectories:
            assert (t.turns[0], t.turns[1].is_demonstration) == (source.template.encode_prompt(group.row), True)
            assert t.turns[1].ids[-1] in source.template.end_token_ids
            assert source.template.decode(t.turns[1].ids) == t.answer


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"answer": "4"}, (), r"has none of the columns response, .* columns present: prompt, answer\. .*--answers"),
        ({"response": "a", "completion": "b"}, (), r"has answers in response and completion; .*--answers COLUMN"),
        ({"respones": "a"}, ("response",), r"has no column 'response'; .*Did you mean 'respones'"),
    ],
)
def test_columns_that_are_not_there_or_could_be_several_are_refused(tmp_path, chars, row, columns, message):
    with pytest.raises(DataError, match=message):
        answers(tmp_path, chars, [{"prompt": "1+1=", **row}], columns)


@pytest.mark.parametrize(
    ("value", "message", "expected"),
    [
        (["a", " "], r"line 1, answer 1: the answer is empty", {"answers that cannot be used": 1}),
        (["a", "b" * 60], r"line 1, answer 1: prompt and answer have 65 tokens, over data\.max_tokens = 32", None),
        ([], r"line 1: column 'response' holds no answer", {"rows whose answers cannot be read": 1}),
        (3, r"An answer is text, or a list of one assistant message .*; got int '3'", None),
        (
            [message_of("a", "user")],
            r"line 1: column 'response': must be an answer .* An answer is text, or a list of one assistant",
            None,
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            r"one assistant message with text and without tool calls",
            None,
        ),
        (["a", None], r"got NoneType 'None'", None),
    ],
)
def test_invalid_answers_are_refused_or_counted(tmp_path, chars, value, message, expected):
    rows = [{"prompt": "1+1=", "response": value}]
    with pytest.raises(DataError, match=rf"{message}.*--data\.(bad_rows|too_long) drop to drop and count such answers"):
        answers(tmp_path, chars, rows, max_tokens=32).group(0, Counter())
    left_out = Counter()
    drops = answers(tmp_path, chars, rows, max_tokens=32, too_long="drop", bad_rows="drop")
    group = drops.group(0, left_out)
    assert sum(left_out.values()) == 1
    assert expected is None or left_out == expected
    texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    assert [t.answer for t in group.trajectories] == (["a"] if texts and value else [])
