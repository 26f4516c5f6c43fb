"""The conformance suite of observers.

::

    from rlhf_testing.observer import ObserverContract

    class TestMyObserver(ObserverContract):
        observer = MyObserver
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import RunControl
from rlhf.interfaces.observer import Observer, RunInfo

from rlhf_testing import fabricate
from rlhf_testing.contract import Contract, Nonconformance, expect

EVENTS = ("run_started", "rollouts_finished", "step_finished", "checkpoint_saved", "run_ended")
METRICS = {"policy/loss": 0.25, "reward/mean": -1.0, "time/step": 1.5, "step": 1.0}


class RecordedControl(RunControl):
    """A ``RunControl`` that only records: ``requests`` holds every request, ``("stop", reason)``, ``("save",)`` or
    ``("change", option, value)``."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self._options: dict[str, Any] = {"trainer.lr": 1e-3}

    def stop(self, reason: str) -> None:
        self.requests.append(("stop", reason))

    def save(self) -> None:
        self.requests.append(("save",))

    @property
    def changeable(self) -> Mapping[str, Any]:
        return dict(self._options)

    def change(self, option: str, value: Any) -> None:
        if option not in self._options:
            raise ConfigError(f"the option {option!r} cannot be changed; those that can are {', '.join(self._options)}")
        self._options[option] = value
        self.requests.append(("change", option, value))


class ObserverContract(Contract):
    """Simulates the events of whole runs: online, offline, failed at the start, stopped and resumed."""

    kind = "observer"
    observer: Any = None
    environment: Mapping[str, str] = {}
    """Environment variables during the checks (to keep a logger off the network)."""

    @contextmanager
    def run(self) -> Iterator[Path]:
        """A new run directory, with the environment set."""
        old = {k: os.environ.get(k) for k in self.environment}
        os.environ.update(self.environment)
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
        finally:
            for key, value in old.items():
                os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)

    def info(self, output: Path, first_step: int = 0) -> RunInfo:
        config = {"run": {"name": "suite", "seed": 0}, "algorithm": {"use": "made_up", "options": {}}}
        control = RecordedControl()
        return RunInfo("suite", output, config, total_steps=4, first_step=first_step, control=control)

    def play(
        self, observer: Any, output: Path, *, online: bool, first: int = 0, steps: int = 2, end: str = "finished"
    ) -> None:
        """The events of a run, in the runtime's order. Fails if the observer changes their arguments."""
        groups = fabricate.groups(count=2) if online else []
        metrics = dict(METRICS) if online else {k: v for k, v in METRICS.items() if not k.startswith("reward")}
        copies = copy.deepcopy((groups, metrics))
        info = self.info(output, first)
        self.call(observer, "run_started", info)
        for step in range(first + 1, first + steps + 1):
            if online:
                self.call(observer, "rollouts_finished", step, groups)
            self.call(observer, "step_finished", step, metrics)
            if step % 2 == 0:
                self.call(observer, "checkpoint_saved", step, output / f"step-{step}")
        # requests until here were made during the run; run_ended() must make none
        requests = list(info.control.requests)  # type: ignore[attr-defined]
        self.call(observer, "run_ended", end)
        late = info.control.requests[len(requests) :]  # type: ignore[attr-defined]
        expect(not late, f"{self.label()} run_ended() asks the control for {late}, but the run is over")
        expect(
            (groups, metrics) == copies,
            f"{self.label()} changed the metrics or rollouts that it received: change a run only through the control",
        )

    def call(self, observer: Any, event: str, *arguments: Any) -> None:
        try:
            result = getattr(observer, event)(*arguments)
        except Exception as error:
            raise Nonconformance(f"{self.label()} {event}() raised {type(error).__name__}: {error}") from error
        if inspect.iscoroutine(result):
            result.close()
            raise Nonconformance(f"{self.label()} {event}() is `async def`, which is never awaited: write plain `def`")
        expect(result is None, f"{self.label()} {event}() returned {result!r}; return values of events are ignored")

    # ------------------------------------------------------------------------------------- checks

    def test_listens(self) -> None:
        """At least one method is an event of observers; otherwise the observer is never called."""
        methods = sorted(
            n for n, member in vars(self.cls).items() if not n.startswith("_") and inspect.isfunction(member)
        )
        hears = any(getattr(self.cls, event) is not getattr(Observer, event) for event in EVENTS)
        expect(
            hears or not methods,
            f"{self.label()} handles no event: nothing calls {', '.join(methods)}; events are {', '.join(EVENTS)}",
        )

    def test_runs(self) -> None:
        """The observer handles all events of runs that are online, offline, without a step, stopped or failed."""
        for config in self.grid():
            for online in (True, False):
                for steps, end in ((2, "finished"), (0, "finished"), (1, "stopped"), (1, "failed"), (0, "failed")):
                    with self.run() as output:
                        self.play(self.build(config), output, online=online, steps=steps, end=end)

    def test_metrics_come_and_go(self) -> None:
        """The set of metrics may change from step to step, and names may contain slashes, dots and @."""
        for config in self.grid():
            with self.run() as output:
                observer = self.build(config)
                self.call(observer, "run_started", self.info(output))
                for step, extra in enumerate(({}, {"eval/pass@1": 0.5}, {"source.a/reward": 1.0, "kl": 0.0}), 1):
                    self.call(observer, "step_finished", step, {**METRICS, **extra})
                self.call(observer, "step_finished", 4, {"time/step": 0.5})
                self.call(observer, "run_ended", "finished")

    def test_resume(self) -> None:
        """The state in the middle of a run is JSON. A fresh instance that loads it continues with equal state."""
        for config in self.grid():
            with self.run() as output:
                first = self.build(config)
                self.call(first, "run_started", self.info(output))
                self.call(first, "step_finished", 1, dict(METRICS))
                state = first.state_dict()
                try:
                    text = json.dumps(state)
                except (TypeError, ValueError) as error:
                    raise Nonconformance(
                        f"{self.label(config)} state_dict() must be JSON: {error}; got {state!r}"
                    ) from error
                self.call(first, "run_ended", "stopped")
                second = self.build(config)
                second.load_state_dict(json.loads(text))
                self.play(second, output, online=True, first=1)
                for key, value in state.items():
                    resumed = second.state_dict().get(key)
                    unchanged = not isinstance(value, str) or resumed == value
                    expect(
                        unchanged,
                        f"{self.label(config)} {key} was {value!r} before the resume and is {resumed!r} after it",
                    )
