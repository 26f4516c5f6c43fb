"""The behaviour of pluggy that ``rlhf.plugins.registration`` relies on or works around.

Where one of these fails after an upgrade, read that module again before loosening the pin.
"""

from types import SimpleNamespace

import pytest
from pluggy import PluginManager, PluginValidationError
from rlhf import hookimpl, hookspecs


def manager(*plugins):
    registry = PluginManager("rlhf")
    registry.add_hookspecs(hookspecs)
    for plugin in plugins:
        registry.register(plugin)
    return registry


def offering(*classes):
    @hookimpl
    def rlhf_register_reward():
        return list(classes)

    return SimpleNamespace(rlhf_register_reward=rlhf_register_reward)


def test_pluggy_reports_a_misspelled_hook_only_when_pending_hooks_are_checked():
    @hookimpl
    def rlhf_register_rewards():
        return []

    registry = manager(SimpleNamespace(rlhf_register_rewards=rlhf_register_rewards))
    with pytest.raises(PluginValidationError, match="unknown hook 'rlhf_register_rewards'"):
        registry.check_pending()


def test_an_unknown_argument_is_refused_at_registration():
    @hookimpl
    def rlhf_register_reward(extra):
        return []

    with pytest.raises(PluginValidationError, match="extra"):
        manager(SimpleNamespace(rlhf_register_reward=rlhf_register_reward))


def test_results_come_in_reverse_order_of_registration():
    assert manager(offering(1), offering(2)).hook.rlhf_register_reward() == [[2], [1]]


def test_one_hook_that_raises_ends_a_call_of_all_hooks():
    @hookimpl
    def rlhf_register_reward():
        raise RuntimeError("broken")

    registry = manager(offering(1), SimpleNamespace(rlhf_register_reward=rlhf_register_reward))
    with pytest.raises(RuntimeError):
        registry.hook.rlhf_register_reward()
    assert len(registry.hook.rlhf_register_reward.get_hookimpls()) == 2
