"""The continuous stream on the simulated runtime: staleness is a promise, and no prompt is lost or trained on twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.continuous import BREAKS, DEALS, check_ledger, drawn, groups_of, simulated
from tests.forks import Forks
from tests.runs import Finished, Workshop, merged
from tests.test_resume import KILLER, Runs


def run_and_check(shop: Workshop, output: str, **changes: Any) -> Finished:
    config = simulated(shop, output, **changes)
    run = shop.train_config(config)
    check_ledger(run, config)
    return run


def break_and_resume(shop: Workshop, seed: int) -> None:
    """A run with random options, which a reward ends at a random moment, and its resume."""
    draw, output = random.Random(seed), f"run-{seed}"
    marker = shop.folder / f"{output}.breaks"
    reward = shop.file(f"{output}.py", BREAKS.format(marker=str(marker)))
    config = simulated(shop, output, **merged(drawn(seed), {"reward": [{"use": f"file:{reward}"}]}))
    if draw.random() < 0.5:
        config["curriculum"] = {"use": f"file:{shop.file(f'{output}-deals.py', DEALS)}"}
    marker.write_text(str(draw.randrange(40)))
    run = shop.run_config(config)
    if run.code:
        assert "the reward broke" in run.said
        marker.unlink(missing_ok=True)
        run = shop.run_config(config, "--run.resume")
    assert run.code == 0, run.said
    check_ledger(run, config)


@pytest.mark.parametrize("seed", [0, 1, 2, 5])  # each value of each option of the stream is in one
def test_no_prompt_is_lost_and_none_is_too_old_whatever_the_timing(shop: Workshop, seed: int) -> None:
    break_and_resume(shop, seed)


@pytest.mark.full
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_runs_keep_the_promise(shop: Workshop, block: int) -> None:
    for seed in range(100 + 50 * block, 150 + 50 * block):
        break_and_resume(shop, seed)


def test_a_curriculum_is_asked_and_told_as_in_waves(shop: Workshop) -> None:
    """Without rejected groups: the same rows for the same steps, knowing the same batches."""
    logs = []
    for mode in ("waves", "continuous"):
        file = shop.file(f"{mode}.py", DEALS)
        stream = {"mode": mode, "staleness": 2}
        config = simulated(shop, mode, stream=stream, curriculum={"use": f"file:{file}"})
        run = shop.train_config(config)
        assert [line["curriculum/dealt"] for line in run.lines()] == [4.0 * n for n in range(1, 7)]
        logs.append(file.with_suffix(".log").read_text().splitlines())
    check_ledger(run, config)
    start, choices = [f"choose 4 {step}" for step in range(3)], [f"choose 4 {step}" for step in range(3, 6)]
    assert (
        logs[0]
        == logs[1]
        == start + [line for choice in choices for line in ("finished 4", choice)] + ["finished 4"] * 3
    )


def test_a_curriculum_that_fails_while_samples_go_on_ends_the_run(shop: Workshop) -> None:
    """It is asked for the row that takes the place of a rejected group."""
    broken = DEALS.replace("return list(range(self.dealt - n, self.dealt))", "return [0] * n if n > 1 else ['x']")
    config = simulated(
        shop, "run", stream={"filter": {"low": 2.0}}, curriculum={"use": f"file:{shop.file('broken.py', broken)}"}
    )
    run = shop.run_config(config)
    assert run.code != 0
    assert "of curriculum 'deals' chose str 'x', which is not a position" in run.said


@pytest.mark.parametrize(("moment", "saved"), [("saved 4", 4), ("rollouts 7", 6)])
def test_a_killed_process_goes_on_where_its_checkpoint_stood(
    shop: Workshop, forks: Forks, moment: str, saved: int
) -> None:
    """Killed right after a checkpoint, and after a batch that no checkpoint knows of. Samples are under way."""
    observer = [{"use": f"file:{shop.file('killer.py', KILLER)}"}]
    config = simulated(shop, "run", run={"steps": 10}, stream={"staleness": 2}, observer=observer)
    runs = Runs(forks, shop)
    runs.die_at(config, moment)
    run = runs.resume(config)
    assert f"resumed after step {saved}" in run.err
    check_ledger(run, config)


@pytest.mark.parametrize("in_flight", ["drain", "restart"])
def test_no_answer_mixes_weights_unless_it_continues(shop: Workshop, in_flight: str) -> None:
    run = run_and_check(
        shop,
        "run",
        run={"steps": 8},
        stream={"staleness": 2},
        sync={"in_flight": in_flight},
        generator={"tokens": 60.0, "tokens_sigma": 0.2, "speed": 20.0},  # slow: some answers outlast a step
        trainer={"speed": 20.0},
        env={"speed": 20.0},
    )
    spans = [len(turn["versions"]) for sample in run.samples() for turn in sample["turns"] if turn["sampled"]]
    assert set(spans) == {1}
    restarted = sum(line["stream/tokens_restarted_weights"] for line in run.lines())
    assert (restarted > 0) == (in_flight == "restart")


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize("in_flight", ["continue", "drain", "restart"])
def test_engines_that_are_actors_of_ray_keep_the_promise(shop: Workshop, in_flight: str) -> None:
    pytest.importorskip("ray")
    speed = {"speed": 50.0}
    run_and_check(
        shop,
        "run",
        launcher={"use": "ray", "cpus": 4, "object_store_gib": 0.25},
        placement={"generator": {"ranks": 2}},
        sync={"in_flight": in_flight, "canaries": 0},
        generator={"engines": 1, **speed},
        env=speed,
        trainer=speed,
    )


def test_learning_and_sampling_overlap(shop: Workshop) -> None:
    """While a step learns, the samples of the next one are under way."""
    run = run_and_check(shop, "run", stream={"staleness": 1}, trainer={"seconds": 20.0})
    assert [number for _, number, _, _ in groups_of(run)] == list(range(24)), "in submission order, without gaps"
    assert all(line["stream/waiting"] + line["stream/running"] == 4 for line in run.lines()[:-1])
    assert run.lines()[0]["stream/age"] == 0
    assert max(line["stream/age"] for line in run.lines()[1:]) == 1.0


def test_without_staleness_nothing_is_sampled_while_the_policy_learns(shop: Workshop) -> None:
    run = run_and_check(shop, "run", stream={"staleness": 0})
    assert {line["stream/oldest"] for line in run.lines()} == {0.0}
    assert {line["stream/waiting"] + line["stream/running"] for line in run.lines()} == {0.0}


def test_a_filter_that_rejects_everything_ends_with_its_cause(shop: Workshop) -> None:
    config = simulated(shop, "run", run={"steps": 2}, stream={"filter": {"low": 2.0, "max_rounds": 2}})
    run = shop.run_config(config)
    assert run.code != 0
    assert "groups did not pass stream.filter" in run.said


def test_an_environment_that_fails_ends_the_run_with_its_cause(shop: Workshop) -> None:
    env = shop.file(
        "env.py",
        "from rlhf.interfaces import Env\n\n\nclass Broken(Env):\n    name = 'broken'\n\n"
        "    async def reset(self, row, seed):\n        raise ValueError('no game today')\n\n"
        "    async def step(self, action):\n        raise ValueError\n",
    )
    run = shop.run_config(merged(simulated(shop, "run"), {"env": None}) | {"env": {"use": f"file:{env}"}})
    assert run.code != 0
    assert "no game today" in run.said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": {"round": 2}}, "stream.round = 2 generates whole rounds before the first of their steps"),
        (
            {"stream": {"staleness": 0, "oversample": 1.5}},
            "stream.oversample = 1.5: with stream.staleness = 0 at most 1 batches may be started",
        ),
        ({"launcher": {"use": "local"}}, "launcher 'local' alternates between generation and training"),
        (
            {"placement": {"generator": {"share": "policy"}}},
            "[placement.generator] shares the devices of 'policy', which learns while samples are generated",
        ),
        (
            {"stream": {"mode": "waves", "order": "completion"}},
            "stream.order = 'completion': batches that are generated as a whole are in submission order",
        ),
        (
            {"stream": {"mode": "waves", "oversample": 1.0}},
            "stream.oversample = 1: batches are generated as a whole, and no others are started meanwhile",
        ),
        (
            {"stream": {"mode": "waves"}, "sync": {"in_flight": "drain"}},
            "sync.in_flight = 'drain': no answer is unfinished when weights are sent",
        ),
        (
            {"stream": {"mode": "waves"}, "sync": {"keys": "keep"}},
            "sync.keys = 'keep': no answer is unfinished when weights are sent",
        ),
        (
            {"sync": {"keys": "keep", "in_flight": "drain"}},
            "sync.keys = 'keep': with sync.in_flight = 'drain' no answer continues with new weights",
        ),
        ({"sync": {"keys": "keep"}}, "sync.keys = 'keep': generator 'simulated' does not keep keys and values"),
        ({"placement": {"policy": {"ranks": 2}}}, "launcher 'simulated' reserves none"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    shop: Workshop, changes: dict[str, Any], message: str
) -> None:
    run = shop.run_config(simulated(shop, "run", **changes))
    assert run.code != 0
    assert message in " ".join(run.said.split())
    assert not (run.path / "metrics.jsonl").exists()


def test_a_generator_without_single_requests_is_refused(shop: Workshop) -> None:
    config = simulated(shop, "run")
    config["generator"] = {"use": "transformers"}
    run = shop.run_config(config)
    assert run.code != 0
    assert "generator 'transformers' does not answer single requests" in " ".join(run.said.split())
