"""The evaluation of a run on its held-out rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlhf.types import Row

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
) -> Evaluation:
    """The evaluation of a run: the metrics of the policy's answers to ``rows`` and, in an offline run, the loss.

    Args:
        failures: the counter of failed samples, where there is a sampler.
    """
    config, parts = prepared.config, list[Callable[[], Metrics]]()
    if sampler is not None:
        rollouts, settings = sampler.rollouts, evaluation_settings(config, failures[0])
        parts.append(lambda: evaluate_rollouts(rollouts, rows, settings, config.eval)[0])
    if not prepared.online:
        examples = prepared.data.examples(rows)
        losses = functools.partial(evaluate_loss, prepared.algorithm, roles, examples)
        if not config.run.resume:
            sources = {row.source for row in rows} if sampler is not None else ()
            check_metric(config.eval, sources, is_scored(prepared), losses)
        parts.append(losses)

    def compute() -> Metrics:
        return {name: value for part in parts for name, value in part().items()}

    best = BestTracker(config.eval.metric, config.eval.mode, config.eval.patience)
    policy, trainer = roles["policy"], prepared.trainer("policy").resolved.cls
    if not evaluates_average(policy, trainer, config.eval.weights):
        return Evaluation(compute, best)
    return Evaluation(functools.partial(with_average, compute, policy, sampler, stream, prepared.total_steps), best)
