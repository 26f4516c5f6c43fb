"""The same rollouts, or rows, give the same gradients and losses embedded, on Ray, in processes without Ray, and with
ZeRO and FSDP on one and two ranks, which compute rows of their own or divide each row.

The rollouts are recorded once with the embedded backend. Gradients of the first step agree to 1e-5 norm-wise in fp32,
because only the order of sums differs. Losses of five steps agree to 1e-4, because AdamW amplifies differences of 1e-7
in near-zero gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
from rlhf_testing.tiny import tiny_model

from tests.runs import Finished, Workshop, merged, require
from tests.same_numbers import Case, Learnt, distance, learn_everywhere

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

require("ray", "deepspeed")

CASES = {
    "ppo": Case("ppo", {"algorithm": {"kl": {"coef": 0.05}}}),
    "grpo": Case("grpo"),
    "rloo": Case("rloo"),
    "sft": Case("sft"),
    "dpo": Case("dpo"),
    "dpo, sorted over the batch": Case("dpo", {"algorithm": {"loss": {"loss_type": "aot_unpaired"}}}),
    "kto": Case("kto"),
    "reward model": Case("reward_model"),
    "per source": Case(
        "per_source",
        {
            "data": {"batch_size": 6},
            "algorithm": {
                "members": {
                    "math": {"use": "grpo", "sources": ["math"], "loss": {"entropy_coef": 0.05}},
                    "chat": {
                        "use": "rloo",
                        "sources": ["chat"],
                        "weight": 0.5,
                        "kl": {"coef": 0.3, "where": "loss"},
                    },
                }
            },
        },
    ),
}
SHORT = ("ppo", "dpo, sorted over the batch", "per source", "reward model")
"""For ``make test``: a critic, losses of pairs, two algorithms in a batch, a scalar head. The others: test-all."""
PARAMS = [pytest.param(label, marks=() if label in SHORT else pytest.mark.full) for label in CASES]
FIVE = {"run": {"steps": 5}}
RAGGED = {**FIVE, "policy": {"micro_tokens": 40}, "critic": {"micro_tokens": 64}}
"""Few tokens per micro-batch, so that ranks get several of different sizes."""


def on_ray(ranks: int = 1, launcher: str = "ray", **trainer: Any) -> dict[str, Any]:
    """All roles on the same devices, with as many ranks."""
    colocation = {"ranks": ranks, "share": "policy"}
    placement = {"policy": {"ranks": ranks}, "critic": colocation, "reference": colocation}
    return {"launcher": {"use": launcher}, "trainer": trainer, "placement": placement}


RUNTIMES = {
    "ray": on_ray(use="torch"),
    "ray, ZeRO-2, 1 rank": on_ray(use="deepspeed", stage=2),
    "ray, ZeRO-2, 2 ranks": on_ray(use="deepspeed", stage=2, ranks=2),
    "ray, ZeRO-3, 1 rank": on_ray(use="deepspeed", stage=3),
    "ray, ZeRO-3, 2 ranks": on_ray(use="deepspeed", stage=3, ranks=2),
    "processes, ZeRO-3, 2 ranks": on_ray(use="deepspeed", stage=3, ranks=2, launcher="processes"),
    "ray, FSDP, 1 rank": on_ray(use="fsdp"),
    "ray, FSDP, 2 ranks": on_ray(use="fsdp", ranks=2),
    "ray, ZeRO-3, 2 ranks that divide rows": on_ray(use="deepspeed", stage=3, ranks=2, sequence_parallel=2),
    "ray, FSDP, 2 ranks that divide rows": on_ray(use="fsdp", ranks=2, sequence_parallel=2),
}


@pytest.fixture(scope="module")
def shop(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("recorded"), tiny.model, tiny.data)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, shop: Workshop) -> dict[str, Case]:
    """The cases of the selected tests. The critic and the reward model have the same initial weights."""
    selected = {i.callspec.params["label"] for i in request.session.items if i.path == request.path} | {"ppo"}
    scalar = str(tiny_model(shop.folder / "scalar", head="scalar", hidden=16, heads=2, kv_heads=1))
    two = [{"path": str(shop.data), "name": name, "probability": 0.5} for name in ("math", "chat")]
    changes = {
        "ppo": {"critic": {"model": scalar}},
        "reward model": {"policy": {"model": scalar}},
        "per source": {"data": {"train": two}},
    }
    return {
        label: Case(c.algo, merged(c.changes, changes.get(label, {})))
        for label, c in CASES.items()
        if label in selected
    }


@pytest.fixture(scope="module")
def recorded(shop: Workshop, cases: dict[str, Case]) -> dict[str, Finished]:
    """Five embedded steps of every case, with their rollouts."""
    return {label: shop.train(c.algo, f"recorded {label}", **merged(c.changes, FIVE)) for label, c in cases.items()}


@pytest.fixture(scope="module")
def embedded(shop, cases, recorded, tmp_path_factory) -> dict[str, Learnt]:
    return learn_everywhere(shop, cases, recorded, tmp_path_factory.mktemp("initial"), **RAGGED)


ALWAYS = "ray, ZeRO-3, 2 ranks"
"""The backend that differs most from the embedded one; ``make test-all`` tests the others."""
BACKENDS = [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.full) for name in RUNTIMES]


@pytest.fixture(scope="module", params=BACKENDS)
def learnt(request, shop, cases, recorded, tmp_path_factory, two_cpus) -> dict[str, Learnt]:
    """The results of all cases on one backend, whose processes are started once."""
    runtime = merged(RAGGED, RUNTIMES[request.param])
    return learn_everywhere(shop, cases, recorded, tmp_path_factory.mktemp("initial"), **runtime)


@pytest.mark.parametrize("label", PARAMS)
def test_replaying_is_the_recorded_run(label, recorded, embedded):
    for step, line in zip(embedded[label].steps, recorded[label].lines(), strict=True):
        assert abs(step["policy/loss"] - line["policy/loss"]) <= 1e-6


@pytest.mark.parametrize("label", PARAMS)
def test_gradients_of_the_first_step_are_equal(label, learnt, embedded):
    assert learnt[label].gradients.keys() == embedded[label].gradients.keys()
    for role, gradients in learnt[label].gradients.items():
        assert distance(gradients, embedded[label].gradients[role]) <= 1e-5, role


@pytest.mark.parametrize("label", PARAMS)
def test_losses_of_five_steps_are_equal(label, learnt, embedded):
    names = [name for name in embedded[label].steps[0] if name.endswith(("/loss", "/grad_norm", "/token_accuracy"))]
    assert len(names) == {"ppo": 4, "sft": 3}.get(label, 2)
    assert len(learnt[label].steps) == 5
    for step, (metrics, expected) in enumerate(zip(learnt[label].steps, embedded[label].steps, strict=True)):
        for name in names:
            assert abs(metrics[name] - expected[name]) <= 1e-4 * max(1.0, abs(expected[name])), (step, name)
