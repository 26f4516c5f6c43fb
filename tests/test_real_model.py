"""A pretrained chat model, SmolLM2-135M-Instruct: its log-probs and first losses beside plain transformers, the tokens
and masks of real rows, and whole runs of its first layers on every runtime.

`make quickstart` puts the model into the user's cache; RLHF_REAL_MODEL names another folder. RLHF_DATA names a folder
with the rows of HH and GSM8K (examples/preferences/README.md). Tests without their model or rows are skipped.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from examples.gsm8k.prepare import cleaned
from tests.forks import Forks
from tests.members import ROOT
from tests.runs import Finished, Workshop, assert_same_run, merged

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
MODEL = Path(os.environ.get("RLHF_REAL_MODEL") or CACHE / "rlhf/models/SmolLM2-135M-Instruct")
DATA = Path(os.environ.get("RLHF_DATA") or ROOT.parent / "shared" / "data")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message that the model's template adds."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason=f"the model is not in {MODEL}"),
]
has_rows = pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").exists(), reason=f"no rows in {DATA}")

DIALOGUES = [
    {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    for question, chosen, rejected in (
        ("What is 17 + 25?", "17 + 25 = 42.", "17 + 25 = 32."),
        ("Name the capital of France.", "Paris.", "The capital of France is the city of Lyon, I think."),
        ("Is the sea blue?", "It often looks blue, because water absorbs red light first.", "no"),
        ("Write a word in capitals.", "HELLO", "hello, and here are some more words than were asked for"),
    )
]
QUESTIONS = [{"prompt": row["prompt"], "answer": "4"} for row in DIALOGUES]


# ------------------------------------------------------------------------------------------- tokens and masks of rows


def chatml(messages: Sequence[Mapping[str, str]], answer: str) -> list[tuple[str, bool]]:
    """The text of a conversation in pieces, each with whether it is trained on: the last answer and its end token."""
    pieces = [("" if messages[0]["role"] == "system" else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", False)]
    pieces += [(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False) for m in messages]
    return [*pieces, ("<|im_start|>assistant\n", False), (f"{answer}<|im_end|>", True)]


def turns(prompt: str) -> list[dict[str, str]]:
    """The messages of HH's text before the last answer."""
    roles = {"Human": "user", "Assistant": "assistant"}
    parts = prompt.split("\n\n")
    messages: list[dict[str, str]] = []
    for part in parts[1:]:
        name, colon, text = part.partition(":")
        if colon and name in roles:
            messages.append({"role": roles[name], "content": text.strip()})
        elif messages:  # an empty line inside a message
            messages[-1]["content"] += "\n\n" + part
    return messages


def gsm8k() -> list[dict[str, Any]]:
    with (DATA / "gsm8k_train.jsonl").open(encoding="utf-8") as file:
        rows = cleaned([json.loads(line) for line in itertools.islice(file, 200)])
    return [{"prompt": [{"role": "user", "content": r["question"]}], "response": r["answer"]} for r in rows]


def hh() -> list[dict[str, Any]]:
    with gzip.open(DATA / "hh_harmless_pairs.jsonl.gz", "rt", encoding="utf-8") as file:
        parts = (json.loads(line)["chosen"].rpartition("\n\nAssistant:") for line in file)
        rows = ({"prompt": turns(prompt), "response": answer.strip()} for prompt, _, answer in parts if answer.strip())
        return list(itertools.islice(rows, 200))


@has_rows
@pytest.mark.parametrize("rows", [gsm8k, hh])
def test_tokens_and_masks_of_200_real_rows_are_those_of_the_template_written_by_hand(
    rows: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer, written = AutoTokenizer.from_pretrained(str(MODEL)), rows()
    assert len(written) == 200
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in written))
    section = DataSection(train=(SourceSection(path=str(file)),), shuffle=False, max_tokens=8192)
    data = TrainData(section, tokenizer, "demonstrations", seed=0)
    (source,) = data.sources["train"]
    for number, row in enumerate(written):
        (sequence,) = data.judge(source[number]).example.sequences
        pieces = chatml(row["prompt"], row["response"])
        encoded = tokenizer("".join(text for text, _ in pieces), return_offsets_mapping=True, add_special_tokens=False)
        begin = len("".join(text for text, _ in pieces[:-1]))
        assert list(sequence.ids) == encoded["input_ids"], row
        assert list(map(bool, sequence.loss_mask)) == [start >= begin for start, _ in encoded["offset_mapping"]], row


