"""Makes the layout of a run file: its plugins, roles and places. Data, tokenizer and weights are not read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.memory import SamplingWork, TrainerWork
from rlhf.plugins import Plugins
from rlhf.types import Annotation, Head, Update
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.models.precompute import BATCHES
from rlhf_runtime.setup.plugins import RunPlugins, run_plugins
from rlhf_runtime.setup.preflight import check_parts, idle_options

from rlhf_plugin_plan.layout import EngineLayout, Layout, Machine, RoleLayout, View
from rlhf_plugin_plan.model_size import read_size

_STEPS = (0, 1, 1_000_000)
"""Steps whose updates and annotations are read: a role may be trained late in the run, or only at its start."""

MOST_STEPS = 10_000
"""Steps that are searched for snapshots, where the number of steps depends on the data."""

MANY = 2**31
"""Number of samples, if no option limits it."""


def resolve(config: RunFile, plugins: Plugins, machine: Machine) -> Layout:
    """The layout of the run on ``machine``.

    Raises the ConfigError, PluginError or ModelError that the run itself would raise.
    """
    made = run_plugins(config, plugins)
    raise_problems("these options do nothing", idle_options(made))
    places = made.places_on(machine.device)
    specs = {name: made.spec(name, ranks=places[name].ranks) for name in made.roles}
    check_parts(made, places, specs, here=False)
    processes = "processes" in made.parts["launcher"].resolved.cls.capabilities
    machine = Machine(machine.device, machine.memory, machine.host_memory, machine.devices_per_node, processes)
    roles = {name: _role(made, name, places[name], machine) for name in made.roles}
    views = _views(made, places, roles)
    for source in {view.of for view in views.values()}:
        own = [name for name, view in views.items() if view.of == source]
        roles[source] = _role(made, source, places[source], machine, own)
    held = tuple(role for name, role in roles.items() if name not in views)
    return Layout(held, _engines(made, places, machine), machine, views)


def _views(made: RunPlugins, places: dict[str, Place], roles: dict[str, RoleLayout]) -> dict[str, View]:
    """Roles that are another role's model with its adapters switched off
    (:meth:`RunPlugins.base_of`)."""
    steps = range(made.config.run.steps or MOST_STEPS)
    updated = {u.role for step in steps for u in made.algorithm.updates(step) if not isinstance(u, Update)}
    found = {name: made.base_of(name, places) for name in made.roles if name not in updated}
    return {
        name: View(source, places[name])
        for name, source in found.items()
        if source is not None and "base" in roles[source].memory.views
    }


def longest_sequence(config: RunFile, online: bool) -> int:
    """Tokens of the longest sequence: ``data.max_tokens``, or prompt and answer if both are limited and there is one
    turn."""
    data = config.data
    if online and config.env is None and data.max_prompt_tokens is not None:
        return min(data.max_tokens, data.max_prompt_tokens + config.sampling.max_new_tokens)
    return data.max_tokens


def _role(made: RunPlugins, name: str, place: Place, machine: Machine, views: Sequence[str] = ()) -> RoleLayout:
    """``views``: roles that this role's model computes too."""
    role = made.roles[name]
    spec = made.spec(name, ranks=place.ranks)
    size = read_size(spec.path, role.head, spec.trust_remote_code, spec.images)
    trainer, names = made.trainer(name), {name, *views}
    annotated = {_name(a.output) for a in _annotations(made) if a.role in names}
    early = made.section(name).precompute
    work = work_of(made, name, annotated, BATCHES if early else 1)
    return RoleLayout(
        name,
        place,
        size,
        trainer.resolved.cls.memory(trainer.config, spec, size, work, machine.device),
        role.trained,
        work.longest,
        spec.gradient_checkpointing,
        annotates=bool(annotated),
        rewards=any(r.name in names for reward in made.rewards for r in reward.instance.roles()),
        precomputed=early,
        borrowed=_borrowed(made, name) if machine.processes else 0,
    )


