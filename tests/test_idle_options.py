"""An option without effect is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import PAIRS, Workshop

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "group": ("sft", {"sampling": {"samples_per_prompt": 4}}, "sampling.samples_per_prompt = 4: sft learns from "),
    "temperature": ("dpo", {"sampling": {"temperature": 0.5}}, "sampling.temperature = 0.5: dpo learns from pairs and"),
    "answers": ("sft", {"sampling": {"max_new_tokens": 4}}, "sampling.max_new_tokens = 4: sft learns from"),
    "generator": (
        "sft", {"generator": {"max_cache_tokens": 640}},
        "generator.max_cache_tokens: set, but this run samples nothing",
    ),
    "rollout": ("sft", {"rollout": {"use": "multi_turn"}}, "rollout.use: set, but this run samples nothing"),
    "patience": (
        "sft", {"data": {"eval": "TRAIN"}, "eval": {"patience": 2}},
        "eval.patience = 2 counts evaluations during",
    ),
    "passing": (
        "sft", {"data": {"eval": "TRAIN"}, "eval": {"pass_threshold": 0.5}},
        "eval.pass_threshold = 0.5 applies to answers",
    ),
    "metric": (
        "sft",
        {"data": {"eval": "TRAIN"}, "eval": {"metric": "pass@1"}},
        "metric = 'pass@1' applies to answers",
    ),
    "several": ("sft", {"data": {"eval": "TRAIN"}, "eval": {"samples": 4}}, "eval.samples = 4 applies to answers"),
    "warm-up": (
        "sft", {"trainer": {"warmup_steps": 500}, "run": {"steps": 2}},
        "trainer.warmup_steps = 500: the run has 2 optimizer steps",
    ),
    "all warm-up": ("sft", {"trainer": {"warmup_steps": 3}}, "trainer.warmup_steps = 3: the run has 3 optimizer steps"),
    "margin": ("dpo", {"data": {"margin": "gap"}}, "data.margin = 'gap': the loss of dpo reads no margins"),
    "response": (
        "rloo", {"data": {"response": "answer"}},
        "data.response: used for demonstrations and labels only, but rloo learns from prompts",
    ),
    "end": ("rloo", {"data": {"add_eos": False}}, "data.add_eos: used for demonstrations and pairs and labels only"),
    "messages": (
        "dpo", {"data": {"messages": "m"}},
        "data.messages: used for demonstrations and labels and prompts only",
    ),
    "history": (
        "rloo", {"data": {"earlier_answers": "sampled"}},
        "data.earlier_answers = 'sampled' applies to rollouts with an environment",
    ),
    "prompt": (
        "rloo", {"data": {"prompt": "answer", "input_template": "{prompt}"}},
        "data.prompt = 'answer' has no effect, because data.input_template makes the prompt",
    ),
    "critic's loss": (
        "grpo", {"algorithm": {"value_loss": {"clip": 0.1}}},
        "algorithm.value_loss.clip = 0.1 is an option of the critic",
    ),
    "KL": ("grpo", {"algorithm": {"kl": {"where": "loss"}}}, "coef = 0 turns the KL off: set coef, or remove where"),
    "credit": (
        "sft", {"data": {"eval": "TRAIN"}, "reward": [{"use": "REWARD", "credit": "step"}]},
        "credit = 'step' applies to training, but sft learns from demonstrations",
    ),
    "samples": ("sft", {"run": {"show_samples": 1}}, "run.show_samples = 1: sft learns from demonstrations and"),
    "tolerance": ("grpo", {"sync": {"canaries": 0, "tolerance": 0.1}}, "sync.tolerance = 0.1 applies to the canaries"),
}  # fmt: skip
"""{case: (algorithm, changes, message)}."""


def fill_paths(tiny: Workshop, changes: Any) -> Any:
    """``changes`` with paths of the workshop's files instead of their names."""
    files = {"TRAIN": str(tiny.data), "REWARD": f"file:{tiny.file('digits.py', DIGITS)}"}
    if isinstance(changes, dict):
        return {key: fill_paths(tiny, value) for key, value in changes.items()}
    if isinstance(changes, list):
        return [fill_paths(tiny, value) for value in changes]
    return files.get(changes, changes) if isinstance(changes, str) else changes


