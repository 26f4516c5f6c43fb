"""`rlhf serve-training`: the policy of a run file, with an optimizer and a generator, for the requests of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf.interfaces import GENERATOR, Generator
from rlhf.plugins import Plugins
from rlhf.types import Needs, RoleSpec

from rlhf_runtime.checks.order import LEARNS_FROM_CLIENTS, check
from rlhf_runtime.checks.run import Job, job_plugins
from rlhf_runtime.config.components import Selection
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.tokenizer import check_ids, load_tokenizer
from rlhf_runtime.loop.schedule import UpdateSchedule
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.setup.launch import launch_generator, launch_roles
from rlhf_runtime.setup.prepare import PlacedPlugins, place

CLIENTS_DECIDE = (
    "lr", "betas", "eps", "weight_decay", "max_grad_norm", "optimizer", "muon_lr", "muon_momentum", "schedule",
    "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio", "ema_decay",
)  # fmt: skip
"""Options of the trainer that clients send with each optimizer step, or that need a run of known length."""


class ServeTrainingJob(Job):
    """Trains the policy on data that clients send."""

    name = "serve_training"

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", trained=True),))


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy with adapters, ready to learn and to sample."""

    config: RunFile
    role: Role
    trainer: Selection
    generator: Generator
    weights: WeightSync
    """Sends the policy's weights to the generator."""
    adapter_rank: int


def place_policy(config: RunFile, plugins: Plugins) -> PlacedPlugins:
    """Check everything that needs no model. No data is read.

    Raises ConfigError, PluginError, CapabilityError or ModelError saying what to change.
    """
    run = job_plugins(config, plugins, ServeTrainingJob(), ("launcher", "trainer", "rollout", GENERATOR), scored=False)
    check(run, LEARNS_FROM_CLIENTS)
    trainer = run.trainer("policy")
    raise_problems("this cannot be served for training", _problems(config, trainer))
    path = run.model("policy")
    tokenizer = load_tokenizer(path, config.policy.trust_remote_code)
    check_ids(path, config.policy.trust_remote_code)
    return place(run, tokenizer, UpdateSchedule())


def _problems(config: RunFile, trainer: Selection) -> list[str]:
    sections = {"trainer": config.trainer.options, "policy.trainer": config.policy.trainer}
    problems = [
        f"{section}.{name}: clients set it with each optimizer step. Remove it"
        for section, options in sections.items()
        for name in CLIENTS_DECIDE
        if name in options
    ]
    if config.policy.model is None:
        problems.append("no model is named. Set --model PATH (a folder or a hub name)")
    if config.reward or config.env is not None:
        problems.append("clients have their own rewards and environments. Remove [[reward]] and [env]")
    if getattr(trainer.config, "lora", None) is None:
        problems.append("clients train adapters of one base model. Set --trainer.lora.rank")
    return problems


@contextmanager
def trained_policy(plugins_of_run: PlacedPlugins, note: Callable[[str], None]) -> Iterator[TrainedPolicy]:
    """Load the policy and start its generator."""
    launcher = plugins_of_run.parts["launcher"].build()
    with ExitStack() as resources:
        resources.callback(launcher.shutdown)
        role = launch_roles(plugins_of_run, launcher)["policy"]
        generator, weights = launch_generator(plugins_of_run, role, launcher, note, resources)
        trainer = plugins_of_run.trainer("policy")
        options: Any = trainer.config
        yield TrainedPolicy(plugins_of_run.config, role, trainer, generator, weights, options.lora.rank)
