"""Checks across sections, before anything starts: options that are valid alone but cannot work together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.interfaces import (
    Algorithm,
    ComponentConfig,
    Curriculum,
    Generator,
    Launcher,
    LendsHead,
    Loss,
    TakesTensors,
    Trainer,
)
from rlhf.types import DataForm, Needs, RoleSpec

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.online_validation import capability_problems, env_problems, sampling_problems, stream_problems
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import EnvSection, EvalSection, ModelSection, StreamSection, SyncSection

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
    "messages": ("demonstrations", "labels", "prompts"),
    "chosen": ("pairs",),
    "rejected": ("pairs",),
    "margin": ("pairs",),
    "label": ("labels",),
    "steps": ("steps",),
    "step_labels": ("steps",),
    "step_separator": ("steps",),
    "add_eos": ("demonstrations", "pairs", "labels"),
}
"""{field of ``[data]``: data forms that use it}. All forms use a field that is not listed."""
_OF_ANSWERS = ("response", "add_eos")
"""Fields that the form ``prompts`` also uses if an algorithm learns from the answers of some rows (``Needs.given``)."""


def check(
    run: RunFile,
    algorithm: Algorithm,
    *,
    rollout_needs_env: bool = False,
    rollout_replays_env: bool = False,
    reward_roles: Collection[RoleSpec] = (),
    generator: type[Generator] | None = None,
    trainer: type[Trainer] | None = None,
    launcher: type[Launcher] | None = None,
    curriculum: type[Curriculum] | None = None,
    scored: bool = True,
) -> None:
    """Refuse a run that would fail later or silently ignore an option.

    Args:
        rollout_needs_env, rollout_replays_env: of the selected rollout, ``Rollout.needs_env`` and ``replays_env``
            (online runs).
        reward_roles: roles that the selected rewards declare; the run holds them too.
        generator, trainer, launcher, curriculum: the selected classes, if their capabilities are to be checked.
        scored: whether answers must get a reward.

    Raises ConfigError listing every problem and what to do about it.
    """
    needs = algorithm.needs()
    problems = _models(run, algorithm, needs, reward_roles)
    problems += _ignored_columns(run, algorithm)
    if run.data.batch_size < needs.rows_min:
        problems.append(
            f"{algorithm.name} needs at least {needs.rows_min} rows a step, got data.batch_size = "
            f"{run.data.batch_size}; set --data.batch_size {needs.rows_min} or more."
        )
    if needs.lent and trainer is not None and not issubclass(trainer, LendsHead):
        problems.append(
            f"{algorithm.name} lets a role compute with the output head of another role, which trainer "
            f"{trainer.name!r} does not support (it is no LendsHead). Use another --trainer.use."
        )
    if trainer is not None and STORAGE not in trainer.capabilities:
        problems += [
            f"{where}.storage = 'bf16': trainer {trainer.name!r} stores weights in fp32 only (it lacks {STORAGE!r}). "
            "Remove it, or use another --trainer.use."
            for where, section in _model_sections(run).items()
            if section.storage == "bf16"
        ]
    if algorithm.data == "prompts":
        problems += sampling_problems(run, algorithm, needs, rollout_needs_env, scored, rollout_replays_env)
        problems += stream_problems(run, launcher, generator)
    else:
        problems += _offline(run, algorithm)
        if run.reward or run.env is not None:  # the policy answers held-out rows
            problems += env_problems(run, rollout_needs_env, rollout_replays_env)
    if curriculum is not None:
        problems += curriculum_problems(run, algorithm, curriculum, scored)
    problems += reward_source_problems(run, scored and needs.reward and algorithm.data == "prompts")
    problems += capability_problems(algorithm, needs, generator, trainer)
    if run.sync != SyncSection() and (generator is None or not issubclass(generator, TakesTensors)):
        why = (
            "this run has no generator"
            if generator is None
            else f"generator {generator.name!r} holds no copy of the weights"
        )
        problems.append(f"[sync] is set, but {why}, so nothing is sent. Remove it.")
    if run.sync.tolerance is not None and run.sync.canaries == 0:
        problems.append(
            f"sync.tolerance = {run.sync.tolerance:g} is for the canaries, but sync.canaries = 0. Remove it."
        )
    problems += _evaluation(run, generator is not None)
    raise_problems("these parts of the configuration do not fit together", problems)


def ignored_fields(data: DataSection, form: DataForm, name: str, answers: bool = False) -> list[str]:
    """Fields of ``[data]`` that are for other data forms than that of the algorithm ``name``.

    Args:
        answers: form ``prompts``: the algorithm learns from the answers of some rows (``Needs.given``).
    """
    problems, learns, forms = [], f"{name} learns from {form}", LOSS_ON[data.loss_on]
    if forms and form not in forms:
        problems.append(f"data.loss_on = {data.loss_on!r} is for {' and '.join(forms)}; {learns}. Remove it.")
    by_readers: dict[tuple[DataForm, ...], list[str]] = {}
    for field, readers in READ_OF.items():
        is_read = form in readers or (answers and field in _OF_ANSWERS)
        if not is_read and getattr(data, field) != type(data).model_fields[field].default:
            by_readers.setdefault(readers, []).append(f"data.{field}")
    for readers, fields in by_readers.items():
        listing, of = ", ".join(fields), " and ".join(readers)
        problems.append(f"{listing}: used for {of} only, but {learns}. Remove what is not used.")
    return problems


def _ignored_columns(run: RunFile, algorithm: Algorithm) -> list[str]:
    """Fields of ``[data]`` that are for another data form, or for another loss."""
    data, form = run.data, algorithm.data
    problems = ignored_fields(data, form, algorithm.name, algorithm.needs().given > 0)
    losses = [part for part in algorithm.parts.values() if isinstance(part, Loss)]
    if form == "pairs" and data.margin is not None and not any("margin" in loss.columns() for loss in losses):
        problems.append(
            f"data.margin = {data.margin!r}: the loss of {algorithm.name} reads no margins. Remove it, or use one that "
            "does."
        )
    return problems


def _model_sections(run: RunFile) -> dict[str, ModelSection]:
    sections = {"policy": run.policy, "critic": run.critic, "reference": run.reference}
    return sections | {f"roles.{name}": section for name, section in run.roles.items()}


def _models(run: RunFile, algorithm: Algorithm, needs: Needs, reward_roles: Collection[RoleSpec]) -> list[str]:
    problems = []
    if run.policy.model is None:
        problems.append("policy.model: no model is named. Set --model PATH (a folder or a hub name).")
    if not run.data.train:
        problems.append("data.train: no training data is named. Set --data FILE.")
    roles = (*needs.roles, *reward_roles)
    role_names = {r.name for r in roles}
    if run.checkpoint.export_trained and {r.name for r in roles if r.trained} <= {"policy"}:
        problems.append(
            f"checkpoint.export_trained: {algorithm.name!r} configured like this trains no role beside the policy, "
            "which is exported in any case. Remove it."
        )
    frozen = {
        r.name for r in roles if not r.trained and r.name != "policy"
    }  # a policy that only answers trains elsewhere
    sections: Mapping[str, ModelSection] = {"critic": run.critic, "reference": run.reference}
    for name, section in sections.items():
        if name not in role_names and section != ModelSection():
            problems.append(
                f"[{name}] is set, but {algorithm.name!r} configured like this holds no role {name!r} (it holds "
                f"{', '.join(sorted(role_names))}). Remove the section, or switch on what needs it."
            )
    for name, section in {**sections, **run.roles}.items():
        if name in frozen and section.gradient_checkpointing:
            where = name if name in sections else f"roles.{name}"
            problems.append(
                f"{where}.gradient_checkpointing = true: {name} is not trained, so it has no backward pass. Remove it."
            )
    for name in run.roles:
        if name not in role_names or name in ("policy", "critic", "reference"):
            hint = f"Write [{name}]." if name in ("policy", "critic", "reference") else "Remove the section."
            problems.append(f"[roles.{name}]: no selected plugin declares this further role. {hint}")
    return problems


def equal_answers(run: RunFile) -> list[str]:
    """The problem of an evaluation that asks for several answers to a row, which are all equal at temperature 0."""
    if run.eval.samples <= 1 or run.eval.temperature > 0 or run.env is not None:
        return []
    return [
        f"eval.samples = {run.eval.samples} at eval.temperature = 0 gives the same answer {run.eval.samples} times, so "
        "pass@k tells nothing. Set --eval.temperature 1, or --eval.samples 1."
    ]


def _evaluation(run: RunFile, sampled: bool) -> list[str]:
    """Options of evaluation that have no effect."""
    problems = []
    if not run.data.eval:
        if run.eval != EvalSection():
            problems.append(
                "[eval] is set, but there is no data.eval to evaluate on. Set --eval-data FILE, or remove it."
            )
        for name in ("save_best", "export_best"):
            if not getattr(run.checkpoint, name):
                problems.append(f"checkpoint.{name} = false: there is no data.eval, so no step is the best. Remove it.")
        return problems
    if run.eval.patience is not None and run.eval.every is None:
        problems.append(
            f"eval.patience = {run.eval.patience} counts evaluations during training, and eval.every is not set: there "
            "is one at the end only. Set --eval.every STEPS, or remove it."
        )
    problems += equal_answers(run) if sampled else []
    return problems


def _not_default(section: ComponentConfig, *but: str) -> list[str]:
    """Fields of a section whose values are not their defaults."""
    defaults = type(section)()
    return [n for n in type(section).model_fields if n not in but and getattr(section, n) != getattr(defaults, n)]


def _offline(run: RunFile, algorithm: Algorithm) -> list[str]:
    """Options that only online runs use are refused, not ignored. Rewards and an environment may be for evaluation."""
    problems = []
    reason = f"{algorithm.name} learns from {algorithm.data} and samples nothing in training"
    if run.stream != StreamSection():
        problems.append(f"[stream] is set, but {reason}. Remove it.")
    answers = bool(run.data.eval) and (bool(run.reward) or run.env is not None)
    for name in _not_default(run.sampling, *([] if not answers else ["max_new_tokens", "stop"])):
        problems.append(f"sampling.{name} = {getattr(run.sampling, name)!r}: {reason}. Remove it.")
    of_answers = ("samples", "temperature", "max_new_tokens", "pass_threshold")
    for name in [n for n in _not_default(run.eval) if n in of_answers and run.data.eval and not answers]:
        problems.append(
            f"eval.{name} = {getattr(run.eval, name)!r} is of answers, and without a reward or an environment "
            "data.eval is scored by the loss. Remove it, or set --reward NAME."
        )
    for reward in run.reward:
        if reward.credit != "outcome":
            problems.append(
                f"reward.{reward.label}.credit = {reward.credit!r} is of training, and {reason}. Remove it."
            )
    if not run.data.eval:
        for kind, is_set in (("reward", bool(run.reward)), ("env", isinstance(run.env, EnvSection))):
            if is_set:
                problems.append(f"{kind} is set, but {reason}, and there is no data.eval to use it on. Remove it.")
    if run.run.show_samples is not None:
        problems.append(f"run.show_samples = {run.run.show_samples}: {reason}. Remove it.")
    if run.env is not None and run.env.credit != "outcome":
        problems.append(f"env.credit = {run.env.credit!r} is of training, and {reason}. Remove it.")
    head = next((role.head for role in algorithm.needs().roles if role.name == "policy"), "lm")
    if run.data.eval and head != "lm" and (run.reward or run.env is not None):
        problems.append(
            f"reward or env is set to evaluate by answers, but the policy of {algorithm.name} has a {head!r} head and "
            "writes none; data.eval is scored by the loss. Remove it."
        )
    return problems


def curriculum_problems(run: RunFile, algorithm: Algorithm, curriculum: type[Curriculum], scored: bool) -> list[str]:
    """Problems of a run with a curriculum: what it cannot read, and options that have no effect beside it.

    Args:
        scored: whether answers must get a reward; false where the run may have none.
    """
    problems, name = [], f"curriculum {curriculum.name!r}"
    if curriculum.min_scores and algorithm.data != "prompts":
        problems.append(
            f"{name} chooses rows by the scores of sampled answers, and {algorithm.name} learns from {algorithm.data} "
            "and samples nothing in training. Remove [curriculum], or use one that reads no scores."
        )
    elif curriculum.min_scores and scored and not run.reward and run.env is None:
        problems.append(
            f"{name} chooses rows by the scores of answers, and nothing gives any. Set --reward NAME, or remove "
            "[curriculum]."
        )
    elif run.sampling.samples_per_prompt < curriculum.min_scores:
        problems.append(
            f"{name} compares the scores of at least {curriculum.min_scores} samples of a prompt, got "
            f"sampling.samples_per_prompt = {run.sampling.samples_per_prompt}; set --sampling.samples_per_prompt "
            f"{curriculum.min_scores} or more."
        )
    if not curriculum.repeats and run.stream.mode == "continuous" and run.stream.replay is None:
        problems.append(
            f"stream.mode = 'continuous': {name} promises that no row comes twice in a batch, and a group that is "
            "rejected leaves its place to one that was chosen for a later batch. Remove [curriculum] or stream.mode."
        )
    if not run.data.shuffle:
        problems.append(f"data.shuffle = false: {name} decides the order of the rows. Remove one of them.")
    if not curriculum.reads_probabilities and any(source.probability is not None for source in run.data.train):
        problems.append(
            f"data.train: probabilities are given, and {name} does not read them: it decides which rows come. Remove "
            "the probabilities, or [curriculum]."
        )
    return problems


def reward_source_problems(run: RunFile, trains: bool) -> list[str]:
    """Names that are no source, and sources whose rows no reward scores.

    Args:
        trains: whether training rows must be scored; held-out rows must be in any case.
    """
    labels = list(dict.fromkeys(source.label for source in (*run.data.train, *run.data.eval)))
    problems = [
        f"reward.{reward.label}.sources: {source!r} is no source of data.train or data.eval; there are "
        f"{', '.join(map(repr, labels)) or 'none'}."
        for reward in run.reward
        for source in reward.sources
        if source not in labels
    ]
    if run.env is not None or not run.reward or any(not reward.sources for reward in run.reward):
        return problems
    scored = {source for reward in run.reward for source in reward.sources}
    needed = {"data.train": run.data.train if trains else (), "data.eval": run.data.eval}
    for where, sources in needed.items():
        if unscored := [source.label for source in sources if source.label not in scored]:
            problems.append(
                f"reward: no reward scores the rows of {', '.join(map(repr, unscored))} of {where}. Add it to the "
                "`sources` of a reward, or add a reward without `sources`."
            )
    return problems
