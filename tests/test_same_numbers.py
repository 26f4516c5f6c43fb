"""The same rollouts give the same gradients and losses embedded, on Ray, and on Ray with ZeRO over one and two ranks.

Recorded once with the embedded runtime, replayed on each. Gradients of the first step agree to 1e-5 norm-wise in fp32:
summation order is all that differs. Losses of five steps agree to 1e-4: in between an AdamW step amplifies 1e-7 in
near-zero gradients.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs import Finished, Workshop
from tests.same_numbers import distance, first_gradients

pytestmark = pytest.mark.slow

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

ALGORITHMS = ("ppo", "grpo", "rloo", "sft")
RAGGED = {"policy": {"micro_tokens": 40}}
"""Few tokens a micro-batch, so that ranks get several, of different sizes."""
STEPS = {"run": {"steps": 5}}


def on_ray(**trainer: Any) -> dict[str, Any]:
    ranks = trainer.pop("ranks", 1)
    roles = {"policy": {"ranks": ranks}}
    return {"launcher": {"use": "ray"}, "trainer": trainer, "placement": roles}


RUNTIMES = {
    "ray": on_ray(use="torch"),
    "ray, ZeRO-2, 1 rank": on_ray(use="deepspeed", stage=2),
    "ray, ZeRO-2, 2 ranks": on_ray(use="deepspeed", stage=2, ranks=2),
    "ray, ZeRO-3, 1 rank": on_ray(use="deepspeed", stage=3),
    "ray, ZeRO-3, 2 ranks": on_ray(use="deepspeed", stage=3, ranks=2),
}


@pytest.fixture(scope="module")
def recorded(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Workshop, Finished]]:
    """Five embedded steps of every algorithm, with their rollouts."""
    runs = {}
    for algo in ALGORITHMS:
        shop = Workshop(tmp_path_factory.mktemp(algo), tiny.model, tiny.data)
        runs[algo] = shop, shop.train(algo, "recorded", **STEPS)
    return runs


def replayed(algo: str, first: Finished) -> dict[str, Any]:
    if algo == "sft":
        return {**STEPS, **RAGGED}
    return {**STEPS, **RAGGED, "rollout": {"use": "replay", "path": str(first.path / "rollouts")}}


@pytest.fixture(scope="module")
def reference(recorded):
    """The embedded runtime's first gradients, on the recorded rollouts."""
    found = {}
    for algo, (shop, first) in recorded.items():
        found[algo] = first_gradients(shop, algo, "reference", **replayed(algo, first))
    return found


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_gradients_of_the_first_step_are_equal(algo, runtime, recorded, reference):
    shop, first = recorded[algo]
    changes = merge(replayed(algo, first), RUNTIMES[runtime], algo)
    found = first_gradients(shop, algo, f"gradients {runtime}", **changes)
    assert found.keys() == reference[algo].keys()
    for role, gradients in found.items():
        assert distance(gradients, reference[algo][role]) <= 1e-5, role


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("runtime", ["ray", "ray, ZeRO-2, 2 ranks", "ray, ZeRO-3, 2 ranks"])
def test_losses_of_five_steps_are_equal(algo, runtime, recorded):
    shop, first = recorded[algo]
    changes = merge(replayed(algo, first), RUNTIMES[runtime], algo)
    lines = shop.train(algo, f"losses {runtime}", **changes).lines()
    names = [name for name in first.lines()[0] if name.endswith(("/loss", "/grad_norm"))]
    assert names
    assert len(lines) == 5
    for ours, theirs in zip(lines, first.lines(), strict=True):
        for name in names:
            assert abs(ours[name] - theirs[name]) <= 1e-4 * max(1.0, abs(theirs[name])), (theirs["step"], name)


def merge(changes: dict[str, Any], runtime: dict[str, Any], algo: str) -> dict[str, Any]:
    """A runtime laid over a run: the critic, where there is one, has as many ranks as the policy, on its devices."""
    placement = dict(runtime["placement"])
    if algo == "ppo":
        placement["critic"] = {"ranks": placement["policy"]["ranks"], "share": "policy"}
    return {**changes, **runtime, "placement": placement}
