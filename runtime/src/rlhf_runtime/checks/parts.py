"""Refusals by the parts of a run (plugins, roles, rewards, rows), and warnings about settings that are allowed but
rarely intended. Nothing is started for these checks. They call the classes of the parts, which say whether they would
refuse the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import CapabilityError, ConfigError, PluginError, PluginInvalid, boundary, brief, did_you_mean
from rlhf.interfaces import (
    GENERATOR,
    Advantage,
    Algorithm,
    AnswersRequests,
    Generator,
    GeneratorSpec,
    Launcher,
    Loss,
    ModelSpec,
    Place,
    Rollout,
    SendsWeights,
    TakesTensors,
    TakesWeights,
)
from rlhf.ops.heads import BUILTIN, gives
from rlhf.types import ExpertLayers, Lent, RoleSpec, Row, Update
from rlhf_hub.adapter_folders import adapter_of

from rlhf_runtime.calls.algorithm_calls import ask, assemble
from rlhf_runtime.checks.run import RunPlugins, device_here
from rlhf_runtime.checks.sampling import ANSWERS, CORRECTION
from rlhf_runtime.config.components import component_config
from rlhf_runtime.config.problems import origin, raise_problems
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import section_path
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.sources import TOOLS, Source
from rlhf_runtime.data.tokenizer import special_tokens_in
from rlhf_runtime.loop.schedule import UpdateSchedule
from rlhf_runtime.models.precompute import problems_of
from rlhf_runtime.rewards.scoring import ActiveReward
from rlhf_runtime.samples.rollout_settings import evaluation_sampling, training_sampling

EXPERTS, BASE = "experts", "base"
"""Capabilities of generators: ``GeneratorSpec.experts``, ``GenerationRequest.base``."""


def check_parts(
    plugins_of_run: RunPlugins, places: Mapping[str, Place], specs: Mapping[str, ModelSpec], is_local: bool
) -> None:
    """Raises ConfigError, CapabilityError or PluginError, as the run itself would.

    Args:
        is_local: whether the run would start on this machine. False: it is only planned.
    """
    config, selection = plugins_of_run.config, plugins_of_run.parts["launcher"]
    launcher, generator = selection.resolved.cls, plugins_of_run.parts.get(GENERATOR)
    launcher.check(selection.config, places, generator.resolved.cls if generator else None, config.sync.transport)
    device = device_here() if is_local and launcher.is_local(selection.config) else None
    for name, spec in specs.items():
        trainer = plugins_of_run.trainer(name)
        if is_local:
            trainer.resolved.cls.check_files(spec)
        trainer.resolved.cls.check(trainer.config, spec, device)
    experts = _replayed_experts(plugins_of_run, specs["policy"]) if "policy" in specs else None
    if generator is not None and "policy" in specs:
        policy, data = specs["policy"], config.data
        # End tokens and the decoder are placeholders, because they are known only when the policy is loaded.
        engine = GeneratorSpec(
            (),
            str,
            policy.path,
            policy.dtype,
            policy.trust_remote_code,
            data.max_tokens,
            config.run.seed,
            in_flight=config.sync.in_flight,
            keys=config.sync.keys,
            max_images=plugins_of_run.engine_images(policy),
            experts=experts,
            storage=policy.storage,
        )
        engine = with_adapters(plugins_of_run, policy, engine)
        check_base(plugins_of_run, policy, engine)
        samplings = [evaluation_sampling(config)] if data.eval else []
        samplings += [training_sampling(config)] if plugins_of_run.online and plugins_of_run.trains else []
        generator.resolved.cls.check(generator.config, engine, samplings, device)


def with_adapters(plugins_of_run: RunPlugins, policy: ModelSpec, engine: GeneratorSpec) -> GeneratorSpec:
    """``engine`` with the policy's adapters, which it keeps separate from the base model, if ``sync.adapters`` is
    ``alone``.

    Raises CapabilityError if they cannot be sent alone.
    """
    if plugins_of_run.config.sync.adapters == "merged" or not policy.role.trained:
        return engine
    generator, trainer = plugins_of_run.parts[GENERATOR], plugins_of_run.trainer("policy")
    adapters = trainer.resolved.cls.adapters(trainer.config, policy)
    reason, adapter_spec = "the policy trains no adapters (trainer.lora)", replace(engine, adapters=adapters)
    if adapters is not None:
        reason = adapters.merged_only or generator.resolved.cls.refuses_adapters(generator.config, adapter_spec)
    if reason:
        raise CapabilityError(f"sync.adapters = 'alone': {reason}. Remove it, or set it to 'merged'.")
    return adapter_spec


def check_base(run: RunPlugins, policy: ModelSpec, engine: GeneratorSpec) -> None:
    """Raises CapabilityError if the rollout needs turns of the policy's base model and the generator cannot sample
    them."""
    rollout, generator, trainer = run.rollout, run.generator_class, run.trainer("policy")
    if rollout is None or generator is None or not rollout.needs_base:
        return
    adapters = trainer.resolved.cls.adapters(trainer.config, policy) if policy.role.trained else None
    is_engine = issubclass(generator, TakesTensors)
    if adapters is None:
        reason = "the policy trains no adapters. Set --trainer.lora.rank 16; a job that trains nothing has no adapters"
    elif BASE not in generator.capabilities:
        reason = (
            f"generator {generator.name!r} cannot sample from it (it lacks the capability {BASE!r}). Use another "
            "--generator.use: transformers and vllm can"
        )
    elif is_engine and engine.adapters is None:
        reason = "with sync.adapters = 'merged' engines hold one merged model. Set --sync.adapters alone"
    elif is_engine and adapter_of(policy.path) is not None:
        reason = (
            f"training starts from the adapter {policy.path}, and engines do not keep its initial values. Merge it "
            f"first, and use the new folder: rlhf merge {policy.path} NEW_FOLDER"
        )
    else:
        return
    raise CapabilityError(f"rollout {rollout.name!r} samples from the base of the policy, but {reason}.")


def _replayed_experts(run: RunPlugins, policy: ModelSpec) -> ExpertLayers | None:
    """The experts that the generator must record. Raises CapabilityError if the run cannot record them."""
    trainer, generator = run.trainer("policy"), run.generator_class
    experts = trainer.resolved.cls.experts(trainer.config, policy)
    if experts is None:
        return None
    problem = f"trainer {trainer.resolved.cls.name!r} is set to replay the experts that were chosen in sampling"
    if not run.online:
        raise CapabilityError(f"{problem}, but this run learns from data. Remove trainer.router_replay.")
    if generator is not None and EXPERTS not in generator.capabilities:
        raise CapabilityError(
            f"{problem}, but generator {generator.name!r} does not record them (it lacks the capability {EXPERTS!r}). "
            "Remove trainer.router_replay, or use another --generator.use: transformers and vllm record them."
        )
    return experts


def idle_options(plugins_of_run: RunPlugins) -> list[str]:
    """Problems with training-only options in the trainer section of a frozen role.

    Training-only options that the role inherits from ``[trainer]`` are allowed, because the trained roles read them.
    The policy is exempt. In a job that only answers, its section comes from the run that trained it.
    """
    problems = []
    for name, role in plugins_of_run.roles.items():
        options = plugins_of_run.section(name).trainer
        trainer = plugins_of_run.trainer(name).resolved.cls
        for key in sorted(trainer.training_options & options.keys()) if not role.trained and name != "policy" else ():
            path = f"{section_path(name)}.trainer.{key}"
            problems.append(
                f"{path}{origin(path, plugins_of_run.config.origins)}: {name} is not trained, so nothing reads it. "
                "Remove it. In [trainer] the option applies to the trained roles."
            )
    return problems


def unread_sections(plugins_of_run: RunPlugins) -> list[str]:
    """Problems with options of ``[rollout]`` and ``[generator]`` in a run without these parts. Options with their
    default values are allowed. ``generator.use`` is allowed too, because ``--backend`` sets it in every run."""
    problems = []
    for kind in ("rollout", GENERATOR):
        section, default = getattr(plugins_of_run.config, kind), RunFile.model_fields[kind].default
        if kind in plugins_of_run.parts or section == default:
            continue
        try:
            plain = component_config(plugins_of_run.selections[kind].resolved, {}, kind).model_dump()
        except ConfigError:  # the plugin has options without a default, so the run file sets them all
            plain = {}
        keys = sorted(key for key, value in section.options.items() if key not in plain or plain[key] != value)
        fields = [f"{kind}.{key}" for key in keys]
        if kind == "rollout" and section.use != default.use:
            fields.insert(0, "rollout.use")
        if fields:
            problems.append(f"{', '.join(fields)}: set, but this run samples nothing, so nothing reads it. Remove it.")
    return problems


def check_roles(plugins_of_run: RunPlugins, schedule: UpdateSchedule) -> None:
    """Raises ConfigError if a trained role would never be updated, weights cannot be copied from role to role, or a
    role cannot be precomputed or lend its head."""
    algorithm, roles, snapshots = plugins_of_run.algorithm, plugins_of_run.roles, schedule.snapshots
    updates = schedule.total()
    _check_declared(algorithm, roles, snapshots | schedule.sources)
    _check_outputs(algorithm, roles)
    trained = [name for name, role in roles.items() if role.trained]
    idle = [
        f"{algorithm.name} configured like this does not update {name!r} in any of the run's {len(schedule.planned)} "
        "steps. Raise --run.steps, or let the training of this role start at an earlier step."
        for name in trained
        if not updates[name]
    ]
    raise_problems("these roles are trained but never updated", idle)
    trainers = {name: plugins_of_run.trainer(name).resolved.cls for name in roles}
    uncopied = [
        f"{algorithm.name} copies weights {direction} {name!r}, whose trainer {trainers[name].name!r} is not a "
        f"{ability.__name__}. Use another --trainer.use."
        for direction, names, ability in (("from", schedule.sources, SendsWeights), ("to", snapshots, TakesWeights))
        for name in sorted(names)
        if not issubclass(trainers[name], ability)
    ]
    raise_problems("these weights cannot be copied", uncopied)
    rounded = [
        f"{algorithm.name} moves the weights of {name!r} by a fraction at a time. Stored in bf16, they would lose "
        f"small changes to rounding. Set --{section_path(name)}.storage fp32."
        for name in sorted(snapshots & schedule.sources)
        if plugins_of_run.spec(name).storage == "bf16"
    ]
    raise_problems("these weights cannot be averaged", rounded)
    precomputed = [name for name in roles if plugins_of_run.section(name).precompute]
    raise_problems("these roles cannot be precomputed", problems_of(precomputed, algorithm, trained, snapshots))
    raise_problems("this head cannot be lent", lending_problems(algorithm.needs().loans, roles, snapshots, precomputed))


def lending_problems(
    loans: Iterable[Lent], roles: Mapping[str, RoleSpec], snapshots: Collection[str], precomputed: Collection[str]
) -> list[str]:
    """Why these heads cannot be lent. The borrower's copy must always equal the lender's head.

    Args:
        snapshots: roles whose weights are replaced during the run.
        precomputed: roles whose models are unloaded before the first step.
    """
    problems = []
    for loan in loans:
        if loan.role not in roles or loan.borrower not in roles:
            reason = f"the run has no such role; its roles are {', '.join(roles)}"
        elif roles[loan.role].head != "lm":
            reason = f"it has a {roles[loan.role].head!r} head, not a language-model head"
        elif roles[loan.role].trained or loan.role in snapshots:
            reason = "its weights change during the run"
        elif loan.role in precomputed:
            reason = f"{loan.role}.precompute = true unloads its model. Remove it"
        else:
            continue
        problems.append(f"{loan.borrower!r} needs the output head of {loan.role!r}, but {reason}.")
    return problems


def _check_declared(algorithm: Algorithm, roles: Collection[str], copied: Collection[str]) -> None:
    """Raises PluginInvalid if the first step names an undeclared role. Later steps are not checked."""
    updates = [update for update in ask(algorithm, "updates", 0) if isinstance(update, Update)]
    if strangers := [update.loss for update in updates if update.loss not in algorithm.parts]:
        raise PluginInvalid(
            f"updates() of algorithm {algorithm.name!r} names the slot {strangers[0]!r}; its slots are "
            f"{', '.join(map(repr, algorithm.parts)) or 'none'}"
        )
    prepass = [a for update in updates for a in ask(algorithm.parts[update.loss], "prepass")]
    role_names = {
        "annotations()": {a.role for a in ask(algorithm, "annotations", 0)},
        "updates()": {*(update.role for update in updates), *copied},
        "prepass() of a loss": {a.role for a in prepass},
    }
    for method, names in role_names.items():
        if unknown := sorted(names - set(roles)):
            raise PluginInvalid(
                f"{method} of algorithm {algorithm.name!r} names the role {unknown[0]!r}, which no plugin declares. "
                f"The run has the roles {', '.join(sorted(roles))}. needs() must return Needs(roles=(..., "
                f"RoleSpec({unknown[0]!r})))."
            )


def _check_outputs(algorithm: Algorithm, roles: Mapping[str, RoleSpec]) -> None:
    """Raises ConfigError if a loss of the first step reads an output that the model of its role does not have."""
    for update in ask(algorithm, "updates", 0):
        if not isinstance(update, Update):
            continue
        loss, head = algorithm.parts[update.loss], roles[update.role].head
        for output in ask(loss, "outputs"):
            if isinstance(output, str) and output in BUILTIN and not gives(head, output):
                raise ConfigError(
                    f"algorithm.{update.loss}: the loss {loss.name!r} reads {output!r}, which the {head!r} head of "
                    f"{update.role!r} does not give. Use another loss, or another algorithm."
                )


def check_columns(plugins_of_run: RunPlugins, data: TrainData, held_out: Sequence[Row], samples: bool) -> None:
    """Refuse a run if a source lacks a column that a reward or the algorithm declares (``Reward.columns``,
    ``Algorithm.columns``), so that it could read no row of the source.

    A source lacks a column if none of its rows has it. No row is read for this check. It does not detect a column that
    only some rows lack. The reward fails when it scores such a row.

    Args:
        held_out: the rows of evaluations.
        samples: whether the run samples and scores answers to training rows.

    Raises ConfigError that names each reward, column and source.
    """
    evaluated = {row.source for row in held_out}
    demonstrations = plugins_of_run.algorithm.needs().demonstration_sources
    trained = [source for source in data.sources["train"] if samples and source.name not in demonstrations]
    problems = column_problems(plugins_of_run.rewards, trained, "train")
    problems += column_problems(
        plugins_of_run.rewards, [s for s in data.sources["eval"] if s.name in evaluated], "eval"
    )
    refuse(problems)
    algorithm = plugins_of_run.algorithm
    raise_problems(
        "the algorithm cannot read the data",
        [
            f"data.train {source.name!r} ({source.section.path}) has no column {column!r}, which algorithm "
            f"{algorithm.name!r} or a part of it reads; columns present: {', '.join(source.columns)}."
            f"{did_you_mean(column, source.columns)} Change the option that names it, or add it to the data."
            for source in trained
            for column in ask(algorithm, "columns", source.name)
            if not source.has(column)
        ],
    )


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError if there are problems."""
    raise_problems("the rewards cannot score the data", problems)


