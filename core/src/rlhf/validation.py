"""Checks across sections, before anything starts: combinations that each part accepts but that cannot work together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.config_errors import raise_problems
from rlhf.data_section import DataSection
from rlhf.interfaces import Algorithm, Generator, Loss, Trainer
from rlhf.online_validation import capability_problems, env_problems, sampling_problems
from rlhf.runfile import RunFile
from rlhf.sections import EnvSection, EvalSection, ModelSection, StreamSection, SyncSection
from rlhf.types import DataForm, Needs, RoleSpec

LENDING = "lend:head"
"""Capability of trainers: what ``Needs.lent`` asks for."""

LOSS_ON: Mapping[str, tuple[DataForm, ...]] = {
    "completion": (),
    "assistant": ("demonstrations", "pairs", "labels"),
    "all": ("demonstrations",),
}
"""{value of ``data.loss_on``: forms that it is for}; none: all of them."""
ONLY_OF: Mapping[DataForm, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected", "margin"),
    "labels": ("label",),
    "steps": ("steps", "step_labels", "step_separator"),
}
"""{form: fields of ``[data]`` that are read of its rows alone}."""


def check(
    run: RunFile,
    algorithm: Algorithm,
    *,
    rollout_needs_env: bool = False,
    rollout_replays_env: bool = False,
    reward_roles: Collection[RoleSpec] = (),
    generator: type[Generator] | None = None,
    trainer: type[Trainer] | None = None,
    scored: bool = True,
) -> None:
    """Refuse a run that could only fail later or silently ignore something.

    Args:
        rollout_needs_env, rollout_replays_env: of the selected rollout, ``Rollout.needs_env`` and ``replays_env``
            (online runs).
        reward_roles: roles that the selected rewards declare; the run holds them too.
        generator, trainer: the selected classes, where their capabilities are to be checked.
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
    if needs.lent and trainer is not None and LENDING not in trainer.capabilities:
        problems.append(
            f"{algorithm.name} has roles compute with each other's output heads, which trainer {trainer.name!r} cannot "
            f"(it lacks {LENDING!r}). Use another --trainer.use."
        )
    if algorithm.data == "prompts":
        problems += sampling_problems(run, algorithm, needs, rollout_needs_env, scored, rollout_replays_env)
    else:
        problems += _offline(run, algorithm)
        if run.reward or run.env is not None:  # the policy answers held-out rows
            problems += env_problems(run, rollout_needs_env, rollout_replays_env)
    problems += capability_problems(algorithm, needs, generator, trainer)
    if run.sync != SyncSection() and (generator is None or "accept:tensors" not in generator.capabilities):
        why = (
            "this run has no generator"
            if generator is None
            else f"generator {generator.name!r} holds no copy of the weights"
        )
        problems.append(f"[sync] is set, but {why}, so nothing is sent. Remove it.")
    problems += _evaluation(run, generator is not None)
    raise_problems("these parts of the configuration do not fit together", problems)


def ignored_fields(data: DataSection, form: DataForm, name: str) -> list[str]:
    """What of ``[data]`` is for rows of another form than the algorithm ``name`` learns from."""
    problems, learns, forms = [], f"{name} learns from {form}", LOSS_ON[data.loss_on]
    if forms and form not in forms:
        problems.append(f"data.loss_on = {data.loss_on!r} is for {' and '.join(forms)}; {learns}. Remove it.")
    for reader, fields in ONLY_OF.items():
        given = [name for name in fields if getattr(data, name) != type(data).model_fields[name].default]
        if given and form != reader:
            named = ", ".join(f"data.{name}" for name in given)
            problems.append(f"{named}: read of {reader} only; {learns}. Remove what is not read.")
    return problems


