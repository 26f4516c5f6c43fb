"""Observers stop a run, save it and change its learning rate through the control object."""

from __future__ import annotations

import pytest
from rlhf.errors import ConfigError, RlhfError, RolloutError, SyncError
from rlhf.interfaces import Observer
from rlhf_plugin_local.generator import TransformersGenerator

from tests.runs import Workshop
from tests.test_python import OPTIONS, finished, score, train


def steps_saved(result) -> list[str]:
    return sorted(path.name for path in (result.output / "checkpoints").glob("step-*"))


def test_a_function_stops_the_run_after_the_current_step(shop: Workshop):
    def watch(step, metrics, control):
        assert "reward/mean" in metrics
        if step == 2:
            control.stop("that is enough")

    result = train(shop, "out", steps=5, observers=[watch])
    assert (result.status, result.reason) == ("stopped", "that is enough")
    assert [row["step"] for row in result.metrics] == [1, 2]
    assert steps_saved(result) == ["step-000002"]
    assert (result.model_path / "model.safetensors").exists()
    baseline = train(shop, "whole", steps=3)
    assert finished(train(shop, "out", steps=3, resume=True)).weights == finished(baseline).weights


def test_a_stop_before_the_first_step_trains_nothing(shop: Workshop):
    class Refuse(Observer):
        def run_started(self, info):
            info.control.stop("not today")

    result = train(shop, "out", observers=[Refuse])
    assert (result.status, result.reason, result.metrics) == ("stopped", "not today", [])


def test_a_checkpoint_is_saved_on_request(shop: Workshop):
    def watch(step, metrics, control):
        if step in (1, 3):
            control.save()

    result = train(shop, "out", steps=4, observers=[watch])
    assert steps_saved(result) == ["step-000001", "step-000003", "step-000004"]


def lower(step, metrics, control):
    """The observer divides the learning rate by ten after the second step."""
    if step == 2:
        assert control.changeable == {"trainer.lr": 1e-3}
        control.change("trainer.lr", 1e-4)
        assert control.changeable == {"trainer.lr": 1e-4}


def test_the_learning_rate_changes_from_the_next_step_on(shop: Workshop):
    options = {**OPTIONS, "trainer.optimizer": "muon"}
    result = train(shop, "out", steps=4, observers=[lower], options=options)
    assert [row["policy/lr"] for row in result.metrics] == [1e-3, 1e-3, 1e-4, 1e-4]
    unchanged = train(shop, "unchanged", steps=4, options=options)
    assert finished(unchanged).lines()[:2] == finished(result).lines()[:2]
    norms = [row["policy/grad_norm"] for row in result.metrics], [row["policy/grad_norm"] for row in unchanged.metrics]
    assert norms[0][2] == norms[1][2]  # the third step starts from the same weights
    assert norms[0][3] != norms[1][3]  # and moves them less


def test_a_resume_continues_with_the_changed_learning_rate(shop: Workshop):
    baseline = train(shop, "whole", steps=4, observers=[lower])
    train(shop, "parts", steps=2, observers=[lower])
    resumed = train(shop, "parts", steps=4, observers=[lower], resume=True)
    assert finished(resumed).lines() == finished(baseline).lines()
    assert finished(resumed).weights == finished(baseline).weights


class AfterThree(Observer):
    """Sets the learning rate to 1e-5 after the third step that it has seen."""

    steps = 0

    def run_started(self, info):
        self.control = info.control

    def step_finished(self, step, metrics):
        self.steps += 1
        if self.steps == 3:
            self.control.change("trainer.lr", 1e-5)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_changed_options_and_the_state_of_observers_are_kept_where_the_next_step_fails(shop: Workshop):
    """What is saved after the failure holds them as they were between the two steps."""
    down = shop.folder / "down"

    async def judge(prompt, completion, row):
        if down.exists():
            raise ConnectionError("the judge is down")
        return await score(prompt, completion, row)

    def watch(step, metrics, control):
        if step == 2:
            down.touch()

    with pytest.raises(RolloutError, match="the judge is down"):
        train(shop, "out", steps=4, reward=judge, observers=[lower, AfterThree, watch])
    down.unlink()
    resumed = train(shop, "out", steps=4, reward=judge, observers=[lower, AfterThree], resume=True)
    assert [row["policy/lr"] for row in resumed.metrics] == [1e-3, 1e-3, 1e-4, 1e-5]


