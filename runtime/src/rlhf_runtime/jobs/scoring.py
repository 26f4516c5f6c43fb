"""`rlhf score` and `rlhf serve-reward`: the rewards of a run file without a run, for existing answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec

from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checks.order import SCORES, check
from rlhf_runtime.checks.run import Job, job_plugins
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.tokenizer import check_ids, check_vocabularies, load_tokenizer
from rlhf_runtime.loop.schedule import UpdateSchedule
from rlhf_runtime.rewards.reward_models import read_role, score_with_role
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.rewards.shared_passes import SharedPasses
from rlhf_runtime.setup.launch import launch_roles, make_scorer
from rlhf_runtime.setup.prepare import PlacedPlugins, place

PARTS = ("launcher", "trainer", "rollout", GENERATOR, "curriculum")
"""The plugins whose options are checked in addition to the rewards."""


class ScoreJob(Job):
    """Scores answers. Its only roles are those of the rewards."""

    name = "score"
    data = "demonstrations"


def place_rewards(config: RunFile, plugins: Plugins) -> PlacedPlugins:
    """Check everything that needs no model. The only roles are those of the rewards. Options that only training reads
    are ignored. No row of the data is read.

    Raises ConfigError, PluginError, DataError or ModelError saying what to change.
    """
    if config.env is not None:
        raise ConfigError(f"env {config.env.use!r} is set, but given answers use no environment. Remove [env].")
    rows = config.data.eval or (SourceSection(path="answers"),)  # the checks require data, but answers come later
    data = config.data.model_copy(update={"train": rows, "eval": rows, "loss_on": "completion"})
    run = job_plugins(config.model_copy(update={"data": data}), plugins, ScoreJob(), PARTS, scored=True)
    if not run.rewards:
        names = ", ".join(repr(section.label) for section in config.reward) or "none"
        raise ConfigError(
            f"no reward scores the answers: the rewards are {names}, and a teacher gives no reward. Set --reward NAME."
        )
    model = config.policy.model or next((run.model(name) for name in run.roles), None)
    if model is None:
        raise ConfigError(
            "no tokenizer is named, and no reward has a model. A tokenizer is needed because prompts and answers "
            "become tokens as in a run. Set --model PATH (a folder or a hub name); only its tokenizer is loaded."
        )
    check(run, SCORES)
    policy = run.config.policy.model_copy(update={"model": model})
    run = replace(
        run,
        config=run.config.model_copy(update={"policy": policy}),
        # No batch is assembled that could place the rewards of steps at their tokens.
        rewards=[replace(reward, credit="outcome") for reward in run.rewards],
        parts={kind: part for kind, part in run.parts.items() if kind in ("launcher", "trainer")},
        rollout=None,
    )
    tokenizer = load_tokenizer(model, config.policy.trust_remote_code)
    check_ids(model, config.policy.trust_remote_code)
    plugins_of_run = place(run, tokenizer, UpdateSchedule())
    policy_spec = replace(run, roles={"policy": RoleSpec("policy")}).spec("policy")
    check_vocabularies(policy_spec, tokenizer, plugins_of_run.specs.values())
    return plugins_of_run


def start_scorer(
    plugins_of_run: PlacedPlugins,
    main: MainThread,
    closing: ExitStack,
    *,
    wait: float = 0.0,
    largest: int | None = None,
    passed: Callable[[int], None] = lambda sequences: None,
) -> Scorer:
    """Load the models of the rewards, and set the rewards up.

    Args:
        closing: receives the callbacks that release everything that was started.
        wait, largest, passed: how calls are batched (:class:`~rlhf_runtime.rewards.shared_passes.SharedPasses`).
    """
    launcher = plugins_of_run.parts["launcher"].build()
    closing.callback(launcher.shutdown)
    roles = launch_roles(plugins_of_run, launcher)
    passes = SharedPasses(score_with_role(roles, main), read_role(roles, main), wait, largest, passed)
    scorer = make_scorer(plugins_of_run, passes.score, passes.read)
    closing.callback(scorer.close)
    main.run(scorer.setup())
    return scorer
