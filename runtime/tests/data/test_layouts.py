"""Column layouts of the hub: what each is recognised as, what its rows become, what is ambiguous, what is refused."""

from __future__ import annotations

import json
import re

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.conversions import is_dialogue, is_turn, repeats
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.source_layouts import recognise
from rlhf_runtime.data.sources import SourceLayout

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
NO = {"role": "assistant", "content": "no"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
HH = "\n\nHuman: hi\n\nAssistant:"
PRM800K = {
    "question": {"problem": "1+1?", "ground_truth_answer": "2"},
    "label": {"steps": [
        {"completions": [{"text": "Hm.", "rating": 0}, {"text": "Add.", "rating": 1}], "human_completion": None,
         "chosen_completion": 1},
        {"completions": [{"text": "x", "rating": -1}], "human_completion": {"text": "By hand.", "rating": None},
         "chosen_completion": None},
        {"completions": [{"text": "So.", "rating": 0}], "human_completion": None, "chosen_completion": 0},
        {"completions": [{"text": "3.", "rating": -1}, {"text": "4.", "rating": -1}], "human_completion": None,
         "chosen_completion": None},
    ], "finish_reason": "found_error"},
}  # fmt: skip
SHEPHERD = {"input": "1+1? Step 1: Add. ки\nStep 2: It is 3. ки", "label": "1+1? Step 1: Add. +\nStep 2: It is 3. -"}


def found(form, row, **options):
    """({field: column}, conversion) of a source with this first row."""
    layout = recognise(form, list(row), row, **options)
    return dict(layout.columns), layout.conversion


# ---------------------------------------------------------------------------------- recognised


@pytest.mark.parametrize(
    ("form", "row", "columns", "conversion"),
    [
        # this project's own names, and TRL's
        ("demonstrations", {"prompt": "a", "response": "b", "id": 1}, {"prompt": "prompt", "response": "response"}, ""),
        ("demonstrations", {"prompt": "a", "completion": "b"}, {"prompt": "prompt", "response": "completion"}, ""),
        ("demonstrations", {"prompt": [USER], "completion": [BOT]},
         {"prompt": "prompt", "response": "completion"}, ""),
        ("demonstrations", {"messages": [USER, BOT], "source": "x"}, {"messages": "messages"}, ""),
        ("demonstrations", {"text": "a", "meta": {}}, {"text": "text"}, ""),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"},
         {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, ""),
        ("pairs", {"prompt": [USER], "chosen": [BOT], "rejected": [NO]},
         {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, ""),
        ("pairs", {"chosen": [USER, BOT], "rejected": [USER, NO]}, {"chosen": "chosen", "rejected": "rejected"}, ""),
        ("pairs", {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO], "messages": [USER, BOT]},
         {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, ""),
        ("pairs", {"chosen_messages": [USER, BOT], "rejected_messages": [USER, NO]},
         {"chosen": "chosen_messages", "rejected": "rejected_messages"}, ""),
        ("pairs", {"system": None, "chosen": [USER, BOT], "rejected": [USER, NO]},
         {"system": "system", "chosen": "chosen", "rejected": "rejected"}, ""),
        ("demonstrations", {"system": None, "prompt": "a", "response": "b"},
         {"system": "system", "prompt": "prompt", "response": "response"}, ""),
        ("demonstrations", {"system": 3, "prompt": "a", "response": "b"},
         {"prompt": "prompt", "response": "response"}, ""),
        ("pairs", {"chosen": HH + " yo", "rejected": HH + " no"},
         {"chosen": "chosen", "rejected": "rejected"}, "dialogues"),
        ("labels", {"prompt": "a", "completion": "b", "label": True},
         {"prompt": "prompt", "response": "completion", "label": "label"}, ""),
        ("labels", {"messages": [USER, BOT], "label": 0}, {"messages": "messages", "label": "label"}, ""),
        ("steps", {"prompt": "a", "completions": ["b"], "labels": [True]},
         {"prompt": "prompt", "steps": "completions", "step_labels": "labels"}, ""),
        ("prompts", {"prompt": "a", "completion": "b", "question": "c"}, {"prompt": "prompt"}, ""),
        # OpenRLHF's keys, and the data sets that its scripts name
        ("demonstrations", {"input": "a", "output": "b"}, {"prompt": "input", "response": "output"}, ""),
        ("demonstrations", {"id": "1", "system_prompt": "s", "question": "a", "response": "b"},
         {"system": "system_prompt", "prompt": "question", "response": "response"}, ""),
        ("labels", {"instruction": "a", "response": "b", "score": 1.0},
         {"prompt": "instruction", "response": "response", "label": "score"}, ""),
        ("steps", SHEPHERD | {"task": "GSM8K"}, {"steps": "input", "step_labels": "label"}, "marked_steps"),
        ("steps", {"input": SHEPHERD["input"], "value": ["+", "-"]},
         {"steps": "input", "step_labels": "value"}, "marked_steps"),
        ("prompts", {"input": "a", "answer": "b"}, {"prompt": "input"}, ""),
        # ShareGPT, alpaca and others
        ("demonstrations", {"conversations": [HUMAN, GPT], "system": "s"},
         {"system": "system", "messages": "conversations"}, "turns"),
        ("labels", {"conversations": [HUMAN, GPT], "is_correct": True},
         {"messages": "conversations", "label": "is_correct"}, "turns"),
        ("pairs", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}},
         {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}, "answers_in_turns"),
        ("pairs", {"system": "", "question": "a", "chosen": "b", "rejected": "c"},
         {"system": "system", "prompt": "question", "chosen": "chosen", "rejected": "rejected"}, ""),
        ("demonstrations", {"instruction": "a", "input": "b", "output": "c", "text": "a b c"},
         {"prompt": "instruction", "context": "input", "response": "output"}, "context"),
        ("demonstrations", {"instruction": "a", "output": "c"}, {"prompt": "instruction", "response": "output"}, ""),
        ("demonstrations", {"instruction": "a", "context": "", "response": "c", "category": "qa"},
         {"prompt": "instruction", "context": "context", "response": "response"}, "context"),
        ("demonstrations", {"question": "a", "answer": "b"}, {"prompt": "question", "response": "answer"}, ""),
        ("prompts", {"instruction": "a", "input": "b", "output": "c"},
         {"prompt": "instruction", "context": "input"}, "context"),
        ("prompts", {"question": "a", "answer": "b"}, {"prompt": "question"}, ""),
        ("prompts", {"problem": "a", "solution": "b", "level": "c"}, {"prompt": "problem"}, ""),
        ("prompts", {"messages": [USER, BOT]}, {"messages": "messages"}, ""),
        ("prompts", {"conversations": [HUMAN, GPT]}, {"messages": "conversations"}, "turns"),
        ("steps", {"problem": "a", "steps": [{"text": "b", "rating": 1}, {"text": "c", "rating": -1}]},
         {"prompt": "problem", "steps": "steps"}, "rated_steps"),
        ("steps", PRM800K, {"prompt": "question", "steps": "label"}, "prm800k"),
        ("steps", {"question": "a", "steps": ["b"], "ratings": [0.5]},
         {"prompt": "question", "steps": "steps", "step_labels": "ratings"}, ""),
        ("steps", {"prompt": "a", "steps": ["b"], "step_labels": [True]},
         {"prompt": "prompt", "steps": "steps", "step_labels": "step_labels"}, ""),
    ],
)  # fmt: skip
def test_recognised(form, row, columns, conversion):
    assert found(form, row, chat=True) == (columns, conversion)
    has_messages = form == "pairs" and [USER, BOT] in row.values()
    conversations = "messages" in columns or has_messages
    if conversations:
        with pytest.raises(
            DataError,
            match=r"which need a chat template, but none is used; .* or set data.chat_template to a file with one",
        ):
            found(form, row)
    else:
        assert found(form, row) == (columns, conversion)