def test_an_observer_is_told_by_the_resume_where_another_one_failed_before_it(shop: Workshop):
    down = shop.folder / "down"
    down.touch()

    def send(step, metrics, control):
        if step == 2 and down.exists():
            raise ConnectionError("the server is down")

    with pytest.raises(RlhfError, match="the server is down"):
        train(shop, "out", steps=4, observers=[send, AfterThree])
    down.unlink()
    resumed = train(shop, "out", steps=4, observers=[send, AfterThree], resume=True)
    assert [row["policy/lr"] for row in resumed.metrics] == [1e-3, 1e-3, 1e-3, 1e-5]
    baseline = train(shop, "whole", steps=4, observers=[send, AfterThree])
    assert finished(resumed).lines() == finished(baseline).lines()


class Early(Observer):
    """Asks for another learning rate when it gets the samples of the second step."""

    def run_started(self, info):
        self.control = info.control

    def rollouts_finished(self, step, groups):
        if step == 2:
            self.control.change("trainer.lr", 1e-4)


def test_a_change_is_kept_where_the_sync_of_its_step_fails(shop: Workshop, monkeypatch: pytest.MonkeyPatch):
    load = TransformersGenerator.load

    def refuse(self, module, version):
        if version == 2:
            raise SyncError("the canaries differ")
        return load(self, module, version)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersGenerator, "load", refuse)
        with pytest.raises(SyncError, match="the canaries differ"):
            train(shop, "out", observers=[Early])
    resumed = train(shop, "out", observers=[Early], resume=True)
    assert [row["policy/lr"] for row in resumed.metrics] == [1e-3, 1e-3, 1e-4]


def test_a_role_with_its_own_learning_rate_is_changed_by_its_name(shop: Workshop):
    def watch(step, metrics, control):
        if step == 1:
            assert control.changeable == {"trainer.lr": 1e-3, "critic.trainer.lr": 2e-3}
            control.change("trainer.lr", 5e-4)
            control.change("critic.trainer.lr", 5e-3)

    result = train(shop, "out", algorithm="ppo", observers=[watch], options={**OPTIONS, "critic.trainer.lr": 2e-3})
    rates = [(row["policy/lr"], row["critic/lr"]) for row in result.metrics]
    assert rates == [(1e-3, 2e-3), (5e-4, 5e-3), (5e-4, 5e-3)]


def test_other_options_cannot_be_changed_and_the_error_lists_those_that_can(shop: Workshop):
    cases = (
        ("trainer.lr", -1.0, r"trainer\.lr: .*greater than or equal to 0"),
        ("trainer.lr", "1e-4", r"trainer\.lr: .*got"),
        ("trainer.betas", (0.9, 0.99), r"'trainer\.betas' cannot be .* run trains; these options can: trainer\.lr\."),
    )

    def watch(step, metrics, control):
        for option, value, problem in cases:  # refused where it is asked, before the run changes anything
            with pytest.raises(ConfigError, match=problem) as refused:
                control.change(option, value)
        raise refused.value

    with pytest.raises(ConfigError, match=r"'trainer\.betas' cannot be changed"):
        train(shop, "out", observers=[watch])


def test_an_observer_instance_gets_the_events_of_the_run(shop: Workshop):
    class Heard(Observer):
        def __init__(self, config=None):
            super().__init__(config)
            self.steps = []

        def step_finished(self, step, metrics):
            self.steps.append(step)

    heard = Heard()
    train(shop, "out", steps=2, observers=[heard, "tensorboard"])
    assert heard.steps == [1, 2]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            lambda step, metrics: None,
            r"observer '<lambda>' has the parameters \(step, metrics\)\. An observer is",
        ),
        (lambda metrics, step, control: None, r"has the parameters \(metrics, step, control\)"),
        (int, r"observers: got type <class 'int'>"),
    ],
)
def test_other_functions_are_refused_with_the_form(shop: Workshop, function, problem):
    with pytest.raises(ConfigError, match=problem):
        train(shop, "out", observers=[function])


def test_an_async_function_is_refused(shop: Workshop):
    async def watch(step, metrics, control):
        pass

    with pytest.raises(ConfigError, match=r"observer 'watch' is `async def`, which is never awaited"):
        train(shop, "out", observers=watch)
