"""Evaluation on held-out rows: by rollouts and rewards, or by the loss in offline runs. By default it evaluates the
weights that the run exports, which may be a moving average."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from rlhf.errors import CapabilityError, RlhfError, TrainingError, boundary
from rlhf.interfaces import Algorithm, HasViews, Trainer
from rlhf.ops.loss_value import finish_sums
from rlhf.types import Group, Row, Update
from rlhf.types.examples import Example

from rlhf_runtime.calls.algorithm_calls import ask, assemble
from rlhf_runtime.config.sections import EvalSection
from rlhf_runtime.loop.best_value import BestTracker, is_number_of_samples, unknown_metric
from rlhf_runtime.loop.learn import Metrics, loss_batch, role_of, summary
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.sample_metrics import evaluation_metrics, metric_names
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Count, Rollouts, Sampler, no_count
from rlhf_runtime.samples.stream import Stream


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run on held-out rows, and the best value so far."""

    compute: Callable[[int], Metrics]
    """The metrics after this many finished steps."""
    best: BestTracker


def evaluate_rollouts(
    rollouts: Rollouts,
    rows: Sequence[Row],
    settings: RolloutSettings,
    section: EvalSection,
    batch_size: int = 64,
    count: Count = no_count,
) -> tuple[Metrics, list[Group]]:
    """Answer every row ``samples`` times with the current weights. Metrics are named ``eval/...``.

    Seeds depend only on the run's seed, the row's position and the sample's number, so evaluations of the same weights
    are equal, also in different runs. Failed samples count as failed, regardless of ``stream.on_failed_sample``. Raises
    RolloutError if too many fail (``stream.max_failed``).

    Args:
        count: called after each sample with (samples that have ended, all samples).
    """
    settings = replace(settings, abort_on_failure=False)
    if settings.failures is not None:
        settings.failures.forget()
    groups: list[Group] = []
    for start in range(0, len(rows), batch_size):
        offset = start * settings.samples

        def count_samples(samples: int, of_batch: int, offset: int = offset) -> None:
            count(offset + samples, len(rows) * settings.samples)

        groups += rollouts.run(rows[start : start + batch_size], start, settings, count_samples)
    metrics = evaluation_metrics(groups, section.samples, section.pass_threshold)
    return {f"eval/{name}": value for name, value in metrics.items()}, groups


def check_metric(
    section: EvalSection, sources: Collection[str], scored: bool, losses: Callable[[], Mapping[str, float]] | None
) -> None:
    """Raises ConfigError if no evaluation of the run has ``eval.metric``. Whether samples bring numbers ``env/KEY`` and
    ``rollout/KEY`` is not known before the first evaluation, which raises if they do not.

    Args:
        sources: names of the sources of held-out rows that the policy answers; empty if it answers none.
        scored: whether its answers get a reward.
        losses: computes the metrics of the loss on held-out rows, if the loss is evaluated. Their names are not known
            without calling it, so it is called once if ``eval.metric`` is no other known name.
    """
    metric = section.metric
    passes = section.pass_threshold is not None
    names = [f"eval/{name}" for name in metric_names(section.samples, sources, scored, passes)] if sources else []
    spellings = {metric, f"eval/{metric}"}
    if metric is None or (sources and is_number_of_samples(metric)):
        return
    if spellings & {*names, *(["eval/loss"] if losses is not None else [])}:
        return
    names += losses() if losses is not None else ()
    if not spellings & set(names):
        raise unknown_metric(metric, sorted(names))


def evaluate_loss(algorithm: Algorithm, roles: Mapping[str, Role], examples: Sequence[Example]) -> Metrics:
    """The algorithm's losses on all held-out examples as one batch, without training. If the examples have several
    sources, each source with enough examples for the algorithm also gets its own losses, ``eval/SOURCE/...``."""
    metrics = _losses(algorithm, roles, examples)
    sources = Counter(example.row.source for example in examples)
    for source in sorted(sources) if len(sources) > 1 else ():
        if sources[source] >= algorithm.needs().rows_min:
            part = _losses(algorithm, roles, [example for example in examples if example.row.source == source])
            metrics |= {f"{source}/{name}": value for name, value in part.items()}
    return {f"eval/{name}": value for name, value in metrics.items()}


