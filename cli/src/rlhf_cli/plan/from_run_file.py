"""Makes the layout of a run file: its plugins, roles and places. Weights are not read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlhf.interfaces import GENERATOR, Place, abilities
from rlhf.interfaces.memory import SamplingWork, TrainerWork
from rlhf.plugins import Plugins
from rlhf.types import Annotation, Head, Update
from rlhf_runtime.checks.order import checked
from rlhf_runtime.checks.parts import check_parts
from rlhf_runtime.checks.run import RunPlugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.models.precompute import BATCHES

from rlhf_cli.plan.layout import EngineLayout, Layout, Machine, RoleLayout, View
from rlhf_cli.plan.model_size import read_size
from rlhf_cli.plan.phases import occupied, starts_beside_roles
from rlhf_cli.plan.row_lengths import Lengths, read_lengths

_STEPS = (0, 1, 1_000_000)
"""Steps whose updates and annotations are read: a role may be trained late in the run, or only at its start."""

MOST_STEPS = 10_000
"""Number of steps that are searched for snapshots, if the number of steps depends on the data."""

MANY = 2**31
"""Number of samples, if no option limits it."""


def planned_run(config: RunFile, plugins: Plugins, device: str) -> RunPlugins:
    """The plugins of a run on devices of this kind. Raises the ConfigError, PluginError or ModelError that the run
    itself would raise."""
    run = checked(config, plugins)
    places = run.places_on(device)
    specs = {name: run.spec(name, ranks=places[name].ranks) for name in run.roles}
    check_parts(run, places, specs, is_local=False)
    return run


def layout_of(run: RunPlugins, machine: Machine, lengths: Lengths | None = None) -> Layout:
    """The layout of a checked run on ``machine``.

    Args:
        lengths: lengths of the sequences; None: they are read from the rows.
    """
    places = run.places_on(machine.device)
    lengths = lengths or read_lengths(run)
    machine = replace(machine, processes="processes" in run.parts["launcher"].resolved.cls.capabilities)
    roles = {name: _role(run, name, places[name], machine, lengths) for name in run.roles}
    views = _views(run, places, roles)
    # The model of these roles also does the work of their views, which were only known with the sizes above.
    for source in {view.base_role for view in views.values()}:
        views_of_source = [name for name, view in views.items() if view.base_role == source]
        roles[source] = _role(run, source, places[source], machine, lengths, views_of_source)
    models = tuple(role for name, role in roles.items() if name not in views)
    engines, checkpoints = _engines(run, places, machine, lengths), run.config.most_checkpoints
    layout = Layout(models, engines, machine, views, lengths, checkpoints)
    # How much memory is left for these engines depends on the rest of the layout.
    if starts_beside_roles(layout):
        layout = replace(layout, engines=_engines(run, places, machine, lengths, occupied(layout)))
    return layout


def _views(run: RunPlugins, places: dict[str, Place], roles: dict[str, RoleLayout]) -> dict[str, View]:
    """Roles that are another role's model with its adapters switched off
    (:meth:`RunPlugins.base_of`)."""
    steps = range(run.config.run.steps or MOST_STEPS)
    updated = {u.role for step in steps for u in run.algorithm.updates(step) if not isinstance(u, Update)}
    bases = {name: run.base_of(name, places) for name in run.roles if name not in updated}
    return {
        name: View(source, places[name])
        for name, source in bases.items()
        if source is not None and "base" in roles[source].memory.views
    }


def _role(
    run: RunPlugins, name: str, place: Place, machine: Machine, lengths: Lengths, views: Sequence[str] = ()
) -> RoleLayout:
    """``views``: roles that this role's model computes too."""
    role = run.roles[name]
    spec = run.spec(name, ranks=place.ranks)
    size = read_size(spec.path, role.head, spec.trust_remote_code, spec.images)
    trainer, names = run.trainer(name), {name, *views}
    annotated = {_name(a.output) for a in _annotations(run) if a.role in names}
    early = run.section(name).precompute
    work = work_of(run, name, annotated, BATCHES if early else 1, lengths)
    return RoleLayout(
        name,
        place,
        size,
        trainer.resolved.cls.memory(trainer.config, spec, size, work, machine.device),
        role.trained,
        work.longest,
        spec.gradient_checkpointing,
        annotates=bool(annotated),
        rewards=any(r.name in names for reward in run.rewards for r in reward.instance.roles()),
        precomputed=early,
        borrowed=_borrowed(run, name) if machine.processes else 0,
    )


