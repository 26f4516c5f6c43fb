"""The rewards of a run file without a run, for answers from elsewhere: `rlhf score`, `rlhf serve-reward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Algorithm
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.types import Needs, RoleSpec
from rlhf_hub.hub import Commits

from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checks.order import check
from rlhf_runtime.checks.parts import check_parts
from rlhf_runtime.checks.run import active_rewards, built, device_here, model_of
from rlhf_runtime.config.components import Selections
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice, ModelSection, SamplingSection, StreamSection, SyncSection
from rlhf_runtime.data.tokenizer import check_ids, check_vocabularies, load_tokenizer
from rlhf_runtime.loop.schedule import Schedule
from rlhf_runtime.rewards.reward_models import read_role, score_with_role, together
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.setup.launch import launch_roles, make_scorer
from rlhf_runtime.setup.prepare import Placed, on_processor


class Score(Algorithm):
    """The algorithm of a job that only scores answers. It learns nothing and holds no policy."""

    name = "score"
    data = "demonstrations"

    def needs(self) -> Needs:
        return Needs(())

    def assemble(self, examples: Sequence[object]) -> tuple[Batch | None, dict[str, float]]:
        return None, {}

    def updates(self, step: int, batch: Batch | None = None) -> list:
        return []


def place_rewards(config: RunFile, plugins: Plugins) -> Placed:
    """Check everything that needs no model. The roles are those of the rewards. What only training reads is ignored. No
    row of the data is read.

    Raises ConfigError, PluginError, DataError or ModelError saying what to change.
    """
    if config.env is not None:
        raise ConfigError(f"env {config.env.use!r} is set, but given answers use no environment. Remove [env].")
    plugins = plugins.extended("algorithm", Score)
    commits = Commits()
    rows = config.data.eval or (SourceSection(path="answers"),)  # the checks ask for data, where answers come later
    update: dict[str, Any] = {
        "algorithm": Choice(use=Score.name),
        "data": config.data.model_copy(update={"train": rows, "eval": rows, "loss_on": "completion"}),
        "reward": tuple(r.model_copy(update={"credit": "outcome"}) for r in config.reward),
        "observer": (),
        "sampling": SamplingSection(),
        "stream": StreamSection(),
        "sync": SyncSection(),
        "critic": ModelSection(),
        "reference": ModelSection(),
    }
    plugins.check_requirements(config.run.requires)
    selections = Selections.of(plugins, config.model_copy(update=update))
    config, rewards = selections.config, active_rewards(selections)
    reward_roles = {role.name: role for reward in rewards for role in reward.instance.roles()}
    model = config.policy.model or next((model_of(config, reward_roles, name, commits) for name in reward_roles), None)
    if model is None:
        raise ConfigError(
            "no tokenizer is named, and no reward has a model: prompts and answers become tokens as in a run. Set "
            "--model PATH (a folder or a hub name); of it only the tokenizer is loaded."
        )
    config = config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"model": model}),
            "placement": {name: place for name, place in config.placement.items() if name in reward_roles},
            "roles": {name: section for name, section in config.roles.items() if name in reward_roles},
        }
    )
    plugins_of_run = built(replace(selections, config=config), commits=commits)
    check(plugins_of_run)
    parts = {kind: part for kind, part in plugins_of_run.parts.items() if kind not in (GENERATOR, "rollout")}
    plugins_of_run = replace(plugins_of_run, parts=parts, rollout=None)
    tokenizer = load_tokenizer(model, config.policy.trust_remote_code)
    check_ids(model, config.policy.trust_remote_code)
    places = plugins_of_run.places_on(device_here())
    specs = {name: plugins_of_run.spec(name, ranks=places[name].ranks) for name in plugins_of_run.roles}
    specs = on_processor(specs, plugins_of_run.trainer_class)
    policy = replace(plugins_of_run, roles={"policy": RoleSpec("policy")}).spec("policy")
    check_parts(plugins_of_run, places, specs, here=True)
    check_vocabularies(policy, tokenizer, specs.values())
    used = [*(s.resolved for s in parts.values()), *(r.resolved for r in plugins_of_run.rewards)]
    return Placed(
        **vars(plugins_of_run),
        tokenizer=tokenizer,
        specs=specs,
        schedule=Schedule(),
        plugins=list({(r.kind, r.ref): r for r in used}.values()),
        places=places,
    )


def start_scorer(
    placed: Placed,
    main: MainThread,
    closing: ExitStack,
    *,
    wait: float = 0.0,
    largest: int | None = None,
    passed: Callable[[int], None] = lambda sequences: None,
) -> Scorer:
    """Load the models of the rewards, and set the rewards up.

    Args:
        closing: receives the callbacks that release what was started.
        wait, largest, passed: how calls of a model are batched (:func:`~rlhf_runtime.rewards.reward_models.together`).
    """
    launcher = placed.parts["launcher"].build()
    closing.callback(launcher.shutdown)
    roles = launch_roles(placed, launcher)
    ask = together(score_with_role(roles, main), read_role(roles, main), wait, largest, passed)
    scorer = make_scorer(placed, *ask)
    closing.callback(scorer.close)
    main.run(scorer.setup())
    return scorer
