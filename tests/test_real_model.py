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
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from examples.gsm8k.prepare import cleaned
from tests.forks import Forks
from tests.members import ROOT
from tests.runs import Finished, Workshop, assert_same_run, merged
from tests.test_first_step import Sample, first_step, norm

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
SAMPLED: dict[str, Any] = {
    "data": {"batch_size": 2, "max_tokens": 128},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 12},
}


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

    def token_logprobs(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[tokens after the prompt]: log-prob of each token, of the last ``len(ids) - prompt``."""
        logits_TV = self.model(torch.tensor([list(ids)])).logits[0, :-1]
        return log_softmax(logits_TV, -1).gather(-1, torch.tensor(ids[1:])[:, None])[prompt - 1 :, 0]

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], prompt: int) -> Tensor:
        return self.token_logprobs(ids, prompt)

    def ids(self, prompt: Sequence[Mapping[str, str]], answer: str) -> tuple[list[int], int]:
        """The tokens of a conversation up to the end token of its answer, and those before the answer."""
        pieces = chatml(prompt, answer)
        before = self.tokenizer("".join(t for t, _ in pieces[:-1]), add_special_tokens=False)["input_ids"]
        return self.tokenizer("".join(t for t, _ in pieces), add_special_tokens=False)["input_ids"], len(before)

    def answer(self, prompt: Sequence[Mapping[str, str]], answer: str) -> Tensor:
        """Log-probs of the answer's tokens with its end token."""
        return self.logprobs(*self.ids(prompt, answer))


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
def real(tmp_path: Path) -> Iterator[Workshop]:
    """Runs of the whole model. A run leaves 2 GB."""
    shop = Workshop(tmp_path, MODEL, tmp_path / "rows.jsonl")
    shop.rows("rows.jsonl", DIALOGUES)
    yield shop
    shutil.rmtree(tmp_path)


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


def constant(value: float) -> Callable[..., float]:
    """Policy and reference are one model."""
    return lambda chosen, rejected: value


@pytest.mark.parametrize(
    ("algorithm", "statement"),
    [
        ("dpo", constant(0.6931471805599453)),
        *(
            pytest.param(name, statement, marks=pytest.mark.full)
            for name, statement in (
                ("sft", sft_loss),
                ("simpo", simpo_loss),
                ("orpo", orpo_loss),
                ("cpo", cpo_loss),
                ("kto_pair", constant(0.5)),
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


def scores(head: Tensor, body: Any, ids: Sequence[int]) -> Tensor:
    """[tokens]: the head's output after each token."""
    return body(torch.tensor([list(ids)])).last_hidden_state[0] @ head


@pytest.mark.full
@torch.no_grad()
def test_the_first_loss_of_a_reward_model_with_a_new_head_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain
) -> None:
    run = real.train("reward_model", "scores", data={"train": str(real.data)}, run={"steps": 1}, trainer={"lr": 1e-9})
    head = load_file(run.path / "model" / "model.safetensors")["score.weight"][0].double()
    assert float(head.std()) == pytest.approx(1 / 577, rel=0.1)
    chosen, rejected = (
        torch.stack(
            [scores(head, fp64.model.model, fp64.ids(d["prompt"], d[r][0]["content"])[0])[-1] for d in DIALOGUES]
        )
        for r in ("chosen", "rejected")
    )
    margins = chosen - rejected
    line = run.lines()[0]
    assert line["policy/loss"] == pytest.approx(-float(logsigmoid(margins).mean()), rel=1e-4)
    assert line["policy/margin"] == pytest.approx(float(margins.mean()), abs=1e-4)
    assert line["policy/chosen_score"] == pytest.approx(float(chosen.mean()), abs=1e-4)


@pytest.mark.full
def test_the_first_loss_of_kto_with_labels_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, cut: Path
) -> None:
    """The reference is the first four layers, so log-ratios and the drift on mismatched answers are not 0."""
    reference, (desirable, undesirable) = Plain.load(cut, torch.float64), (1.5, 0.7)
    rows = [
        {"prompt": row["prompt"], "response": row[role], "label": role == "chosen"}
        for role, row in zip(("chosen", "rejected", "chosen", "rejected"), DIALOGUES, strict=True)
    ]

    def ratio(prompt: Sequence[Mapping[str, str]], answer: Sequence[Mapping[str, str]]) -> Tensor:
        logprobs, others = (model.answer(prompt, answer[0]["content"]) for model in (fp64, reference))
        return (logprobs - others).sum()

    drifts = [ratio(row["prompt"], rows[i - 1]["response"]) for i, row in enumerate(rows)]
    z = torch.stack(drifts).mean().clamp(min=0)
    losses = [
        desirable * torch.sigmoid(0.01 * (z - h)) if row["label"] else undesirable * torch.sigmoid(0.01 * (h - z))
        for row, h in zip(rows, (ratio(row["prompt"], row["response"]) for row in rows), strict=True)
    ]
    run = real.train(
        "kto",
        "labels",
        data={"train": str(real.rows("labels.jsonl", rows))},
        algorithm={"loss": {"beta": 0.01, "desirable_weight": desirable, "undesirable_weight": undesirable}},
        reference={"model": str(cut)},
        run={"steps": 1},
        trainer={"lr": 1e-9},
    )
    line = run.lines()[0]
    assert float(z) > 1
    assert line["policy/kl"] == pytest.approx(float(z), rel=1e-4)
    assert line["policy/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def step_on_samples(real: Workshop, use: str, **changes: Any) -> tuple[dict[str, Any], list[Sample]]:
    """The metrics of a first step on two prompts, and its samples. The reward is the length of an answer."""
    real.rows("rows.jsonl", QUESTIONS)
    reward = real.file("length.py", "def score(prompt, completion, row):\n    return len(completion) / 32\n")
    first = {"run": {"steps": 1}, "trainer": {"lr": 1e-9}, "reward": [{"use": f"file:{reward}"}]}
    line, samples = first_step(real.train(use, "samples", **SAMPLED, **first, **changes))
    assert len(samples) == 8
    assert len({sample.reward for sample in samples}) > 2, "rewards that differ"
    return line, samples


def grad_norm(model: Any, loss: Tensor) -> float:
    model.zero_grad()
    loss.backward()
    value = norm(model)
    model.zero_grad()
    return value


def token_weights(algorithm: str, samples: Sequence[Sample]) -> list[float]:
    """The factor of a token's log-prob in the first gradient, for each sample."""
    rewards_GS = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(2, 4)
    own_GS = torch.tensor([len(s.own) for s in samples], dtype=torch.float64).view(2, 4)
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    if algorithm == "rejection_sampling":
        kept_GS = torch.zeros_like(own_GS).scatter(1, rewards_GS.argmax(1, keepdim=True), 1.0)
        return (kept_GS / (kept_GS * own_GS).sum()).flatten().tolist()
    if algorithm == "dr_grpo":
        return (centred_GS / (8 * 256)).flatten().tolist()
    if algorithm in ("grpo", "dapo"):
        values_GS = centred_GS / (rewards_GS.std(1, keepdim=True) + 1e-9)
    elif algorithm == "rloo":
        values_GS = centred_GS * 4 / 3
    else:  # whitened over all tokens
        raw_GS = rewards_GS if algorithm == "reinforce_pp" else centred_GS
        mean = (raw_GS * own_GS).sum() / own_GS.sum()
        variance = ((raw_GS - mean).square() * own_GS).sum() / own_GS.sum()
        values_GS = (raw_GS - mean) / variance.sqrt()
    return (values_GS / own_GS.sum()).flatten().tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    "algorithm",
    ["rloo", "grpo", "dapo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "rejection_sampling"],
)
def test_first_steps_on_samples_are_those_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, algorithm: str
) -> None:
    line, samples = step_on_samples(real, algorithm)
    weights = token_weights(algorithm, samples)
    sums = [fp64.token_logprobs(s.ids, s.own[0]).sum() for s in samples]
    objective = sum((w * value for w, value in zip(weights, sums, strict=True)), torch.zeros(()))
    likelihood = algorithm == "rejection_sampling"  # elsewhere the ratio to the policy before the step, which is 1
    value = (
        float(objective.detach()) if likelihood else sum(w * len(s.own) for w, s in zip(weights, samples, strict=True))
    )
    assert line["policy/loss"] == pytest.approx(-value, rel=1e-4, abs=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(grad_norm(fp64.model, objective), rel=1e-3)


@pytest.mark.full
def test_the_first_step_of_ppo_is_that_of_plain_transformers_in_fp64(real: Workshop, fp64: Plain, cut: Path) -> None:
    """The critic is the first four layers with a head of its own; advantages are not whitened, or their mean is 0."""
    from transformers import AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(str(cut), num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(critic.score.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    critic.save_pretrained(str(real.folder / "critic"))
    fp64.tokenizer.save_pretrained(str(real.folder / "critic"))
    critic = critic.double()
    line, samples = step_on_samples(
        real,
        "ppo",
        algorithm={"advantage": {"normalise": "none"}},
        critic={"model": str(real.folder / "critic")},
    )
    states = [scores(critic.score.weight[0], critic.model, s.ids)[s.own[0] - 1 : -1] for s in samples]
    logprobs_A = torch.cat([fp64.token_logprobs(s.ids, s.own[0]) for s in samples])
    values_A, returns_A = torch.cat(states), torch.cat([torch.full((len(s.own),), s.reward) for s in samples])
    advantages_A, value_loss = returns_A - values_A.detach(), (values_A - returns_A).square().mean() / 2
    assert line["policy/loss"] == pytest.approx(-float(advantages_A.mean()), rel=1e-4)
    assert line["policy/grad_norm"] == pytest.approx(
        grad_norm(fp64.model, (advantages_A * logprobs_A).mean()), rel=1e-3
    )
    assert line["critic/loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
    assert line["critic/grad_norm"] == pytest.approx(grad_norm(critic, value_loss), rel=1e-3)


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