def check_texts(rewards: Sequence[ActiveReward], tokenizer: Any) -> None:
    """Refuse rewards that look for special tokens in answers (``Reward.texts``). Raises ConfigError that names reward,
    text and token."""
    problems = []
    for reward in rewards:
        with boundary(PluginError, f"{reward}: texts()"):
            texts = list(reward.instance.texts())
        problems += [
            f"reward {reward.name!r} looks for {text!r}, which holds the special token {token!r}. The text of an "
            "answer has no special tokens, so no answer would match. Choose other texts, or make the token an "
            'ordinary one: `"special": false` in tokenizer.json and tokenizer_config.json.'
            for text in texts
            for token in special_tokens_in(text, tokenizer)
        ]
    raise_problems("the rewards cannot score answers", problems)


def column_problems(rewards: Sequence[ActiveReward], sources: Sequence[Source], key: str) -> list[str]:
    """A message for each column that a reward declares and a source lacks.

    Args:
        key: ``train`` or ``eval``, for messages.
    """
    return [
        _problem(reward, column, option, source, sources, key)
        for reward in rewards
        for column, option in _declared(reward).items()
        for source in sources
        if (not reward.sources or source.name in reward.sources) and not source.has(column)
    ]


def _declared(reward: ActiveReward) -> dict[str, str]:
    """{column: option that names it, or an empty text}."""
    with boundary(PluginError, f"{reward}: columns()"):
        columns = reward.instance.columns()
        names = [] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not all(isinstance(name, str) and name for name in names):
        raise PluginError(f"{reward}: columns() returned {brief(columns)}; allowed: a list or tuple of column names")
    if isinstance(columns, Mapping):
        return {name: str(columns[name]) for name in names}
    return {name: next((n for n, value in reward.config or () if value == name), "") for name in names}


