"""Logs metrics, a table of samples and the resolved config to Weights & Biases. A resumed run continues its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import wandb
from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Observer, RunInfo
from rlhf.samples import first_samples, sample_table
from rlhf.secrets import redact
from rlhf.types import Group

_KEY = "WANDB_API_KEY"


class WandbConfig(ComponentConfig):
    """The API key is not an option: it comes from the environment (``WANDB_API_KEY``) or ``wandb login``."""

    project: str = "rlhf"
    """Project that lists the run."""
    entity: str | None = None
    """User or team; if empty, the account's default."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """If absent: ``WANDB_MODE`` of the environment, else online. ``wandb sync`` uploads offline runs."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Samples shown per table; 0 = no tables."""
    samples_every: Annotated[int, Field(gt=0)] = 10
    """Steps between tables."""


class WandbObserver(Observer):
    """Logs each line of ``metrics.jsonl``, plotted over ``step``.

    The config is redacted, and W&B's capture of the command line, the terminal, the source code and the git remote is
    off.
    """

    name = "wandb"
    source = "https://docs.wandb.ai/ref/python/"
    Config = WandbConfig
    conformance = {"configs": (WandbConfig(mode="offline"),), "environment": {"WANDB_SILENT": "true"}}
    """Config for ``rlhf plugins check``, because the default needs an account."""

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self._run: Any = None
        self._run_id = ""
        self._table: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = str(state.get("run_id", ""))

    def check(self, output: Path) -> None:
        """Raises ConfigError if no key is configured, except in a terminal: there W&B asks for it at the start."""
        mode = self.config.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not sys.stdin.isatty() and not wandb.login(prompt=False, verify=False):
            raise _not_started("no API key is configured.")

    def run_started(self, info: RunInfo) -> None:
        settings = wandb.Settings(
            console="off",
            save_code=False,
            disable_git=True,
            x_disable_meta=True,  # holds the command line
        )
        try:
            self._run = wandb.init(
                project=self.config.project,
                entity=self.config.entity,
                group=self.config.group,
                tags=list(self.config.tags) or None,
                mode=self.config.mode,
                name=info.name,
                id=self._run_id or None,
                resume="allow" if self._run_id else None,
                dir=info.output,
                config={**redact(info.config), "total_steps": info.total_steps},
                settings=settings,
            )
        except wandb.errors.Error as cause:
            raise _not_started(_without_key(str(cause))) from None  # the traceback may contain the key
        self._run_id = self._run.id
        self._run.define_metric("*", step_metric="step")

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        if not self.config.samples or (step - 1) % self.config.samples_every:
            return
        columns, rows = sample_table(first_samples(groups, self.config.samples))
        self._table = wandb.Table(columns=["step", *columns], data=[[step, *row] for row in rows])

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {**metrics, "step": step}
        if self._table is not None:
            line["rollouts"], self._table = self._table, None
        self._run.log(line)

    def checkpoint_saved(self, step: int, path: os.PathLike[str]) -> None:
        self._run.summary["checkpoint/step"] = step

    def run_ended(self, status: str) -> None:
        if self._run is not None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=1 if status == "failed" else 0)
            self._run = None


def _not_started(reason: str) -> ConfigError:
    return ConfigError(
        f"observer 'wandb' could not start: {reason} Set {_KEY} in the environment, run "
        f'`wandb login`, or log without network: [[observer]] use = "wandb", mode = "offline".'
    )


def _without_key(text: str) -> str:
    key = os.environ.get(_KEY)
    return text.replace(key, "<hidden>") if key else text
