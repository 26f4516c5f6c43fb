"""Reinforcement learning with adapters: the reference is the base of the policy and needs no second model."""

from __future__ import annotations

from rlhf_plugin_local.launcher import LocalLauncher

KL = {"kl": {"coef": 0.1, "where": "loss", "estimator": "k3"}}


def test_the_base_view_gives_the_numbers_of_a_second_reference_model(shop, monkeypatch):
    launch, loaded = LocalLauncher.launch_trainer, []

    def launch_trainer(self, trainer, config, spec):
        loaded.append(spec.role.name)
        return launch(self, trainer, config, spec)

    monkeypatch.setattr(LocalLauncher, "launch_trainer", launch_trainer)
    changes = {"trainer": {"lora": {"rank": 4}, "lr": 1e-2}, "algorithm": KL}
    alone = shop.train("grpo", "base_view", **changes).lines()
    assert loaded == ["policy"]
    beside = shop.train("grpo", "second_model", placement={"reference": {}}, **changes).lines()
    assert loaded == ["policy", "policy", "reference"]
    for one, two in zip(alone, beside, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert abs(value - two[name]) <= 1e-4 * max(1.0, abs(value)), name
    shop.train("grpo", "same_place", placement={"reference": {"share": "policy"}}, **changes)
    assert loaded[3:] == ["policy"], "the base view is in the policy's process, and no devices are reserved"
    del loaded[3:]
    shop.train("grpo", "own_settings", reference={"micro_tokens": 64}, **changes)
    assert loaded[3:] == ["policy", "reference"], "options of the reference are not ignored"
    assert any(value > 0 for name, value in alone[-1].items() if "kl" in name), sorted(alone[-1])
