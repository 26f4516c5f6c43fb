"""The roles that the plugins of a run declare."""

from __future__ import annotations

import pytest
from rlhf.errors import ConfigError, PluginInvalid
from rlhf.interfaces import Reward
from rlhf.plugins import Plugins
from rlhf.types import Group, RewardResult, RoleSpec
from rlhf_runtime.checks.run import declared_roles
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.rewards.scoring import ActiveReward


def judge(name: str, model: str) -> ActiveReward:
    class Judge(Reward):
        def roles(self) -> tuple[RoleSpec, ...]:
            return (RoleSpec("judge", head="scalar", model=model),)

        async def score(self, group: Group) -> list[RewardResult]:
            return []

    Judge.name = name
    plugins = Plugins()
    plugins.register("reward", Judge)
    return ActiveReward(name, plugins.resolve("reward", name), Judge())


def test_two_rewards_that_declare_one_role_differently_are_refused():
    algorithm = build_algorithm(Plugins.discover(), Choice(use="rloo"))
    roles = declared_roles(algorithm, [judge("a", "one"), judge("b", "one")])
    assert roles["judge"].model == "one"
    with pytest.raises(ConfigError, match=r"reward 'a' and reward 'b' declare the role 'judge' differently.*`role`"):
        declared_roles(algorithm, [judge("a", "one"), judge("b", "two")])


def test_a_reward_that_returns_no_roles_is_named(monkeypatch):
    algorithm = build_algorithm(Plugins.discover(), Choice(use="rloo"))
    reward = judge("a", "one")
    monkeypatch.setattr(reward.instance, "roles", lambda: None)
    with pytest.raises(PluginInvalid, match=r"roles\(\) of reward 'a' returned NoneType None; allowed: a tuple"):
        declared_roles(algorithm, [reward])
