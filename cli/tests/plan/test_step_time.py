"""Step times: the virtual clock against times computed by hand, speeds read from a timeline, and what is refused."""

from __future__ import annotations

import json
import random

import pytest
from rlhf.errors import ConfigError
from rlhf_cli.main import main
from rlhf_cli.plan.measured_speeds import measured_speeds
from rlhf_cli.plan.speeds import Distribution, GroupTimes, SampleTimes, Speeds, TurnTimes, with_distributions
from rlhf_cli.plan.virtual_run import virtual_run
from rlhf_runtime.config.sections import StreamSection
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_testing.tiny import tiny_model

TWO_TURNS = Speeds([GroupTimes([SampleTimes((TurnTimes(100, 1.0),) * 2)] * 2, 0.5)], 0.01, 3 / 800, sync=0.25)
"""A batch of 2 x 2 samples takes 2 x (1 s sampling + 1 s environment) + 0.5 s reward = 4.5 s; learning takes 3 s."""
TAIL = Speeds([GroupTimes([SampleTimes((TurnTimes(n, 0.0),)) for n in (10, 30)])], 0.0, 1 / 40, per_answer=0.1)
"""Answers of 10 and 30 tokens share an engine: 10 x 0.2 s for both, then 20 x 0.1 s for one."""
PAUSED = Speeds([GroupTimes([SampleTimes((TurnTimes(400, 0.0),))])], 0.01, 1 / 400, sync=0.5, pause=0.5)
"""A batch of one answer takes 4 s, and 0.5 s more for each sync meanwhile; learning takes 1 s."""


def planned(speeds, batch=2, engines=1, limit=None, **stream):
    samples = len(speeds.groups[0].samples)
    return virtual_run(speeds, StreamSection(**stream), settings(samples), batch, engines, limit)


def settings(samples):
    return RolloutSettings(None, samples, "sample", 0, 100, 60.0)


@pytest.mark.parametrize(
    ("speeds", "layout", "step"),
    [
        (TWO_TURNS, {}, 4.5 + 3 + 0.25),
        (TWO_TURNS, {"staleness": 2}, 4.5 + 3 + 0.25),
        (TWO_TURNS, {"round": 2}, 4.5 + 3 + 0.25 / 2),
        (TWO_TURNS, {"mode": "continuous"}, 4.5 + 3 + 0.25),
        # a batch is sampled while the one before it is waited for and learnt from
        (TWO_TURNS, {"mode": "continuous", "staleness": 1}, (4.5 + 3 + 0.25) / 2),
        (TWO_TURNS, {"mode": "continuous", "staleness": 1, "oversample": 1.0}, 4.5 + 3 + 0.25),
        (TWO_TURNS, {"mode": "continuous", "staleness": 2}, 3 + 0.25),
        (TWO_TURNS, {"limit": 2}, 2 * 4 + 0.5 + 3 + 0.25),
        (TWO_TURNS, {"limit": 2, "mode": "continuous"}, 2 * 4 + 0.5 + 3 + 0.25),
        (TAIL, {"batch": 1}, 4 + 1),
        (TAIL, {"batch": 1, "mode": "continuous"}, 4 + 1),
        (TAIL, {"batch": 1, "engines": 2}, 3 + 1),
        (TAIL, {"batch": 1, "engines": 2, "mode": "continuous"}, 3 + 1),
        (PAUSED, {"batch": 1, "mode": "continuous", "staleness": 1}, (4 + 0.5 + 1 + 0.5) / 2),
    ],
)
def test_the_step_is_as_long_as_computed_by_hand(speeds, layout, step):
    assert planned(speeds, **layout).step == pytest.approx(step, abs=1e-4)


def test_shares_of_idle_time():
    """Engines sample in 2 s of a batch."""
    for layout, step in (({}, 7.75), ({"mode": "continuous", "staleness": 1}, 3.875)):
        time = planned(TWO_TURNS, **layout)
        assert (time.trainer_idle, time.engines_idle) == pytest.approx((1 - 3 / step, 1 - 2 / step), abs=1e-4)
        assert time.generate == pytest.approx(step - 3.25, abs=1e-4)
    assert planned(TAIL, batch=1, engines=2).engines_idle == pytest.approx(1 - (1 + 3) / 2 / 4, abs=1e-4)


