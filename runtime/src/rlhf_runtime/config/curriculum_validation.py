"""Checks of runs with a curriculum, before anything starts: a part of :mod:`rlhf_runtime.config.validation`."""

from __future__ import annotations

from rlhf.interfaces import Algorithm, Curriculum

from rlhf_runtime.config.runfile import RunFile


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