# ---------------------------------------------------------------------------------- log-probs, first losses


@dataclass(frozen=True)
class Plain:
    """The model in plain transformers, one sequence at a time."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> Plain:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager").eval()
        return cls(model, AutoTokenizer.from_pretrained(str(folder)))

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[tokens after the prompt]: log-prob of each token, of the last ``len(ids) - prompt``."""
        logits_TV = self.model(torch.tensor([list(ids)])).logits[0, :-1]
        return log_softmax(logits_TV, -1).gather(-1, torch.tensor(ids[1:])[:, None])[prompt - 1 :, 0]

    def answer(self, prompt: Sequence[Mapping[str, str]], answer: str) -> Tensor:
        """Log-probs of the answer's tokens with its end token."""
        pieces = chatml(prompt, answer)
        before = self.tokenizer("".join(t for t, _ in pieces[:-1]), add_special_tokens=False)["input_ids"]
        ids = self.tokenizer("".join(t for t, _ in pieces), add_special_tokens=False)["input_ids"]
        return self.logprobs(ids, len(before))


@pytest.fixture(scope="module")
def fp64() -> Plain:
    return Plain.load(MODEL, torch.float64)


@pytest.fixture(scope="module")
def answers(fp64: Plain) -> dict[str, list[Tensor]]:
    """{chosen, rejected: log-probs of every answer}."""
    return {
        role: [fp64.answer(row["prompt"], row[role][0]["content"]) for row in DIALOGUES]
        for role in ("chosen", "rejected")
    }


@pytest.fixture
def real(tmp_path: Path) -> Workshop:
    """Runs of the whole model."""
    shop = Workshop(tmp_path, MODEL, tmp_path / "rows.jsonl")
    shop.rows("rows.jsonl", DIALOGUES)
    return shop


def sft_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    return -float(torch.cat(chosen).mean())


def simpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """beta = 2, gamma = 0.5 (a target margin, not divided by beta)."""
    margins = torch.stack([2.0 * (c.mean() - r.mean()) - 0.5 for c, r in zip(chosen, rejected, strict=True)])
    return -float(logsigmoid(margins).mean())


def orpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """The NLL of the chosen answers' tokens, and 0.1 times the odds-ratio term."""

    def log_odds(logprobs: Tensor) -> Tensor:
        mean = logprobs.mean()
        return mean - torch.log1p(-torch.exp(mean))

    ratios = torch.stack([log_odds(c) - log_odds(r) for c, r in zip(chosen, rejected, strict=True)])
    return sft_loss(chosen, rejected) - 0.1 * float(logsigmoid(ratios).mean())


def cpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """beta = 0.1, and the NLL of the chosen answers' tokens."""
    margins = torch.stack([0.1 * (c.sum() - r.sum()) for c, r in zip(chosen, rejected, strict=True)])
    return -float(logsigmoid(margins).mean()) + sft_loss(chosen, rejected)


