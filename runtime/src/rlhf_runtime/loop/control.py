"""Requests of observers to a run. They are applied between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ConfigError, did_you_mean
from rlhf.interfaces import ComponentConfig, RunControl
from rlhf.plugins import Resolved

from rlhf_runtime.config.components import component_config
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.models.roles import Role


@dataclass
class TrainerOptions:
    """The trainer options of one trained role, some of which may change."""

    role: Role
    resolved: Resolved
    """The trainer's plugin."""
    config: ComponentConfig
    """The current options."""
    names: Mapping[str, str]
    """{option that may change: its dotted name in the run file}. Roles that share a name change together."""

    def with_value(self, option: str, value: Any) -> ComponentConfig:
        """The config with another value of the option. Raises ConfigError if the value is invalid."""
        options = self.config.model_dump(mode="json", exclude_none=True)
        section = self.names[option].rpartition(".")[0]
        config: ComponentConfig = component_config(self.resolved, {**options, option: value}, section)
        return config


class Control(RunControl):
    """The control of one run.

    Args:
        stop: the stop request of the run.
        trainers: options of the trained roles.
        note: called with a message about every change.
    """

    def __init__(self, stop: StopRequest, trainers: Sequence[TrainerOptions], note: Callable[[str], None]) -> None:
        self._stop, self._trainers, self._note = stop, trainers, note
        self._waiting: dict[str, Any] = {}
        self._save = False
        self._values: dict[str, Any] = {}

    # ---------------------------------------------------------------------------- what observers call

    def stop(self, reason: str) -> None:
        self._stop.request(reason)

    def save(self) -> None:
        self._save = True

    @property
    def changeable(self) -> Mapping[str, Any]:
        values = {n: getattr(t.config, option) for t in self._trainers for option, n in t.names.items()}
        return values | self._waiting

    def change(self, option: str, value: Any) -> None:
        if option not in (allowed := self.changeable):
            raise ConfigError(
                f"the option {option!r} cannot be changed while the run trains; these options can: "
                f"{', '.join(sorted(allowed)) or 'none'}.{did_you_mean(option, allowed)}"
            )
        for trainer, field in self._trainers_of(option):
            trainer.with_value(field, value)
        self._waiting[option] = value

    # ------------------------------------------------------------------------------- what the run calls

    @property
    def changes(self) -> Mapping[str, Any]:
        """{option: value} of every option that was changed, in this process and before a resume, or that changes at the
        end of the step. The step may not reach its end in this process."""
        return self._values | self._waiting

    def apply(self) -> None:
        """Apply the requested options on every rank, between two steps."""
        waiting, self._waiting = self._waiting, {}
        for option, value in waiting.items():
            # `_waiting` is empty now, so this is the value in use.
            old_value = self.changeable[option]
            for trainer, field in self._trainers_of(option):
                trainer.config = trainer.with_value(field, value)
                trainer.role.every("change", trainer.config)
            self._values[option] = value
            self._note(f"{option} changed from {old_value} to {value}")

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        save, self._save = self._save, False
        return save

    def restore(self, options: Mapping[str, Any]) -> None:
        """On resume, set the options to their values when the checkpoint was saved."""
        for option, value in options.items():
            self.change(option, value)
        self.apply()

    def _trainers_of(self, option: str) -> list[tuple[TrainerOptions, str]]:
        """The trainers that have an option, each with the name of its field."""
        return [(t, field) for t in self._trainers for field, name in t.names.items() if name == option]
