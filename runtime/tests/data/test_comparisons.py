"""Published sets of several answers and a preference: which answer is chosen, margins, ties, and what is refused."""

from __future__ import annotations

import re

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.comparisons import SHAPES
from rlhf_runtime.data.dataset import TrainData

from runtime.tests.data.template_cases import talk


def texts(tokenizer, example):
    return [tokenizer.decode(s.ids) for s in example.sequences]


GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
HELPSTEER3 = {"domain": "general", "context": talk("q"), "response1": "good", "response2": "bad",
              "overall_preference": -3, "individual_preference": [{"score": -3, "reasoning": "r"}]}  # fmt: skip
HELPSTEER2 = {"prompt": "q", "response_1": "bad", "response_2": "good", "preference_strength": 2}
PKU = {"prompt": "q", "response_0": "bad", "response_1": "good", "is_response_0_safe": True, "better_response_id": 1}
SHP = {"post_id": "1", "history": "q", "score_A": 9, "human_ref_A": "good", "human_ref_B": "bad", "labels": 1,
       "score_ratio": 1.5}  # fmt: skip
ARENA = {"model_a": "m", "winner": "model_b", "conversation_a": talk("q", "bad"), "conversation_b": talk("q", "good")}
KAGGLE = {"id": 1, "prompt": '["q"]', "response_a": '["good"]', "response_b": '["bad"]', "winner_model_a": 1,
          "winner_model_b": 0, "winner_tie": 0}  # fmt: skip
WEBGPT = {"question": {"id": "1", "full_text": "q"}, "answer_0": "bad", "score_0": -0.5, "answer_1": "good",
          "score_1": 0.25}  # fmt: skip
SUMMARIES = {"info": {"post": "p", "title": "t", "subreddit": "s", "article": None}, "choice": 1,
             "summaries": [{"text": "bad", "policy": "x"}, {"text": "good", "policy": "y"}]}  # fmt: skip
ULTRAFEEDBACK = {"instruction": "q", "completions": [
    {"response": "fair", "overall_score": 5.0}, {"response": "bad", "overall_score": 2.0},
    {"response": "good", "overall_score": 8.5}]}  # fmt: skip
NECTAR = {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [
    {"answer": "fair", "rank": 2.0}, {"answer": "good", "rank": 1.0}, {"answer": "bad", "rank": 7.0}]}  # fmt: skip
