import pytest
from rlhf_plugin_runs.recorded_samples import Sample


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
