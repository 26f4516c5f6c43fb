"""`rlhf replay RUN` trains on the samples that a run trained on, and ends with its weights."""

from __future__ import annotations

import shutil
import tomllib
from typing import Any

import pytest
import tomli_w
from rlhf.plugins import Plugins
from rlhf_runtime.config.components import dumped
from rlhf_runtime.config.flag_values import read

from tests.continuous import simulated
from tests.runs import Finished, Workshop, merged


def replay(shop: Workshop, run: Finished, *flags: str, output: str = "again") -> Finished:
    return shop.command("replay", str(run.path), "-o", str(shop.folder / output), *flags, output=shop.folder / output)


def learnt(run: Finished) -> list[dict[str, Any]]:
    """What each step reports of learning."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("stream/", "epoch", "sync/", "eval/"))}
        for line in run.lines()
    ]


@pytest.fixture(scope="module")
def grpo(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Workshop(tmp_path_factory.mktemp("grpo"), tiny.model, tiny.data).train("grpo", "run")


@pytest.fixture
def recorded(grpo: Finished, shop: Workshop) -> Finished:
    """A copy of a run of three steps, which a test may change."""
    return Finished(shutil.copytree(grpo.path, shop.folder / "run"), 0)


def test_a_replay_in_one_process_ends_with_the_same_weights(shop: Workshop) -> None:
    run = shop.train("ppo", "run", stream={"staleness": 1})
    rerun = replay(shop, run)
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights
    assert learnt(rerun) == learnt(run)
    assert all("epoch" in line for line in run.lines())
    assert not any("epoch" in line for line in rerun.lines()), "no row is drawn"
    assert rerun.rollouts() == run.rollouts()


def real_trainer(shop: Workshop, output: str, **changes: Any) -> Finished:
    """A continuous run of the trainer torch on random samples of the simulated engines."""
    trainer = {"use": "torch", "lr": 1e-3, "seconds": None, "speed": None}
    config = simulated(shop, output, **merged({"sync": {"canaries": 0}, "run": {"steps": 4}}, changes))
    return shop.train_config({**config, "trainer": {k: v for k, v in trainer.items() if v is not None}})


def test_a_run_whose_samples_depended_on_the_clock_can_be_repeated(shop: Workshop) -> None:
    run = real_trainer(shop, "run", stream={"staleness": 2, "order": "completion"})
    # This generator would sample other, shorter answers: the replay must take every sample from the record.
    flags = ("--launcher.use", "local", "--generator.use", "simulated", "--generator.tokens", "3")
    rerun = replay(shop, run, *flags)
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights
    assert rerun.rollouts() == run.rollouts()


def test_a_generator_without_a_copy_of_the_weights_replays_a_run_that_sent_weights(shop: Workshop) -> None:
    """``[sync]`` says how the recorded samples were drawn."""
    run = real_trainer(shop, "run", stream={"staleness": 2}, sync={"in_flight": "drain"})
    rerun = replay(shop, run, "--launcher.use", "local", "--generator.use", "transformers")
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights


def test_a_run_of_several_processes_is_replayed_in_one(shop: Workshop, recorded: Finished) -> None:
    file = recorded.path / "config.toml"
    places = {"policy": {"ranks": 2, "devices": 1}, "generator": {"ranks": 2, "devices": 1, "share": "policy"}}
    changes = {"placement": places, "sync": {"transport": "shared"}}
    file.write_text(tomli_w.dumps(merged(tomllib.loads(file.read_text()), changes)))
    rerun = replay(shop, recorded, "--launcher.use", "local", output="local")
    assert rerun.code == 0, rerun.said
    assert rerun.weights == recorded.weights
    for option in ("placement.policy.ranks = integer 2", "placement.generator.share = ", "sync.transport = "):
        assert option in rerun.err, "the note names it"
    assert "devices" not in rerun.err, "it has its default"
    refused = replay(shop, recorded, "--launcher.use", "local", "--placement.policy.ranks", "2", output="x")
    assert "launcher 'local' has one process" in refused.said


@pytest.mark.parametrize(
    ("trainer", "options"),
    [("torch", {}), ("deepspeed", {"cpus": 2, "namespace": "mine"})],
    ids=["defaults", "options"],
)
def test_a_run_of_other_plugins_is_replayed_here(
    shop: Workshop, recorded: Finished, trainer: str, options: dict[str, Any]
) -> None:
    """``config.toml`` holds every option of the launcher and the trainer, which these plugins do not have."""
    file = recorded.path / "config.toml"
    config = tomllib.loads(file.read_text())
    plugins = Plugins.discover()
    for kind, use, section in (("launcher", "ray", options), ("trainer", trainer, config["trainer"])):
        cls = plugins.resolve(kind, use).cls
        values = {key: value for key, value in section.items() if key in cls.Config.model_fields}
        config[kind] = {"use": use, **dumped(cls.Config(**read(cls.Config, values)))}
    file.write_text(tomli_w.dumps(config))
    rerun = replay(shop, recorded, "--launcher.use", "local", "--trainer.use", "torch")
    assert rerun.code == 0, rerun.said
    assert rerun.weights == recorded.weights
    assert [name for name in options if f"launcher.{name} = " in rerun.err] == list(options), "the note names them"
    assert ("note: left out" in rerun.err) == bool(options)
    refused = shop.command("train", str(file), "--run.output", str(shop.folder / "x"), "--launcher.use", "local")
    assert [name for name in options if f"launcher.{name}" in refused.said] == list(options), "they are refused"
    assert "strategy" not in refused.said


def test_a_replay_that_was_stopped_continues(shop: Workshop) -> None:
    run = shop.train("grpo", "run", run={"steps": 4}, checkpoint={"every": 1}, trainer={"schedule": "linear"})
    first = replay(shop, run, "--steps", "2")
    assert first.code == 0, first.said
    assert learnt(first) == learnt(run)[:2], "the learning rate falls as in a run of 4 steps"
    rerun = replay(shop, run, "--resume")
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights


def test_a_replay_may_split_its_batches_otherwise(shop: Workshop) -> None:
    """A run of a large device is replayed on a small one."""
    run = shop.train("grpo", "run", policy={"micro_tokens": 4096})
    rerun = replay(shop, run, "--policy.micro_tokens", "16", "--policy.gradient_checkpointing", "true")
    assert rerun.code == 0, rerun.said
    norm, original = (finished.lines()[-1]["policy/grad_norm"] for finished in (rerun, run))
    assert norm == pytest.approx(original, rel=1e-4)  # sums of fp32 in another order


def test_the_first_steps_of_a_run_that_broke_off_are_replayed(shop: Workshop, recorded: Finished) -> None:
    (recorded.path / "rollouts/step-000003.arrow").unlink()
    refused = replay(shop, recorded)
    assert refused.code == 2
    assert "records no samples of step 3 of 3. Set --steps 2 to replay the recorded steps." in refused.said
    assert replay(shop, recorded, "--steps", "2").code == 0


def test_a_record_that_is_cut_short_is_named(shop: Workshop, recorded: Finished) -> None:
    file = recorded.path / "rollouts/step-000002.arrow"
    file.write_bytes(file.read_bytes()[:200])
    refused = replay(shop, recorded)
    assert refused.code != 0
    assert "step-000002.arrow" in refused.said


def test_a_record_with_samples_that_are_too_old_is_named(shop: Workshop, recorded: Finished) -> None:
    rollouts = recorded.path / "rollouts"
    (rollouts / "step-000003.arrow").write_bytes((rollouts / "step-000001.arrow").read_bytes())
    refused = replay(shop, recorded)
    assert refused.code == 1
    assert "step-000003.arrow records tokens of version 0 for step 3" in refused.said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sampling.temperature", "0.5"), "records a different run: sampling.temperature: was 1.0, now 0.5. Use its"),
        (("--stream.staleness", "1"), "records a different run: stream.staleness: was 0, now 1. Use its"),
        (("--steps", "4"), "run.stop_after = 4, but the run has only run.steps = 3. Remove stop_after."),
        (("--run.seed", "5"), "was recorded with seed 1, but run.seed = 5"),
    ],
)
def test_a_record_of_another_run_is_refused(
    shop: Workshop, grpo: Finished, flags: tuple[str, ...], message: str
) -> None:
    refused = replay(shop, grpo, *flags)
    assert refused.code == 2
    assert message in refused.said


def test_a_folder_without_a_record_is_refused(shop: Workshop) -> None:
    run = shop.train("grpo", "run", checkpoint={"save_rollouts": False})
    refused = replay(shop, run)
    assert "records no samples of step 1 of 3. It was run with checkpoint.save_rollouts = false." in refused.said
    itself = replay(shop, run, output="run")
    assert itself.code == 2
    failure = shop.command("replay", str(shop.folder), "-o", str(shop.folder / "x"))
    assert "is not the folder of a run: it has no config.toml" in failure.said
    algorithm = shop.run("grpo", "named", stream={"replay": str(shop.folder)})
    assert "is not the folder of a run: it has no config.toml" in algorithm.said
