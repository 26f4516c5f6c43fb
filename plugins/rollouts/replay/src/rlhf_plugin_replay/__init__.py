"""Rollout: samples from a recording instead of the policy, with the recorded tokens, log-probs and versions."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from rlhf import hookimpl
from rlhf.errors import ConfigError, RolloutError
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig, Rollout, RolloutContext
from rlhf.types import ExpertRecord, Image, Row, Turn

Key = tuple[int, int]
"""(group number in the run, sample in the group)."""
Recorded = tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]]
"""({source, index} of the row, turns, numbers about the sample)."""


class ReplayRollout(Rollout):
    """Reads the turns of every sample from the ``rollouts/`` of another run.

    A run with the same data, seed and batch size requests the same groups. Rewards, advantages and losses are computed
    again. This allows comparing two backends or losses on equal samples, and studying a bad step without a generator.

    A sample that is not in the recording is a failed sample. With ``stream.on_failed_sample = "drop_group"`` groups
    that the recorded run had filtered out are left out and refilled again.

    The recording contains the environment's rewards for turns. ``[env]`` of the recorded run may stay: no environment
    is opened, and its ``credit`` still determines how those rewards are credited.

    Limitation: the recording of a rollout that called ``ctx.score()`` already contains the rewards of ``[[reward]]``,
    so they would count twice. Use the command ``rlhf replay`` for such a run: it keeps the recorded rewards.
    """

    name = "replay"
    needs_generator = False
    replays_env = True
    plays_agents = True

    class Config(ComponentConfig):
        path: PathText
        """A run's ``rollouts`` folder (``step-*.arrow``), or one such file."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._turns: dict[Key, Recorded] | None = None

    def check(self) -> None:
        """Reads the recording."""
        self._recording()

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        recorded = self._recording().get(ctx.index)
        number, sample = ctx.index
        if recorded is None:
            recording = self._recording()
            groups = sorted({n for n, _ in recording})
            raise RolloutError(
                f"{self.config.path} has no sample {sample} of group {number}; it holds {len(recording)} samples "
                f"of groups {groups[0]} to {groups[-1]}. Replay with the recorded run's data, batch size, samples per "
                'prompt and steps, or set stream.on_failed_sample to "drop_group".'
            )
        origin, turns, numbers = recorded
        if (origin["source"], origin["index"]) != (row.source, row.index):
            raise RolloutError(
                f"group {number} was recorded for row {origin['index']} of {origin['source']!r}, but this run has row "
                f"{row.index} of {row.source!r} there. Use the recorded run's data, seed and batch size."
            )
        for name, value in numbers.items():
            ctx.report(name.removeprefix("rollout/"), value)
        return [_turn(t) for t in turns]

    def _recording(self) -> dict[Key, Recorded]:
        if self._turns is None:
            self._turns = read(Path(self.config.path))
        return self._turns


def read(path: Path) -> dict[Key, Recorded]:
    """Every sample of a recording.

    Raises ConfigError for a missing, empty or damaged recording, naming the file and the line or row.
    """
    files = sorted(path.glob("step-*.arrow")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise ConfigError(f"rollout.path: {path} is neither a file nor a folder with step-*.arrow")
    samples: dict[Key, Recorded] = {}
    for file in files:
        location = str(file)
        try:
            for place, sample in _rows(file) if file.suffix == ".arrow" else _lines(file):
                location = place
                if sample["sample"] is not None:
                    begun: Recorded = (sample["row"], [], sample.get("info") or {})
                    samples.setdefault(tuple(sample["index"]), begun)[1].extend(sample["turns"])  # of each agent
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as cause:
            raise ConfigError(f"rollout.path: {location} is not a recorded sample: {cause}") from cause
    if not samples:
        raise ConfigError(f"rollout.path: {path} holds no samples")
    return samples


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, text in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):  # texts may hold other line ends
        if text:
            yield f"{file}:{number}", json.loads(text)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, sample) of each sample in an Arrow file. Tokens and log-probs stay arrays."""
    with pa.OSFile(str(file)) as source:
        reader = pa.ipc.open_file(source)
        count = 0
        for position in range(reader.num_record_batches):
            batch = reader.get_batch(position)
            batch.validate(full=True)
            # without the turns, whose tokens stay arrays: as Python lists they would take many times the memory
            names = [n for n in ("sample", "index", "source", "row", "info", "exact") if n in batch.schema.names]
            for number, row in enumerate(batch.select(names).to_pylist()):
                count += 1
                turns = _turns(batch.column("turns")[number])
                info = json.loads(row.get("info") or "{}")
                sample = {**row, "row": {"source": row["source"], "index": row["row"]}, "turns": turns, "info": info}
                yield f"{file}, row {count}", sample if row["exact"] is None else json.loads(row["exact"])


def _turns(turn_list: Any) -> list[dict[str, Any]]:
    if turn_list.values is None:
        return []
    columns = {}
    for field in turn_list.values.type:
        column = turn_list.values.field(field.name)
        if field.name in ("ids", "logprobs"):
            columns[field.name] = [values.values.to_numpy() if values.is_valid else None for values in column]
        else:
            columns[field.name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _turn(recorded: dict[str, Any]) -> Turn:
    images = tuple(
        Image(b64decode(image["data"]), image["at"], image["tokens"], image["short"])
        for image in recorded.get("images") or ()
    )
    experts = recorded.get("experts")
    if experts is not None:
        experts = ExpertRecord(**{**experts, "choices": b64decode(experts["choices"])})
    turn = Turn(**{**recorded, "images": images, "experts": experts})
    turn.versions = tuple((first, version) for first, version in recorded["versions"])
    turn.messages = tuple((role, text) for role, text in recorded.get("messages") or ())
    return turn


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [ReplayRollout]
