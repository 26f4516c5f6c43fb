"""The same rollouts give the same gradients and losses embedded, on Ray, and on Ray with ZeRO over one and two ranks.

Recorded once with the embedded runtime, learnt from on each. Gradients of the first step agree to 1e-5 norm-wise in
fp32: the order of summation is all that differs. Losses of five steps agree to 1e-4: in between an AdamW step amplifies
1e-7 in near-zero gradients.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs import Finished, Workshop
from tests.same_numbers import Learnt, distance, learn_everywhere

pytestmark = pytest.mark.slow

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

ALGORITHMS = ("ppo", "grpo", "rloo", "sft")
FIVE = {"run": {"steps": 5}}
RAGGED = {**FIVE, "policy": {"micro_tokens": 40}, "critic": {"micro_tokens": 64}}
"""Few tokens a micro-batch, so that ranks get several, of different sizes."""


def on_ray(ranks: int = 1, **trainer: Any) -> dict[str, Any]:
    """Policy and critic on the same devices, with as many ranks."""
    placement = {"policy": {"ranks": ranks}, "critic": {"ranks": ranks, "share": "policy"}}
    return {"launcher": {"use": "ray", "cpus": 4}, "trainer": trainer, "placement": placement}


RUNTIMES = {
    "ray": on_ray(use="torch"),
    "ray, ZeRO-2, 1 rank": on_ray(use="deepspeed", stage=2),
    "ray, ZeRO-2, 2 ranks": on_ray(use="deepspeed", stage=2, ranks=2),
    "ray, ZeRO-3, 1 rank": on_ray(use="deepspeed", stage=3),
    "ray, ZeRO-3, 2 ranks": on_ray(use="deepspeed", stage=3, ranks=2),
}


@pytest.fixture(scope="module")
def shop(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("recorded"), tiny.model, tiny.data)


@pytest.fixture(scope="module")
def recorded(shop: Workshop) -> dict[str, Finished]:
    """Five embedded steps of every algorithm, with their rollouts."""
    return {algo: shop.train(algo, f"recorded {algo}", **FIVE) for algo in ALGORITHMS}


@pytest.fixture(scope="module")
def embedded(shop, recorded, tmp_path_factory) -> dict[str, Learnt]:
    return learn_everywhere(shop, recorded, tmp_path_factory.mktemp("initial"), **RAGGED)


@pytest.fixture(scope="module", params=list(RUNTIMES))
def learnt(request, shop, recorded, tmp_path_factory) -> dict[str, Learnt]:
    """Everything on one runtime: its processes are started once."""
    return learn_everywhere(shop, recorded, tmp_path_factory.mktemp("initial"), **{**RAGGED, **RUNTIMES[request.param]})


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_replaying_is_the_recorded_run(algo, recorded, embedded):
    for ours, line in zip(embedded[algo].steps, recorded[algo].lines(), strict=True):
        assert abs(ours["policy/loss"] - line["policy/loss"]) <= 1e-6


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_gradients_of_the_first_step_are_equal(algo, learnt, embedded):
    assert learnt[algo].gradients.keys() == embedded[algo].gradients.keys()
    for role, gradients in learnt[algo].gradients.items():
        assert distance(gradients, embedded[algo].gradients[role]) <= 1e-5, role


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_losses_of_five_steps_are_equal(algo, learnt, embedded):
    names = [name for name in embedded[algo].steps[0] if name.endswith(("/loss", "/grad_norm"))]
    assert len(names) == (4 if algo == "ppo" else 2)
    assert len(learnt[algo].steps) == 5
    for step, (ours, theirs) in enumerate(zip(learnt[algo].steps, embedded[algo].steps, strict=True)):
        for name in names:
            assert abs(ours[name] - theirs[name]) <= 1e-4 * max(1.0, abs(theirs[name])), (step, name)
