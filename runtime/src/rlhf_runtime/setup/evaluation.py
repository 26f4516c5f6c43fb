"""The evaluation of a run on its held-out rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlhf.types import Group, Row

from rlhf_runtime.loop.ema_evaluation import evaluates_average, with_average
from rlhf_runtime.loop.evaluate import Evaluation, check_metric, evaluate_loss, evaluate_rollouts
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.best_value import BestTracker
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.sampling import Sampler, evaluation_settings
from rlhf_runtime.samples.stream import Stream
from rlhf_runtime.setup.prepare import Prepared, is_scored


def make_evaluation(
    prepared: Prepared,
    rows: list[Row],
    roles: dict[str, Role],
    sampler: Sampler | None,
    stream: Stream | None,
    failures: Sequence[Failures],
    save: Callable[[int, list[Group]], None],
    count: Callable[[int, int], None],
) -> Evaluation:
    """The evaluation of a run: the metrics of the policy's answers to ``rows`` and, in an offline run, the loss.

    Args:
        failures: the counter of failed samples, where there is a sampler.
        save: keeps the policy's answers after so many finished steps.
        count: shows how many samples have ended.
    """
    config, parts = prepared.config, list[Callable[[int], Metrics]]()
    if sampler is not None:
        rollouts, settings = sampler.rollouts, evaluation_settings(config, failures[0])

        def answer(steps_done: int) -> Metrics:
            metrics, groups = evaluate_rollouts(rollouts, rows, settings, prepared.evaluation, count=count)
            save(steps_done, groups)
            return metrics

        parts.append(answer)
    if not prepared.online:
        examples = prepared.data.examples(rows)
        losses = functools.partial(evaluate_loss, prepared.algorithm, roles, examples)
        if not config.run.resume:
            sources = {row.source for row in rows} if sampler is not None else ()
            check_metric(prepared.evaluation, sources, is_scored(prepared), losses)
        parts.append(lambda steps_done: losses())

    def compute(steps_done: int) -> Metrics:
        return {name: value for part in parts for name, value in part(steps_done).items()}

    best = BestTracker(config.eval.metric, config.eval.mode, config.eval.patience)
    policy, trainer = roles["policy"], prepared.trainer("policy").resolved.cls
    if not evaluates_average(policy, trainer, config.eval.weights):
        return Evaluation(compute, best)

    def compute_average(steps_done: int) -> Metrics:
        return with_average(functools.partial(compute, steps_done), policy, sampler, stream, prepared.total_steps)

    return Evaluation(compute_average, best)
