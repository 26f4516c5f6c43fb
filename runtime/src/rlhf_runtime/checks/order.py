"""The checks of sections and plugins, in order, for `rlhf train`, its dry run, `rlhf plan` and the jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf.plugins import Plugins
from rlhf_hub.hub import Commits

from rlhf_runtime.checks import parts, sampling, sections
from rlhf_runtime.checks.run import RunPlugins, run_plugins
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.runfile import RunFile

Check = Callable[[RunPlugins], list[str]]
"""Returns one text for each problem: what is wrong, what is allowed, what to do."""

FIT: Sequence[Check] = (
    sections.model_and_data,
    sections.roles,
    sections.checkpointing,
    sections.ignored_columns,
    sections.rows_per_step,
    sections.trainer_capabilities,
    sampling.sampling,
    sampling.room,
    sampling.stream,
    sampling.environment,
    sampling.concurrency,
    sections.offline,
    sections.curriculum,
    sections.reward_sources,
    sampling.generator_capabilities,
    sections.sync,
    sections.evaluation,
)
"""Parts that are valid alone but cannot work together."""
ANSWERS: Sequence[Check] = (
    sections.checkpointing,
    sections.trainer_capabilities,
    sampling.room,
    sampling.environment,
    sampling.concurrency,
    sections.reward_sources,
    sampling.generator_capabilities,
    sections.sync,
)
"""The same for a job that answers prompts and trains nothing."""
SCORES: Sequence[Check] = (
    sections.checkpointing,
    sections.ignored_columns,
    sections.trainer_capabilities,
    sampling.environment,
    sampling.concurrency,
    sections.reward_sources,
    sections.evaluation,
)
"""The same for a job that scores existing answers."""
LEARNS_FROM_CLIENTS: Sequence[Check] = (
    sections.checkpointing,
    sections.trainer_capabilities,
    sampling.generator_capabilities,
    sections.sync,
)
"""The same for a server whose clients send the policy's training data."""
IDLE: Sequence[Check] = (parts.idle_options, parts.unread_sections)
"""Options of plugins that nothing would read."""


def check(run: RunPlugins, fit: Sequence[Check] = FIT) -> None:
    """Raises ConfigError that lists every problem of a group of checks, and what to do about it."""
    for headline, checks in (
        ("these parts of the configuration do not fit together", fit),
        ("these options do nothing", IDLE),
    ):
        raise_problems(headline, [problem for check in checks for problem in check(run)])


def checked(config: RunFile, plugins: Plugins, scored: bool = True, commits: Commits | None = None) -> RunPlugins:
    """The plugins of a run, checked against each other. For arguments and errors see
    :func:`~rlhf_runtime.checks.run.run_plugins` and :func:`check`."""
    run = run_plugins(config, plugins, scored, commits)
    check(run)
    return run
