"""Writes event files with TensorBoard's own writer. It needs neither torch nor TensorFlow."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rlhf.interfaces import ComponentConfig, Observer, RunInfo
from rlhf.paths import require_possible
from rlhf.samples import Sample, first_samples
from rlhf.secrets import redact
from rlhf.types import Group
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardConfig(ComponentConfig):
    folder: str = "tensorboard"
    """Folder for the event files, inside the run directory."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Samples shown per table; 0 = no tables."""
    samples_every: Annotated[int, Field(gt=0)] = 10
    """Steps between tables."""


class TensorBoardObserver(Observer):
    """Logs every metric of a step as a scalar, a few samples as a text table, and the config (redacted) as text.

    A resumed run marks its first step as a restart. TensorBoard then removes the steps that the killed process had
    logged after its last checkpoint, so no step is shown twice.
    """

    name = "tensorboard"
    source = "https://www.tensorflow.org/tensorboard"
    Config = TensorBoardConfig

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self._writer: EventFileWriter | None = None

    def check(self, output: Path) -> None:
        require_possible(output / self.config.folder, "observer 'tensorboard', folder")

    def run_started(self, info: RunInfo) -> None:
        self._writer = EventFileWriter(str(info.output / self.config.folder))
        # A run that starts again without a checkpoint removes all earlier steps, also the evaluation at step 0.
        restart = info.first_step + 1 if info.first_step else 0
        self._add(Event(step=restart, session_log=SessionLog(status=SessionLog.START)))
        config = json.dumps(redact(info.config), indent=1, default=str)
        # Markdown shows indented lines as code
        indented = "\n".join(f"    {line}" for line in config.splitlines())
        self._add(Event(step=restart, summary=Summary(value=[_text("config", indented)])))
        self._writer.flush()

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        if self.config.samples and (step - 1) % self.config.samples_every == 0:
            table = _table(first_samples(groups, self.config.samples))
            self._add(Event(step=step, summary=Summary(value=[_text("rollouts", table)])))

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(Event(step=step, summary=Summary(value=values)))
        assert self._writer is not None
        self._writer.flush()  # so a killed process has every step that metrics.jsonl has

    def run_ended(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        assert self._writer is not None
        self._writer.add_event(event)


def _text(tag: str, markdown: str) -> Any:
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[markdown.encode(errors="replace")],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=tag, metadata=create_summary_metadata(None, None), tensor=tensor)


def _table(samples: Sequence[Sample]) -> str:
    names = ["reward", "prompt", "completion", "rewards", "status", "tokens"]
    names += ["agent"] if any(s.agent for s in samples) else []
    rows = [names, ["---"] * len(names), *([_cell(str(getattr(s, name))) for name in names] for s in samples)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cell(text: str) -> str:
    """Escapes a model's text, so that it contains no HTML and no Markdown."""
    return html.escape(text).replace("|", "\\|").replace("\r", "").replace("\n", " ⏎ ")