def _problem(
    reward: ActiveReward, column: str, option: str, source: Source, sources: Sequence[Source], key: str
) -> str:
    flag = f"--reward.{reward.name}"
    todo = [f"name the right one with {flag}.{option}" if option else "add it to the data"]
    if any(other.has(column) for other in sources):
        todo.append(f"name the sources that this reward scores with {flag}.sources")
    advice = ", or ".join(todo)
    return (
        f"data.{key} {source.name!r} ({source.section.path}) has no column {column!r}, which reward {reward.name!r} "
        f"reads; columns present: {', '.join(source.columns)}.{did_you_mean(column, source.columns)} "
        f"{advice[0].upper()}{advice[1:]}."
    )


def check_margins(algorithm: Algorithm, data: TrainData) -> None:
    """Raises ConfigError if the loss reads margins and the algorithm does not put them into the batch. This happens
    only if the algorithm builds units from rows by itself."""
    rows = next(data.every_example(max(2, algorithm.needs().rows_min)), [])
    batch = assemble(algorithm, rows)[0] if rows else None
    if batch is not None and not batch.has("margin"):
        raise ConfigError(
            f"data.margin = {data.section.margin!r}: the loss reads the column 'margin', and assemble() of "
            f"{algorithm.name} does not create it. Remove data.margin. The author of the algorithm can use "
            'rlhf.ops.rows.pack_rows, or add Example.values["margin"] as a unit column.'
        )


