"""Samples from a recording instead of the policy: the same tokens, log-probs and versions again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, RolloutError
from rlhf.interfaces import ComponentConfig, Rollout, RolloutContext
from rlhf.paths import PathText
from rlhf.types import Row, Turn

Key = tuple[int, int]
"""(group number in the run, sample in the group)."""


class Replay(Rollout):
    """Every sample's turns as another run wrote them to its ``rollouts/``.

    A run with the same data, seed and batch size asks for the same groups; rewards, advantages and losses are computed
    anew. So two runtimes, or two losses, can be compared on equal samples, and a bad step can be studied without a
    generator: none is started.

    A sample that is not in the recording is a failed sample; with ``stream.on_failed_sample = "drop_group"`` groups
    that the recorded run had filtered out are left out again and refilled.

    Rewards that an environment gave to turns are in the recording. ``[env]`` of the recorded run may stay: no
    environment is opened, its ``credit`` says where those rewards go.
    """

    name = "replay"
    needs_generator = False
    replays_env = True

    class Config(ComponentConfig):
        path: PathText
        """A run's ``rollouts`` folder (``step-*.jsonl``), or one such file."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._turns: dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]] | None = None

    def check(self) -> None:
        """Reads the recording."""
        self._recording()

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        recorded = self._recording().get(ctx.index)
        number, sample = ctx.index
        if recorded is None:
            held = self._recording()
            groups = sorted({n for n, _ in held})
            raise RolloutError(
                f"{self.config.path} has no sample {sample} of group {number}; it holds {len(held)} samples "
                f"of groups {groups[0]} to {groups[-1]}. Replay with the recorded run's data, batch size, samples per "
                'prompt and steps, or set stream.on_failed_sample to "drop_group".'
            )
        where, turns = recorded
        if (where["source"], where["index"]) != (row.source, row.index):
            raise RolloutError(
                f"group {number} was recorded for row {where['index']} of {where['source']!r}, but this run has row "
                f"{row.index} of {row.source!r} there. Use the recorded run's data, seed and batch size."
            )
        return [_turn(t) for t in turns]

    def _recording(self) -> dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]]:
        if self._turns is None:
            self._turns = read(Path(self.config.path))
        return self._turns


def read(path: Path) -> dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """{(group, sample): ({source, index} of its row, its turns)} of every line.

    Raises ConfigError for a missing, empty or damaged recording, naming file and line.
    """
    files = sorted(path.glob("step-*.jsonl")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise ConfigError(f"rollout.path: {path} is neither a file nor a folder with step-*.jsonl")
    found: dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for file in files:
        for number, text in enumerate(
            file.read_text(encoding="utf-8").split("\n"), 1
        ):  # texts may hold other line ends
            if not text:
                continue
            try:
                line = json.loads(text)
                if line["sample"] is not None:
                    found[tuple(line["index"])] = (line["row"], line["turns"])
            except (ValueError, KeyError, TypeError) as cause:
                raise ConfigError(f"rollout.path: {file}:{number} is not a recorded sample: {cause}") from cause
    if not found:
        raise ConfigError(f"rollout.path: {path} holds no samples")
    return found


def _turn(recorded: dict[str, Any]) -> Turn:
    turn = Turn(**recorded)
    turn.versions = tuple((first, version) for first, version in recorded["versions"])
    return turn
