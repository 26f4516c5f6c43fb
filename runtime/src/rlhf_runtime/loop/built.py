"""What a run consists of once it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.interfaces import Algorithm, Launcher, Observer, Reward

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.loop.control import Control, TrainerOptions
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.loop.schedule import Schedule
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.observe.best_value import BestTracker
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.observe.signals import StopRequest
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.stream import Stream


@dataclass
class Built:
    """The parts of a run: what its steps work with, and what its checkpoints are made of."""

    config: RunFile
    meta: Mapping[str, Any]
    """Goes into every checkpoint: what must agree for a resume to be the same run."""
    algorithm: Algorithm
    roles: dict[str, Role]
    data: TrainData
    launcher: Launcher
    directory: RunDirectory
    store: CheckpointStore
    progress: Progress
    total_steps: int
    schedule: Schedule = field(default_factory=Schedule)
    stream: Stream | None = None
    weights: WeightSync | None = None
    """Takes the policy's weights to the generator, where there is one."""
    phases: Phases | None = None
    """Who has the devices that the generator shares, where there is one."""
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    observers: Mapping[str, Observer] = field(default_factory=dict)
    trainers: Sequence[TrainerOptions] = ()
    """Of the roles that are trained: what observers may change."""
    evaluate: Callable[[], Metrics] | None = None
    best: BestTracker | None = None
    first_step: int = 0
    failures: list[Failures] = field(default_factory=list)
    """The failed samples of training and of evaluation."""
    closers: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trained_roles = tuple(name for name, role in self.roles.items() if role.spec.role.trained)
        self.saved_roles = tuple(name for name in self.roles if name in (*self.trained_roles, *self.schedule.snapshots))
        """Roles whose weights no model of the run file holds: a checkpoint does."""
        self.updates = 0
        """Steps that changed weights, those before a resume included."""
        self.stop = StopRequest()
        self.control = Control(self.stop, self.trainers, self.progress.note)
        self.reports = Reports(self.directory, self.progress, self.observers, self.store)

    def take_devices_back(self) -> None:
        """Trainers learn, and save, with everything where it belongs."""
        if self.phases is not None:
            self.phases.begin_learning()

    def writing(self, path: Path) -> AbstractContextManager[None]:
        """Turn a full disk into an error that says what is left of the run."""
        return self.store.writing(path)
