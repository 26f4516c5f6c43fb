"""Refusals of options that are valid alone but cannot work together, or that nothing would read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.interfaces import ComponentConfig, Curriculum, LendsHead, Loss, TakesTensors
from rlhf.types import DataForm

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import (
    ROLES,
    EnvSection,
    EvalSection,
    ModelSection,
    StreamSection,
    SyncSection,
    section_path,
)

if TYPE_CHECKING:
    from rlhf_runtime.checks.run import RunPlugins

STORAGE = "storage:bf16"
"""Capability of trainers that ``storage = "bf16"`` requires."""

LOSS_ON: Mapping[str, tuple[DataForm, ...]] = {
    "completion": (),
    "assistant": ("demonstrations", "pairs", "labels"),
    "all": ("demonstrations",),
}
"""{value of ``data.loss_on``: data forms that support it}; empty: all forms."""
READ_OF: Mapping[str, tuple[DataForm, ...]] = {
    "response": ("demonstrations", "labels"),
    "reasoning": ("demonstrations", "labels"),
    "messages": ("demonstrations", "labels", "prompts"),
    "chosen": ("pairs",),
    "rejected": ("pairs",),
    "margin": ("pairs",),
    "pairs": ("pairs",),
    "label": ("labels",),
    "steps": ("steps",),
    "step_labels": ("steps",),
    "step_separator": ("steps",),
    "add_eos": ("demonstrations", "pairs", "labels"),
}
"""{field of ``[data]``: data forms that use it}. All forms use a field that is not listed."""
_OF_ANSWERS = ("response", "reasoning", "add_eos")
"""Fields that the form ``prompts`` also uses if an algorithm learns from the answers of some rows
(``Needs.demonstration_share``)."""

SECTIONS_OF_ANSWERS = ("sampling", "rollout", "generator", "sync")
"""Sections that a run reads only if it samples answers."""


def rows_per_step(run: RunPlugins) -> list[str]:
    """A step with fewer rows than the algorithm needs."""
    algorithm, min_rows, rows = run.algorithm, run.algorithm.needs().rows_min, run.config.data.batch_size
    if rows >= min_rows:
        return []
    return [
        f"{algorithm.name} needs at least {min_rows} rows per step, got data.batch_size = {rows}; set "
        f"--data.batch_size {min_rows} or more."
    ]


def trainer_capabilities(run: RunPlugins) -> list[str]:
    """Capabilities that the algorithm, or the section of a role, needs and the trainer does not have."""
    problems, trainer = [], run.trainer_class
    if run.algorithm.needs().loans and not issubclass(trainer, LendsHead):
        problems.append(
            f"{run.algorithm.name} lets a role compute with the output head of another role, which trainer "
            f"{trainer.name!r} does not support (it is not a LendsHead). Use another --trainer.use."
        )
    if STORAGE not in trainer.capabilities:
        problems += [
            f"{section_path(name)}.storage = 'bf16': trainer {trainer.name!r} stores weights in fp32 only (it lacks "
            f"{STORAGE!r}). Remove it, or use another --trainer.use."
            for name in run.roles
            if run.section(name).storage == "bf16"
        ]
    return problems


def sync(run: RunPlugins) -> list[str]:
    """Options of ``[sync]`` that nothing reads. In a replay they describe how the recorded samples were drawn."""
    problems, section, generator = [], run.config.sync, run.generator_class
    is_sent = generator is not None and issubclass(generator, TakesTensors)
    if section != SyncSection() and not is_sent and run.config.stream.replay is None:
        reason = (
            "this run has no generator"
            if generator is None
            else f"generator {generator.name!r} holds no copy of the weights"
        )
        problems.append(f"[sync] is set, but {reason}, so nothing is sent. Remove it.")
    if section.tolerance is not None and section.canaries == 0:
        problems.append(
            f"sync.tolerance = {section.tolerance:g} applies to the canaries, but sync.canaries = 0. Remove it."
        )
    return problems


def ignored_fields(data: DataSection, form: DataForm, name: str, answers: bool = False) -> list[str]:
    """Fields of ``[data]`` that are not for the data form of the algorithm ``name``.

    Args:
        answers: form ``prompts``: the algorithm learns from the answers of some rows (``Needs.demonstration_share``).
    """
    problems, learns, forms = [], f"{name} learns from {form}", LOSS_ON[data.loss_on]
    if forms and form not in forms:
        problems.append(f"data.loss_on = {data.loss_on!r} applies to {' and '.join(forms)}, but {learns}. Remove it.")
    by_readers: dict[tuple[DataForm, ...], list[str]] = {}
    for field, readers in READ_OF.items():
        is_read = form in readers or (answers and field in _OF_ANSWERS)
        if not is_read and getattr(data, field) != type(data).model_fields[field].default:
            by_readers.setdefault(readers, []).append(f"data.{field}")
    for readers, fields in by_readers.items():
        listing, form_names = ", ".join(fields), " and ".join(readers)
        problems.append(f"{listing}: used for {form_names} only, but {learns}. Remove what is not used.")
    return problems


def ignored_columns(run: RunPlugins) -> list[str]:
    """Fields of ``[data]`` that are for another data form, or for another loss."""
    data, algorithm, form = run.config.data, run.algorithm, run.algorithm.data
    problems = ignored_fields(data, form, algorithm.name, bool(algorithm.needs().answered))
    if data.earlier_answers == "sampled" and (run.rollout is None or not run.rollout.needs_env):
        problems.append("data.earlier_answers = 'sampled' applies to rollouts with an environment only. Remove it.")
    losses = [part for part in algorithm.parts.values() if isinstance(part, Loss)]
    if form == "pairs" and data.margin is not None and not any("margin" in loss.columns() for loss in losses):
        problems.append(
            f"data.margin = {data.margin!r}: the loss of {algorithm.name} reads no margins. Remove it, or use a loss "
            "that does."
        )
    return problems


def model_and_data(run: RunPlugins) -> list[str]:
    """A run without a model, or without data."""
    problems = []
    if run.config.policy.model is None:
        problems.append("policy.model: no model is named. Set --model PATH (a folder or a hub name).")
    if not run.config.data.train:
        problems.append("data.train: no training data is named. Set --data FILE.")
    return problems


def roles(run: RunPlugins) -> list[str]:
    """Sections of roles that the run does not have."""
    problems, config, algorithm = [], run.config, run.algorithm
    if config.checkpoint.export_trained and {r.name for r in run.roles.values() if r.trained} <= {"policy"}:
        problems.append(
            f"checkpoint.export_trained: {algorithm.name!r} configured like this trains no role except the policy, "
            "which is exported in any case. Remove it."
        )
    sections: Mapping[str, ModelSection] = {"critic": config.critic, "reference": config.reference}
    for name, section in sections.items():
        if name not in run.roles and section != ModelSection():
            problems.append(
                f"[{name}] is set, but {algorithm.name!r} configured like this has no role {name!r} (it has "
                f"{', '.join(sorted(run.roles))}). Remove the section, or switch on what needs it."
            )
    for name in config.roles:
        if name not in run.roles or name in ROLES:
            hint = f"Write [{name}]." if name in ROLES else "Remove the section."
            problems.append(f"[roles.{name}]: no selected plugin declares this role. {hint}")
    return problems


def checkpointing(run: RunPlugins) -> list[str]:
    """Gradient checkpointing of roles that are not trained. A policy that only answers is trained elsewhere."""
    return [
        f"{section_path(name)}.gradient_checkpointing = true: {name} is not trained, so it has no backward pass. "
        "Remove it."
        for name, role in run.roles.items()
        if run.section(name).gradient_checkpointing and not role.trained and name != "policy"
    ]


def equal_answers(run: RunFile) -> list[str]:
    """The problem of an evaluation with several answers to a row at temperature 0, where all of them are equal."""
    if run.eval.samples <= 1 or run.eval.temperature > 0 or run.env is not None:
        return []
    return [
        f"eval.samples = {run.eval.samples} at eval.temperature = 0 gives the same answer {run.eval.samples} times, so "
        "pass@k is not informative. Set --eval.temperature 1, or --eval.samples 1."
    ]


def evaluation(run: RunPlugins) -> list[str]:
    """Options of evaluation that have no effect."""
    problems, config = [], run.config
    if not config.data.eval:
        if config.eval != EvalSection():
            problems.append(
                "[eval] is set, but there is no data.eval to evaluate on. Set --eval-data FILE, or remove it."
            )
        for name in ("save_best", "export_best"):
            if not getattr(config.checkpoint, name):
                problems.append(
                    f"checkpoint.{name} = false: there is no data.eval, so there is no best step. Remove it."
                )
        return problems
    if config.eval.patience is not None and config.eval.every is None:
        problems.append(
            f"eval.patience = {config.eval.patience} counts evaluations during training, but eval.every is not set: "
            "the only evaluation is at the end. Set --eval.every STEPS, or remove it."
        )
    return problems + equal_answers(config) if run.generator_class is not None else problems


def _not_default(section: ComponentConfig, *but: str) -> list[str]:
    """Fields of a section whose values are not their defaults."""
    defaults = type(section)()
    return [n for n in type(section).model_fields if n not in but and getattr(section, n) != getattr(defaults, n)]


def offline(run: RunPlugins) -> list[str]:
    """Refuse options that only online runs use. Rewards and an environment may be for evaluation."""
    config, algorithm = run.config, run.algorithm
    if run.online:
        return []
    problems = []
    reason = f"{algorithm.name} learns from {algorithm.data} and samples nothing in training"
    if config.stream != StreamSection():
        problems.append(f"[stream] is set, but {reason}. Remove it.")
    answers = bool(config.data.eval) and (bool(config.reward) or config.env is not None)
    for name in _not_default(config.sampling, *([] if not answers else ["max_new_tokens", "stop"])):
        problems.append(f"sampling.{name} = {getattr(config.sampling, name)!r}: {reason}. Remove it.")
    of_answers = ["samples", "temperature", "max_new_tokens", "pass_threshold"]
    if re.search(r"\b(pass|avg)@\d", config.eval.metric or ""):  # only a loss knows the other names of its metrics
        of_answers.append("metric")
    for name in [n for n in _not_default(config.eval) if n in of_answers and config.data.eval and not answers]:
        problems.append(
            f"eval.{name} = {getattr(config.eval, name)!r} applies to answers, but without a reward or an environment "
            "data.eval is scored by the loss. Remove it, or set --reward NAME."
        )
    for active in run.rewards:
        if active.instance.is_teacher:
            problems.append(f"reward {active.name!r} gives log-probs of a teacher to samples, but {reason}. Remove it.")
    for reward in config.reward:
        if reward.credit != "outcome":
            problems.append(
                f"reward.{reward.label}.credit = {reward.credit!r} applies to training, but {reason}. Remove it."
            )
    if not config.data.eval:
        for kind, is_set in (("reward", bool(config.reward)), ("env", isinstance(config.env, EnvSection))):
            if is_set:
                problems.append(f"{kind} is set, but {reason}, and there is no data.eval to use it on. Remove it.")
    if config.run.show_samples is not None:
        problems.append(f"run.show_samples = {config.run.show_samples}: {reason}. Remove it.")
    if config.env is not None and config.env.credit != "outcome":
        problems.append(f"env.credit = {config.env.credit!r} applies to training, but {reason}. Remove it.")
    head = next((role.head for role in algorithm.needs().roles if role.name == "policy"), "lm")
    if config.data.eval and head != "lm" and (config.reward or config.env is not None):
        problems.append(
            f"reward or env is set to evaluate by answers, but the policy of {algorithm.name} has a {head!r} head and "
            "writes no answers; data.eval is scored by the loss. Remove it."
        )
    return problems


def curriculum(run: RunPlugins) -> list[str]:
    """Problems of a run with a curriculum, and options that have no effect with it."""
    if "curriculum" not in run.parts:
        return []
    config, algorithm, scored = run.config, run.algorithm, run.scored
    curriculum: type[Curriculum] = run.parts["curriculum"].resolved.cls
    problems, name = [], f"curriculum {curriculum.name!r}"
    if curriculum.min_scores and algorithm.data != "prompts":
        problems.append(
            f"{name} chooses rows by the scores of sampled answers, but {algorithm.name} learns from {algorithm.data} "
            "and samples nothing in training. Remove [curriculum], or use one that reads no scores."
        )
    elif curriculum.min_scores and scored and not run.has_rewards and config.env is None:
        problems.append(
            f"{name} chooses rows by the scores of answers, but nothing scores the answers. Set --reward NAME, or "
            "remove [curriculum]."
        )
    elif config.sampling.samples_per_prompt < curriculum.min_scores:
        problems.append(
            f"{name} compares the scores of at least {curriculum.min_scores} samples of a prompt, got "
            f"sampling.samples_per_prompt = {config.sampling.samples_per_prompt}; set --sampling.samples_per_prompt "
            f"{curriculum.min_scores} or more."
        )
    if not config.data.shuffle:
        problems.append(f"data.shuffle = false: {name} decides the order of the rows. Remove one of them.")
    if not curriculum.reads_probabilities and any(source.probability is not None for source in config.data.train):
        problems.append(
            f"data.train: probabilities are set, but {name} does not read them: it chooses the rows. Remove the "
            "probabilities, or [curriculum]."
        )
    return problems


def reward_sources(run: RunPlugins) -> list[str]:
    """Names that are not sources, and sources whose rows no reward scores. Held-out rows must always be scored.
    Training rows must be scored if the run learns from rewards, except demonstrations.

    A job reads only some of the sources of its run file, so its rewards may name others."""
    config = run.config
    trains = run.trains and run.scored and run.algorithm.needs().reward and run.online
    labels = list(dict.fromkeys(source.label for source in (*config.data.train, *config.data.eval)))
    problems = [
        f"reward.{reward.label}.sources: {source!r} is not a source of data.train or data.eval; available: "
        f"{', '.join(map(repr, labels)) or 'none'}."
        for reward in config.reward
        for source in reward.sources
        if source not in labels and run.trains
    ]
    rewards = [reward for reward in run.rewards if not reward.instance.is_teacher]
    if config.env is not None or not rewards or any(not reward.sources for reward in rewards):
        return problems
    scored = {source for reward in rewards for source in reward.sources}
    demonstrations = run.algorithm.needs().demonstration_sources
    train = [source for source in config.data.train if trains and source.label not in demonstrations]
    needed = {"data.train": train, "data.eval": config.data.eval}
    for option, sources in needed.items():
        if unscored := [source.label for source in sources if source.label not in scored]:
            problems.append(
                f"reward: no reward scores the rows of {', '.join(map(repr, unscored))} of {option}. Add it to the "
                "`sources` of a reward, or add a reward without `sources`."
            )
    return problems
