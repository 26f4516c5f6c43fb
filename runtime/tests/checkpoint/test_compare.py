import copy

import pytest
from rlhf.errors import CheckpointError
from rlhf_runtime.checkpoint.compare import compare, describe, layout_of, require_same_run

CONFIG = {
    "run": {"seed": 1, "steps": 10, "output": "a", "resume": False, "threads": None},
    "algorithm": {"use": "x", "options": {"loss": {"clip": 0.2}}},
    "data": {"batch_size": 8, "train": [{"path": "rows.jsonl"}]},
    "policy": {"model": "tiny"},
    "stream": {"staleness": 0, "rollout_deadline": 600.0},
    "reward": [{"use": "math", "weight": 1.0, "deadline": 60.0}],
    "checkpoint": {"every": 5},
}
PLUGINS = [{"kind": "reward", "name": "math", "distribution": "rlhf-plugin-math", "version": "0.1.0"}]


def as_written(key):
    """As in a run file, where options of a plugin stand in its section."""
    return key.replace(".options", "")


def meta(plugins=PLUGINS, threads=2, device="cpu", content=None, **changes):
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = config
        for part in path:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return describe(config, plugins, threads=threads, device=device, content=content or {})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"policy__model": "other"}, "policy.model"),
        ({"algorithm__use": "y"}, "algorithm.use"),
        ({"algorithm__options__loss__new": 1}, "algorithm.options.loss.new"),
        ({"data__train__0__path": "b.jsonl"}, "data.train.0.path"),
        ({"data__batch_size": 16}, "data.batch_size"),
        ({"run__seed": 2}, "run.seed"),
        ({"stream__staleness": 2}, "stream.staleness"),
        ({"stream__round": 2}, "stream.round"),
        ({"reward__0__weight": 0.5}, "reward.0.weight"),
    ],
)
def test_another_run_is_refused_with_its_keys(change, key):
    differences = compare(meta(), meta(**change))
    assert [(d.key, d.severity) for d in differences] == [(key, "refuse")]
    with pytest.raises(
        CheckpointError, match=rf"(?s)step-3 was saved with a different config:\n  {as_written(key)}: was .*, now"
    ):
        require_same_run(differences, "step-3")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"run__steps": 20}, "run.steps"),
        ({"run__threads": 4}, "run.threads"),
        ({"policy__micro_tokens": 99}, "policy.micro_tokens"),
        ({"checkpoint__every": 1}, "checkpoint.every"),
        ({"reward__0__deadline": 5.0}, "reward.0.deadline"),
        ({"stream__rollout_deadline": 5.0}, "stream.rollout_deadline"),
        ({"threads": 1}, "environment.threads"),
        ({"device": "NVIDIA"}, "environment.device"),
        ({"plugins": [{**PLUGINS[0], "version": "0.2.0"}]}, "plugins.reward:math"),
    ],
)
def test_a_different_run_is_reported(change, key):
    differences = compare(meta(), meta(**change))
    assert [(d.key, d.severity) for d in differences] == [(key, "report")]
    lines = require_same_run(differences, "step-3")
    assert "different run" in lines[0]
    assert lines[1].startswith(f"{key}: was ")


@pytest.mark.parametrize(
    "change", [{"run__output": "b"}, {"run__name": "b"}, {"run__show_samples": 5}, {"checkpoint__keep": 1}]
)
def test_a_runs_location_console_output_and_kept_files_are_not_compared(change):
    assert compare(meta(), meta(**change)) == []


def test_a_difference_shows_the_old_and_the_new_value():
    newer = [{**PLUGINS[0], "version": "0.2.0"}]
    differences = compare(meta(), meta(threads=1, plugins=newer, run__steps=20))
    assert sorted(str(d) for d in differences) == [
        "environment.threads: was 2, now 1",
        "plugins.reward:math: was 'rlhf-plugin-math 0.1.0', now 'rlhf-plugin-math 0.2.0'",
        "run.steps: was 10, now 20",
    ]


