"""Loads and checks the run file of `rlhf eval` and `rlhf generate`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.checks.sections import SECTIONS_OF_ANSWERS, equal_answers
from rlhf_runtime.config.components import select
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.config.load import load, look_for_models
from rlhf_runtime.config.runfile import RunFile

_ALL_TOKENS = "Remove it: answers are sampled from all tokens."
ADVICE = {
    "temperature": "Set --eval.temperature.",
    "samples_per_prompt": "Set --eval.samples.",
    "top_p": _ALL_TOKENS,
    "top_k": _ALL_TOKENS,
    "min_p": _ALL_TOKENS,
    "ignore_eos": "Remove it: an answer ends where the model ends it.",
}
"""{field of [sampling] that these commands do not read: what to do}. They are refused as flags, but a run file may have
them."""

_ANSWER_OPTIONS = ("eval.samples", "eval.temperature", "eval.max_new_tokens", "eval.pass_threshold")


def check_folder(save: Path | None) -> None:
    """Raises ConfigError if the file of answers cannot be created. Called before anything is sampled."""
    if save is not None and (not save.parent.is_dir() or save.is_dir()):
        problem = "is a folder" if save.is_dir() else f"cannot be created: there is no folder {save.parent}"
        raise ConfigError(f"--save {save} {problem}. Name a file in a folder that exists.")
    try:
        if save is not None:  # a folder is made there, because permission bits do not prove write access
            os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=save.parent))
    except OSError as cause:
        raise ConfigError(f"--save {save} cannot be created: {cause.strerror}. Name another folder.") from cause


def load_for_answers(
    run_file: str | None, flags: list[tuple[str, str | None]], scored: bool = True, prompts: Path | None = None
) -> tuple[RunFile, Plugins]:
    """The run file with flags, and the plugins. The algorithm is not used and need not be set.

    Args:
        prompts: file with the column ``prompt``, which replaces the rows and columns of the run file.

    Raises ConfigError if a model, data or (with ``scored``) a reward is missing, and for a flag that only the sampling
    of training reads.
    """
    config = load(run_file, flags, algorithm="answer")
    if prompts is not None:
        rows = {"eval": (SourceSection(path=str(prompts)),), "prompt": None, "messages": None, "images": None}
        every = config.eval.model_copy(update={"max_rows": None})
        config = config.model_copy(update={"data": config.data.model_copy(update=rows), "eval": every})
    for field, advice in ADVICE.items():
        if config.origins.get(f"sampling.{field}", "").startswith("flag"):
            raise ConfigError(f"--sampling.{field} applies to training samples, which are not drawn here. {advice}")
    _require_names(config)
    plugins = Plugins.discover()
    if scored and not config.reward and config.env is None and not _rollout_gives_rewards(config, plugins):
        raise ConfigError(
            "no reward is named: there is nothing to score with. Set --reward plugin:NAME, or --algo NAME for the "
            "losses of an algorithm that learns from rows."
        )
    for problem in equal_answers(config):
        raise ConfigError(problem)
    look_for_models(config)
    if not scored:
        config = config.model_copy(update={"reward": ()})
    return config, plugins


def load_for_losses(run_file: str | None, flags: list[tuple[str, str | None]]) -> tuple[RunFile, Plugins]:
    """The run file with flags, and the plugins, to compute the losses of its algorithm.

    Raises ConfigError if a model or data is missing, and for a flag that only applies to the scoring of answers.
    """
    config = load(run_file, flags)
    names = [name for name, origin in config.origins.items() if origin.startswith("flag")]
    for name in names:
        section = name.partition(".")[0]
        if section in ("reward", "env"):
            raise ConfigError(
                f"--{section} scores answers, but with --algo no answers are sampled. Remove one of the two."
            )
        of_answers = section in SECTIONS_OF_ANSWERS and name != "generator.use"  # --backend sets it
        if of_answers or name in _ANSWER_OPTIONS:
            raise ConfigError(
                f"--{name} applies to answers, but with --algo no answers are sampled. Remove one of the two."
            )
    _require_names(config)
    look_for_models(config)
    return config, Plugins.discover()


def _require_names(config: RunFile) -> None:
    """Raises ConfigError if no model or no data is named."""
    if config.policy.model is None:
        raise ConfigError("no model is named. Set --model PATH (a folder or a hub name).")
    if not (config.data.eval or config.data.train):
        raise ConfigError("no data is named. Set --data FILE.")


def _rollout_gives_rewards(config: RunFile, plugins: Plugins) -> bool:
    """Whether the rollout with its options scores its samples itself, as an agent program can."""
    rollout = select(plugins, "rollout", config.rollout, "rollout", config.origins).build()
    return bool(rollout.gives_rewards)
