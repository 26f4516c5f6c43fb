"""The model reward, with a stand-in for the run's forward pass."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import ConfigError, ModelError
from rlhf.plugins import Plugins
from rlhf.types import Group, Image, Row, Trajectory, Turn
from rlhf_plugin_model import ModelReward

from tests.support.scoring import score_groups


@pytest.fixture
def model(tmp_path):
    def make(**settings) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 100, **settings}))
        return str(tmp_path)

    return make


def group(*last: int) -> Group:
    row = Row({}, "unit", 0)
    turns = [[Turn([1, 2], False), Turn([3], True), Turn([4, 5], False, fresh=True), Turn([n], True)] for n in last]
    return Group(row, 0, [Trajectory(row, t, (0, i)) for i, t in enumerate(turns)])


def score(samples: Group, **config) -> list[tuple[str, list[int]]]:
    """The calls of the role; the role returns the sum of the tokens."""
    calls: list[tuple[str, list[int]]] = []

    async def score_with_role(role, ids):
        calls.extend((role, list(i)) for i in ids)
        return [float(sum(i)) for i in ids]

    score_groups("model", samples, options=config, score_with_role=score_with_role)
    return calls


def test_the_role_gets_the_tokens_of_the_last_context(model) -> None:
    samples = group(6, 7)
    assert score(samples, model=model()) == [("reward_model", [4, 5, 6]), ("reward_model", [4, 5, 7])]
    assert [t.reward for t in samples.trajectories] == [15.0, 16.0]


def test_the_role_gets_the_images_of_the_last_context(model) -> None:
    """At their places in it: the image of an earlier context is not among them."""
    samples = group(6, 7)
    first, last = Image(b"first", 0, 1, [2]), Image(b"last", 1, 1, [5])
    samples.trajectories[0].turns[0].images, samples.trajectories[0].turns[2].images = (first,), (last,)
    samples.trajectories[0].turns.insert(3, Turn([8, 9, 9], False, images=(Image(b"more", 1, 2, [9]),)))
    calls = []

    async def score_with_role(role, ids, images=()):
        calls.append((ids, images))
        return [1.0] * len(ids)

    score_groups("model", samples, options={"model": model()}, score_with_role=score_with_role)
    assert calls == [([[4, 5, 8, 9, 9, 6], [4, 5, 7]], [(last, Image(b"more", 3, 2, [9])), ()])]


def test_a_model_of_steps_is_refused_before_it_is_loaded(model) -> None:
    of_steps = ModelReward(ModelReward.Config(model=model(step_separator=";")))
    with pytest.raises(ConfigError, match=r"read after each step that ends with ';'. Use --reward plugin:prm"):
        of_steps.roles()
    (role,) = ModelReward(ModelReward.Config(model=model())).roles()
    assert (role.name, role.head) == ("reward_model", "scalar")
    (role,) = ModelReward(ModelReward.Config(model="nowhere/at/all")).roles()
    assert role.model == "nowhere/at/all"


def test_outputs_are_normalised_by_the_saved_mean_and_std(model) -> None:
    samples = group(6)
    score(samples, model=model(mean=5.0, std=2.0), normalise=True)
    assert samples.trajectories[0].reward == 5.0
    assert samples.trajectories[0].rewards["model"].info == {"output": 15.0}


@pytest.mark.parametrize("settings", [{}, {"mean": 1.0}, {"mean": 1.0, "std": 0.0}, {"mean": "1", "std": 1.0}])
def test_normalisation_without_mean_and_std_is_refused(model, settings: dict) -> None:
    with pytest.raises(ModelError, match=r"needs the numbers `mean` and `std` > 0 .* Set normalise = false"):
        score(group(6), model=model(**settings), normalise=True)


@pytest.mark.parametrize("settings", [{"vocab_size": 100}, {"vocab_size": None, "text_config": {"vocab_size": 100}}])
def test_a_token_outside_the_vocabulary_is_refused(model, settings: dict) -> None:
    """The size stands in a table of its own where a model also reads images."""
    samples = group(6, 100)
    score(samples, model=model(**settings))
    assert "token 100 is outside the vocabulary" in samples.trajectories[0].error


def test_a_reward_model_that_does_not_exist_is_an_error(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config.json"):
        score(group(6), model=str(tmp_path / "absent"))


def test_the_role_is_declared(model) -> None:
    resolved = Plugins.discover().resolve("reward", "model:somewhere")
    (spec,) = resolved.cls(resolved.cls.Config(**resolved.options, role="judge")).roles()
    assert (spec.name, spec.head, spec.model, spec.trained) == ("judge", "scalar", "somewhere", False)


def test_a_reward_without_its_model_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reward model:PATH"):
        ModelReward()
