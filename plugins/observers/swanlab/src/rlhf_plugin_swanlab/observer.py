"""Logs metrics, samples and the resolved config to SwanLab. A resumed run continues its run.

SwanLab is imported when a run starts: it is an extra, because it allows no version of protobuf above 6.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Observer, RunInfo
from rlhf.samples import first_samples
from rlhf.secrets import redact
from rlhf.types import Group

_KEY = "SWANLAB_API_KEY"
_ENDS = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLabConfig(ComponentConfig):
    """The API key is not an option: it comes from the environment (``SWANLAB_API_KEY``)."""

    project: str = "rlhf"
    """Project that lists the run."""
    workspace: str | None = None
    """User or team; if empty, the account's default."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""
    mode: Literal["online", "local", "offline", "disabled"] = "online"
    """``offline``: files in ``swanlab/`` of the run directory, which ``swanlab sync`` uploads."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Samples logged each time; 0 = none."""
    samples_every: Annotated[int, Field(gt=0)] = 10
    """Steps between samples."""


class SwanLabObserver(Observer):
    """Logs each line of ``metrics.jsonl``, over ``step``.

    The config is redacted, and SwanLab's capture of the command line, the terminal, the installed packages and the git
    remote is off.
    """

    name = "swanlab"
    source = "https://docs.swanlab.cn/en/api/py-init.html"
    Config = SwanLabConfig
    conformance = {"configs": (SwanLabConfig(mode="offline"),)}
    """Config for ``rlhf plugins check``, because the default needs an account."""

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self._run: Any = None
        self._run_id = ""

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = str(state.get("run_id", ""))

    def check(self, output: Path) -> None:
        if importlib.util.find_spec("swanlab") is None:
            raise ConfigError(
                "observer 'swanlab': the package swanlab is not installed. It is an extra, because its requirements "
                "may clash with others: pip install 'rlhf-plugin-swanlab[swanlab]', or pip install --no-deps swanlab "
                "and the requirements that are then missing."
            )
        if self.config.mode == "online" and not os.environ.get(_KEY) and not sys.stdin.isatty():
            raise ConfigError(
                f"observer 'swanlab' could not start: no API key is configured. Set {_KEY} in the environment, or log "
                'without network: [[observer]] use = "swanlab", mode = "offline".'
            )

    def run_started(self, info: RunInfo) -> None:
        self.check(info.output)
        import swanlab

        probes = ("hardware", "runtime", "requirements", "git", "monitor")  # the command line is part of the runtime
        folder = info.output / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=self.config.project,
            workspace=self.config.workspace,
            name=info.name,
            group=self.config.group,
            tags=list(self.config.tags) or None,
            mode=self.config.mode,
            id=self._run_id or None,
            resume="allow" if self._run_id else None,
            log_dir=str(folder),
            config={**redact(info.config), "total_steps": info.total_steps},
            settings=swanlab.Settings(terminal={"proxy_type": "none"}, probe=dict.fromkeys(probes, False)),
        )
        self._run_id = str(self._run.id or "")

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        if self.config.samples and (step - 1) % self.config.samples_every == 0:
            import swanlab

            samples = [
                swanlab.Text(
                    f"{s.prompt}\n---\n{s.completion}",
                    caption=f"{s.agent and f'{s.agent}: '}reward {s.reward} ({s.rewards}), {s.status}",
                )
                for s in first_samples(groups, self.config.samples)
            ]
            self._run.log({"rollouts": samples}, step=step)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items() if name != "step"}, step=step)

    def run_ended(self, status: str) -> None:
        if self._run is not None:
            state = _ENDS[status]
            self._run.finish(state, error="the run failed; its log has the error" if state == "crashed" else None)
            self._run = None
