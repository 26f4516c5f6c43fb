"""`rlhf runs`, `rlhf show` and `rlhf samples` on real runs."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import rlhf
from rich.console import Console
from rlhf.errors import RlhfError
from rlhf_cli.main import main
from rlhf_cli.runs import output
from rlhf_runtime.output.run_directory import RunDirectory

from tests.runs import REWARD, Finished, Workshop, change_rows

FAILS = """
from pathlib import Path

async def score(prompt, completion, row):
    if Path({path!r}).exists():
        raise ValueError("no such\\x1b[2J row")
    return len(set(completion)) / 6
"""
GAME = {"rollout": {"use": "multi_turn"}, "env": {"use": "number_game", "max_turns": 3}}


@pytest.fixture(scope="module")
def shop(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("looking")
    (folder / "runs").mkdir()
    return Workshop(folder, tiny.model, tiny.data)


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Finished:
    evaluated = {"data": {"eval": [{"path": str(shop.data), "max_rows": 3}]}, "eval": {"every": 1, "metric": "reward"}}
    rewards = [{"use": f"file:{shop.file('reward.py', REWARD)}"}, {"use": "length", "high": 4, "name": "short"}]
    return shop.train("rloo", "runs/whole", run={"steps": 3, "show_samples": 2}, reward=rewards, **evaluated)


@pytest.fixture(scope="module")
def offline(shop: Workshop) -> Finished:
    return shop.train("dpo", "runs/offline", trainer={"lr": 1e-2})


def called(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> str:
    """The output of a command. Its exit code must be ``code``."""
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert status == code, captured.err
    return captured.out if code == 0 else captured.err


def copied(run: Finished, target: Path) -> Path:
    shutil.copytree(run.path, target)
    return target


def edit_start(run: Path, *gone: str) -> None:
    """Remove keys from the last start in the manifest, like in that of a killed run."""
    manifest = json.loads((run / "manifest.json").read_text())
    for key in gone:
        del manifest["starts"][-1][key]
    (run / "manifest.json").write_text(json.dumps(manifest))


# ----------------------------------------------------------------------------------------------- runs


def test_runs_are_listed_newest_first(whole, offline, shop, capsys):
    lines = called(capsys, "runs", shop.folder / "runs").splitlines()
    assert lines[0].split() == ["run", "algorithm", "model", "step", "state", "last", "best", "when"]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["offline", "dpo", "model", "3/3", "finished"],
        ["whole", "rloo", "model", "3/3", "finished"],
    ]
    newest, older = json.loads(called(capsys, "runs", shop.folder / "runs", "--json"))
    assert (newest["last"]["name"], older["last"]["name"], newest["best"]) == ("loss", "reward", None)
    rewards = [line["eval/reward"] for line in whole.lines()]
    assert older["last"]["value"] == whole.lines()[-1]["reward/mean"]
    best = {"metric": "eval/reward", "value": max(rewards), "step": rewards.index(max(rewards)) + 1}
    assert older["best"] == best
    assert older["run"] == "whole"


def test_links_and_folders_inside_a_run_are_not_listed(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "a" / "1")
    (tmp_path / "a" / "latest").symlink_to("1")
    (row,) = json.loads(called(capsys, "runs", tmp_path, "--json"))
    assert (row["run"], row["path"]) == ("a/1", str(run))
    assert [row["run"] for row in json.loads(called(capsys, "runs", run, "--json"))] == ["1"]


def test_a_folder_without_runs_is_an_error(tmp_path, capsys):
    assert "there is no run in" in called(capsys, "runs", tmp_path, code=2)
    assert "does not exist" in called(capsys, "runs", tmp_path / "x", code=2)
    assert "is a file" in called(capsys, "runs", __file__, code=2)
    assert json.loads(called(capsys, "runs", tmp_path, "--json")) == []


# ---------------------------------------------------------------------------------------------- states


def test_a_run_whose_process_works_is_shown_as_running(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    edit_start(run, "ended")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    with RunDirectory.create(run, resume=True):
        assert "  running: process " in called(capsys, "show", run)
        (row,) = json.loads(called(capsys, "runs", run, "--json"))
    assert (row["state"], row["step"], row["problems"]) == ("running", 3, [])


def test_a_killed_run_is_shown_as_failed_with_the_reason(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    edit_start(run, "ended")
    text = called(capsys, "show", run)
    assert "failed: it did not record its end: it was killed" in text
    assert f"rlhf train {run}/config.toml --output {run} --resume" in text


def test_a_failed_run_says_why_and_the_command_that_is_shown_continues_it(shop, capsys):
    down = shop.folder / "down"
    down.touch()
    reward = [{"use": f"file:{shop.file('fails.py', FAILS.format(path=str(down)))}"}]
    broken = shop.run("rloo", "broken", reward=reward)
    assert broken.code == 1
    text = called(capsys, "show", broken.path)
    assert "broken: failed" in text
    assert "raised ValueError: no such\\x1b[2J row" in text
    assert "Continue from step 0, as there is no checkpoint:" in text
    (command,) = [line.strip() for line in text.splitlines() if line.strip().startswith("rlhf train")]
    down.unlink()
    called(capsys, *shlex.split(command)[1:])
    text = called(capsys, "show", broken.path)
    assert "broken: finished" in text
    assert "sampling.max_new_tokens" in text
    assert "sampling.top_p" not in text  # the resume read it from config.toml, where every option is


def test_the_command_that_is_shown_continues_a_run_that_was_stopped_by_its_options(shop, capsys):
    stopped = shop.train("rloo", "stopped", run={"steps": 3, "stop_after": 1})
    text = called(capsys, "show", stopped.path)
    (command,) = [line.strip() for line in text.splitlines() if line.strip().startswith("rlhf train")]
    called(capsys, *shlex.split(command)[1:])
    assert "stopped: finished" in called(capsys, "show", stopped.path)
    held_out = {"data": {"eval": str(shop.data)}, "eval": {"every": 1, "metric": "prompts", "patience": 1}}
    impatient = shop.train("rloo", "impatient", **held_out)
    text = called(capsys, "show", impatient.path)
    assert "2 of 3 steps" in text
    assert "Try the model" in text  # a resume would stop again at once
    assert "--resume" not in text


def test_a_run_whose_checkpoints_cannot_be_read_says_so(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    edit_start(run, "ended")
    for manifest in run.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text("{")
    text = called(capsys, "show", run)
    assert "It cannot be resumed as it is" in text
    assert "manifest.json is not valid JSON" in text
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "not mounted")
    assert "cannot be listed" in called(capsys, "show", run)


def test_a_run_with_objects_of_python_is_continued_in_python(shop, capsys):
    def broken(completions, **columns):
        raise ValueError("no reward")

    output = shop.folder / "python"
    with pytest.raises(RlhfError, match="no reward"):
        rlhf.train(
            algorithm="rloo",
            model=str(shop.model),
            data=str(shop.data),
            reward=broken,
            steps=1,
            options={"sampling.samples_per_prompt": 2, "sampling.max_new_tokens": 4, "data.batch_size": 2},
            output=output,
        )
    text = called(capsys, "show", output)
    assert f"in Python and with the same objects:\n    rlhf.train(..., output='{output}', resume=True)" in text
    assert ["sampling.samples_per_prompt", "2"] in [line.split() for line in text.splitlines()]


def test_a_run_that_does_not_record_its_end_and_its_options_is_shown_with_what_it_lacks(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    edit_start(run, "ended", "total_steps", "options")
    text = called(capsys, "show", run)
    assert "run: failed" in text
    assert "This run does not record which options differ from their defaults" in text


@pytest.mark.parametrize("name", ["config.toml", "manifest.json"])
def test_missing_and_damaged_files_are_named_and_the_rest_is_shown(whole, tmp_path, capsys, name):
    run = copied(whole, tmp_path / "run")
    (run / name).write_text("{")
    assert f"note: {run / name}" in called(capsys, "show", run)
    assert f"note: run: {run / name}" in called(capsys, "runs", tmp_path)
    (run / name).unlink()
    text = called(capsys, "show", run)
    assert f"note: {name} is missing" in text
    assert "3 of " in text


def test_of_many_starts_the_first_and_the_last_are_shown(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    times = [f"2026-01-{day:02} 10:00" for day in range(1, 9)]
    for count, names in ((6, times[:6]), (7, [times[0], "5 more", times[6]]), (8, [times[0], "6 more", times[7]])):
        manifest["starts"] = [manifest["starts"][-1] | {"time": time} for time in times[:count]]
        (run / "manifest.json").write_text(json.dumps(manifest))
        assert f" {', '.join(names)}\n" in called(capsys, "show", run)


def test_a_metric_that_is_not_a_number_is_left_out(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["reward/mean"], lines[2]["reward/mean"] = [], "x"
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward = lines[0]["reward/mean"]
    first = f"{reward:.4g}"
    assert ["reward/mean", first, first] in [line.split()[:3] for line in called(capsys, "show", run).splitlines()]
    (row,) = json.loads(called(capsys, "runs", run, "--json"))
    assert row["last"] == {"name": "reward", "value": reward}
    for line in lines:
        line.pop("reward/mean")
    del lines[2]["policy/loss"]  # a step that was skipped has no loss
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = json.loads(called(capsys, "runs", run, "--json"))
    assert row["last"] == {"name": "loss", "value": lines[1]["policy/loss"]}


def test_damaged_metrics_are_reported_once(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{", lines[2], ""]))
    text = called(capsys, "show", run)
    assert text.count("metrics.jsonl:2 is not valid JSON") == 1
    assert "3 of 3 steps" in text


# ------------------------------------------------------------------------------------------------ show


def test_a_run_is_shown(whole, capsys):
    text = called(capsys, "show", whole.path)
    facts = [line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1]
    assert ["sampling.max_new_tokens", "6"] in facts
    assert ["reward.1.high", "4"] in facts
    assert not any(name == "sampling.top_p" for name, _ in facts)  # at its default
    assert ["reward", "length        rlhf-plugin-length 0.1.0"] in [[a, b.strip()] for a, b in facts]
    assert "3 of 3 steps (100 %)" in text
    first, last = (whole.lines()[n]["reward/mean"] for n in (0, -1))
    assert ["reward/mean", f"{first:.4g}", f"{last:.4g}"] in [line.split()[:3] for line in text.splitlines()]
    assert "best value" in text
    assert "whole/model" in text
    assert "\n  finished\n  Try the model:\n" in text


def test_curves_of_the_named_metrics_are_drawn(whole, capsys):
    text = called(capsys, "show", whole.path, "--metric", "policy/grad_norm")
    values = [line["policy/grad_norm"] for line in whole.lines()]
    assert f"{max(values):.4g} │" in text
    assert f"{min(values):.4g} │" in text
    assert "reward/mean" not in text.partition("\nMetrics\n")[2]
    error = called(capsys, "show", whole.path, "--metric", "policy/grad_nrm", code=2)
    assert "has no such metric; it has " in error
    assert "Did you mean 'policy/grad_norm'?" in error


def test_two_runs_are_compared(whole, offline, capsys):
    text = called(capsys, "show", whole.path, offline.path)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["algorithm.use"] == ['"rloo"', '"dpo"']
    assert rows["trainer.lr"] == ["0.001", "0.01"]
    assert "data.batch_size" not in rows
    assert "run.output" not in rows
    losses = [line["policy/loss"] for line in offline.lines()]
    assert f"  {losses[0]:.4g} -> {losses[-1]:.4g}\n" in text
    assert text.count("\npolicy/loss\n") == 1
    error = called(capsys, "show", whole.path, whole.path, code=2)
    assert error.endswith("are the same run. Name two runs, or only one.\n")


def test_two_equal_runs_have_no_differences(whole, tmp_path, capsys):
    text = called(capsys, "show", whole.path, copied(whole, tmp_path / "other"))
    assert "Options that differ: none" in text
    assert "Plugins that differ: none" in text


def test_in_a_terminal_two_curves_share_a_picture(whole, offline, capsys, monkeypatch):
    terminal = io.StringIO()
    console = Console(
        file=terminal, force_terminal=True, width=120, highlight=False, markup=False, color_system="standard"
    )
    monkeypatch.setattr(output, "terminal", lambda: console)
    called(capsys, "show", whole.path, offline.path, "--metric", "policy/loss")
    text = terminal.getvalue()
    assert text.count(" step 1") == 1
    assert "\x1b[36m" in text  # cyan
    assert "\x1b[35m" in text  # magenta


def test_control_characters_in_the_files_of_a_run_are_escaped(offline, tmp_path, capsys):
    run = copied(offline, tmp_path / "run")
    config = (run / "config.toml").read_text()
    for name in ("dpo", "model"):  # names of the algorithm and of the model
        config = config.replace(f'{name}"', f'{name}\\u001b[2J"')
    (run / "config.toml").write_text(config)
    manifest = (run / "manifest.json").read_text().replace('"name": "', '"name": "\\u001b]0;x')
    (run / "manifest.json").write_text(manifest)
    metrics = (run / "metrics.jsonl").read_text().replace('"policy/loss"', '"policy/\\u001b[2Jloss"')
    (run / "metrics.jsonl").write_text(metrics)
    for words in (["runs", tmp_path], ["show", run], ["show", run, offline.path, "--metric", "policy/\x1b[2Jloss"]):
        text = called(capsys, *words)
        assert "\x1b" not in text, words
        assert "\\x1b" in text, words


def test_a_wrong_folder_is_an_error(whole, tmp_path, capsys):
    error = called(capsys, "show", whole.path.with_name("whle"), code=2)
    assert f"there is no folder {whole.path.with_name('whle')}. Did you mean '{whole.path}'?" in error
    error = called(capsys, "show", whole.path.parent, code=2)
    assert re.search(rf"holds no run: .* Runs below it: .*{whole.path}\b", error)
    assert "holds no run" in called(capsys, "show", tmp_path, code=2)
    assert "is a file. Name the folder of a run" in called(capsys, "show", __file__, code=2)


# --------------------------------------------------------------------------------------------- samples


def recorded(run: Finished, step: int) -> list[dict[str, Any]]:
    return list(run.samples_of(f"step-{step:06d}.arrow"))


def sample_rows(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    return [json.loads(text) for text in called(capsys, "samples", *words, "--json").splitlines()]


def test_the_worst_and_the_best_samples_of_a_step(whole, capsys):
    samples = sample_rows(capsys, whole.path, "--step", 2, "--worst", 3, "--best", 2)
    rewards = sorted(line["reward"] for line in recorded(whole, 2))
    assert [(s["chosen"], s["reward"]) for s in samples] == [
        *(("worst", r) for r in rewards[:3]), *(("best", r) for r in rewards[:-3:-1])
    ]  # fmt: skip
    worst = samples[0]
    line = next(x for x in recorded(whole, 2) if (x["group"], x["sample"]) == (worst["group"], worst["sample"]))
    assert worst["prompt"] == line["prompt"]
    assert worst["turns"][0]["text"] == line["turns"][1]["text"]
    assert worst["rewards"] == {name: result["value"] for name, result in line["rewards"].items()}
    group = [x["reward"] for x in recorded(whole, 2) if x["group"] == worst["group"]]
    assert worst["group_mean"] == pytest.approx(sum(group) / len(group))

    text = called(capsys, "samples", whole.path, "--step", 2, "--worst", 3)
    assert text.startswith(f"{whole.path / 'rollouts' / 'step-000002.arrow'}: 12 samples of 4 prompts\n")
    assert f"worst 1 of 3: group {worst['group']}, sample {worst['sample']}, row {worst['row']} of 'data'" in text
    assert f"  reward {worst['reward']:.4g} (mean of its group {worst['group_mean']:.4g}): reward " in text
    assert f"  prompt\n    {worst['prompt']}\n  completion\n" in text
    first = called(capsys, "samples", whole.path, "--step", 2)
    assert first.count("\ngroup ") == 5
    assert "12 samples of 4 prompts; the first 5 are shown (others: --worst" in first.partition("\n")[0]


def test_samples_are_sorted_by_one_reward_or_by_length(whole, capsys):
    lines = recorded(whole, 3)  # the last step
    for name in ("reward", "short"):
        (best,) = sample_rows(capsys, whole.path, "--best", 1, "--sort-by", name)
        assert best["rewards"][name] == max(line["rewards"][name]["value"] for line in lines)
    (longest,) = sample_rows(capsys, whole.path, "--best", 1, "--sort-by", "length")
    assert longest["length"] == max(len(line["turns"][1]["ids"]) for line in lines)
    error = called(capsys, "samples", whole.path, "--best", 1, "--sort-by", "shrt", code=2)
    assert "--sort-by shrt: allowed: length, reward, short. Did you mean 'short'?" in error
    assert "Set one of them" in called(capsys, "samples", whole.path, "--sort-by", "short", code=2)


def test_samples_of_one_group_source_or_at_random(whole, capsys):
    group = recorded(whole, 3)[0]["group"]
    assert [(s["group"], s["sample"]) for s in sample_rows(capsys, whole.path, "--group", group)] == [
        (group, 0), (group, 1), (group, 2)
    ]  # fmt: skip
    heading = called(capsys, "samples", whole.path, "--group", group).splitlines()[0]
    assert heading.endswith(f"step-000003.arrow, group {group}: 3 samples of 1 prompts")
    assert len(sample_rows(capsys, whole.path)) == 12
    draws = [sample_rows(capsys, whole.path, "--random", 4) for _ in range(2)]
    assert draws[0] == draws[1]
    assert len({(s["group"], s["sample"]) for s in draws[0]}) == 4
    assert len(sample_rows(capsys, whole.path, "--source", "data", "--random", 99)) == 12
    error = called(capsys, "samples", whole.path, "--source", "math", code=2)
    assert "--source math: no sample has this value; the sources are data." in error
    assert "--group 999: no sample" in called(capsys, "samples", whole.path, "--group", 999, code=2)


def test_turns_in_an_environment_are_shown_with_their_rewards(shop, capsys):
    played = shop.train("rloo", "game", reward=None, run={"steps": 1}, **GAME)
    sample = next(s for s in sample_rows(capsys, played.path, "--random", 99) if len(s["turns"]) > 2)
    assert {turn["speaker"] for turn in sample["turns"]} == {"policy", "environment"}
    assert sample["rewards"] == {"env": pytest.approx(sum(turn["reward"] or 0 for turn in sample["turns"]))}
    text = called(capsys, "samples", played.path, "--group", sample["group"])
    turn = sample["turns"][0]
    assert f"  policy, {turn['tokens']} tokens, reward {turn['reward']:.4g}\n" in text
    assert f"  environment, {sample['turns'][1]['tokens']} tokens\n" in text
    assert " turns\n" in text


def test_a_failed_sample_is_shown_with_its_error_and_not_compared(whole, tmp_path, capsys):
    run = copied(whole, tmp_path / "run")
    file = run / "rollouts" / "step-000003.arrow"

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0] |= {"status": "failed", "error": "RolloutError: \x1b[31mdown", "reward": None}
        rows[0] |= {"turns": [], "rewards": []}
        rows[1]["turns"][1]["text"] = "x" * 5000

    change_rows(file, change)
    text = called(capsys, "samples", run)
    assert "  reward none" in text
    assert "  error: RolloutError: \\x1b[31mdown" in text
    assert "xxx ... 3800 characters ... xxx" in text
    assert "x" * 5000 in called(capsys, "samples", run, "--full")
    assert "1 of them have no reward, and are not compared." in called(capsys, "samples", run, "--worst", 1)
    assert len(sample_rows(capsys, run, "--worst", 99)) == 11


def test_a_missing_step_is_an_error(whole, capsys):
    error = called(capsys, "samples", whole.path, "--step", 7, code=2)
    assert f"--step 7: {whole.path} holds no samples of this step. It holds samples of steps 1 to 3." in error


def test_a_run_without_samples_is_refused_with_the_reason(offline, whole, shop, tmp_path, capsys):
    assert "dpo learns from data and samples nothing." in called(capsys, "samples", offline.path, code=2)
    unsaved = shop.train("rloo", "unsaved", run={"steps": 1}, checkpoint={"save_rollouts": False})
    assert "checkpoint.save_rollouts = false" in called(capsys, "samples", unsaved.path, code=2)
    run = copied(whole, tmp_path / "run")
    shutil.rmtree(run / "rollouts")
    assert "They were deleted" in called(capsys, "samples", run, code=2)
    (run / "metrics.jsonl").write_text("")
    assert "The run has finished no step." in called(capsys, "samples", run, code=2)


def test_a_file_of_samples_can_be_named(whole, tmp_path, capsys):
    file = whole.path / "rollouts" / "step-000001.arrow"
    assert len(sample_rows(capsys, file, "--worst", 2)) == 2
    assert "is a single file of samples, without steps" in called(capsys, "samples", file, "--step", 1, code=2)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"prompt": "1+1="}\n')
    error = called(capsys, "samples", damaged, code=1)
    assert f"{damaged}:1 is not a recorded sample: it has no 'sample'." in error
    damaged.write_text(json.dumps(recorded(whole, 1)[0] | {"reward": "high"}) + "\n")
    error = called(capsys, "samples", damaged, code=1)
    assert "a reward is str 'high', not a number" in error


# -------------------------------------------------------------------------------------- while training


def test_the_best_and_the_worst_sample_are_printed_while_training(whole):
    lines = [line for line in whole.out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 2, best", "step 2, worst"]
    rewards = sorted(line["reward"] for line in recorded(whole, 2))
    assert f"step 2, best: reward {rewards[-1]:.4g} (reward " in lines[0]
    assert f"step 2, worst: reward {rewards[0]:.4g} (reward " in lines[1]
    assert "\n  prompt: " in whole.out
    assert "\n  completion: " in whole.out