def _losses(algorithm: Algorithm, roles: Mapping[str, Role], examples: Sequence[Example]) -> Metrics:
    batch, _ = assemble(algorithm, examples)
    if batch is None:
        return {}
    for annotation in ask(algorithm, "annotations", 0):
        batch = role_of(roles, annotation.role, f"annotations() of {algorithm.name!r}").annotate(batch, [annotation])
    batch, _ = algorithm.credit(batch)
    metrics: Metrics = {}
    for update in ask(algorithm, "updates", 0, batch):
        if not isinstance(update, Update):
            continue
        loss = algorithm.parts[update.loss]
        weighted = loss_batch(batch, loss, roles)
        with boundary(TrainingError, f"the evaluation of {update.role!r} with the loss {loss.name!r}"):
            means = finish_sums(roles[update.role].evaluate(weighted, loss, update))
        prefix = "" if update.role == "policy" else f"{update.role}/"
        metrics |= {f"{prefix}{name}": value for name, value in (means | summary(loss, means)).items()}
    return metrics


EXPORTED = "ema"
"""The view that is exported if the policy has it."""


def evaluates_average(policy: Role, trainer: type[Trainer], weights: Literal["exported", "live"]) -> bool:
    """Whether evaluations need :func:`with_average`.

    Args:
        trainer: class of the policy's trainer.
        weights: ``eval.weights``.

    Raises CapabilityError if the trainer cannot compute with its average.
    """
    if weights == "live" or EXPORTED not in policy.facts.views:
        return False
    if not issubclass(trainer, HasViews):
        raise CapabilityError(
            f"trainer {trainer.name!r} keeps an average of the weights, but cannot compute with it. Set --eval.weights "
            "live (the best step is then chosen by the live weights), or turn the average off."
        )
    return True


def with_average(
    evaluate: Callable[[], Metrics], policy: Role, sampler: Sampler | None, stream: Stream | None, total_steps: int
) -> Metrics:
    """Call ``evaluate`` with the policy's average instead of its weights, also in the generator.

    A generator with its own copy gets the average before the evaluation and the live weights after it. Both syncs are
    verified. It gets the live weights only if training samples will be drawn with them. After a failure the policy has
    its live weights again, so that they can be saved.

    No token of a training sample is drawn with the average: live samples of a continuous stream are completed first,
    and further ones wait until the generator has its live weights again.

    Args:
        stream: the stream of an online run.
    """
    try:
        if stream is not None:
            stream.hold()
        _use_view(EXPORTED, policy, sampler, sync=True)
        metrics = evaluate()
    except BaseException:
        # The run ends with this error and samples no more, so the generator may keep the average.
        with suppress(RlhfError):  # if the policy's workers are gone, only the first error is shown
            _use_view("live", policy, sampler, sync=False)
        raise
    _use_view("live", policy, sampler, sync=_samples_again(sampler, stream, total_steps))
    if stream is not None:
        stream.release()
    return metrics


def _use_view(view: str, policy: Role, sampler: Sampler | None, sync: bool) -> None:
    if sampler is not None:
        sampler.phases.begin_learning()  # offloaded weights cannot be exchanged
    policy.every("use_view", view)
    if sampler is not None and sync:
        sampler.phases.begin_sync()
        pause = sampler.weights.pause_seconds
        sampler.weights.push(sampler.weights.version)
        sampler.weights.pause_seconds = pause  # a part of the evaluation, not of a step's sync


def _samples_again(sampler: Sampler | None, stream: Stream | None, total_steps: int) -> bool:
    """Whether training samples will be drawn with the weights that the generator had before."""
    if sampler is None or stream is None:
        return False
    version = sampler.weights.version
    return version < total_steps and stream.samples_with(version)
