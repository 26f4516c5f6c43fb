"""Checks of ``reward.sources`` before anything starts; part of :mod:`rlhf_runtime.config.validation`."""

from __future__ import annotations

from rlhf_runtime.config.runfile import RunFile


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
