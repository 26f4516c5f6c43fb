"""A run for tests of single checks: its plugins are classes that declare something and do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhf.interfaces import Algorithm, LendsHead, SendsWeights, SharesModule, Trainer
from rlhf.types import Needs, RoleSpec
from rlhf_hub.hub import Commits
from rlhf_runtime.checks.order import FIT
from rlhf_runtime.checks.run import RunPlugins
from rlhf_runtime.config.load import load
from rlhf_runtime.config.problems import raise_problems


class StubAlgorithm(Algorithm):
    """Trains a policy on nothing. ``needs``: fields of its needs."""

    def __init__(self, **needs):
        super().__init__()
        self._needs = Needs(**{"roles": (RoleSpec("policy", trained=True),), **needs})

    def needs(self):
        return self._needs

    def assemble(self, examples):
        return None, {}

    def updates(self, step, batch=None):
        return []


class AnyTrainer(LendsHead, SendsWeights, SharesModule, Trainer):
    name, capabilities = "any", frozenset({"storage:bf16"})


class AnyLauncher:
    name, capabilities = "any", frozenset({"answers"})


def stub_run(
    flags,
    algorithm,
    *,
    needs_env=False,
    replays_env=False,
    reward_roles=(),
    scored=True,
    limits=(None, None),
    **classes,
):
    """``classes``: of the generator, trainer, launcher and curriculum. There is a generator or curriculum only if it is
    given. ``limits``: ``concurrency`` of the rollout and of each reward."""
    config = load(None, flags)
    sampled = algorithm.data == "prompts" or config.reward or config.env is not None
    rollout: Any = (
        SimpleNamespace(
            needs_env=needs_env,
            replays_env=replays_env,
            observes=needs_env or replays_env,
            gives_rewards=False,
            concurrency=limits[0],
        )
        if sampled
        else None
    )
    roles = {role.name: role for role in (*algorithm.needs().roles, *reward_roles)}
    selected: dict[str, Any] = {"trainer": AnyTrainer, "launcher": AnyLauncher, **classes}
    parts: Any = {
        kind: SimpleNamespace(resolved=SimpleNamespace(cls=cls), config=None) for kind, cls in selected.items()
    }
    selections: Any = {"algorithm": algorithm}
    values = SimpleNamespace(is_teacher=False, concurrency=limits[1])
    rewards: Any = [SimpleNamespace(name=r.label, sources=r.sources, instance=values) for r in config.reward]
    return RunPlugins(config, selections, algorithm, parts, rewards, roles, rollout, scored, Commits())


def check(flags, algorithm, **options):
    run = stub_run(flags, algorithm, **options)
    raise_problems("these do not fit", [problem for check in FIT for problem in check(run)])
