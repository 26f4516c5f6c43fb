"""Reinforcement learning with adapters: the reference is the policy's own base, and needs no second model."""

from __future__ import annotations

from rlhf_plugin_local.launcher import LocalLauncher

KL = {"kl": {"coef": 0.1, "where": "loss", "estimator": "k3"}}


def test_the_base_view_is_the_reference_that_a_second_model_would_be(shop, monkeypatch):
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
    assert loaded[3:] == ["policy"], "that is where the base view is, and no devices are kept for a model of its own"
    del loaded[3:]
    shop.train("grpo", "own_settings", reference={"micro_tokens": 64}, **changes)
    assert loaded[3:] == ["policy", "reference"], "what is said about the reference is not ignored"
    assert any(value > 0 for name, value in alone[-1].items() if "kl" in name), sorted(alone[-1])