def test_named_columns_have_precedence():
    row = {"prompt": "a", "q": "b", "response": "c", "r": "d", "messages": [USER, BOT], "ok": True, "label": "x"}
    demonstrations = {"prompt": "prompt", "response": "response"}
    assert found("demonstrations", row, chat=True) == (demonstrations, "")
    assert found("demonstrations", row, chat=True, names={"prompt": "q"}) == ({**demonstrations, "prompt": "q"}, "")
    assert found("demonstrations", row, names={"response": "r"}) == ({**demonstrations, "response": "r"}, "")
    assert found("demonstrations", row, chat=True, names={"messages": "messages"}) == ({"messages": "messages"}, "")
    assert found("labels", row, names={"label": "ok"}) == ({**demonstrations, "label": "ok"}, "")
    assert found("labels", row)[0]["label"] == "label"  # by its default name, whatever it holds: said row by row
    # a column that is named and not there is never replaced by another
    with pytest.raises(
        DataError,
        match=r"no column 'answr'; columns present: prompt, answer\. Did you mean 'answer'\? Name .* --data\.response",
    ):
        found("demonstrations", {"prompt": "a", "answer": "b"}, names={"response": "answr"})
    # naming a column keeps its conversion, and takes no further column along
    row = {"talk": [HUMAN, GPT], "system": "s"}
    assert found("demonstrations", row, chat=True, names={"messages": "talk"}) == ({"messages": "talk"}, "turns")
    # whole conversations beside a prompt that is named: taken by its word
    row = {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO]}
    assert "prompt" in found("pairs", row, chat=True, names={"prompt": "prompt"})[0]


