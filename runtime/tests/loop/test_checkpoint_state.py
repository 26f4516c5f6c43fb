"""The state of a run, taken while a continuous stream goes on."""

from __future__ import annotations

from types import SimpleNamespace

from rlhf.interfaces import Reward
from rlhf_runtime.loop.checkpoint_state import RunState


class Counts(Reward):
    """Keeps how many groups it scored."""

    scored = 0

    async def score(self, group):
        raise NotImplementedError

    def state_dict(self):
        return {"scored": self.scored}


def test_a_reward_is_saved_with_the_samples_that_it_scored() -> None:
    """A continuous stream scores samples until the moment in which its snapshot is taken."""
    reward = Counts()

    class Going:
        def snapshot(self, beside):
            reward.scored += 1
            beside()
            return {"scored": reward.scored}, []

    algorithm = SimpleNamespace(parts={}, state_dict=dict)
    data, control = SimpleNamespace(curriculum=None), SimpleNamespace(changes={})
    state = RunState(algorithm, {}, data, Going(), {"own": reward}, {}, None, control)
    values = state.collect(3).values
    assert values["components"]["reward.own"] == values["stream"] == {"scored": 1}