def _ignored_columns(run: RunFile, algorithm: Algorithm) -> list[str]:
    """What of ``[data]`` is for rows of another form, or for a loss that reads it."""
    data, form = run.data, algorithm.data
    problems = ignored_fields(data, form, algorithm.name)
    losses = [part for part in algorithm.parts.values() if isinstance(part, Loss)]
    if form == "pairs" and data.margin is not None and not any("margin" in loss.columns() for loss in losses):
        problems.append(
            f"data.margin = {data.margin!r}: the loss of {algorithm.name} reads no margins. Remove it, or use one that "
            "does."
        )
    return problems


def _models(run: RunFile, algorithm: Algorithm, needs: Needs, reward_roles: Collection[RoleSpec]) -> list[str]:
    problems = []
    if run.policy.model is None:
        problems.append("policy.model: no model is named. Set --model PATH (a folder or a hub name).")
    if not run.data.train:
        problems.append("data.train: no training data is named. Set --data FILE.")
    roles = (*needs.roles, *reward_roles)
    held = {r.name for r in roles}
    if run.checkpoint.export_trained and {r.name for r in roles if r.trained} <= {"policy"}:
        problems.append(
            f"checkpoint.export_trained: {algorithm.name!r} configured like this trains no role beside the policy, "
            "which is exported in any case. Remove it."
        )
    frozen = {
        r.name for r in roles if not r.trained and r.name != "policy"
    }  # a policy that only answers trains elsewhere
    given: Mapping[str, ModelSection] = {"critic": run.critic, "reference": run.reference}
    for name, section in given.items():
        if name not in held and section != ModelSection():
            problems.append(
                f"[{name}] is set, but {algorithm.name!r} configured like this holds no role {name!r} (it holds "
                f"{', '.join(sorted(held))}). Remove the section, or switch on what needs it."
            )
    for name, section in {**given, **run.roles}.items():
        if name in frozen and section.gradient_checkpointing:
            where = name if name in given else f"roles.{name}"
            problems.append(
                f"{where}.gradient_checkpointing = true: {name} is not trained, so it has no backward pass. Remove it."
            )
    for name in run.roles:
        if name not in held or name in ("policy", "critic", "reference"):
            hint = f"Write [{name}]." if name in ("policy", "critic", "reference") else "Remove the section."
            problems.append(f"[roles.{name}]: no selected plugin declares this further role. {hint}")
    return problems


def _evaluation(run: RunFile, sampled: bool) -> list[str]:
    """What would be evaluated to no purpose, or not at all."""
    if not run.data.eval and run.eval != EvalSection():
        return ["[eval] is set, but there is no data.eval to evaluate on. Set --eval-data FILE, or remove it."]
    if run.data.eval and sampled and run.eval.samples > 1 and run.eval.temperature == 0 and run.env is None:
        return [
            f"eval.samples = {run.eval.samples} at eval.temperature = 0 gives one answer {run.eval.samples} times, and "
            "pass@k tells nothing. Set --eval.temperature 1, or --eval.samples 1."
        ]
    return []


def _offline(run: RunFile, algorithm: Algorithm) -> list[str]:
    """What only online runs read is refused rather than ignored. Rewards and an environment may be for evaluation."""
    problems = []
    what = f"{algorithm.name} learns from {algorithm.data} and samples nothing in training"
    if run.stream != StreamSection():
        problems.append(f"[stream] is set, but {what}. Remove it.")
    if not run.data.eval:
        for kind, given in (("reward", bool(run.reward)), ("env", isinstance(run.env, EnvSection))):
            if given:
                problems.append(f"{kind} is set, but {what}, and there is no data.eval to use it on. Remove it.")
    if run.env is not None and run.env.credit != "outcome":
        problems.append(f"env.credit = {run.env.credit!r} is of training, and {what}. Remove it.")
    head = next((role.head for role in algorithm.needs().roles if role.name == "policy"), "lm")
    if run.data.eval and head != "lm" and (run.reward or run.env is not None):
        problems.append(
            f"reward or env is set to evaluate by answers, but the policy of {algorithm.name} has a {head!r} head and "
            "writes none; data.eval is scored by the loss. Remove it."
        )
    return problems