def test_rejected_groups_are_replaced():
    rejecting = Speeds(TWO_TURNS.groups, 0.01, 3 / 800, rejected=0.5)
    assert planned(rejecting).generate > planned(TWO_TURNS).generate + 1


def timeline(folder, turns, samples, *spans):
    """A run whose step 2 has these slices.

    Args:
        turns: (group, sample, turn, tokens, begin, end).
        samples: (group, sample, begin, end).
        more: (name, begin, end, arguments).
    """
    folder.mkdir(exist_ok=True)
    times = {"time/step": 9.0, "time/generate": 5.0, "time/learn": 2.0, "time/sync": 1.0, "time/sync_pause": 0.5}
    counts = {"stream/prompts": 4.0, "stream/filtered": 1.0, "stream/failed_groups": 0.0}
    lines = [{"step": 1, **times, **counts, "time/learn": 50.0}, {"step": 2, **times, **counts}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    slices = [
        *(
            ("turn", b, e, {"group": g, "sample": s, "turn": t, "tokens": n, "context": 5})
            for g, s, t, n, b, e in turns
        ),
        *(("sample", b, e, {"group": g, "sample": s, **SAMPLE}) for g, s, b, e in samples),
        *spans,
    ]
    events = [
        {"ph": "X", "name": name, "ts": round(b * 1e6), "dur": round((e - b) * 1e6), "args": {"step": 2, **arguments}}
        for name, b, e, arguments in slices
    ]
    (folder / "timeline.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]")
    return folder


SAMPLE = {"purpose": "sample", "status": "ok"}


def test_speeds_are_read_from_a_timeline(tmp_path):
    """Sample 0 waits for sample 1 before each wave. A token takes 0.1 s, the environment 0.5 s and 1 s."""
    turns = [
        *((7, 0, 0, 10, 9.0, 11.0), (7, 1, 0, 30, 10.0, 13.0)),
        *((7, 0, 1, 20, 11.5, 16.0), (7, 1, 1, 5, 14.0, 14.5)),
    ]
    evaluated = ("sample", 20.0, 25.0, {"group": 7, "sample": 0, "purpose": "eval", "status": "ok"})
    rewards = [
        ("rewards", 16.5, 18.5, {"group": 7, "purpose": "sample"}),
        ("rewards", 25, 30, {"group": 7, "purpose": "eval"}),
    ]
    folder = timeline(tmp_path, turns, [(7, 0, 8.0, 16.5), (7, 1, 8.0, 15.5)], evaluated, *rewards)
    measured = measured_speeds(folder, waves=True, batch=4, engines=1)
    speeds = measured.speeds
    assert (speeds.token, speeds.per_answer, speeds.request) == pytest.approx((0.1, 0.0, 0.0), abs=1e-9)
    [group] = speeds.groups
    assert group.reward == pytest.approx(2.0)
    assert [[turn.tokens for turn in sample.turns] for sample in group.samples] == [[10, 20], [30, 5]]
    assert [turn.after for sample in group.samples for turn in sample.turns] == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert [sample.opening for sample in group.samples] == pytest.approx([1.0, 2.0])
    assert speeds.learn(samples=4) == pytest.approx(2.0), "the first step is not counted"
    assert (speeds.sync, speeds.pause, speeds.other, speeds.rejected) == (1.0, 0.5, 1.0, 0.25)


@pytest.mark.parametrize("engines", [1, 2])
def test_what_an_answer_costs_beside_others_is_read_too(tmp_path, engines):
    """Answers of 10 to 40 tokens on one engine; a token takes 0.02 s, and 0.1 s more for each answer at once. Two
    engines have half of them each."""
    lengths, clock, ends = [10, 20, 30, 40], 0.0, []
    for index, (start, tokens) in enumerate(zip([0, *lengths], lengths, strict=False)):
        clock += (tokens - start) * (0.02 + 0.1 * (4 - index))
        ends.append(clock)
    turns = [(engine, n, 0, tokens, 0.0, ends[n]) for engine in range(engines) for n, tokens in enumerate(lengths)]
    samples = [(group, n, 0.0, end) for group, n, *_, end in turns]
    measured = measured_speeds(timeline(tmp_path, turns, samples), waves=True, batch=4, engines=engines)
    assert (measured.speeds.token, measured.speeds.per_answer) == pytest.approx((0.02, 0.1), rel=0.02)
    assert measured.answers[1] == pytest.approx(4.0)


def test_nothing_is_sampled_during_a_sync(tmp_path):
    turns = [(0, 0, 0, 10, 0.0, 2.0), (1, 0, 0, 20, 5.0, 7.0)]
    folder = timeline(tmp_path, turns, [(0, 0, 0.0, 2.0), (1, 0, 5.0, 7.0)], ("sync", 0.5, 1.5, {}))
    assert measured_speeds(folder, waves=False, batch=4, engines=1).speeds.token == pytest.approx(0.1)


def test_lengths_and_delays_of_flags_replace_the_measured_ones():
    distribution = Distribution.parse("300,800", "--answer-tokens")
    draws = sorted(distribution.draw(source) for source in [random.Random(0)] for _ in range(20_000))
    assert sum(draws) / len(draws) == pytest.approx(300, rel=0.03)
    assert draws[19_000] == pytest.approx(800, rel=0.03)
    speeds = with_distributions(TWO_TURNS, Distribution(70, 70), None, Distribution(2, 2), longest=60)
    assert {turn for group in speeds.groups for s in group.samples for turn in s.turns} == {TurnTimes(60, 1.0)}
    assert {group.reward for group in speeds.groups} == {2.0}
    assert with_distributions(TWO_TURNS, None, Distribution(3, 3), None, longest=60).groups[0].samples[0].turns[
        0
    ].after == pytest.approx(3)


@pytest.mark.parametrize("text", ["lots", "1,2,3", "0", "300,200", "300,1300", "nan", "inf"])
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ConfigError, match="--env-seconds is "):
        Distribution.parse(text, "--env-seconds")