def log_2(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """Policy and reference are one model."""
    return 0.6931471805599453


def one_half(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """Policy and reference are one model."""
    return 0.5


@pytest.mark.parametrize(
    ("algorithm", "statement"),
    [
        ("dpo", log_2),
        *(
            pytest.param(name, statement, marks=pytest.mark.full)
            for name, statement in (
                ("sft", sft_loss),
                ("simpo", simpo_loss),
                ("orpo", orpo_loss),
                ("cpo", cpo_loss),
                ("kto_pair", one_half),
            )
        ),
    ],
)
def test_first_losses_are_those_of_plain_transformers_in_fp64(
    real: Workshop, answers: dict[str, list[Tensor]], algorithm: str, statement: Callable[..., float]
) -> None:
    """Within 1e-4 of the value: the arithmetic is fp32, through 30 layers."""
    rows = [{"prompt": r["prompt"], "response": r["chosen"]} for r in DIALOGUES] if algorithm == "sft" else DIALOGUES
    changes = {"data": {"train": str(real.rows("these.jsonl", rows))}, "run": {"steps": 1}, "trainer": {"lr": 1e-9}}
    run = real.train(algorithm, "first", **changes, sampling=None, reward=None)
    value = statement(answers["chosen"], answers["rejected"])
    assert run.lines()[0]["policy/loss"] == pytest.approx(value, rel=1e-4)
    if algorithm == "dpo":
        for role, logprobs in answers.items():
            mean = float(torch.stack([t.sum() for t in logprobs]).mean())
            assert run.lines()[0][f"policy/{role}_logprobs"] == pytest.approx(mean, rel=1e-4)


def test_sampled_logprobs_are_those_of_plain_transformers_in_fp64(real: Workshop, fp64: Plain) -> None:
    real.rows("rows.jsonl", QUESTIONS)
    run = real.train("grpo", "sampled", **SAMPLED, run={"steps": 1}, trainer={"lr": 1e-9})
    samples = list(run.samples())
    assert len(samples) == 8
    for sample in samples:
        prompt, answer = sample["turns"]
        plain_T = fp64.logprobs([*prompt["ids"], *answer["ids"]], len(prompt["ids"]))
        assert torch.tensor(answer["logprobs"]).sub(plain_T).abs().max() < 1e-3


# ------------------------------------------------------------------------------------------- whole runs of four layers

SAMPLED: dict[str, Any] = {
    "data": {"batch_size": 2, "max_tokens": 128},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 12},
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the model, with its embedding, tokenizer and template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("cut") / "model"
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(MODEL)).save_pretrained(str(folder))
    return folder


@pytest.fixture
def part(cut: Path, tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path, cut, tmp_path / "rows.jsonl")
    shop.rows("rows.jsonl", QUESTIONS)
    return shop


def on_two_ranks(launcher: str, **trainer: Any) -> dict[str, Any]:
    return merged(
        SAMPLED,
        {
            "launcher": {"use": launcher, "cpus": 2},
            "placement": {"policy": {"ranks": 2}, "generator": {"share": "policy"}},
            "trainer": trainer,
            "run": {"steps": 2},
        },
    )


@pytest.mark.full
def test_a_stopped_run_goes_on_bit_for_bit_and_its_export_is_loaded_by_transformers(part: Workshop) -> None:
    whole = part.train("grpo", "whole", **SAMPLED)
    part.train("grpo", "resumed", **merged(SAMPLED, {"run": {"stop_after": 2}}))
    resumed = part.train("grpo", "resumed", "--resume", **SAMPLED)
    assert_same_run(whole, resumed)
    exported = Plain.load(whole.path / "model", torch.float32)
    assert exported.model.generation_config.eos_token_id in (2, [2])
    assert exported.tokenizer.chat_template == Plain.load(part.model, torch.float32).tokenizer.chat_template


@pytest.mark.full
def test_adapters_learn_and_are_merged_into_the_export(part: Workshop) -> None:
    pytest.importorskip("peft")
    pairs = part.rows("pairs.jsonl", DIALOGUES)
    run = part.train("dpo", "lora", data={"train": str(pairs)}, trainer={"lora": {"rank": 8}, "lr": 1e-3})
    losses = [line["policy/loss"] for line in run.lines()]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("launcher", "trainer"),
    [
        ("processes", {"use": "fsdp"}),
        ("processes", {"use": "deepspeed", "stage": 3}),
        ("ray", {"use": "deepspeed", "stage": 3}),
    ],
)
def test_vllm_and_two_ranks_agree_about_logprobs_and_every_sync_is_proven(
    part: Workshop, forks: Forks, launcher: str, trainer: dict[str, Any]
) -> None:
    for name in ("vllm", *(("ray",) if launcher == "ray" else ()), *(("deepspeed",) if "stage" in trainer else ())):
        pytest.importorskip(name)
    config = part.config(
        "grpo",
        "ranks",
        **merged(on_two_ranks(launcher, **trainer), {"generator": {"use": "vllm", "kv_cache_gib": 0.25}}),
    )
    process = forks.start(part.arguments(config))
    assert process.wait() == 0, process.output[-6000:]
    lines = Finished(Path(config["run"]["output"]), 0).lines()
    assert len(lines) == 2
    for line in lines:
        assert line["policy/kl_generator"] < 1e-4
        assert line["sync/canary"] < 1e-3