@pytest.mark.parametrize(
    ("form", "row", "ways", "naming"),
    [
        ("demonstrations", {"question": "a", "answer": "b", "solution": "c"}, 2, {"response": "solution"}),
        ("demonstrations", {"prompt": "a", "completion": "b", "messages": [USER, BOT]}, 2, {"messages": "messages"}),
        ("demonstrations", {"messages": [USER], "conversations": [HUMAN]}, 2, {"messages": "messages"}),
        ("prompts", {"question": "a", "input": "b"}, 2, {"prompt": "question"}),
        ("labels", {"prompt": "a", "response": "b", "score": 1, "is_correct": True}, 2, {"label": "score"}),
        ("pairs", {"question": "a", "query": "b", "chosen": "c", "rejected": "d"}, 2, {"prompt": "query"}),
        (
            "pairs",
            {
                "prompt": "a",
                "response_0": "b",
                "response_1": "c",
                "better_response_id": 1,
                "messages": [USER, BOT],
                "rejected_response": "d",
            },
            2,
            {"messages": "messages", "rejected": "rejected_response"},
        ),
    ],
)
def test_ambiguous_columns_are_refused(form, row, ways, naming):
    with pytest.raises(DataError) as error:
        found(form, row, chat=True)
    message = str(error.value)
    assert "can be read in several ways: (1) " in message
    assert f"({ways}) " in message
    assert f"({ways + 1}) " not in message
    assert "Name the columns to use, e.g. --data." in message
    columns, _ = found(form, row, chat=True, names=naming)
    assert naming.items() <= columns.items()


@pytest.mark.parametrize("form", ["prompts", "demonstrations"])
def test_two_contexts_are_refused_and_a_template_chooses(form):
    row = {"instruction": "Add.", "input": "1, 2", "context": "", "output": "3"}
    for naming in ({}, {"prompt": "instruction"}):
        with pytest.raises(DataError, match="in several ways") as error:
            found(form, row, names=naming)
        template = re.search(r'data\.input_template = "(.*)"\.$', str(error.value))[1]
        assert template == r"{instruction}\n\n{input}\n\n{context}"
    assert found(form, row, prompt="made") == ({} if form == "prompts" else {"response": "output"}, "")


def test_a_named_column_is_read_in_place_of_another_that_holds_prompts():
    row = {"question": "a", "messages": [USER, BOT]}
    with pytest.raises(DataError, match="several ways"):
        found("prompts", row, chat=True)
    for field, column in (("prompt", "question"), ("messages", "messages")):
        assert found("prompts", row, chat=True, names={field: column})[0] == {field: column}
    # Its values are checked when rows are read.
    assert found("prompts", {**row, "choice": 1}, chat=True, names={"messages": "choice"})[0] == {"messages": "choice"}


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        (
            "pairs",
            {"chosen": "a", "rejected": "b"},
            "has no column 'prompt'; columns present: chosen, rejected. Name the right one with --data.prompt.",
        ),
        ("pairs", {"prompt": "a", "chosen": "b"}, "has no column 'rejected'; columns"),
        ("pairs", {"prompt": "other", "chosen": [USER, BOT], "rejected": [USER, NO]}, "that they do not repeat; name"),
        ("labels", {"prompt": "a", "response": "b", "score": 7.5}, "has no column 'label';"),
        ("steps", {"prompt": "a", "steps": [{"text": "b"}]}, "has no column 'completions' or 'labels';"),
        ("steps", {"prompt": "a", "completions": ["b"]}, "has no column 'labels';"),
        ("demonstrations", {"prompt": "a"}, "has no column 'response';"),
        (
            "demonstrations",
            {"question": "a", "complettion": "b"},
            "no column 'response'; columns present: question, "
            "complettion. Did you mean 'complettion'? Name the right one with --data.response.",
        ),
        ("labels", {"question": "a", "answer": "b", "score": 0.7}, "has no column 'label';"),
        ("demonstrations", {"": "0", "prompt": "a"}, "has no column 'response'; columns present: '', prompt."),
        (
            "pairs",
            {"question": "a", "answer": "b"},
            "has no column 'chosen' or 'rejected'; columns present: question, "
            "answer. Name the right ones with --data.chosen, --data.rejected.",
        ),
    ],
)
def test_the_error_for_unknown_columns_says_what_is_missing(form, row, message):
    with pytest.raises(DataError) as error:
        found(form, row, chat=True)
    assert message in str(error.value)
    assert f"columns present: {', '.join(c or repr(c) for c in row)}." in str(error.value) or "repeat" in message


