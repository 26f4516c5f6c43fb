"""From a run file to a layout: the plugins, roles and places of the run, without its data, tokenizer or models."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf.interfaces import GENERATOR, Place
from rlhf.plugins import Plugins
from rlhf.types import Annotation, Head, Update
from rlhf_modeling.adapters import matching
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.models.precompute import BATCHES
from rlhf_runtime.setup.plugins import RunParts, base_of, model_spec, places_of, run_parts, section_of
from rlhf_runtime.setup.preflight import check_parts, idle_options

from rlhf_plugin_plan.layout import EngineLayout, Layout, Machine, RoleLayout, View
from rlhf_plugin_plan.shape import read_shape

_STEPS = (0, 1, 1_000_000)
"""Steps whose updates and annotations are looked at: roles may be trained later, or only at first."""

MOST_STEPS = 10_000
"""Looked at for snapshots, where the run's steps depend on its data."""


def resolve(config: RunFile, plugins: Plugins, machine: Machine) -> Layout:
    """What ``config`` would run on ``machine``.

    Raises ConfigError, PluginError or ModelError, as the run itself would.
    """
    made = run_parts(config, plugins)
    raise_problems("these options do nothing", idle_options(made))
    places = places_of(made, machine.device)
    specs = {name: model_spec(made.config, made.roles, name, ranks=places[name].ranks) for name in made.roles}
    check_parts(made, places, specs, here=False)
    processes = "processes" in made.parts["launcher"].resolved.cls.capabilities
    machine = Machine(machine.device, machine.memory, machine.host_memory, machine.devices_per_node, processes)
    roles = {name: _role(made, name, places[name], machine) for name in made.roles}
    views = _views(made, places, roles)
    for name, view in views.items():
        roles[view.of] = _with_view(roles[view.of], roles.pop(name))
    return Layout(tuple(roles.values()), _engines(made, places, roles["policy"], machine), machine, views)


def _views(made: RunParts, places: dict[str, Place], roles: dict[str, RoleLayout]) -> dict[str, View]:
    """Roles that are the model of another one without its adapters (:func:`rlhf_runtime.setup.plugins.base_of`)."""
    steps = range(made.config.run.steps or MOST_STEPS)
    updated = {u.role for step in steps for u in made.algorithm.updates(step) if not isinstance(u, Update)}
    found = {name: base_of(made.config, made.roles, places, name) for name in made.roles if name not in updated}
    return {
        name: View(source, places[name])
        for name, source in found.items()
        if source is not None and roles[source].trained and roles[source].sharding.adapter_rank
    }


def _with_view(role: RoleLayout, view: RoleLayout) -> RoleLayout:
    """The role with what its view computes."""
    annotated = tuple(sorted({*role.annotated, *view.annotated}))
    return replace(role, annotated=annotated, rewards=role.rewards or view.rewards)


def longest_sequence(config: RunFile, online: bool) -> int:
    """Tokens: ``data.max_tokens``, or prompt and answer where both are bounded and there is one turn."""
    data = config.data
    if online and config.env is None and data.max_prompt_tokens is not None:
        return min(data.max_tokens, data.max_prompt_tokens + config.sampling.max_new_tokens)
    return data.max_tokens