def check_eval_rows(algorithm: Algorithm, rows: int) -> None:
    """Raises ConfigError if the loss cannot be evaluated on so few rows."""
    min_rows = algorithm.needs().rows_min
    if 0 < rows < min_rows:
        raise ConfigError(
            f"{algorithm.name} needs at least {min_rows} rows to evaluate on, got {rows} from data.eval. Add rows, or "
            "remove data.eval."
        )


def stream_notes(config: RunFile, algorithm: Algorithm) -> list[str]:
    """A warning if samples come from an older policy and no importance weight corrects for it.

    It applies only to algorithms with an advantage. An algorithm that only compares answers does not assume that they
    come from the current policy.
    """
    stream, estimates = config.stream, any(isinstance(part, Advantage) for part in algorithm.parts.values())
    if algorithm.data != "prompts" or not estimates or CORRECTION in algorithm.needs().features:
        return []
    if stream.staleness:
        age, flag = f"stream.staleness = {stream.staleness}: samples are {_steps(stream.staleness)} old", "staleness 0"
    elif stream.round > 1:
        age, flag = f"stream.round = {stream.round}: samples are up to {_steps(stream.round - 1)} old", "round 1"
    else:
        return []
    losses = {slot: part for slot, part in algorithm.parts.items() if isinstance(part, Loss)}
    options = [
        f"--algorithm.{slot}.{loss.correction_option}" for slot, loss in losses.items() if loss.correction_option
    ]
    return [
        f"{age} when they are trained on, and no importance weight corrects for it: the loss treats them as samples of "
        f"the policy at the start of the step. Set {' or '.join([*options, f'--stream.{flag}'])}."
    ]