# ------------------------------------------------------------------------------------- what rows become


def render(tokenizer, sequence):
    """Text with what is trained on in brackets."""
    parts, on = [], False
    for token, trained in zip(sequence.ids, sequence.loss_mask, strict=True):
        parts.append("[" if trained and not on else "]" if on and not trained else "")
        parts.append(tokenizer.decode([token]))
        on = trained
    return "".join(parts) + ("]" if on else "")


def test_dialogues_as_plain_text(read, chars):
    data, (example,) = read(chars, "pairs", [{"chosen": HH + " yo", "rejected": HH + " yes"}])
    assert [render(chars, s) for s in example.sequences] == [f"{HH}[ yo<eos>]", f"{HH}[ yes<eos>]"]
    assert data.template.encode_prompt(data.row("rows", 0)).text == HH  # for evaluation by answering
    assert data.notes == [
        f"data.train 'rows' ({data.section.train[0].path}) is read as chosen, rejected (Human/Assistant dialogues: "
        "the prompt is their common prefix up to '\\n\\nAssistant:')"
    ]


def test_dialogues_as_messages(read, chat):
    front = HH + " Yes?\n\nHuman: well\n\nAssistant:"
    _, (example,) = read(chat, "pairs", [{"chosen": front + " yo ", "rejected": front + " no"}])
    start = "<|user|>hi<eos><|assistant|>Yes?<eos><|user|>well<eos><|assistant|>"
    assert [render(chat, s) for s in example.sequences] == [f"{start}[yo<eos>]", f"{start}[no<eos>]"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (HH + " a", "\n\nHuman: ho\n\nAssistant: b", "no common prefix that ends with '\\n\\nAssistant:'"),
        (HH + " a\n\nHuman: x\n\nAssistant: c", HH + " b", "differ before the last answer: chosen continues with ' a"),
        (HH, HH + " b", "the answer is empty"),
        (HH + " a", HH + " a", "the chosen and the rejected answer have the same tokens"),
        (HH + " a", 3, "columns 'chosen', 'rejected': rejected must be text, got int 3"),
    ],
)
def test_dialogues_that_cannot_be_pairs(refusal, chars, chosen, rejected, message):
    good = {"chosen": HH + " yo", "rejected": HH + " yes"}
    assert message in refusal(chars, "pairs", [good], {"chosen": chosen, "rejected": rejected})


def test_conversations_with_an_implicit_prompt(read, chat):
    """TRL's: the prompt is what both share; a prompt column that repeats it changes nothing."""
    rows = [{"chosen": [USER, BOT], "rejected": [USER, NO]}]
    _, (plain,) = read(chat, "pairs", rows)
    data, (peer,) = read(chat, "pairs", [{"prompt": "hi", **rows[0]}])
    assert [render(chat, s) for s in plain.sequences] == [
        "<|user|>hi<eos><|assistant|>[yo<eos>]", "<|user|>hi<eos><|assistant|>[no<eos>]"
    ]  # fmt: skip
    assert plain.sequences == peer.sequences
    assert data.template.encode_prompt(data.row("rows", 0)).text == "hi"