def work_of(made: RunPlugins, name: str, annotated: set[str], batches: int) -> TrainerWork:
    """What the role computes.

    Args:
        batches: steps of the run whose rows are annotated at once.
    """
    config, pairs = made.config, made.algorithm.data == "pairs"
    updates = [u for u in _updates(made) if u.role == name]
    outputs = {_name(o) for u in updates for o in made.algorithm.parts[u.loss].outputs()}
    longest = longest_sequence(config, made.online)
    unit = longest * (2 if pairs else 1)
    units = config.data.batch_size * (config.sampling.samples_per_prompt if made.online else 1)
    prompt, siblings = _shared_prefix(made, longest)
    return TrainerWork(
        longest=longest,
        unit=unit,
        units=math.ceil(batches * units / min((u.minibatches for u in updates), default=1)),
        micro_tokens=made.section(name).micro_tokens,
        prompt=prompt,
        siblings=siblings,
        outputs=tuple(sorted(outputs)) or ("logprobs" if made.roles[name].head == "lm" else "values",),
        annotated=tuple(sorted(annotated)),
        images=config.data.image_limit if made.spec(name).images else 0,
    )


def _shared_prefix(made: RunPlugins, longest: int) -> tuple[int, int]:
    """(tokens of the prompt, sequences that share it): samples of one prompt, or the two answers of a pair. If the run
    file does not limit the prompt: what ``max_new_tokens`` leaves, or half for pairs and for several turns."""
    config, pairs = made.config, made.algorithm.data == "pairs"
    if not (made.online or pairs):
        return 0, 1
    several = pairs or config.env is not None
    prompt = longest // 2 if several else max(0, longest - config.sampling.max_new_tokens)
    prompt = min(config.data.max_prompt_tokens or prompt, longest - 1)
    return prompt, 2 if pairs else config.sampling.samples_per_prompt


def _borrowed(made: RunPlugins, name: str) -> int:
    """Bytes of the fp32 output heads that other roles lend. (In one process they share memory with the lenders.)"""
    lenders = [each.role for each in made.algorithm.needs().lent if each.to == name]
    specs = [made.spec(lender) for lender in lenders]
    return sum(4 * read_size(spec.path, "lm", spec.trust_remote_code, spec.images).head for spec in specs)


def _updates(made: RunPlugins) -> list[Update]:
    return [u for step in _STEPS for u in made.algorithm.updates(step) if isinstance(u, Update)]


def _annotations(made: RunPlugins) -> list[Annotation]:
    found = [a for step in _STEPS for a in made.algorithm.annotations(step)]
    return found + [a for u in _updates(made) for a in made.algorithm.parts[u.loss].prepass()]


def _name(output: str | Head) -> str:
    return output if isinstance(output, str) else output.name


def _engines(made: RunPlugins, places: dict[str, Place], machine: Machine) -> EngineLayout | None:
    if GENERATOR not in places:
        return None
    config, selection, place = made.config, made.parts["generator"], places[GENERATOR]
    generator = selection.resolved.cls
    longest, per_prompt = longest_sequence(config, made.online), config.sampling.samples_per_prompt
    samples = math.ceil(config.data.batch_size * per_prompt / place.ranks) if made.online else 1
    prompts = math.ceil(samples / per_prompt)
    if config.data.eval:  # all of its rows are requested at once, each with a prompt of its own
        samples = prompts = MANY
    policy = made.spec("policy")
    images = config.data.image_limit if policy.images else 0
    work = SamplingWork(samples, prompts, longest, min(longest, config.data.max_prompt_tokens or longest), images)
    size = read_size(policy.path, "lm", policy.trust_remote_code, policy.images)
    tensor, pipeline = generator.parallel_sizes(selection.config)
    return EngineLayout(
        place,
        size,
        generator.memory(selection.config, policy.dtype, size, work, machine.device, machine.memory),
        longest,
        tensor * pipeline,
        config.sync.bucket_mb * 2**20,
        config.sync.canaries > 0,
    )
