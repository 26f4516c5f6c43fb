"""What a run says at its start."""

from __future__ import annotations

import pytest
from rlhf.plugins import Plugins
from rlhf_runtime.checks.parts import idle_engine_notes, stream_notes
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.load import load

BASE = [("policy.model", "m"), ("data.train", "a.jsonl"), ("reward", "math")]
OLD = ("stream.staleness", "2")
TIS = ("algorithm.loss.correction.preset", "tis")


def notes(algorithm: str, *flags: tuple[str, str]) -> list[str]:
    config = load(None, [("algorithm", algorithm), *BASE, *flags])
    return stream_notes(config, build_algorithm(Plugins.discover(), config.algorithm, config.origins))


def test_samples_of_an_older_policy_without_a_correction_are_named_with_what_to_set():
    assert notes("grpo", OLD) == [
        "stream.staleness = 2: samples are 2 steps old when they are trained on, and no importance weight corrects for "
        "it: the loss treats them as samples of the policy at the start of the step. Set "
        "--algorithm.loss.correction.preset tis or --stream.staleness 0."
    ]
    (of_rounds,) = notes("rloo", ("stream.round", "2"))
    assert of_rounds.startswith("stream.round = 2: samples are up to 1 step old when they are trained on")
    assert of_rounds.endswith("Set --algorithm.loss.correction.preset tis or --stream.round 1.")
    (with_kl,) = notes("grpo", OLD, ("algorithm.kl.coef", "0.1"), ("algorithm.kl.where", "loss"))
    assert "--algorithm.loss.correction.preset tis" in with_kl


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("grpo", []),
        ("grpo", [OLD, TIS]),
        ("ppo", [("stream.round", "4"), TIS]),
        ("online_dpo", [OLD]),
        ("rejection_sampling", [("stream.round", "4")]),
        ("sft", []),
    ],
)
def test_no_warning_without_an_older_policy(algorithm, flags):
    assert notes(algorithm, *flags) == []


@pytest.mark.parametrize(
    ("flags", "hinted"),
    [
        ([OLD], True),
        ([OLD, ("stream.mode", "continuous")], False),
        ([("stream.staleness", "0")], False),
        ([OLD, ("placement.generator.share", "policy")], False),
        ([OLD, ("launcher", "local")], False),
        ([OLD, ("generator", "transformers")], False),
    ],
)
def test_a_run_whose_engines_wait_in_vain_is_told_of_the_other_mode(flags, hinted):
    config = load(None, [("algorithm", "grpo"), ("launcher", "simulated"), ("generator", "simulated"), *BASE, *flags])
    plugins = Plugins.discover()
    launcher, generator = (plugins.resolve(k, getattr(config, k).use).cls for k in ("launcher", "generator"))
    lines = idle_engine_notes(config, launcher, generator)
    assert ["--stream.mode continuous" in line for line in lines] == [True] * hinted