@pytest.mark.parametrize("first", ["whole", "repeated", "answers", "text"])
def test_rows_of_pairs_may_be_of_different_forms(read, chat, first):
    """Each row is read by what it holds, not by what the first row held."""
    rows = {
        "whole": {"chosen": [USER, BOT], "rejected": [USER, NO]},
        "repeated": {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO]},
        "answers": {"prompt": "hi", "chosen": [BOT], "rejected": [NO]},
        "text": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    }
    _, examples = read(chat, "pairs", [rows.pop(first), *rows.values()])
    assert {tuple(render(chat, s) for s in e.sequences) for e in examples} == {
        ("<|user|>hi<eos><|assistant|>[yo<eos>]", "<|user|>hi<eos><|assistant|>[no<eos>]")
    }


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "other", "chosen": [USER, BOT], "rejected": [USER, NO]},
            "do not repeat the prompt; name the prompt's column",
        ),
        ({"prompt": "hi", "chosen": [USER, BOT], "rejected": [NO]}, "one answer is a whole conversation"),
        ({"prompt": None, "chosen": [BOT], "rejected": [NO]}, "column 'prompt': must be text or a list"),
        ({"chosen": [BOT], "rejected": [NO]}, "begin with an assistant message, but the row has no prompt"),
        ({"chosen": [{**USER, "role": "User"}, BOT], "rejected": [USER, NO]}, "message 0: the role is str 'User'"),
    ],
)
@pytest.mark.parametrize("first", [{"prompt": "hi"}, {}])
def test_a_pair_of_another_form_that_has_no_reading_is_refused(refusal, chat, first, row, says):
    good = {**first, "chosen": [USER, BOT], "rejected": [USER, NO]}
    if "prompt" not in first and "prompt" in row:
        good["prompt"] = None
    assert says in refusal(chat, "pairs", [good], row)


@pytest.mark.parametrize("turns_first", [True, False])
def test_conversations_of_turns_and_of_messages_may_be_mixed(read, chat, turns_first):
    rows = [{"messages": [HUMAN, GPT]}, {"messages": [USER, BOT]}]
    _, examples = read(chat, "demonstrations", rows if turns_first else rows[::-1])
    assert {render(chat, e.sequences[0]) for e in examples} == {"<|user|>hi<eos><|assistant|>[yo<eos>]"}


@pytest.mark.parametrize("prompt", ["hi", [USER]])
def test_an_answer_that_begins_with_the_prompt_is_refused(read, chat, prompt):
    good = {"prompt": "hi", "response": [BOT]}
    with pytest.raises(DataError, match=r"line 2: column 'response': it begins with the prompt, .* appear twice"):
        read(chat, "demonstrations", [good, {"prompt": prompt, "response": [USER, BOT]}], system="S")


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("demonstrations", {"prompt": "hi", "response": "yo"}),
        ("demonstrations", {"messages": [USER, BOT]}),
        ("demonstrations", {"conversations": [HUMAN, GPT]}),
        ("pairs", {"prompt": "hi", "chosen": "yo", "rejected": "no"}),
        ("pairs", {"chosen": [USER, BOT], "rejected": [USER, NO]}),
        ("pairs", {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO]}),
    ],
)
@pytest.mark.parametrize("null", [{"system": None}, {}])
def test_a_column_of_system_messages_that_is_null_in_the_first_row(read, chat, form, row, null):
    _, (first, second) = read(chat, form, [{**null, **row}, {**row, "system": "S"}])
    for plain, peer in zip(first.sequences, second.sequences, strict=True):
        assert render(chat, peer) == "<|system|>S<eos>" + render(chat, plain)
    with pytest.raises(DataError, match="line 2: column 'system': must be text, got int"):
        read(chat, form, [{**null, **row}, {**row, "system": 3}])