NEMO = {"context": talk("q"), "completions": [
    {"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}]}  # fmt: skip
FARM = {"instruction": "q", "input": "", "output_1": "bad", "output_2": "good", "preference": 2}


@pytest.mark.parametrize(
    ("row", "changes", "margin"),
    [
        (HELPSTEER3, {"overall_preference": 1}, ("overall_preference", 3)),
        (HELPSTEER2, {"preference_strength": "-1"}, ("preference_strength", 2)),
        (PKU, {"better_response_id": 0}, ("better_response_id", 1)),
        ({k: v for k, v in PKU.items() if k != "better_response_id"} | {"safer_response_id": 1},
         {"safer_response_id": 0}, None),
        (SHP, {"labels": 0}, ("score_ratio", 1.5)),
        (ARENA, {"winner": "model_a"}, None),
        ({"prompt": "q", "response_a": "bad", "response_b": "good", "winner": "B"}, {"winner": "A"}, None),
        (KAGGLE, {"winner_model_a": 0, "winner_model_b": 1}, None),
        (WEBGPT, {"score_0": 0.5}, ("score_1", 0.75)),
        (SUMMARIES, {"choice": 0}, None),
        (ULTRAFEEDBACK, {"completions": [{"response": r, "overall_score": s} for r, s in (("good", 1), ("bad", 10))]},
         ("completions", 6.5)),
        (NECTAR, {"answers": [{"answer": "bad", "rank": 1}, {"answer": "good", "rank": 3}]}, ("answers", 6)),
        (NEMO, {"completions": [{"rank": 0, "completion": "bad"}, {"rank": 1, "completion": "good"}]}, None),
        (FARM, {"preference": 1}, None),
    ],
)  # fmt: skip
def test_the_better_answer_is_chosen(read, chat, row, changes, margin):
    _, (example, other) = read(chat, "pairs", [row, row | changes])
    prompt = "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: p\n\nTL;DR:" if row is SUMMARIES else "q"
    pair = [f"<|user|>{prompt}<eos><|assistant|>{answer}<eos>" for answer in ("good", "bad")]
    assert texts(chat, example) == pair
    assert texts(chat, other) == pair[::-1]
    assert example.values == {}
    if margin is not None:
        _, (example,) = read(chat, "pairs", [row], margin=margin[0])
        assert (texts(chat, example), example.values) == (pair, {"margin": margin[1]})


def nectar(**ranks):
    return NECTAR | {"answers": [{"answer": name, "rank": rank} for name, rank in ranks.items()]}


def test_all_pairs_of_ranked_answers(load, chat):
    rows = [nectar(c=3, a=1, b=2, d=3), nectar(x=1, y=2)]
    data = load(chat, "pairs", rows, pairs="all", margin="answers")
    examples = data.examples(data.take(data.rows_per_epoch))
    turns = [[t.split("<|assistant|>")[1].removesuffix("<eos>") for t in texts(chat, e)] for e in examples]
    assert turns == [["a", "c"], ["b", "c"], ["a", "b"], ["a", "d"], ["b", "d"], ["x", "y"]], "c and d are equal"
    assert [e.values["margin"] for e in examples] == [2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    extremes = load(chat, "pairs", rows)
    assert extremes.rows_per_epoch == 2
    assert extremes.fingerprints() != data.fingerprints()
    first = SourceSection(path=data.sources["train"][0].section.path, max_rows=1)
    assert TrainData(DataSection(train=(first,), pairs="all"), chat, "pairs", 0).rows_per_epoch == 5


def test_rows_without_a_pair_are_bad_rows_among_all_pairs(refusal, load, chat):
    good = [nectar(a=1, b=2)]
    assert re.search(r"\(a tie\)", refusal(chat, "pairs", good, nectar(a=1, b=1), pairs="all"))
    assert re.search("a finite number", refusal(chat, "pairs", good, nectar(a=1, b=2, c=None), pairs="all"))
    with pytest.raises(DataError, match=r"line 2, answers 1 and 3: .*must be text"):
        load(
            chat, "pairs", [*good, NECTAR | {"answers": [*nectar(a=1, b=1)["answers"], {"rank": 2}]}], pairs="all"
        ).take(2)


def test_all_pairs_need_ranked_answers(read, chat):
    for row in (HELPSTEER3, {"prompt": "q", "chosen": "a", "rejected": "b"}):
        with pytest.raises(
            DataError, match=r"data\.pairs = 'all' is for rows with a list of answers, .* have no such rows"
        ):
            read(chat, "pairs", [row], pairs="all")


def test_every_shape_has_a_case():
    cases = (HELPSTEER3, HELPSTEER2, PKU | {"safer_response_id": 0}, SHP, ARENA, KAGGLE | {"winner": "a"}, WEBGPT,
             SUMMARIES, ULTRAFEEDBACK, NECTAR, NEMO, FARM)  # fmt: skip
    assert {s for s in SHAPES if any(s.fits(row, row, {}) for row in cases)} == {*SHAPES}


def test_two_preferences_ask_which_decides(read, chat):
    row = PKU | {"safer_response_id": 0}
    with pytest.raises(DataError, match=r"several ways: .*preference = 'safer_response_id'.*--data\.preference better"):
        read(chat, "pairs", [row])
    for column, answer in (("better_response_id", "good"), ("safer_response_id", "bad")):
        _, (example,) = read(chat, "pairs", [row], preference=column)
        assert texts(chat, example)[0] == f"<|user|>q<eos><|assistant|>{answer}<eos>"
    with pytest.raises(DataError, match=r"has no column .*'kinder'"):
        read(chat, "pairs", [row], preference="kinder")
    with pytest.raises(DataError, match=r"data\.preference = 'better_response_id' has no effect"):
        read(chat, "pairs", [row | {"chosen": "a", "rejected": "b"}], preference="better_response_id")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (HELPSTEER3 | {"overall_preference": 0}, r"\(a tie\)"),
        (
            HELPSTEER3 | {"overall_preference": None},
            "a preference, score or rank must be a finite number, got NoneType",
        ),
        (HELPSTEER3 | {"overall_preference": 10**400}, "must be a finite number, got int 1000"),
        (PKU | {"better_response_id": -1}, "int -1 does not say which of 2 answers is better"),
        (SHP | {"labels": 2}, "int 2 does not say which of 2 answers is better"),
        (ARENA | {"winner": "tie (bothbad)"}, r"\(a tie\)"),
        (ARENA | {"winner": "both_bad"}, r"\(a tie\)"),
        (ARENA | {"winner": "gpt-4"}, "str 'gpt-4' does not say which of 2 answers is better"),
        (ARENA | {"conversation_a": talk("q", "x", "q", "bad"), "conversation_b": talk("q", "y", "q", "good")},
         "differ before their last"),
        (KAGGLE | {"winner_model_a": 0, "winner_tie": 1}, r"\(a tie\)"),
        (KAGGLE | {"response_b": '["bad", "b"]'}, "must be JSON lists with the same number of turns"),
        (KAGGLE | {"response_b": '[null]'}, "must be text"),
        (KAGGLE | {"response_b": "bad"}, "must be JSON lists"),
        (WEBGPT | {"score_0": 0.25}, r"\(a tie\)"),
        (WEBGPT | {"question": {"id": "1"}}, "a question with full_text or a post"),
        (SUMMARIES | {"info": {"post": None, "article": "a"}}, "a question with full_text or a post"),
        (SUMMARIES | {"summaries": [{"text": "a"}]}, "at least two answers, got list"),
        (ULTRAFEEDBACK | {"completions": [{"response": "a", "overall_score": 3}] * 2}, r"\(a tie\)"),
        (ULTRAFEEDBACK | {"completions": ["a", "b"]}, "each answer must be an object"),
        (NECTAR | {"answers": [{"answer": "a", "rank": 1}, {"rank": 2}]}, "must be text"),
    ],
)  # fmt: skip
def test_ties_and_values_that_say_nothing_make_a_bad_row(refusal, chat, row, message):
    first = next(r for r in (HELPSTEER3, PKU, SHP, ARENA, KAGGLE, WEBGPT, SUMMARIES, ULTRAFEEDBACK, NECTAR)
                 if r.keys() == row.keys())  # fmt: skip
    assert re.search(message, refusal(chat, "pairs", [first], row))


def test_the_turns_of_helpsteer2_become_messages(read, chat):
    prompt = "hi\n\n<extra_id_1>Assistant\n\nYes?\n\n<extra_id_1>User\n\nwell"
    _, (_, example) = read(chat, "pairs", [HELPSTEER2, HELPSTEER2 | {"prompt": prompt}])
    start = "<|user|>hi<eos><|assistant|>Yes?<eos><|user|>well<eos><|assistant|>"
    assert texts(chat, example) == [f"{start}good<eos>", f"{start}bad<eos>"]
    rows = [{"prompt": "q", "response": "a"}, {"prompt": prompt, "response": "good"}]
    for order in (rows, rows[::-1]):  # HelpSteer2 itself, whose first row has a single turn
        _, examples = read(chat, "demonstrations", order)
        assert f"{start}good<eos>" in [text for example in examples for text in texts(chat, example)]


def test_a_preference_that_is_missing_is_not_the_margin(read, chat):
    rows = [SHP, {k: v for k, v in SHP.items() if k != "labels"} | {"score_ratio": 1.0}]
    with pytest.raises(DataError, match=r"line 2: .* must be a finite number, got NoneType"):
        read(chat, "pairs", rows, margin="score_ratio")


def test_conversations_of_votes(read, chat, chars):
    row = KAGGLE | {"prompt": '["q", "and"]', "response_a": '["a", "good"]', "response_b": '["b", "bad"]'}
    _, (example,) = read(chat, "pairs", [row], loss_on="assistant")
    start = "<|user|>q<eos><|assistant|>{}<eos><|user|>and<eos><|assistant|>{}<eos>"
    assert texts(chat, example) == [start.format("a", "good"), start.format("b", "bad")]
    _, (example,) = read(chars, "pairs", [KAGGLE])
    assert texts(chars, example) == ["qgood<eos>", "qbad<eos>"]


def test_conversations_need_a_chat_template(read, chars):
    with pytest.raises(DataError, match="which need a chat template, but none is used"):
        read(chars, "pairs", [ARENA])


def test_the_way_is_said(read, chat):
    data, _ = read(chat, "pairs", [HELPSTEER3], margin="overall_preference")
    assert data.notes[0].endswith(
        "read as prompt = 'context', first = 'response1', second = 'response2', margin = 'overall_preference' (below "
        "0 the first answer is better, above 0 the second; the difference is the margin)"
    )


@pytest.mark.parametrize(("form", "answers"), [
    ("pairs", {"chosen": " yo", "rejected": " no"}), ("demonstrations", {"response": " yo"}), ("prompts", {}),
])  # fmt: skip
def test_a_dialogue_in_the_prompt_becomes_messages(load, chat, chars, form, answers):
    prompt = "Human: hi\n\nAssistant: Yes?\n\nHuman: well\n\nAssistant:"
    for tokenizer, start, answer in (
        (chat, "<|user|>hi<eos><|assistant|>Yes?<eos><|user|>well<eos><|assistant|>", "yo"), (chars, prompt, " yo")
    ):  # fmt: skip
        data = load(tokenizer, form, [{"prompt": prompt, **answers}, {"prompt": "hi", **answers}])
        rows = data.take(2)
        if form == "prompts":
            assert tokenizer.decode(data.template.encode_prompt(rows[0]).ids) == start
        else:
            assert texts(tokenizer, data.examples(rows)[0])[0] == start + answer + "<eos>"


def test_prompts_that_are_lists_written_as_text_are_said(load, chat):
    data = load(chat, "prompts", [KAGGLE])
    assert any("has prompts that are lists written as text, which the model sees as they are" in n for n in data.notes)
