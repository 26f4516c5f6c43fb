"""Metrics of samples: the statistics of an evaluation (pass@k, avg@k, reward, length, truncation), and the values of
each reward source, because the total reward of several sources does not show the value of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from rlhf.ops.sample_values import ENV, step_rewards_of
from rlhf.types import Group, Trajectory


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k answers passes. The k answers are drawn without replacement from n answers, of
    which c pass.

    1 - C(n - c, k) / C(n, k), as a product that cannot overflow. Unbiased estimate of pass@k
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} answers with {c} passing is undefined; needs 0 <= c <= n and 1 <= k <= n")
    missed = 1.0
    for i in range(n - c + 1, n + 1):
        missed *= 1.0 - k / i
    return 1.0 - missed


def evaluation_metrics(groups: Sequence[Group], samples: int = 1, threshold: float | None = 1.0) -> dict[str, float]:
    """The numbers of one evaluation.

    Args:
        groups: one per prompt, with its answers.
        samples: answers requested per prompt. It is the k of avg@k and the largest k of pass@k (1, 2, 4, ..., samples).
        threshold: an answer passes if its reward is at least this; None: no reward says that an answer passes.

    Returns these metrics over all prompts. If the prompts have several data sources, it also returns them for each
    source, with the prefix ``<source>/``:

    ``pass@k``     mean over prompts of the unbiased estimate; with a threshold only, and over prompts whose answers
                   have more than rewards of steps that are placed at their tokens: with these alone the reward is 0
    ``avg@k``      mean over prompts of the share of answers that pass (samples > 1; equals pass@1); likewise
    ``reward``     mean over prompts of the mean reward of their answers
    ``score``      the same mean of the scores; present where a score differs from its reward (a reward source that
                   gives its own score, or step rewards that are placed at their tokens)
    ``length``     sampled tokens per answer; ``truncated``: share of answers cut at the token budget
    ``unscored``   share of answers without a reward (failed, or no source applied)
    ``failed``     share of answers whose rollout or scoring failed; present where at least one did
    ``prompts``    number of prompts
    ``env/KEY``    and ``rollout/KEY``, ``agent/AGENT/score``: see :func:`info_metrics`

    If the policy plays several agents, a prompt counts once for each agent, with the trajectories of this agent.

    An answer without a reward does not count as wrong. It is left out of its prompt's statistics. A prompt with fewer
    than k scored answers is left out of pass@k. A sample that failed before any token was sampled has no length. A
    metric without values is absent, never zero.
    """
    metrics = _metrics_of(groups, samples, threshold)
    sources = sorted({group.row.source for group in groups})
    if len(sources) > 1:
        for source in sources:
            part = _metrics_of([g for g in groups if g.row.source == source], samples, threshold)
            metrics |= {f"{source}/{name}": value for name, value in part.items()}
    return metrics


def metric_names(samples: int, sources: Collection[str], scored: bool, passes: bool) -> list[str]:
    """Every name that :func:`evaluation_metrics` can return, except names from ``Trajectory.info``, which are not known
    before samples exist.

    Args:
        sources: data sources of the prompts.
        scored: whether answers get a reward.
        passes: whether an answer can pass by its reward.
    """
    names = ["length", "truncated", "unscored", "prompts"]
    if scored:
        names += ["reward", "score", *(f"pass@{k}" for k in _ks(samples) if passes)]
        names += [f"avg@{samples}"] if samples > 1 and passes else []
    return [*names, *(f"{source}/{name}" for source in sorted(sources) for name in names if len(sources) > 1)]


def _metrics_of(groups: Sequence[Group], samples: int, threshold: float | None) -> dict[str, float]:
    answers = [t for group in groups for t in group.trajectories]
    has_scores = any(_scored(t) and t.score is not None and t.score != t.reward for t in answers)
    values: dict[str, list[float]] = defaultdict(list)
    for group in (of_agent for prompt in groups for of_agent in prompt.by_agent().values()):
        scored = [t for t in group.trajectories if _scored(t)]
        rewards = [t.reward for t in scored if t.reward is not None]
        if not rewards:
            continue
        if has_scores:
            values["score"].append(_mean((t.reward if t.score is None else t.score) or 0.0 for t in scored))
        values["reward"].append(_mean(rewards))
        if threshold is None or all(map(_is_placed, scored)):
            continue
        n, passed = len(rewards), sum(r >= threshold for r in rewards)
        if samples > 1:
            values[f"avg@{samples}"].append(passed / n)
        for k in _ks(samples):
            if k <= n:
                values[f"pass@{k}"].append(pass_at_k(n, passed, k))
    metrics = {name: _mean(column) for name, column in values.items()}
    own_answers = [t for t in answers if any(turn.sampled for turn in t.turns)]
    if own_answers:
        metrics["length"] = _mean(t.sampled_tokens for t in own_answers)
        metrics["truncated"] = _mean(t.truncated for t in own_answers)
    if answers:
        metrics["unscored"] = _mean(not _scored(t) for t in answers)
        if any(t.status == "failed" for t in answers):
            metrics["failed"] = _mean(t.status == "failed" for t in answers)
    metrics["prompts"] = float(len(groups))
    return metrics | info_metrics(groups)


def _scored(trajectory: Trajectory) -> bool:
    return trajectory.status != "failed" and trajectory.reward is not None


def _is_placed(trajectory: Trajectory) -> bool:
    """Whether the reward is 0 because all of it is placed at its steps."""
    results, turns = trajectory.rewards.values(), trajectory.turns
    has_value = any(r.value is not None for r in results) or any(turn.reward is not None for turn in turns)
    return trajectory.reward == 0 and not has_value and any(r.steps for r in results)


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and ``samples`` itself."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]


def _mean(values: Iterable[float]) -> float:
    numbers = [float(v) for v in values]
    return sum(numbers) / len(numbers)


def info_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """``env/KEY`` and ``rollout/KEY``: means of the numbers in ``Trajectory.info``, over the samples that have them.
    ``agent/AGENT/score``: the mean score of each agent, if the policy plays several."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    first_agents: dict[tuple[int, int], str] = {}
    for trajectory in (t for group in groups for t in group.trajectories):
        # The trajectories of a sample's agents have the same numbers, and an agent without a turn has no trajectory.
        is_first = first_agents.setdefault(trajectory.index, trajectory.agent) == trajectory.agent
        for name, value in trajectory.info.items() if is_first else ():
            numbers[name].append(value)
        if trajectory.agent and trajectory.score is not None:
            numbers[f"agent/{trajectory.agent}/score"].append(trajectory.score)
    return {name: math.fsum(column) / len(column) for name, column in sorted(numbers.items())}