def test_turns_alpaca_and_system_messages(read, chat, chars):
    _, (turns,) = read(chat, "demonstrations", [{"conversations": [HUMAN, GPT], "system": "S"}])
    assert render(chat, turns.sequences[0]) == "<|system|>S<eos><|user|>hi<eos><|assistant|>[yo<eos>]"
    rows = [{"instruction": "do", "input": "x", "output": "y"}, {"instruction": "do", "input": "", "output": "y"}]
    _, alpaca = read(chat, "demonstrations", rows)
    assert [render(chat, e.sequences[0]) for e in alpaca] == [
        "<|user|>do\n\nx<eos><|assistant|>[y<eos>]", "<|user|>do<eos><|assistant|>[y<eos>]"
    ]  # fmt: skip
    rows = [
        {"system_prompt": "S", "question": "q", "response": "r"},
        {"system_prompt": "", "question": "q", "response": "r"},
    ]
    _, plain = read(chars, "demonstrations", rows)
    assert [render(chars, e.sequences[0]) for e in plain] == ["S\n\nq[r<eos>]", "q[r<eos>]"]
    with pytest.raises(DataError, match="column 'question': the row has its own system message, but data"):
        read(chat, "demonstrations", rows[:1], system="T")
    talk = [{"from": "system", "value": "T"}, HUMAN, GPT]
    with pytest.raises(DataError, match=r"its column 'system_prompt' holds one too; .* --data\.messages conv"):
        read(chat, "demonstrations", [{"system_prompt": "S", "conversations": talk}])
    _, (example,) = read(
        chat, "demonstrations", [{"system_prompt": "S", "conversations": talk}], messages="conversations"
    )
    assert render(chat, example.sequences[0]).startswith("<|system|>T<eos><|user|>")
    with pytest.raises(
        DataError, match="a turn is from 'narrator'; allowed: system, user, assistant, tool, developer, human, gpt"
    ):
        read(chat, "demonstrations", [{"conversations": [{"from": "narrator", "value": "x"}, GPT]}])


@pytest.mark.parametrize("first", [None, [], [["a", "b"]]])
@pytest.mark.parametrize("row", [{"instruction": "do", "input": "x"}, {"instruction": "do\n\nx"}, {"query": "do\n\nx"}])
def test_a_history_comes_before_the_prompt(read, chat, row, first):
    rows = [{**row, "response": "y", "history": history} for history in (first, [["hi", "yo"], ["and", "no"]])]
    _, examples = read(chat, "demonstrations", rows)
    assert render(chat, examples[1].sequences[0]) == (
        "<|user|>hi<eos><|assistant|>yo<eos><|user|>and<eos><|assistant|>no<eos>"
        "<|user|>do\n\nx<eos><|assistant|>[y<eos>]"
    )
    if not first:
        assert render(chat, examples[0].sequences[0]) == "<|user|>do\n\nx<eos><|assistant|>[y<eos>]"


def test_a_history_that_cannot_be_read_is_refused(read, chat, chars):
    rows = [{"instruction": "do", "output": "y", "history": history} for history in ([], [["hi", "yo"]], ["hi"])]
    read(chars, "demonstrations", rows[:1])
    with pytest.raises(
        DataError, match=r"line 2: columns .*'history'.*: the row has a history, whose turns need a chat"
    ):
        read(chars, "demonstrations", rows[:2])
    with pytest.raises(DataError, match=r"line 2: columns .* must be a list of \[question, answer\] pairs, got list"):
        read(chat, "demonstrations", [rows[0], rows[2]])


def test_turns_keep_their_weights(read, chat):
    rows = [{"conversations": [HUMAN, {**GPT, "weight": 0}, HUMAN, {"from": "gpt", "value": "no", "weight": 1}]}]
    _, (example,) = read(chat, "demonstrations", rows, loss_on="assistant")
    assert render(chat, example.sequences[0]) == (
        "<|user|>hi<eos><|assistant|>yo<eos><|user|>hi<eos><|assistant|>[no<eos>]"
    )


def test_texts_are_continued_as_they_are(read, chat, chars):
    """Also where the model has a chat template: continued pre-training sees no prompt."""
    for tokenizer in (chars, chat):
        _, (example,) = read(tokenizer, "demonstrations", [{"text": "<user>ab"}])
        assert render(tokenizer, example.sequences[0]) == "[<user>ab<eos>]"
    for field in ({"template": "chat"}, {"system": "S"}):
        with pytest.raises(DataError, match="has texts to continue, which are tokenised as they are; data"):
            read(chat, "demonstrations", [{"text": "ab"}], **field)