def work_of(run: RunPlugins, name: str, annotated: set[str], batches: int, lengths: Lengths) -> TrainerWork:
    """The work of a role.

    Args:
        batches: steps of the run whose rows are annotated at once.
    """
    config, pairs = run.config, run.algorithm.data == "pairs"
    updates = [u for u in _updates(run) if u.role == name]
    outputs = {_name(o) for u in updates for o in run.algorithm.parts[u.loss].outputs()}
    units = config.data.batch_size * (config.sampling.samples_per_prompt if run.online else 1)
    minibatches = min((u.minibatches for u in updates), default=1)
    siblings = 2 if pairs else 1
    if run.online:  # a minibatch has a share of the samples of each prompt
        siblings = max(1, config.sampling.samples_per_prompt // minibatches)
    return TrainerWork(
        longest=lengths.longest,
        unit=lengths.unit,
        units=math.ceil(batches * units / minibatches),
        micro_tokens=run.section(name).micro_tokens,
        prompt=lengths.prompt if siblings > 1 else 0,
        siblings=siblings,
        outputs=tuple(sorted(outputs)) or ("logprobs" if run.roles[name].head == "lm" else "values",),
        annotated=tuple(sorted(annotated)),
        step=None if lengths.step is None else batches * lengths.step,
        images=config.data.image_limit if run.spec(name).images else 0,
    )


def _borrowed(run: RunPlugins, name: str) -> int:
    """Size in bytes of the fp32 output heads that other roles lend. (In one process they share memory with the
    lenders.)"""
    lenders = [loan.role for loan in run.algorithm.needs().loans if loan.borrower == name]
    specs = [run.spec(lender) for lender in lenders]
    return sum(4 * read_size(spec.path, "lm", spec.trust_remote_code, spec.images).head for spec in specs)


def _updates(run: RunPlugins) -> list[Update]:
    return [u for step in _STEPS for u in run.algorithm.updates(step) if isinstance(u, Update)]


def _annotations(run: RunPlugins) -> list[Annotation]:
    annotations = [a for step in _STEPS for a in run.algorithm.annotations(step)]
    return annotations + [a for u in _updates(run) for a in run.algorithm.parts[u.loss].prepass()]


def _name(output: str | Head) -> str:
    return output if isinstance(output, str) else output.name


def _engines(
    run: RunPlugins, places: dict[str, Place], machine: Machine, lengths: Lengths, resident: int | None = None
) -> EngineLayout | None:
    """``resident``: bytes that roles and processes use on an engine's device when it starts; None: the device has no
    role."""
    if GENERATOR not in places:
        return None
    config, selection, place = run.config, run.parts["generator"], places[GENERATOR]
    generator = selection.resolved.cls
    longest = max(lengths.longest, lengths.held_out_longest)
    per_prompt = config.sampling.samples_per_prompt + run.algorithm.needs().greedy
    samples = math.ceil(config.data.batch_size * per_prompt / place.ranks) if run.online else 1
    prompts = math.ceil(samples / per_prompt)
    if config.data.eval:  # all its rows are requested at once, each with its own prompt
        held_out = MANY if lengths.held_out is None else math.ceil(lengths.held_out / place.ranks)
        samples, prompts = max(samples, held_out * config.eval.samples), max(prompts, held_out)
    policy = run.spec("policy")
    images = config.data.image_limit if policy.images else 0
    longest_prompt = min(longest, config.data.max_prompt_tokens or longest)
    if lengths.measured and run.online:
        longest_prompt = max(lengths.prompt, lengths.held_out_prompt)
    work = SamplingWork(samples, prompts, longest, longest_prompt, images, resident)
    size = read_size(policy.path, "lm", policy.trust_remote_code, policy.images)
    tensor, pipeline = generator.parallel_sizes(selection.config)
    return EngineLayout(
        place,
        size,
        generator.memory(selection.config, policy.dtype, size, work, machine.device, machine.memory),
        longest,
        tensor * pipeline,
        config.sync.bucket_mb * 2**20,
        _maps(run, machine),
        config.sync.canaries > 0,
    )


def _maps(run: RunPlugins, machine: Machine) -> bool:
    """Whether weights are sent through CUDA IPC if the policy and an engine share a device."""
    links = "ReceivesOverLinks" in abilities(run.parts["generator"].resolved.cls)
    return links and machine.device == "cuda" and machine.processes and run.config.sync.transport in ("auto", "shared")
