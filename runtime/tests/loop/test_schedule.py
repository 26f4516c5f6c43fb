"""The optimizer steps that an algorithm plans for a run."""

from types import SimpleNamespace

from rlhf.types import Snapshot, Update
from rlhf_runtime.loop.schedule import UpdateSchedule


def updates(step):
    """Two critic steps first; then the policy joins, and after every second step the reference is copied."""
    result = [Update("critic", "value_loss", epochs=2, minibatches=3)]
    if step >= 2:
        result.append(Update("policy", "loss", minibatches=4))
    return [*result, *([Snapshot("reference", "policy")] if step % 2 else [])]


def test_every_step_of_the_run_is_planned_with_all_its_passes():
    schedule = UpdateSchedule.of(SimpleNamespace(name="mine", updates=updates), 5)
    assert schedule.planned == ({"critic": 6},) * 2 + ({"critic": 6, "policy": 4},) * 3
    assert schedule.total() == {"critic": 30, "policy": 12}
    assert schedule.snapshots == {"reference"}


def test_two_updates_of_one_role_are_added():
    algorithm = SimpleNamespace(
        name="mine", updates=lambda step: [Update("policy", "a"), Update("policy", "b", epochs=3)]
    )
    assert UpdateSchedule.of(algorithm, 1).planned == ({"policy": 4},)


def test_a_run_without_steps_plans_nothing():
    assert UpdateSchedule.of(SimpleNamespace(name="mine", updates=updates), 0) == UpdateSchedule()
    assert UpdateSchedule().total() == {}