def test_steps_of_math_shepherd(read, chars, chat):
    _, (example,) = read(chat, "steps", [SHEPHERD])  # the same tokens as in trl-lib/math_shepherd
    answered = {"prompt": "1+1?", "completions": ["Step 1: Add.", "Step 2: It is 3."], "labels": [True, False]}
    _, (expected,) = read(chat, "steps", [answered])
    assert (example.sequences, example.values) == (expected.sequences, expected.values)
    for labels in ({"label": SHEPHERD["label"]}, {"value": ["+", "-"]}, {"labels": [1.0, 0.0]}):
        _, (example,) = read(chars, "steps", [{"input": SHEPHERD["input"], **labels}])
        (sequence,) = example.sequences
        assert render(chars, sequence) == "1+1? [Step 1: Add.\nStep 2: It is 3.\n]"
        assert example.values["steps"] == [(17, 1.0), (34, 0.0)]
        assert [chars.decode([sequence.ids[position]]) for position, _ in example.values["steps"]] == ["\n", "\n"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "1+1? Step 1: a. ки\nStep 2: b.", "label": ["+", "-"]}, "a step has no mark 'ки' after it: 'S"),
        ({"input": "1+1? a. ки", "label": "1+1? a. +"}, "no 'Step 1:' before the first mark"),
        (
            {"input": SHEPHERD["input"], "label": SHEPHERD["label"].replace("Add", "add")},
            "step 1: the text of the labels differs",
        ),
        ({"input": SHEPHERD["input"], "label": SHEPHERD["label"] + " x"}, "the text of the labels continues after"),
        ({"input": SHEPHERD["input"], "label": SHEPHERD["label"].replace("+\n", "?\n")}, "step 1: a label must be"),
        ({"input": SHEPHERD["input"], "label": ["+"]}, "2 steps in column 'input', but 1 labels in column 'label'"),
    ],
)  # fmt: skip
def test_marked_steps_that_are_refused(refusal, chars, row, message):
    assert message in refusal(chars, "steps", [{k: v for k, v in SHEPHERD.items() if k in row}], row)


def test_steps_of_prm800k(read, chars):
    _, (example,) = read(chars, "steps", [PRM800K])
    (sequence,) = example.sequences
    assert render(chars, sequence) == "1+1?[Add.\nBy hand.\nSo.\n3.\n]"
    assert [label for _, label in example.values["steps"]] == [1.0, 1.0, 1.0, 0.0]  # neutral counts as right
    lost = json.loads(json.dumps(PRM800K))
    lost["label"]["steps"][0]["chosen_completion"] = None
    with pytest.raises(DataError, match="line 1: columns 'question', 'label': step 1: no completion was chosen"):
        read(chars, "steps", [lost])


def test_rated_steps(read, chars):
    rows = [{"prompt": "Q:", "steps": [{"text": "a", "rating": 0}, {"text": "b", "rating": -1}]},
            {"prompt": "Q:", "steps": [{"text": "a", "label": 0.25}, {"text": "b", "label": True}]}]  # fmt: skip
    _, (first, second) = read(chars, "steps", rows)
    assert [first.values["steps"], second.values["steps"]] == [[(3, 1.0), (5, 0.0)], [(3, 0.25), (5, 1.0)]]
    with pytest.raises(DataError, match=r"a rating must be -1 \(wrong\), 0 \(neutral\) or 1 \(right\), got 2"):
        read(chars, "steps", [{"prompt": "Q:", "steps": [{"text": "a", "rating": 2}]}])


def test_recognised_prompts_reach_the_policy_and_templates(load, read, chars, chat):
    for tokenizer, field, text in [
        (chars, {}, "2+2"), (chat, {}, "2+2"), (chars, {"input_template": "Q: {question} A:"}, "Q: 2+2 A:")
    ]:  # fmt: skip
        data = load(tokenizer, "prompts", [{"question": "2+2", "answer": "4"}], **field)
        (row,) = data.take(1)
        assert row.columns == {"question": "2+2", "answer": "4"}  # rewards see the row as it is
        assert data.template.encode_prompt(row).text == text
    _, (example,) = read(chars, "steps", [SHEPHERD], input_template="<{prompt}>\n")  # of the conversion
    assert render(chars, example.sequences[0]).startswith("<1+1? >\n[Step 1")


