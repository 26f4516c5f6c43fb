"""Logs metrics, parameters and a few samples to MLflow, on a server or in a folder. A resumed run continues its run.

MLflow is imported when a run starts: its import takes seconds, and every command lists the observer.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Observer, RunInfo
from rlhf.paths import require_possible
from rlhf.samples import first_samples
from rlhf.secrets import redact
from rlhf.types import Group

_PARAMS_AT_ONCE, _METRICS_AT_ONCE, _PARAM_LENGTH = 100, 1000, 6000
"""MLflow's limits for one call, and for one parameter."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflowConfig(ComponentConfig):
    """Names and passwords are not options. They come from the environment (``MLFLOW_TRACKING_USERNAME``,
    ``MLFLOW_TRACKING_PASSWORD``, ``MLFLOW_TRACKING_TOKEN``)."""

    experiment: str = "rlhf"
    """Experiment that lists the run; created if it does not exist."""
    tracking_uri: str | None = None
    """A server (``http://host:5000``) or a folder. If absent: ``MLFLOW_TRACKING_URI`` of the environment, else the
    folder ``mlruns`` in the run directory."""
    tags: Mapping[str, str] = {}
    """Labels to filter runs by."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Samples logged each time; 0 = none."""
    samples_every: Annotated[int, Field(gt=0)] = 10
    """Steps between samples."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "tracking_uri must hold no user name and password; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment"
            )
        return value


class MLflowObserver(Observer):
    """Logs each line of ``metrics.jsonl``, over ``step``, before the event of the step returns.

    The config is redacted, MLflow's usage statistics are off, and its client records no source, command line or git
    state. MLflow allows no ``@`` in names: ``pass@1`` is ``pass_at_1``; other characters that it refuses become ``_``.
    In a folder ``policy/loss/kl`` is ``policy/loss.kl``, because ``policy/loss`` is a file. If ``policy/loss`` comes
    only after ``policy/loss/kl``, it is ``policy/loss.value``.
    """

    name = "mlflow"
    source = "https://mlflow.org/docs/latest/ml/tracking"
    Config = MLflowConfig
    conformance = {"configs": (MLflowConfig(),), "environment": {"MLFLOW_TRACKING_URI": ""}}
    """Config for ``rlhf plugins check``: a folder, even if the environment names a server."""

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self._client: Any = None
        self._run_id = ""
        self._in_folder = False
        self._files: set[str] = set()
        """In a folder: names of the metrics so far."""

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = str(state.get("run_id", ""))

    def check(self, output: Path) -> None:
        place = self._place(output)
        if "://" not in place and place != "databricks":
            require_possible(Path(place), "observer 'mlflow', tracking_uri")

    def run_started(self, info: RunInfo) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        place = self._place(info.output)
        uri = place if "://" in place or place == "databricks" else Path(place).absolute().as_uri()
        self._in_folder = uri.startswith("file:")
        if self._in_folder:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow writes folders only with this setting
        try:
            client = MlflowClient(tracking_uri=uri)
            if self._run_id:
                client.update_run(self._run_id, status="RUNNING")
                self._files = set(client.get_run(self._run_id).data.metrics)
            else:
                self._run_id = self._new_run(client, info)
        except (MlflowException, ImportError) as cause:
            raise ConfigError(
                f"observer 'mlflow' could not start at {redact(uri)}: {redact(str(cause))} Name a server or a folder "
                'with [[observer]] use = "mlflow", tracking_uri = "...", or remove it to use a folder in the '
                "run directory."
            ) from None
        self._client = client

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        if self.config.samples and (step - 1) % self.config.samples_every == 0:
            samples = [asdict(sample) for sample in first_samples(groups, self.config.samples)]
            text = json.dumps(samples, indent=1, ensure_ascii=False)
            self._client.log_text(self._run_id, text, f"rollouts/step-{step:06d}.json")

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000)
        names = {name: _name(name) for name in metrics}
        if self._in_folder:
            texts = {*names.values()}
            names = {name: _file(text, texts, self._files) for name, text in names.items()}
            self._files |= {*names.values()}
        values = [Metric(names[name], float(value), time_ms, step) for name, value in metrics.items()]
        for start in range(0, len(values), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=values[start : start + _METRICS_AT_ONCE], synchronous=True)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self._client.set_tag(self._run_id, "checkpoint/step", str(step), synchronous=True)

    def run_ended(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, status=_ENDS[status])
            self._client = None

    def _place(self, output: Path) -> str:
        """A server or a folder."""
        return self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(output / "mlruns")

    def _new_run(self, client: Any, info: RunInfo) -> str:
        """Create the run. The config is logged as parameters, and as an artifact."""
        from mlflow.entities import Param, RunTag

        entry = client.get_experiment_by_name(self.config.experiment)
        experiment = entry.experiment_id if entry is not None else client.create_experiment(self.config.experiment)
        run_id: str = client.create_run(experiment, run_name=info.name).info.run_id
        config = {**redact(info.config), "total_steps": info.total_steps}
        params = [Param(_name(key), text[:_PARAM_LENGTH]) for key, text in _flat(config)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            client.log_batch(run_id, params=params[start : start + _PARAMS_AT_ONCE], synchronous=True)
        client.log_batch(run_id, tags=[RunTag(k, v) for k, v in self.config.tags.items()], synchronous=True)
        client.log_text(run_id, json.dumps(config, indent=1, default=str), "config.json")
        return run_id


def _name(text: str) -> str:
    return _NOT_IN_NAMES.sub("_", text.replace("@", "_at_"))


def _file(name: str, names: Collection[str], files: Collection[str]) -> str:
    """The file of a metric, which can be no folder of another metric.

    Args:
        names: the metrics of the same step.
        files: the files of earlier steps.
    """
    if name in files:
        return name
    parts = name.split("/")
    for length in range(1, len(parts)):  # the shortest first: it is the file that can be no folder
        if (front := "/".join(parts[:length])) in names or front in files:
            return ".".join([front, *parts[length:]])
    return f"{name}.value" if any(file.startswith(f"{name}/") for file in files) else name


def _flat(value: Any, front: str = "") -> Iterator[tuple[str, str]]:
    """(``section.field``, value as text) of every option in a config; list entries by their index."""
    if isinstance(value, Mapping | list | tuple) and value:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(item, f"{front}.{key}" if front else str(key))
    elif value is not None and value not in ("", {}, [], ()):
        yield front, str(value)
