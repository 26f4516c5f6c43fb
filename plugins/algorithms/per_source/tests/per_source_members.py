"""Members for tests, and samples of two sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf.interfaces import Algorithm
from rlhf.plugins import Plugins
from rlhf.types import Group, RunOptions, Trajectory
from rlhf_plugin_per_source import Member, PerSource, PerSourceConfig
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.sections import Choice

SOURCES = ("math", "chat")
WEIGHTS = {"math": 1.0, "chat": 0.25}


def member(use: str, **options: Any) -> Callable[[], Algorithm]:
    return lambda: build_algorithm(Plugins.discover(), Choice(use=use, options=options))


LAYOUTS = {
    "clipped": {
        "members.math": member("grpo", loss={"entropy_coef": 0.05}),
        "members.chat": member("dr_grpo", loss={"correction": {"preset": "tis"}}),
    },
    "several passes": {
        "members.math": member("reinforce_pp", minibatches=2, mask_truncated=True),
        "members.chat": member("rloo", minibatches=2, kl={"coef": 0.3, "where": "loss", "target": 0.1}),
    },
    "pairs": {"members.math": member("grpo"), "members.chat": member("online_dpo")},
    "observations": {
        "members.math": member("grpo", echo_coef=0.1, mask_truncated=True),
        "members.chat": member("dr_grpo", echo_coef=0.5, kl={"coef": 0.3, "where": "loss"}),
    },
    "demonstrations": {"members.math": member("grpo", minibatches=2), "members.chat": member("sft")},
}
"""{name: {part: a function that builds it}}."""


def config_of(layout: str, **of_chat: Any) -> PerSourceConfig:
    """Further options are those of the member ``chat``."""
    options = {"math": {}, "chat": of_chat}
    algorithms = {name: LAYOUTS[layout][f"members.{name}"]() for name in SOURCES}
    members = {n: Member(use=algorithms[n].name, sources=(n,), weight=WEIGHTS[n], **options[n]) for n in SOURCES}
    return PerSourceConfig(members=members)


def algorithm(layout: str, run: RunOptions | None = None, **of_chat: Any) -> PerSource:
    return PerSource(config_of(layout, **of_chat), {name: make() for name, make in LAYOUTS[layout].items()}, run)


def with_demonstrations(groups: Sequence[Group], source: str = "chat") -> list[Group]:
    """The groups. That of a row of ``source`` is one trajectory with an answer of the data."""
    for group in groups:
        if group.row.source == source:
            turns = [
                replace(turn, logprobs=None, versions=(), is_demonstration=turn.sampled)
                for turn in group.trajectories[0].turns
            ]
            group.trajectories = [Trajectory(group.row, turns, (group.number, 0))]
    return list(groups)


def with_sources(groups: Sequence[Group], sources: Sequence[str] = SOURCES) -> list[Group]:
    """The groups, the first of the first source, the second of the second, and so on in turn."""
    for group in groups:
        row = replace(group.row, source=sources[group.number % len(sources)])
        group.row = row
        for trajectory in group.trajectories:
            trajectory.row = row
    return list(groups)