def failure_metrics(
    groups: Iterable[Group], failed: float, scored: float, step_sources: Mapping[str, float]
) -> dict[str, float]:
    """``reward/mean_with_failed``: the mean reward of these groups if as large a share of their samples as failed in
    the step had failed, each with the lowest reward, which is at most 0. The mean of the other samples alone would rise
    if a policy made its reward fail for answers with a low reward.

    Args:
        failed: samples of the step that failed, also in groups that are not among these.
        scored: samples of the step that did not fail and have a reward, also in groups that are not among these.
        step_sources: ``RunOptions.step_sources``, whose rewards are not part of ``Trajectory.reward``.
    """
    samples = [t for group in groups for t in group.trajectories if t.reward is not None]
    rewards = [math.fsum((t.reward or 0.0, *step_rewards_of(t, step_sources).values())) for t in samples]
    if not failed or not rewards:
        return {}
    mean, share = math.fsum(rewards) / len(rewards), failed / (failed + scored)
    return {"reward/mean_with_failed": mean + share * (min(0.0, *rewards) - mean)}


def source_metrics(groups: Iterable[Group], teachers: Collection[str] = ()) -> dict[str, float]:
    """``reward/SOURCE/mean`` and ``/std`` (population) of the unweighted values with their process rewards, over the
    samples to which the source applied; ``reward/SOURCE/info/KEY``, the mean of each finite number in
    ``RewardResult.info`` (a bool is 1 or 0). The source ``env`` is the environment. Its value is the sum of the rewards
    of a sample's turns.

    Args:
        teachers: sources whose process rewards are log-probs (``RunOptions.teachers``).
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    infos: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (t for group in groups for t in group.trajectories):
        turns = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        if turns:
            values[ENV].append(math.fsum(turns))
        for source, result in trajectory.rewards.items():
            if (value := result.total) is not None and source not in teachers:
                values[source].append(value)
            for key, value in result.info.items():
                if isinstance(value, bool | int | float) and math.isfinite(value):
                    infos[f"{source}/info/{key}"].append(float(value))
    metrics = {}
    for source, column in values.items():
        mean = math.fsum(column) / len(column)
        metrics[f"reward/{source}/mean"] = mean
        metrics[f"reward/{source}/std"] = math.sqrt(math.fsum((v - mean) ** 2 for v in column) / len(column))
    return metrics | {f"reward/{name}": math.fsum(column) / len(column) for name, column in infos.items()}