@pytest.fixture
def words(tmp_path):
    """`rlhf plan` of a run on the simulated runtime."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    model, data = str(tiny_model(tmp_path / "model", hidden=16, heads=2, kv_heads=1)), str(tmp_path / "data.jsonl")
    return ["plan", "--model", model, "--data", data, "--backend", "simulated", "--algo", "grpo", "--reward", "math",
            "--sampling.samples_per_prompt", "2", "--sampling.max_new_tokens", "200", "--data.batch_size", "2",
            "--device", "cpu", "--device-memory", "64GiB"]  # fmt: skip


NUMBERS = ["--answer-tokens", "100", "--tokens-per-second", "100", "--learn-seconds", "3"]


def test_numbers_of_flags_are_enough(words, capsys):
    flags = [*NUMBERS, "--turns", "2", "--env-seconds", "1", "--reward-seconds", "0.5", "--sync-seconds", "0.25"]
    assert main([*words, *flags, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["step_time"]
    steps = {layout["name"]: layout["step"] for layout in times["layouts"]}
    assert steps["waves, staleness 0"] == pytest.approx(7.75, abs=1e-4)
    assert steps["continuous, staleness 0"] == pytest.approx(7.75, abs=1e-4)
    assert steps["continuous, staleness 4"] == pytest.approx(3.25, abs=1e-4)
    assert times["layouts"][0]["per_second"] == pytest.approx(4 / 7.75, abs=1e-4)
    assert times["layouts"][-1]["options"] == {"stream.mode": "continuous", "stream.staleness": "4"}
    assert main([*words, *flags]) == 0
    out = capsys.readouterr().out
    assert "assumes 3 s of learning for the 800 tokens of a batch, 0.25 s per sync" in out


def test_a_speed_of_sampling_replaces_the_measured_seconds_to_the_first_token(words, tmp_path, capsys):
    plans = []
    for name, request in (("quick", 0.0), ("slow", 2.0)):
        begins = {(0, 0, 10): 1.0, (0, 1, 20): 10.0, (1, 0, 30): 20.0}
        turns = [(g, s, 0, n, begin, begin + request + n / 10) for (g, s, n), begin in begins.items()]
        run = timeline(tmp_path / name, turns, [(group, sample, *times) for group, sample, _, _, *times in turns])
        assert measured_speeds(run, waves=True, batch=4, engines=1).speeds.request == pytest.approx(request, abs=1e-6)
        (run / "manifest.json").write_text('{"schema": 1, "starts": []}')
        options = f'[policy]\nmodel = "{tmp_path / "model"}"\ndtype = "auto"\n[algorithm]\nuse = "grpo"\n'
        (run / "config.toml").write_text(f'{options}[trainer]\nuse = "simulated"\n[generator]\nuse = "simulated"\n')
        assert main([*words, "--speeds", str(run), "--tokens-per-second", "100", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["step_time"])
    assert [layout["generate"] for layout in plans[1]["layouts"]] == [
        pytest.approx(layout["generate"]) for layout in plans[0]["layouts"]
    ]


def test_layouts_that_the_run_file_cannot_have_are_named(words, capsys):
    local = [*words, *NUMBERS, "--launcher.use", "local", "--trainer.use", "torch", "--generator.use", "transformers"]
    assert main([*local, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["step_time"]
    assert [layout["name"] for layout in times["layouts"]] == ["waves, staleness 0", "waves, staleness 1"]
    assert times["layouts"][0]["devices_idle"] == pytest.approx(0.0, abs=1e-6), "one process samples, then learns"
    assert "launcher 'local' alternates between generation and training" in times["left_out"]["continuous, staleness 1"]
    draining = ["--stream.mode", "continuous", "--sync.in_flight", "drain"]
    assert main([*words, *NUMBERS, *draining]) == 0
    assert "sync.in_flight = 'drain' cannot be planned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learn-seconds", "3"], "not known without --answer-tokens, --tokens-per-second; give them, or --speeds"),
        ([*NUMBERS, "--learn-seconds", "-1"], "--learn-seconds is '-1'; give a number above 0"),
        ([*NUMBERS, "--turns", "1.5"], "--turns is '1.5'; give a number above 0, without a fraction"),
        (["--speeds", "absent"], "absent"),
        (["--speeds", "RUN", "--turns", "2"], "--turns cannot be combined with --speeds"),
        (["--speeds", "RUN", "--algo", "rloo"], "its algorithm.use is 'grpo', here it is 'rloo'"),
        ([*NUMBERS, "--stream.replay", "RUN"], "stream.replay is set"),
    ],
)
def test_what_is_refused(words, tmp_path, flags, message, capsys):
    run = tmp_path / "run"
    timeline(run, [(0, 0, 0, 10, 1.0, 2.0)], [(0, 0, 1.0, 2.0)])
    (run / "manifest.json").write_text('{"schema": 1, "starts": []}')
    options = f'[policy]\nmodel = "{tmp_path / "model"}"\ndtype = "auto"\n[algorithm]\nuse = "grpo"\n'
    (run / "config.toml").write_text(f'{options}[trainer]\nuse = "simulated"\n[generator]\nuse = "simulated"\n')
    assert main([*words, *(str(run) if flag == "RUN" else flag for flag in flags)]) == 2
    assert message in capsys.readouterr().err


def test_an_algorithm_that_samples_nothing_has_its_training_step_only(words, tmp_path, capsys):
    run = timeline(tmp_path / "run", [], [])
    (run / "manifest.json").write_text('{"schema": 1, "starts": []}')
    options = (
        f'[policy]\nmodel = "{tmp_path / "model"}"\ndtype = "auto"\n[data]\nbatch_size = 4\n[algorithm]\nuse = "sft"\n'
    )
    (run / "config.toml").write_text(options + '[trainer]\nuse = "torch"\n')
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    sft = [*words[:5], "--algo", "sft", "--data.batch_size", "2", "--device", "cpu", "--device-memory", "64GiB"]
    assert main([*sft, "--speeds", str(run), "--json"]) == 0
    [layout] = json.loads(capsys.readouterr().out)["step_time"]["layouts"]
    assert (layout["name"], layout["learn"], layout["step"]) == ("training step", 1.0, 2.0), "half of 2 s, and 1 s"
    assert main([*sft, "--learn-seconds", "3"]) == 2
    assert "algorithm 'sft' samples nothing: give --speeds RUN, and none of" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["timeline.json", "metrics.jsonl"])
def test_a_run_without_times_is_refused(tmp_path, missing):
    folder = timeline(tmp_path, [(0, 0, 0, 10, 1.0, 2.0)], [(0, 0, 1.0, 2.0)])
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
        measured_speeds(folder, waves=True, batch=4, engines=1)
