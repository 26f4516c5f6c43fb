"""Supervised runs on several data formats. The first step's loss and gradient equal those of transformers, one row at a
time, for trained texts written by hand. Also recognised columns, and rows that are left out and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rlhf_testing.tiny import tiny_model, tiny_tokenizer

from tests.runs import Workshop, merged

THINKING = (
    "{% for m in messages %}{% set c = m.content %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip() %}{% else %}{% set r = '' %}{% endif %}"
    "{% if loop.last %}{{ '<think>' + r + '</think>' }}{% endif %}{% endif %}{{ c + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Like Qwen3's template: earlier answers lose their reasoning; the last one has a block, which may be empty."""


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CASES = {
    "all answers": (
        "default",
        {"loss_on": "assistant"},
        [{"messages": turns("a", "bc", "def", "g")}, {"messages": turns("hello", "x")},
         {"messages": turns("1", "2", "3", "4", "5", "6")}],
        [["<|user|>a<eos><|assistant|>", "[bc<eos>]", "<|user|>def<eos><|assistant|>", "[g<eos>]"],
         ["<|user|>hello<eos><|assistant|>", "[x<eos>]"],
         ["<|user|>1<eos><|assistant|>", "[2<eos>]", "<|user|>3<eos><|assistant|>", "[4<eos>]",
          "<|user|>5<eos><|assistant|>", "[6<eos>]"]],
    ),
    "continued pre-training": (
        "default",
        {},
        [{"text": "it was a night"}, {"text": "x"}, {"text": "so dark that nobody saw"}],
        [["[it was a night<eos>]"], ["[x<eos>]"], ["[so dark that nobody saw<eos>]"]],
    ),
    "everything of a conversation": (
        "default",
        {"loss_on": "all"},
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 2,
        [["[<|user|>a<eos><|assistant|>b<eos>]"]] * 2,
    ),
    "reasoning": (
        THINKING,
        {},
        [{"messages": turns("a", "<think>old</think>b", "c", "<think>new</think>d")},
         {"messages": turns("e", "f")}, {"messages": turns("g", "<think>h</think>i")}],
        [["<|user|>a<eos><|assistant|>b<eos><|user|>c<eos><|assistant|>", "[<think>new</think>d<eos>]"],
         ["<|user|>e<eos><|assistant|>", "[<think></think>f<eos>]"],
         ["<|user|>g<eos><|assistant|>", "[<think>h</think>i<eos>]"]],
    ),
}  # fmt: skip
"""{case: (chat template, [data], rows, for each row its pieces, trained ones in brackets)}. Rows of
unequal lengths are computed in one pass."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    templates = dict.fromkeys(case[0] for case in CASES.values())
    return {t: tiny_model(folder / str(i), chat_template=t) for i, t in enumerate(templates)}


def plain_statement(path, rows: Sequence[Sequence[str]]) -> tuple[float, float, float]:
    """(mean negative log-likelihood of the trained tokens, norm of its gradient, share of these tokens with the highest
    logit), with one forward pass per row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    losses, right = [], []
    for pieces in rows:
        ids, labels = list[int](), list[int]()
        for piece in pieces:
            on = piece.startswith("[")
            tokens = tokenizer(piece[1:-1] if on else piece, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if on else [-100] * len(tokens)
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="none"))
        right.append(logits.argmax(-1) == torch.tensor(labels[1:]))
    counts = sum(int((loss != 0).sum()) for loss in losses)
    mean = torch.cat(losses).sum() / counts
    mean.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(mean.detach()), float(norm), float(torch.cat(right).sum() / counts)


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_that_of_rows_one_at_a_time(shop: Workshop, models, case) -> None:
    template, section, rows, expected = CASES[case]
    data = {"train": str(shop.rows("rows.jsonl", rows)), "batch_size": len(rows), "shuffle": False, "max_tokens": 99}
    run = shop.train("sft", "run", run={"steps": 1}, data=data | section, policy={"model": str(models[template])})
    (line,) = run.lines()
    nll, norm, _ = plain_statement(models[template], expected)
    assert line["policy/nll"] == pytest.approx(nll, rel=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


LAYOUTS = {
    "a row in each micro-batch": {"policy": {"micro_tokens": 8}},
    "chunks of two tokens": {"trainer": {"logits_chunk": 256}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_accuracy_of_tokens_is_that_of_the_highest_logits(shop: Workshop, models, layout) -> None:
    """The untrained model repeats its input, so it is right at some doubled letters."""
    texts = ("aabbccdd", "aab", "tattoo", "xyz", "aabcc")
    data = {"train": str(shop.rows("rows.jsonl", [{"text": text} for text in texts])), "batch_size": 5}
    options = {"run": {"steps": 1}, "data": data, "policy": {"model": str(models["default"])}}
    run = shop.train("sft", "run", **merged(options, LAYOUTS[layout]))
    _, _, accuracy = plain_statement(models["default"], [[f"[{text}<eos>]"] for text in texts])
    assert 0.1 < accuracy < 0.9
    assert run.lines()[0]["policy/token_accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_recognised_columns_are_printed_and_bad_rows_counted(shop: Workshop) -> None:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1) if i != 2 else ""} for i in range(6)]
    data = {"train": str(shop.rows("rows.jsonl", rows)), "eval": str(shop.rows("held.jsonl", rows[3:]))}
    data |= {"batch_size": 5, "shuffle": False}
    stopped = shop.run("sft", "run", data=data)
    assert stopped.code == 1
    assert "rows.jsonl, line 3: column 'answer': the answer is empty" in stopped.err
    assert 'set data.bad_rows = "drop"' in stopped.err
    run = shop.train("sft", "other", data={**data, "bad_rows": "drop"})
    for name in ("train 'rows'", "eval 'held'"):
        (note,) = [text for text in run.said.splitlines() if f"data.{name}" in text]
        assert note.endswith("is read as prompt = 'question', response = 'answer'")
    left_out = "1 of the first 6 training rows are left out (1 with nothing to learn or malformed), e.g. "
    assert left_out in run.said
    assert "rows.jsonl, line 3: column 'answer': the answer is empty" in run.said
    assert [line["data/bad_rows"] for line in run.lines()] == [1, 2, 3]  # 15 of 18 draws are used
    assert "data/dropped" not in run.lines()[0]
    assert "evaluation rows" not in run.said
    held_out = str(shop.rows("some.jsonl", rows[1:]))
    subset = shop.train("sft", "some", data={**data, "bad_rows": "drop", "eval": held_out})
    assert "1 evaluation rows are bad and left out" in subset.said
    dry = shop.run("sft", "third", "--dry-run", data={**data, "bad_rows": "drop"})
    assert "is read as prompt = 'question', response = 'answer'" in dry.out
    assert left_out in dry.out


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
OFFLINE = {"reward": None, "sampling": None}
STEPS = {"prompt": "1+1=", "completions": ["add", "2"], "labels": [True, False]}


@pytest.mark.parametrize(
    ("algo", "good", "bad", "says"),
    [
        ("dpo", PAIR, {**PAIR, "rejected": "2"}, "the chosen and the rejected answer have the same tokens"),
        ("prm", STEPS, {**STEPS, "labels": [True]}, "2 steps in column 'completions', but 1 labels in column 'labels'"),
    ],
)
def test_rows_with_nothing_to_learn_are_refused(shop: Workshop, algo: str, good: dict, bad: dict, says: str) -> None:
    path = shop.rows("rows.jsonl", [good, good, bad, good])
    data = {"train": str(path), "batch_size": 3, "shuffle": False}
    run = shop.run(algo, "refused", data=data, **OFFLINE)
    assert run.code == 1
    assert f"rlhf: {path}, line 3: {says}" in run.err
    assert "Traceback" not in run.said
    run = shop.train(algo, "dropped", data={**data, "bad_rows": "drop"}, run={"steps": 2}, **OFFLINE)
    assert [line["data/bad_rows"] for line in run.lines()] == [1, 2]


def test_a_reference_with_another_vocabulary_is_refused_before_anything_starts(shop: Workshop) -> None:
    """The reference has another tokenizer, or too few rows in its embedding."""
    data = {"train": str(shop.rows("rows.jsonl", [PAIR, PAIR])), "batch_size": 2}
    tiny_tokenizer(shop.folder / "other", chars="0123456789+= abc")
    other, small = tiny_model(shop.folder / "other"), shop.folder / "small"
    tiny_tokenizer(small)
    tiny_model(small, vocab_size=50)
    for path, says in ((other, "vocabulary of 19 tokens"), (small, "50")):
        run = shop.run("dpo", "run", data=data, reference={"model": str(path)}, **OFFLINE)
        assert run.code == 1
        assert "role 'reference'" in run.err
        assert says in run.err
        assert not run.path.exists()
