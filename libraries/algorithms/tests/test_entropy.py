"""The adaptive coefficient of the entropy bonus."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf_algorithms.advantages import LeaveOneOut
from rlhf_algorithms.entropy import EntropyController
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_algorithms.policy_gradient_config import EntropyConfig, PolicyGradientConfig
from rlhf_algorithms.policy_losses import PPOConfig, PPOLoss
from rlhf_testing import fabricate


def test_the_coefficient_by_hand_and_over_a_restart() -> None:
    controller = EntropyController(EntropyConfig(target=0.5, step=0.01, high=0.03), start=0.02)
    assert controller.factor == 1.0
    controller.update(0.4)
    assert (controller.coef, controller.factor) == (pytest.approx(0.03), pytest.approx(1.5))
    controller.update(0.5)
    assert controller.coef == 0.03, "its upper bound; an entropy at the target is low"
    controller.update(0.9)
    assert (controller.coef, controller.factor) == (pytest.approx(0.02), 0.0)
    restarted = EntropyController(EntropyConfig(target=0.5, step=0.01, high=0.03), start=0.02)
    restarted.load_state_dict(controller.state_dict())
    for entropy in (0.9, 0.9, 0.9, 0.1):
        controller.update(entropy)
        restarted.update(entropy)
        assert restarted.state_dict() == controller.state_dict()
    assert (controller.coef, controller.factor) == (0.01, 0.5), "it fell to 0, then rose by one step"


class Bonus(PolicyGradient):
    name = "bonus"


def bonus(**entropy: float) -> Bonus:
    loss = PPOLoss(PPOConfig(entropy_coef=0.1))
    return Bonus(PolicyGradientConfig(entropy=EntropyConfig(**entropy)), {"advantage": LeaveOneOut(), "loss": loss})


def test_an_update_carries_the_factor_and_a_step_adapts_it() -> None:
    algorithm = bonus(target=0.5, step=0.05)
    batch, _ = algorithm.assemble(fabricate.groups(2))
    assert batch is not None
    (update,) = algorithm.updates(0, batch)
    assert update.coef == {"entropy": 1.0}
    assert algorithm.finish(0, batch, {"policy/entropy": 0.7}) == {"entropy/coef": 0.1}
    (update,) = algorithm.updates(1, batch)
    assert update.coef == {"entropy": 0.0}
    assert algorithm.finish(1, batch, {"policy/entropy": 0.3}) == {"entropy/coef": 0.0}
    (update,) = algorithm.updates(2, batch)
    assert update.coef == {"entropy": pytest.approx(1.0)}
    assert bonus().updates(0, batch)[0].coef == {}


def test_a_target_without_a_bonus_is_refused() -> None:
    parts = {"advantage": LeaveOneOut(), "loss": PPOLoss()}
    with pytest.raises(ConfigError, match=r"entropy.target = 0.5 adapts the coefficient of the entropy bonus"):
        Bonus(PolicyGradientConfig(entropy=EntropyConfig(target=0.5)), parts)
    with pytest.raises(ConfigError, match=r"entropy_coef is 0.1: .* above 0 and at most algorithm.entropy.high = 0.05"):
        bonus(target=0.5, high=0.05)
    with pytest.raises(ValidationError, match="set target too"):
        EntropyConfig(step=0.1)
