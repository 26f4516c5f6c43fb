"""Checks across sections, before anything starts: combinations that each part accepts but that cannot work together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.config_errors import raise_problems
from rlhf.data_section import DataSection
from rlhf.interfaces import Algorithm, Generator, Loss, Trainer
from rlhf.runfile import RunFile
from rlhf.sections import EnvSection, EvalSection, ModelSection, StreamSection, SyncSection
from rlhf.types import DataForm, Needs, OnlineShape, RoleSpec

CORRECTION = "correction"
"""In ``Needs.features``: the loss corrects for sampling from another distribution than the policy's."""
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
    reward_roles: Collection[RoleSpec] = (),
    generator: type[Generator] | None = None,
    trainer: type[Trainer] | None = None,
    scored: bool = True,
) -> None:
    """Refuse a run that could only fail later or silently ignore something.

    Args:
        rollout_needs_env: ``Rollout.needs_env`` of the selected rollout (online runs).
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
        problems += _online(run, algorithm, needs, rollout_needs_env, scored)
        problems += _capabilities(algorithm, needs, generator, trainer)
    else:
        problems += _offline(run, algorithm)
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
    held = {r.name for r in (*needs.roles, *reward_roles)}
    given: Mapping[str, ModelSection] = {"critic": run.critic, "reference": run.reference}
    for name, section in given.items():
        if name not in held and section != ModelSection():
            problems.append(
                f"[{name}] is set, but {algorithm.name!r} configured like this holds no role {name!r} (it holds "
                f"{', '.join(sorted(held))}). Remove the section, or switch on what needs it."
            )
    for name in run.roles:
        if name not in held or name in ("policy", "critic", "reference"):
            hint = f"Write [{name}]." if name in ("policy", "critic", "reference") else "Remove the section."
            problems.append(f"[roles.{name}]: no selected plugin declares this further role. {hint}")
    return problems


def _online(run: RunFile, algorithm: Algorithm, needs: Needs, rollout_needs_env: bool, scored: bool) -> list[str]:
    problems, s = [], run.sampling
    name = algorithm.name
    if s.samples_per_prompt < needs.group_min:
        problems.append(
            f"{name} needs at least {needs.group_min} samples per prompt, got {s.samples_per_prompt}; set "
            f"--sampling.samples_per_prompt {needs.group_min}"
        )
    cut = [
        f"{key} = {value}"
        for key, value, off in (("top_p", s.top_p, 1), ("top_k", s.top_k, 0), ("min_p", s.min_p, 0))
        if value != off
    ]
    if cut and CORRECTION not in needs.features:
        problems.append(
            f"sampling.{', sampling.'.join(cut)}: training samples would come from another distribution than the one "
            "whose log-probs are trained on. Leave it at its default, or switch on the loss's importance correction."
        )
    if s.max_new_tokens >= run.data.max_tokens:
        problems.append(
            f"sampling.max_new_tokens = {s.max_new_tokens} leaves no room for a prompt within data.max_tokens = "
            f"{run.data.max_tokens}. Set --data.max_tokens to the longest prompt plus {s.max_new_tokens}."
        )
    problems += algorithm.misfits(_shape(run, rollout_needs_env))
    if rollout_needs_env and run.env is None:
        problems.append(f"rollout {run.rollout.use!r} needs an environment. Name one: --env.use NAME.")
    if run.env is not None and not rollout_needs_env:
        problems.append(
            f"env {run.env.use!r} is set, but rollout {run.rollout.use!r} uses none. Set --rollout.use to one that "
            "does (e.g. multi_turn), or remove it."
        )
    unscored = scored and not run.reward and run.env is None
    if unscored and needs.reward:
        problems.append("reward: an online run needs a reward, or an environment that gives one. Set --reward NAME.")
    if unscored and not needs.reward and run.data.eval and run.eval.metric is None:
        problems.append(
            "data.eval: nothing scores the answers, so no model is the best. Set --reward NAME, or --eval.metric "
            "length, or remove it."
        )
    if needs.given and (needs.reward or not 0 < needs.given < 1):
        problems.append(
            f"{name} declares given = {needs.given:g} and reward = {needs.reward}: answers of the data are not scored, "
            "so given needs reward = False and lies from 0 to below 1. Report this to its author."
        )
    if needs.given and run.env is not None:
        problems.append(
            f"{name} configured like this learns from the answers of {needs.given:.3g} of the rows, which answer the "
            f"row's prompt and no environment, but env {run.env.use!r} is set. Remove it, or have all answers sampled."
        )
    if run.stream.round > 1 and run.stream.staleness > 0:
        problems.append(
            f"stream.round = {run.stream.round} and stream.staleness = {run.stream.staleness}: both say with which "
            "weights a batch is generated. Set --stream.staleness 0 for rounds, or --stream.round 1."
        )
    f = run.stream.filter
    if f is not None:
        if unscored and not needs.reward:
            problems.append("stream.filter reads scores, and nothing gives any. Remove it, or set --reward NAME.")
        if f.low is None and f.high is None and f.min_std is None:
            problems.append("stream.filter: neither low, high nor min_std is set, so it would filter nothing.")
        if f.low is not None and f.high is not None and f.low >= f.high:
            problems.append(f"stream.filter: low = {f.low:g} must be below high = {f.high:g}.")
        if f.min_std is not None and s.samples_per_prompt < 2:
            problems.append(
                "stream.filter.min_std: one sample per prompt has no deviation; set --sampling.samples_per_prompt 2."
            )
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


def _shape(run: RunFile, rollout_needs_env: bool) -> OnlineShape:
    """Only in an environment it is known how many turns an answer can have."""
    s, most = run.sampling, run.data.max_tokens - 1
    turns = run.env.max_turns if rollout_needs_env and run.env is not None else 1
    answer = min(s.max_new_tokens * turns, most)
    return OnlineShape(run.data.batch_size * s.samples_per_prompt, answer, answer if rollout_needs_env else most)


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
    head = next((role.head for role in algorithm.needs().roles if role.name == "policy"), "lm")
    if run.data.eval and head != "lm" and (run.reward or run.env is not None):
        problems.append(
            f"reward or env is set to evaluate by answers, but the policy of {algorithm.name} has a {head!r} head and "
            "writes none; data.eval is scored by the loss. Remove it."
        )
    return problems


def _capabilities(
    algorithm: Algorithm, needs: Needs, generator: type[Generator] | None, trainer: type[Trainer] | None
) -> list[str]:
    problems = []
    if generator is not None and needs.generator_logprobs and "logprobs" not in generator.capabilities:
        problems.append(
            f"{algorithm.name} configured like this needs the log-probs of the generator, which generator "
            f"{generator.name!r} does not report (it can: {', '.join(sorted(generator.capabilities)) or 'nothing'})."
        )
    if generator is not None and trainer is not None:
        pairs = [("accept:module", "export:module"), ("accept:tensors", "export:tensors")]
        if not any(a in generator.capabilities and e in trainer.capabilities for a, e in pairs):
            problems.append(
                f"generator {generator.name!r} ({', '.join(sorted(generator.capabilities))}) cannot take weights from "
                f"trainer {trainer.name!r} ({', '.join(sorted(trainer.capabilities))}): one must accept what the other "
                "exports, 'module' or 'tensors'."
            )
    return problems