def idle_engine_notes(config: RunFile, launcher: type[Launcher] | None, generator: type[Generator] | None) -> list[str]:
    """A hint if engines wait while the policy learns, although older samples are allowed and the engines have separate
    devices. Waves are still the default, because only waves give the same run for the same seed."""
    stream, place = config.stream, config.placement.get(GENERATOR)
    shared = place is not None and place.share is not None
    if stream.mode != "waves" or not stream.staleness or shared or stream.replay is not None:
        return []
    if launcher is None or ANSWERS not in launcher.capabilities:
        return []
    if generator is None or not issubclass(generator, AnswersRequests):
        return []
    return [
        f"stream.staleness = {stream.staleness} and stream.mode = 'waves': the engines wait while the policy learns. "
        "With --stream.mode continuous they keep generating. The run then depends on the clock; `rlhf replay` repeats "
        "it."
    ]


def tool_notes(rollout: Rollout, data: TrainData) -> list[str]:
    """A note if rows have tools and the rollout shows others."""
    return [
        f"data.{use} {source.name!r} has the column {TOOLS!r}, which the rollout {rollout.name!r} does not read: it "
        "shows the policy its own tools"
        for use, sources in data.sources.items()
        for source in sources
        if rollout.needs_messages and source.layout is not None and TOOLS in source.layout.columns
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"