@pytest.mark.parametrize(("old", "new"), [(PLUGINS, []), ([], PLUGINS)])
def test_an_added_or_removed_plugin_is_reported(old, new):
    assert [(d.key, d.severity) for d in compare(meta(plugins=old), meta(plugins=new))] == [
        ("plugins.reward:math", "report")
    ]


def test_the_same_run_has_no_differences():
    assert require_same_run(compare(meta(), meta(run__output="b", run__resume=True)), "step-3") == []


def test_a_plugin_may_be_named_in_another_way():
    assert compare(meta(), meta(reward__0__use="plugin:math")) == []
    [other] = compare(meta(), meta(reward__0__use="plugin:length"))
    assert other.severity == "refuse"
    [difference] = compare(meta(policy__model="math"), meta(policy__model="plugin:math"))
    assert difference.key == "policy.model", "a path means what it says"


def test_a_plugin_of_another_distribution_is_another_plugin():
    other = [{**PLUGINS[0], "distribution": "someone-elses-math"}]
    assert [d.severity for d in compare(meta(), meta(plugins=other))] == ["refuse"]


def test_types_matter():
    assert [d.key for d in compare(meta(data__batch_size=1), meta(data__batch_size=True))] == ["data.batch_size"]


def test_all_refused_keys_are_listed_at_once():
    differences = compare(meta(), meta(run__seed=2, policy__model="b", run__steps=99))
    with pytest.raises(CheckpointError) as caught:
        require_same_run(differences, "c")
    assert "run.seed: was 1, now 2" in str(caught.value)
    assert "policy.model: was 'tiny', now 'b'" in str(caught.value)
    assert "run.steps" not in str(caught.value)


@pytest.mark.parametrize("key", ["trainer.options.stage", "critic.trainer.stage", "roles.judge.trainer.stage"])
def test_options_of_a_trainers_layout_may_change(key):
    """As far as the trainer says so; other options of it stay."""

    def of(name, value):
        settings, config = {"use": "x"}, {}
        *path, _ = key.split(".")
        place = config
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
        return describe({**settings, **config}, [], threads=1, device="cpu")

    layout = layout_of("trainer", ["stage"])
    [stage] = compare(of("stage", 2), of("stage", 3), layout)
    assert (stage.key, stage.severity) == (key, "report")
    [other] = compare(of("lr", 1e-3), of("lr", 1e-4), layout)
    assert other.severity == "refuse"
    [unknown] = compare(of("stage", 2), of("stage", 3))
    assert unknown.severity == "refuse"


@pytest.mark.parametrize(
    ("key", "option", "severity"),
    [
        ("rollout__options__mcp__search__url", "mcp.*.url", "report"),
        ("rollout__options__mcp__search__tools", "mcp.*.url", "refuse"),
        ("rollout__options__url", "mcp.*.url", "refuse"),
    ],
)
def test_a_layout_names_options_in_tables(key, option, severity):
    def of(value):
        config = value
        for part in reversed(key.split("__")):
            config = {part: config}
        return describe(config, [], threads=1, device="cpu")

    [difference] = compare(of("a"), of("b"), layout_of("rollout", [option]))
    assert difference.severity == severity


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"policy__model": "b"}, "policy.model"),
        ({"data__train__0__path": "b.jsonl"}, "data.train.rows"),
        ({"data__chat_template": "b.jinja"}, "data.chat_template"),
    ],
)
def test_a_file_may_have_another_path_if_its_content_is_equal(change, name):
    start = meta(data__chat_template="a.jinja", content={name: "1", "other": "2"})
    changes = {"data__chat_template": "a.jinja", **change}
    [moved] = compare(start, meta(**changes, content={name: "1", "other": "2"}))
    assert moved.severity == "moved"
    [line] = require_same_run([moved], "step-3")
    assert line == f"read from another place, with the same content: {moved}"
    for content in ({name: "3"}, {f"{name}_2": "1"}, {}):
        assert moved.key in [d.key for d in compare(start, meta(**changes, content=content)) if d.severity == "refuse"]
    older = meta(data__chat_template="a.jinja")
    assert [d.severity for d in compare(older, meta(**changes, content={name: "1"}))] == ["refuse"]
