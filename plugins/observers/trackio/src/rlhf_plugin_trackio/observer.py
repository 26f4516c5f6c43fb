"""Logs metrics, a table of samples and the resolved config to trackio, in a folder of this machine or to a Space. A
resumed run continues its run.

Trackio is imported when a run starts: it is an extra, because it allows no version of pillow above 12.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Observer, RunInfo
from rlhf.samples import first_samples, sample_table
from rlhf.secrets import redact
from rlhf.types import Group


class TrackioConfig(ComponentConfig):
    """The folder is that of trackio, ``TRACKIO_DIR`` of the environment. A Space needs ``HF_TOKEN`` there."""

    project: str = "rlhf"
    """Project that lists the run."""
    group: str | None = None
    """Runs of one group are shown together."""
    space: str | None = None
    """Hugging Face Space that stores the run, ``owner/name``; if absent, a folder on this machine."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Samples shown per table; 0 = no tables."""
    samples_every: Annotated[int, Field(gt=0)] = 10
    """Steps between tables."""


class TrackioObserver(Observer):
    """Logs each line of ``metrics.jsonl``, over ``step``. The config is redacted."""

    name = "trackio"
    source = "https://huggingface.co/docs/trackio"
    Config = TrackioConfig

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self._run: Any = None
        self._name = ""
        self._table: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._name = str(state.get("name", ""))

    def check(self, output: Path) -> None:
        if importlib.util.find_spec("trackio") is None:
            raise ConfigError(
                "observer 'trackio': the package trackio is not installed. It is an extra, because its requirements "
                "may clash with others: pip install 'rlhf-plugin-trackio[trackio]', or pip install --no-deps trackio "
                "and the requirements that are then missing."
            )

    def run_started(self, info: RunInfo) -> None:
        self.check(info.output)
        import trackio

        resumed, self._name = bool(self._name), self._name or f"{info.name} {info.output.name}".strip()
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=self.config.project,
                name=self._name,
                group=self.config.group,
                space_id=self.config.space,
                config={**redact(info.config), "total_steps": info.total_steps},
                resume="allow" if resumed else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        if not self.config.samples or (step - 1) % self.config.samples_every:
            return
        import trackio

        columns, rows = sample_table(first_samples(groups, self.config.samples))
        self._table = trackio.Table(columns=columns, data=rows)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {name: value for name, value in metrics.items() if name != "step"}
        if self._table is not None:
            line["rollouts"], self._table = self._table, None
        self._run.log(line, step=step)

    def run_ended(self, status: str) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(sys.stderr):
                trackio.finish()
            self._run = None
