import pytest
from rlhf_plugin_runs.recorded_samples import Sample
from rlhf_plugin_runs.sample_text import sample_text


@pytest.mark.parametrize(
    ("rewards", "name", "value"),
    [
        ({"math": 0.5}, None, 2.0),
        ({"math": 0.5}, "math", 0.5),
        ({"math": 0.5}, "format", None),
        ({"math": 0.5}, "length", 7.0),
        ({"length": 0.25}, "length", 0.25),
    ],
    ids=["the whole reward", "one reward", "a reward that this sample lacks", "the length", "a reward called length"],
)
def test_what_samples_are_sorted_by(rewards, name, value):
    sample = Sample(1, 0, 0, "rows", 0, "1+1=", [], 2.0, rewards, "complete", "", length=7)
    assert sample.value(name) == value


def test_numbers_about_a_sample_are_shown():
    info = {"env/solved": 0.0, "rollout/calls/add": 2.0, "rollout/calls_unknown": 0.0}
    sample = Sample(1, 0, 0, "rows", 0, "1+1=", [], 2.0, {}, "ok", "", length=7, info=info)
    assert "\n  env/solved 0, rollout/calls/add 2\n" in sample_text(sample).plain
    assert "env/solved 0, rollout/calls/add 2, rollout/calls_unknown 0\n" in sample_text(sample, full=True).plain