def _role(made: RunParts, name: str, place: Place, machine: Machine) -> RoleLayout:
    config, role = made.config, made.roles[name]
    spec = model_spec(config, made.roles, name, ranks=place.ranks)
    trainer = made.trainer(name)
    sharding = trainer.resolved.cls.sharding(trainer.config, spec, machine.device)
    shape = read_shape(spec.path, role.head, spec.trust_remote_code)
    if role.trained and sharding.adapter_rank:
        matching([name for name, *_ in shape.linear], sharding.adapter_targets, shape.architecture)
    longest = longest_sequence(config, made.online)
    budget = section_of(config, name).micro_tokens or sharding.micro_tokens
    updates, annotations = _work(made)
    mine = [u for u in updates if u.role == name]
    outputs = {_name(o) for u in mine for o in made.algorithm.parts[u.loss].outputs()}
    annotated = {_name(a.output) for a in annotations if a.role == name}
    rewards = any(r.name == name for reward in made.rewards for r in reward.instance.roles())
    early = section_of(config, name).precompute
    batches = BATCHES if early else 1
    micro = _micro_tokens(made, mine, budget, longest, place.ranks // sharding.layer_ranks, batches)
    return RoleLayout(
        name,
        place,
        shape.part(sharding.layer_ranks),
        sharding,
        role.trained,
        micro,
        longest,
        spec.gradient_checkpointing,
        tuple(sorted(outputs)) or ("logprobs" if role.head == "lm" else "values",),
        tuple(sorted(annotated)),
        rewards,
        _repeats(made, micro, longest) if sharding.shares_prefixes else 1.0,
        early,
        _borrowed(made, name) if machine.processes else 0,
    )


def _borrowed(made: RunParts, name: str) -> int:
    """Whole output heads in fp32; in one process they share memory with their lenders."""
    lenders = [each.role for each in made.algorithm.needs().lent if each.to == name]
    specs = [model_spec(made.config, made.roles, lender) for lender in lenders]
    return sum(4 * read_shape(spec.path, "lm", spec.trust_remote_code).head for spec in specs)


def _work(made: RunParts) -> tuple[list[Update], list[Annotation]]:
    algorithm = made.algorithm
    updates = [u for step in _STEPS for u in algorithm.updates(step) if isinstance(u, Update)]
    annotations = [a for step in _STEPS for a in algorithm.annotations(step)]
    annotations += [a for u in updates for a in algorithm.parts[u.loss].prepass()]
    return updates, annotations


def _name(output: str | Head) -> str:
    return output if isinstance(output, str) else output.name


def _micro_tokens(made: RunParts, updates: list[Update], budget: int, longest: int, ranks: int, batches: int) -> int:
    """The budget, or the longest unit where that is more; never more than a rank's share of an optimizer batch, or of
    the ``batches`` that it reads at once."""
    config = made.config
    unit = longest * (2 if made.algorithm.data == "pairs" else 1)
    units = config.data.batch_size * (config.sampling.samples_per_prompt if made.online else 1)
    parts = min((u.minibatches for u in updates), default=1)
    return min(max(budget, unit), unit * math.ceil(batches * units / parts / ranks))


def _repeats(made: RunParts, micro_tokens: int, longest: int) -> float:
    """Tokens of a full micro-batch's sequences for each computed one, where samples of a prompt, or the answers of a
    pair, are as long as they may be: n sequences of p + a tokens, of which p + n a are computed. Where nothing bounds
    the prompts, p is what ``max_new_tokens`` leaves, or half in several turns and pairs."""
    config, pairs = made.config, made.algorithm.data == "pairs"
    if not (made.online or pairs):
        return 1.0
    several = pairs or config.env is not None
    prompt = longest // 2 if several else max(0, longest - config.sampling.max_new_tokens)
    prompt = min(config.data.max_prompt_tokens or prompt, longest - 1)
    answer = longest - prompt
    fit = max(1, (micro_tokens - prompt) // answer)
    count = min(fit, 2 if pairs else config.sampling.samples_per_prompt)
    return count * longest / (prompt + count * answer)


def _engines(made: RunParts, places: dict[str, Place], policy: RoleLayout, machine: Machine) -> EngineLayout | None:
    if GENERATOR not in places:
        return None
    config, selection, place = made.config, made.parts["generator"], places[GENERATOR]
    section = config.policy
    footprint = selection.resolved.cls.footprint(selection.config, section.dtype, place.devices, machine.device)
    asked = config.data.batch_size * config.sampling.samples_per_prompt if made.online else 0
    if config.data.eval:  # all of its rows are asked for at once
        asked = max(asked, footprint.rows * place.ranks)
    longest = longest_sequence(config, made.online)
    samples = max(1, math.ceil(asked / place.ranks))
    alone = made.online and not config.data.eval  # else nobody knows how many of the samples share a prompt
    once = alone and not footprint.repeats_prompts
    prompts = math.ceil(samples / config.sampling.samples_per_prompt) if once else samples
    return EngineLayout(
        place,
        read_shape(model_spec(config, made.roles, "policy").path, "lm", section.trust_remote_code),
        footprint,
        samples,
        longest,
        prompts * min(longest, config.data.max_prompt_tokens or longest),
        policy.sharding.bf16,
        config.sync.bucket_mb * 2**20,
        config.sync.canaries > 0,
    )
