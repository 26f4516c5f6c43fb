import io

import pytest
from rlhf_runtime.observe.progress import Progress, shown_metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_can_be_parsed_and_are_rate_limited():
    out, clock = io.StringIO(), Clock()
    progress = Progress(5, stream=out, interval=1.0, clock=clock)
    for step, seconds in enumerate([2.0, 2.5, 2.6, 4.0, 4.1], start=1):
        clock.now = seconds
        progress.step(step, {"reward/mean": step / 8, "policy/loss": 0.5, "time/step": 1.0})
    progress.close()
    progress.close()
    lines = out.getvalue().splitlines()
    steps = [dict(part.split("=", 1) for part in line.split()) for line in lines[:-1]]
    assert [s["step"] for s in steps] == ["1/5", "4/5", "5/5"]  # the first, one a second, the last
    assert steps[0] == {"step": "1/5", "reward": "0.125", "loss": "0.5", "left": "0:00:08"}
    assert steps[-1]["left"] == "0:00:00"
    assert lines[-1] == "5 of 5 steps, in 0:00:04 (1 s a step); reward 0.125 -> 0.625; loss 0.5 -> 0.5"


def test_a_resumed_run_counts_from_its_checkpoint():
    out, clock = io.StringIO(), Clock()
    progress = Progress(10, stream=out, clock=clock)
    clock.now = 60.0  # loading the checkpoint
    progress.begin(8)
    clock.now = 63.0
    progress.step(9, {})
    progress.close()
    assert out.getvalue().splitlines() == [
        "step=9/10 left=0:00:03",
        "9 of 10 steps, 1 of them since the resume, in 0:00:03 (3 s a step)",
    ]


def test_the_line_held_back_is_shown_at_the_end():
    out, clock = io.StringIO(), Clock()
    progress = Progress(10, stream=out, clock=clock)
    progress.step(1, {})
    progress.step(2, {})
    progress.close()
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step=1/10", "step=2/10", "2"]


def test_notes_are_whole_lines_and_shown_in_quiet_mode_too(capsys):
    out = io.StringIO()
    Progress(1, stream=out).note("x " * 100 + "[bold]a[/bold]")
    assert out.getvalue() == "note: " + "x " * 100 + "[bold]a[/bold]\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    Progress(1, stream=terminal).note("word " * 50)
    assert set(" ".join(terminal.getvalue().split("\n")).split()) == {"note:", "word"}, "no word is broken"
    quiet = Progress(3, show="quiet")
    quiet.step(0, {"reward/mean": 1.0})
    quiet.step(1, {"reward/mean": 1.0})
    quiet.note("careful \x1b[31m")
    quiet.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "note: careful \\x1b[31m\n", "no text of a row or a model controls the terminal"


def test_a_long_run_keeps_its_first_and_its_latest_notes():
    progress = Progress(200, stream=io.StringIO())
    for step in range(200):
        progress.note(f"step {step}")
    assert progress.notes == [f"step {step}" for step in [*range(50), *range(150, 200)]]


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"policy/kl_old": 0.5, "kl/reference": 0.25, "length/mean": 12.0, "eval/pass@1": 1.0},
         "kl=0.25 kl_old=0.5 length=12 pass@1=1"),
        ({"policy/kl_old": 0.125}, "kl_old=0.125"),  # and not kl, the distance to the reference
        ({"policy/accuracy": 0.75, "policy/reward_margin": 0.5, "policy/grad_norm": 2.0, "critic/loss": 0.25,
          "value/explained_variance": -1.0},
         "accuracy=0.75 margin=0.5 value_loss=0.25 explained_variance=-1 grad_norm=2"),
        ({"math/reward/mean": 0.5, "chat/reward/mean": 2.0, "reward/length/mean": 3.0},  # of an algorithm with members
         "math_reward=0.5 chat_reward=2"),
        # an environment may give all there is at its turns; 0 would be shown for good
        ({"reward/mean": 0.0, "reward/steps": 0.75, "reward/total": 0.75}, "reward=0.75"),
    ],
)  # fmt: skip
def test_what_is_shown_of_a_step(metrics, line):
    out = io.StringIO()
    Progress(1, stream=out).step(1, metrics)
    assert out.getvalue() == f"step=1/1 {line} left=0:00:00\n"


def test_the_metrics_of_a_whole_run_that_are_shown_are_those_of_its_steps():
    """For `rlhf show`, the page of a run and the card of its model."""
    names = ["policy/loss", "math/reward/mean", "reward/length/mean", "chat/reward/mean", "eval/reward"]
    assert shown_metrics(names) == ["math/reward/mean", "chat/reward/mean", "policy/loss"]
    assert shown_metrics(names, ["loss"]) == ["policy/loss"]


def test_a_divergence_or_loss_that_is_always_0_is_not_shown():
    out = io.StringIO()
    progress = Progress(3, stream=out, interval=0)
    metrics = {"policy/kl_old": 0.0, "reward/mean": 0.0}
    progress.step(1, {**metrics, "policy/loss": -1.9e-9, "kl/reference": 0.0, "length/truncated": 0.0})
    progress.step(2, {**metrics, "policy/loss": float("nan"), "kl/reference": 0.25, "length/truncated": 0.5})
    progress.step(3, {**metrics, "policy/loss": 0.0, "kl/reference": 0.0, "length/truncated": 0.0})
    lines = [" ".join(line.split()[1:-1]) for line in out.getvalue().splitlines()]
    assert lines == ["reward=0", "reward=0 kl=0.25 truncated=0.5 loss=nan", "reward=0 kl=0 truncated=0 loss=0"]


def test_one_evaluation_is_no_change():
    out = io.StringIO()
    progress = Progress(2, stream=out)
    progress.step(1, {"reward/mean": 0.25})
    progress.step(2, {"reward/mean": 0.5, "eval/pass@1": 0.5})
    progress.close()
    assert out.getvalue().splitlines()[-1].endswith("reward 0.25 -> 0.5; pass@1 0.5")


def test_the_time_of_a_step_is_without_evaluations_checkpoints_and_exports():
    out, clock = io.StringIO(), Clock()
    progress = Progress(2, stream=out, clock=clock)
    progress.step(1, {"time/step": 7.0})
    progress.spend("learn", 7.0)
    progress.spend("evaluate", 60.0)
    progress.step(2, {"time/step": 67.0, "time/evaluate": 60.0})
    progress.spend("save", 5.0)
    progress.spend("save", 6.0)
    progress.spend("export", 0.5)
    clock.now = 90.0
    progress.close()
    end = "2 of 2 steps, in 0:01:30 (7 s a step, evaluations 0:01:00, checkpoints 0:00:11)"
    assert out.getvalue().splitlines()[-1] == end


def test_a_run_that_fails_before_its_first_step_leaves_the_terminal_as_it_was(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    Progress(2, stream=out).note("loading")  # and then the model cannot be loaded: nobody closes it
    assert out.getvalue() == "note: loading\n"


def test_lines_of_json_are_those_of_the_file(capsys):
    progress = Progress(2, show="json")
    progress.step(1, {"reward/mean": 0.25, "policy/loss": float("nan")})
    progress.note("careful")
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == '{"step": 1, "reward/mean": 0.25, "policy/loss": {"$float": "nan"}}\n'
    assert captured.err == "note: careful\n"


def test_a_run_without_steps():
    out = io.StringIO()
    Progress(0, stream=out).step(0, {"eval/pass@1": 0.5})
    assert out.getvalue() == "step=0/0 pass@1=0.5 left=0:00:00\n"
