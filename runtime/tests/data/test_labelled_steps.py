"""Published sets of solutions with labelled steps: which steps have a label, what each is, and what is refused."""

from __future__ import annotations

import pytest
from rlhf.errors import DataError
from rlhf_runtime.data import labelled_steps

# The forms are those of the sets' pages and of the code that reads them:
# github.com/QwenLM/ProcessBench (README.md), github.com/ssmisya/PRMBench (docs/data_format.md),
# github.com/openai/prm800k (README.md), OpenGVLab/VisualPRM400K-v1.1-Raw on the hub.
PROCESSBENCH = {"id": "gsm8k-0", "generator": "Qwen2-7B-Instruct", "problem": "q", "steps": ["a", "b", "c"],
                "final_answer_correct": False, "label": 1}  # fmt: skip
PRMBENCH = {"original_question": "no", "modified_question": "q", "original_process": ["1. no"],
            "modified_process": ["1. a", "2. b", "3. c"], "modified_steps": [2, 3], "error_steps": [2], "reason": "r",
            "idx": "circular_prm_test_p1_0", "question": "no", "classification": "circular"}  # fmt: skip
VISUAL_PRM = {"question": "q", "answer": "52", "response": "no", "steps_with_score": [
    {"step": "a", "score": 0.875, "num_mc_correct": 14, "num_mc_total": 16},
    {"step": "b", "score": 0, "num_mc_correct": 0, "num_mc_total": 16}]}  # fmt: skip


def completed(text, rating, chosen=0, human=None):
    completions = [{"text": text, "rating": rating, "flagged": None}]
    return {"completions": completions, "human_completion": human, "chosen_completion": chosen}


def prm800k(*steps, finish_reason="give_up"):
    """A row of phase 1."""
    return {"labeler": "d8", "timestamp": "2022-07-17T16:56:51.323252", "generation": None,
            "is_quality_control_question": False, "is_initial_screening_question": False,
            "question": {"problem": "q", "ground_truth_answer": "4"},
            "label": {"steps": [*steps], "total_time": 278270, "finish_reason": finish_reason}}  # fmt: skip


def labelled(tokenizer, example):
    """(the prompt, [[text of a step, its label]]); steps after the last label are together and have none."""
    (sequence,), labels = example.sequences, dict(example.values["steps"])
    text, steps = "", []
    for position, token in enumerate(sequence.ids):
        if not sequence.loss_mask[position]:
            continue
        text += tokenizer.decode([token])
        if position in labels:
            steps.append([text, labels[position]])
            text = ""
    prompt = [i for i, mask in zip(sequence.ids, sequence.loss_mask, strict=True) if not mask]
    return tokenizer.decode(prompt), [*steps, *([[text, None]] if text else [])]


@pytest.mark.parametrize(
    ("row", "steps"),
    [
        (PROCESSBENCH, [["a\n", 1.0], ["b\n", 0.0], ["c\n", None]]),
        (PROCESSBENCH | {"label": -1}, [["a\n", 1.0], ["b\n", 1.0], ["c\n", 1.0]]),
        (PROCESSBENCH | {"label": 0}, [["a\n", 0.0], ["b\nc\n", None]]),
        (PRMBENCH, [["1. a\n", 1.0], ["2. b\n", 0.0], ["3. c\n", 1.0]]),
        (PRMBENCH | {"error_steps": [1, 3]}, [["1. a\n", 0.0], ["2. b\n", 1.0], ["3. c\n", 0.0]]),
        (VISUAL_PRM, [["a\n", 0.875], ["b\n", 0.0]]),
        (prm800k(completed("a", 0), completed("x", -1, None, {"text": "b", "rating": None}), completed("c", -1, None)),
         [["a\n", 1.0], ["b\n", 1.0], ["c\n", 0.0]]),
        # the labeller gave up: no completion of the last step has a rating, or there is none
        (prm800k(completed("a", 1), completed("b", None, None)), [["a\n", 1.0], ["b\n", None]]),
        (prm800k(completed("a", 1), {"completions": None, "human_completion": None, "chosen_completion": None}),
         [["a\n", 1.0]]),
    ],
)  # fmt: skip
def test_steps_of_published_sets(load, chars, row, steps):
    for kind in ("jsonl", "parquet"):
        data = load(chars, "steps", [row], kind)
        (example,) = data.examples(data.take(1))
        assert labelled(chars, example) == ("q", steps), kind


