"""What `rlhf eval` and `rlhf generate` share: a run file for answering only."""

from __future__ import annotations

from rlhf.config import load
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf.runfile import RunFile


def load_for_answers(
    run_file: str | None, flags: list[tuple[str, str]], scored: bool = True
) -> tuple[RunFile, Plugins]:
    """The run file with flags, and the plugins. Its algorithm is not used; without a file none need be named.

    Raises ConfigError where a model, data or (``scored``) a reward is missing.
    """
    if run_file is None:
        flags = [("algorithm.use", "answer"), *flags]
    config = load(run_file, flags)
    if config.policy.model is None:
        raise ConfigError("no model is named. Set --model PATH (a folder or a hub name).")
    if not (config.data.eval or config.data.train):
        raise ConfigError("no data is named. Set --data FILE.")
    if scored and not config.reward and config.env is None:
        raise ConfigError("no reward is named: there is nothing to score with. Set --reward plugin:NAME.")
    if not scored:
        config = config.model_copy(update={"reward": ()})
    return config, Plugins.discover()
