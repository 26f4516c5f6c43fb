"""An option without effect is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs import PAIRS, Workshop

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "generator": (
        "sft", {"generator": {"max_cache_tokens": 640}},
        "generator.max_cache_tokens: set, but this run samples nothing",
    ),
    "rollout": ("sft", {"rollout": {"use": "multi_turn"}}, "rollout.use: set, but this run samples nothing"),
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
    "all warm-up": ("sft", {"trainer": {"warmup_steps": 3}}, "trainer.warmup_steps = 3: the run has 3 optimizer steps"),
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


def test_options_that_do_something_are_not_refused(tiny: Workshop) -> None:
    evaluated = {"data": {"eval": str(tiny.data)}, "eval": {"every": 1, "patience": 2}}
    tiny.train("sft", "read sft", "--dry-run", **evaluated, trainer={"warmup_steps": 2})
    tiny.train("rloo", "read rloo", "--dry-run", data={"prompt": "prompt"})


DROPS = """
from rlhf_plugin_reward_model import RewardModel


class Drops(RewardModel):
    name = "drops"

    def assemble(self, examples):
        batch, metrics = super().assemble(examples)
        return batch and batch.select_columns(["loss_mask"]), metrics
"""


def test_margins_that_an_algorithm_drops_are_refused(tiny: Workshop) -> None:
    rows = {"train": str(tiny.rows("gaps.jsonl", [{**row, "gap": 40.0} for row in PAIRS])), "margin": "gap"}
    algorithm = {"use": f"file:{tiny.file('drops.py', DROPS)}"}
    run = tiny.run("reward_model", "dropped margins", "--dry-run", algorithm=algorithm, data=rows)
    assert run.code != 0
    assert "the loss reads the column 'margin', and assemble() of drops does not create it" in run.said