def test_an_index_without_the_other_columns_of_processbench_must_be_named(load, read, chars):
    """Such a label could as well say whether the answer is right."""
    row = {"question": "q", "steps": ["a", "b"], "label": 1}
    with pytest.raises(DataError, match=r"has no column 'completions' or 'labels'; .* --data\.step_labels"):
        load(chars, "steps", [row])
    _, (example,) = read(chars, "steps", [row], steps="steps", step_labels="label")
    assert labelled(chars, example) == ("q", [["a\n", 1.0], ["b\n", 0.0]])


def test_a_list_of_labels_comes_before_an_index(read, chars):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [False, True], "label": 0, "final_answer_correct": True}
    _, (example,) = read(chars, "steps", [row])
    assert labelled(chars, example) == ("q", [["a\n", 0.0], ["b\n", 1.0]])


def test_a_named_prompt_stands_in_place_of_the_one_of_the_set(read, chars):
    _, (example,) = read(chars, "steps", [PRMBENCH | {"question": "other"}], prompt="question")
    assert labelled(chars, example)[0] == "other"


@pytest.mark.parametrize(
    ("first", "row", "message"),
    [
        (PROCESSBENCH, {"label": 3}, "the index of the first wrong step (of 3), or -1 if no step is wrong, got 3"),
        (PROCESSBENCH, {"label": -2}, "or -1 if no step is wrong, got -2"),
        (PROCESSBENCH, {"label": True}, "or -1 if no step is wrong, got True"),
        (PROCESSBENCH, {"label": None}, "or -1 if no step is wrong, got None"),
        (PROCESSBENCH, {"steps": []}, "columns 'problem', 'steps', 'label': must be a non-empty list"),
        (PRMBENCH, {"error_steps": [0]}, "a list of the numbers of wrong steps (1 to 3), got list [0]"),
        (PRMBENCH, {"error_steps": [4]}, "a list of the numbers of wrong steps (1 to 3), got list [4]"),
        (PRMBENCH, {"error_steps": 2}, "a list of the numbers of wrong steps (1 to 3), got int 2"),
        (prm800k(completed("a", 1)), prm800k(completed("a", None)), "no step has a label, so nothing can be learnt"),
    ],
)
def test_labels_that_are_refused(refusal, chars, first, row, message):
    assert message in refusal(chars, "steps", [first], first | row)


def test_labels_in_the_turns_of_a_conversation_are_refused_with_what_to_make(load, chat):
    """As RLHFlow/Mistral-PRM-Data and OpenGVLab/VisualPRM400K-v1.1 have them."""
    turns = [{"from": "human", "value": "q Step 1: a"}, {"from": "gpt", "value": "+"}]
    with pytest.raises(DataError, match=r"Labels in the turns of conversations \('conversations'\) are not read: make"):
        load(chat, "steps", [{"conversations": turns}])


def test_the_text_of_a_rated_step_may_be_called_otherwise():
    steps = [{"content": "a", "rating": 1}, {"step": "b", "label": 0.5}, {"text": "c", "rating": -1}, {"other": "d"}]
    columns = labelled_steps.rated_steps({"prompt": "p", "steps": steps}, False)
    assert columns == {"prompt": "p", "steps": ["a", "b", "c", None], "step_labels": [1, 0.5, 0, None]}


def test_prm800k_has_steps_in_its_label():
    question = {"problem": "p"}
    assert labelled_steps.is_prm800k(question, {"steps": []})
    assert not labelled_steps.is_prm800k(question, {"total_time": 1})
    for label in ({}, {"steps": None}, {"steps": "a"}):
        with pytest.raises(DataError, match=r"must have question\.problem and label\.steps"):
            labelled_steps.prm800k({"prompt": question, "steps": label}, False)