DIGITS = "def score(prompt, completion, row):\n    return float(completion.isdigit())\n"


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_refuses_options_that_do_nothing(tiny: Workshop, name: str) -> None:
    algorithm, changes, message = CASES[name]
    run = tiny.run(algorithm, f"idle {name}", "--dry-run", **fill_paths(tiny, changes))
    assert run.code != 0
    assert message in " ".join(run.said.split())
    assert "Traceback" not in run.said


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("sft", {"data": {"eval": "TRAIN"}, "reward": [{"use": "REWARD"}], "sampling": {"max_new_tokens": 4}}),
        ("sft", {"data": {"eval": "TRAIN"}, "eval": {"every": 1, "patience": 2}}),
        ("sft", {"trainer": {"warmup_steps": 2}}),
        ("rloo", {"data": {"prompt": "prompt"}}),
        ("ppo", {"algorithm": {"value_loss": {"clip": 0.1}}}),
    ],
)
def test_what_is_read_is_not(tiny: Workshop, algorithm: str, changes: dict[str, Any]) -> None:
    tiny.train(algorithm, f"read {algorithm}", "--dry-run", **fill_paths(tiny, changes))


# ------------------------------------------------------------------------------------------ margins

LOSS_PLUGIN = """
from rlhf.interfaces import Loss, Slot
from rlhf_algorithms.pair_learning import PairLearning
from rlhf_algorithms.pairs import logistic_loss
from rlhf.types import LossOutput, Reduce, Update


class Far(Loss):
    name = "far"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("margin",)

    def reduce(self):
        return {"far": Reduce("unit_mean")}

    def __call__(self, x):
        sums_S = x.sum_per_sequence(x["logprobs"])
        apart_U = x.of_role(sums_S, 0) - x.of_role(sums_S, 1)
        margin_U = x["margin"].to(apart_U.dtype) if x.has("margin") else 0.0
        return LossOutput({"far": logistic_loss(apart_U - margin_U)})


class Apart(PairLearning):
    name = "apart"
    slots = {"loss": Slot("loss", "file:LOSS:Far")}
"""
BY_HAND = """

class ByHand(Apart):
    name = "by_hand"

    def assemble(self, examples):
        batch, metrics = super().assemble(examples)
        return batch and batch.select_columns(["loss_mask"]), metrics
"""


def pairs_with_a_gap(tiny: Workshop) -> Path:
    return tiny.rows("gaps.jsonl", [{**row, "gap": 40.0} for row in PAIRS])


def plugin_algorithm(tiny: Workshop, name: str) -> dict[str, Any]:
    loss = tiny.file("far.py", LOSS_PLUGIN.partition("\n\nclass Apart")[0])
    code = LOSS_PLUGIN + BY_HAND
    return {"use": f"file:{tiny.file('apart.py', code.replace('LOSS', str(loss)))}:{name}"}


def test_an_own_pair_loss_that_declares_the_column_gets_it(tiny: Workshop) -> None:
    shared: dict[str, Any] = {"algorithm": plugin_algorithm(tiny, "Apart"), "run": {"steps": 1}}
    rows = {"train": str(pairs_with_a_gap(tiny))}
    plain = tiny.train("dpo", "without margins", **shared, data=rows)
    far = tiny.train("dpo", "with margins", **shared, data={**rows, "margin": "gap"})
    first, second = (json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0]) for run in (plain, far))
    assert second["policy/loss"] > first["policy/loss"] + 20


def test_an_algorithm_that_drops_the_column_is_refused(tiny: Workshop) -> None:
    rows = {"train": str(pairs_with_a_gap(tiny)), "margin": "gap"}
    run = tiny.run("dpo", "dropped margins", "--dry-run", algorithm=plugin_algorithm(tiny, "ByHand"), data=rows)
    assert run.code != 0
    assert (
        "data.margin = 'gap': the loss reads the column 'margin', and assemble() of by_hand does not create it"
        in run.said
    )