def test_each_source_has_its_own_layout(tmp_path, chat):
    rows = {"a": {"conversations": [HUMAN, GPT]}, "b": {"instruction": "hi", "output": "yo"},
            "c": {"messages": [USER, BOT]}, "d": {"prompt": "hi", "response": "yo"}}  # fmt: skip
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = tuple(SourceSection(path=str(tmp_path / f"{name}.jsonl")) for name in rows)
    data = TrainData(DataSection(train=sources, shuffle=False), chat, "demonstrations", 0)
    texts = {render(chat, e.sequences[0]) for e in data.examples(data.take(4))}
    assert texts == {"<|user|>hi<eos><|assistant|>[yo<eos>]"}
    assert [note.split("is read as ")[1] for note in data.notes] == [
        "messages = 'conversations' (from/value turns as messages)", "prompt = 'instruction', response = 'output'",
        "messages"
    ]  # fmt: skip


def test_a_layout_pickles(chars):
    import pickle

    layout = recognise("pairs", ["chosen", "rejected"], {"chosen": HH + " a", "rejected": HH + " b"})
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout == SourceLayout({"chosen": "chosen", "rejected": "rejected"}, "dialogues")
    assert copy.read({"chosen": HH + " a", "rejected": HH + " b"})["prompt"] == HH


def test_columns_for_the_template_that_it_is_not_given_are_said(read, chat, chars):
    row = {"messages": [USER, BOT], "tools": [], "chat_template_kwargs": None}
    data, _ = read(chat, "demonstrations", [row])
    (note,) = [n for n in data.notes if "is not passed" in n]
    assert "has the column 'chat_template_kwargs', which is not passed to the chat template" in note
    data, _ = read(chars, "demonstrations", [{"prompt": "a", "response": "b", "tools": []}])
    assert data.notes == []
    for videos, notes in ((["a.mp4"], 1), ("a title", 0)):
        data, _ = read(chat, "demonstrations", [{"messages": [USER, BOT], "videos": videos}])
        assert len([n for n in data.notes if "'videos': models here read text and images only" in n]) == notes


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("demonstrations", {"conversations": [{"from": ["x"], "value": "x"}, GPT]}, "a turn is from"),
        *(
            ("demonstrations", {"conversations": [HUMAN, {"from": "function_call", "value": value}]}, problem)
            for value, problem in (
                ("f(1)", "must be the JSON of {name, arguments} or a list of them, got str 'f(1)'"),
                ("[]", "must be the JSON of"),
                ('{"arguments": {}}', "a tool call must be {id, type, function: {name, arguments}}"),
            )
        ),
        ("steps", {"prompt": "p", "steps": [{"text": "t", "rating": [1]}]}, "a rating must be -1"),
        ("steps", {"prompt": "p", "steps": [{"text": "t", "rating": "1"}]}, "a rating must be -1"),
        ("steps", {"question": {"problem": "p"}, "label": {"steps": [1]}}, "step 1: must have completions"),
        *(
            ("steps", {"question": {"problem": "p"}, "label": {"steps": [step]}}, problem)
            for step, problem in (
                ({"completions": 5}, "step 1: each completion must be"),
                ({"completions": [1], "chosen_completion": 0}, "step 1: each completion must be"),
                ({"completions": [], "chosen_completion": -1}, "step 1: no completion was chosen"),
                ({"human_completion": "x"}, "step 1: each completion must be"),
            )
        ),
    ],
)
def test_values_of_a_wrong_form_make_a_bad_row(refusal, chat, form, row, message):
    """Behind a first row that is as it should be; not a TypeError that ends the run without file and line."""
    good = {"conversations": {"conversations": [HUMAN, GPT]}, "label": PRM800K}
    first = good.get([*row][-1], {"prompt": "p", "steps": [{"text": "t", "rating": 1}]})
    assert message in refusal(chat, form, [first], row)


def test_text_that_only_mentions_the_words_is_neither_a_turn_nor_a_dialogue():
    assert is_turn({"from": "human", "value": "hi"})
    assert not is_turn("a value from a list")
    assert is_dialogue("\n\nHuman: hi\n\nAssistant: yes")
    assert not is_dialogue("He asked:\n\nHuman: hi\n\nAssistant: yes")
    assert not is_dialogue("Human: hi")


def test_a_conversation_repeats_a_prompt_of_messages_by_beginning_with_it():
    other = {"role": "user", "content": "other"}
    assert repeats([[USER, BOT], [USER, other]], [USER])
    assert not repeats([[USER, BOT], [other, USER, BOT]], [USER])
    assert repeats([[USER, BOT], [other, USER, BOT]], USER["content"]), "a text is said anywhere"
    assert not repeats([[USER, BOT], [other, BOT]], USER["content"])
