"""The suites of observers, launchers and adapters pass good ones and fail broken ones."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest
from rlhf.errors import PluginInvalid
from rlhf.interfaces import Adapter, Launcher, Observer, Reward
from rlhf.types import RewardResult
from rlhf_testing.adapter import AdapterContract
from rlhf_testing.contract import Nonconformance
from rlhf_testing.launcher import LauncherContract
from rlhf_testing.observer import ObserverContract

from tests.support.parts import RanksHere


class Quiet(Observer):
    """Listens to nothing."""

    name = "quiet"


class TestQuiet(ObserverContract):
    observer = Quiet
    registered = False


class Logger(Observer):
    """Keeps its id when a run is resumed, and writes lines."""

    name = "logger"
    id = None

    def run_started(self, info):
        self.id = self.id or f"run-{id(self)}"
        self.file = info.output / "log"

    def step_finished(self, step, metrics):
        with self.file.open("a") as file:
            file.write(f"{step} {metrics}\n")

    def state_dict(self):
        return {"id": self.id}

    def load_state_dict(self, state):
        self.id = state["id"]


class NewId(Logger):
    """Starts another run after a resume."""

    def run_started(self, info):
        super().run_started(info)
        self.id = f"run-{id(self)}"


class NeedsRollouts(Logger):
    """Assumes that rollouts come first."""

    def rollouts_finished(self, step, groups):
        self.count = len(groups)

    def step_finished(self, step, metrics):
        assert self.count


class WantsRewards(Quiet):
    """Assumes that every step reports a reward; supervised runs and empty steps have none."""

    def step_finished(self, step, metrics):
        self.best = metrics["reward/mean"]


class PopsMetrics(Logger):
    """Takes entries out of the metrics."""

    def step_finished(self, step, metrics):
        metrics.pop("time/step", None)


class Controls(Observer):
    """Lowers the learning rate, saves and stops."""

    name = "controls"

    def run_started(self, info):
        self.control = info.control

    def step_finished(self, step, metrics):
        self.control.change("trainer.lr", self.control.changeable["trainer.lr"] / 2)
        self.control.save()
        self.control.stop("done")


class TestControls(ObserverContract):
    observer = Controls
    registered = False


class ChangesAnything(Controls):
    def step_finished(self, step, metrics):
        self.control.change("run.steps", 1)


class AsksTooLate(Controls):
    def run_ended(self, status):
        self.control.save()


class NeedsStart(Logger):
    """Fails when a run ends before its first step."""

    def step_finished(self, step, metrics):
        self.last = step

    def run_ended(self, status):
        print(self.last)


class InProcess(Launcher):
    """One worker per rank, here."""

    name = "in_process"

    def launch_trainer(self, trainer, config, spec):
        from dataclasses import replace

        return Group([trainer(config, replace(spec, rank=r)) for r in range(spec.world_size)])

    def place(self, places, plugins=(), reports=None):
        return None

    def launch_generator(self, generator, config, spec, policy=None, refresh=None):
        return generator(config, spec)


class Group(RanksHere):
    def stream(self, method, *arguments, timeout=None):
        return iter(getattr(self.workers[0], method)(*arguments))


class Embedded(InProcess):
    """Promises a worker in this process; its groups hold none."""

    capabilities = frozenset({"in_process", "export:module"})


class Broadcast(Group):
    def call(self, method, per_rank):
        return [getattr(w, method)(*per_rank[0]) for w in self.workers]


class Backwards(Group):
    def call(self, method, per_rank):
        return super().call(method, per_rank)[::-1]


class Silent(Group):
    def call(self, method, per_rank):
        try:
            return super().call(method, per_rank)
        except ValueError:
            return [None] * self.size


class Vague(Group):
    def call(self, method, per_rank):
        try:
            return super().call(method, per_rank)
        except ValueError:
            raise RuntimeError("actor died") from None


def launcher_with(group):
    def launch_trainer(self, trainer, config, spec):
        return group(InProcess.launch_trainer(self, trainer, config, spec).workers)

    return type("Made", (InProcess,), {"launch_trainer": launch_trainer, "__doc__": "Made."})


FOREIGN = "import their_framework\n\n\ndef their_reward(text):\n    return len(text)\n"


class Foreign(Adapter):
    """Files that import ``their_framework``."""

    name = "foreign"

    def recognises(self, kind, text):
        return kind == "reward" and "import their_framework" in text

    @contextmanager
    def importing(self):
        sys.modules["their_framework"] = types.ModuleType("their_framework")
        try:
            yield
        finally:
            del sys.modules["their_framework"]

    def adapt(self, kind, module, attribute):
        function = getattr(module, attribute or "their_reward", None)
        if function is None:
            raise PluginInvalid(f"no function {attribute!r}; it defines {sorted(vars(module))}")

        async def score(self, group):
            return [RewardResult(float(function(t.answer))) for t in group.trajectories]

        return type("Adapted", (Reward,), {"name": "their_reward", "score": score})


class TestForeign(AdapterContract):
    adapter = Foreign
    registered = False
    files = [("reward", FOREIGN, None), ("reward", FOREIGN, "their_reward")]


class Greedy(Foreign):
    """Recognises every file."""

    def recognises(self, kind, text):
        return True


class Leaks(Foreign):
    """Replaces a module for good."""

    @contextmanager
    def importing(self):
        sys.modules["their_framework"] = types.ModuleType("their_framework")
        self.old, sys.modules["this_is_there"] = sys.modules["this_is_there"], types.ModuleType("this_is_there")
        yield


class Guesses(Foreign):
    """Loads another function than the named one."""

    def adapt(self, kind, module, attribute):
        return super().adapt(kind, module, None)


class Executes(Foreign):
    """Runs the file to recognise it."""

    def recognises(self, kind, text):
        try:
            compile(text, "x", "exec")
        except SyntaxError:
            return False
        if not super().recognises(kind, text):
            return False
        with self.importing():
            exec(text, {})
        return True


def suite(contract, cls, **attributes):
    return type("Broken", (contract,), {contract.kind: cls, "registered": False, **attributes})()


@pytest.mark.parametrize(
    ("contract", "cls", "check", "message"),
    [
        (ObserverContract, NewId, "test_resume", "before the resume"),
        (ObserverContract, NeedsRollouts, "test_runs", r"step_finished\(\) raised AttributeError"),
        (ObserverContract, WantsRewards, "test_runs", r"step_finished\(\) raised KeyError: 'reward/mean'"),
        (ObserverContract, WantsRewards, "test_metrics_come_and_go", r"step_finished\(\) raised KeyError"),
        (ObserverContract, PopsMetrics, "test_runs", "change a run only through the control"),
        (
            ObserverContract,
            ChangesAnything,
            "test_runs",
            r"step_finished\(\) raised ConfigError: .*'run.steps'",
        ),
        (ObserverContract, AsksTooLate, "test_runs", r"run_ended\(\) asks the control for \[\('save',\)\]"),
        (ObserverContract, NeedsStart, "test_runs", r"run_ended\(\) raised AttributeError"),
        (LauncherContract, launcher_with(Broadcast), "test_calls", "must give"),
        (LauncherContract, launcher_with(Backwards), "test_calls", "must give"),
        (LauncherContract, launcher_with(Broadcast), "test_wrong_number_of_arguments", "accepts arguments for"),
        (LauncherContract, launcher_with(Silent), "test_first_cause", "does not reach the caller"),
        (LauncherContract, Embedded, "test_worker_in_this_process", "`worker` of a group of one rank is None: set it"),
        (LauncherContract, launcher_with(Vague), "test_first_cause", "message is lost: actor died"),
    ],
)
def test_broken_part_fails_the_right_check(contract, cls, check, message):
    sizes = {"world_sizes": (2,)} if contract is LauncherContract else {}
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(contract, cls, **sizes), check)()


def test_broken_adapters_fail(monkeypatch):
    files = TestForeign.files
    with pytest.raises(Nonconformance, match="for a file that is not its own"):
        suite(AdapterContract, Greedy, files=files).test_recognises()
    with pytest.raises(Nonconformance, match="which does not exist"):
        suite(AdapterContract, Guesses, files=files).test_missing_attribute()
    with pytest.raises(Nonconformance, match="executes the file"):
        suite(AdapterContract, Executes, files=files).test_recognises()
    monkeypatch.setitem(sys.modules, "this_is_there", types.ModuleType("this_is_there"))
    monkeypatch.setitem(sys.modules, "their_framework", types.ModuleType("their_framework"))
    with pytest.raises(Nonconformance, match=r"left .*this_is_there"):
        suite(AdapterContract, Leaks, files=files).test_adapts()
