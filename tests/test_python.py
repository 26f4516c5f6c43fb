"""``rlhf.train`` with objects gives the same run as the command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import rlhf
from rlhf.errors import CheckpointError, ConfigError, DataError, PluginNotFound, RewardError, RlhfError
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.setup import build

from tests.runs import PROMPTS, Finished, assert_same_run

OPTIONS = {
    "run.seed": 1,
    "trainer.lr": 1e-3,
    "data.batch_size": 4,
    "data.max_tokens": 64,
    "policy.dtype": "fp32",
    "sampling.samples_per_prompt": 3,
    "sampling.max_new_tokens": 6,
}


async def score(prompt, completion, row):
    digits = sum(c in "0123456789" for c in completion)
    return digits / 6 + (row["answer"] in completion)


def digits(completions, answer, **columns):
    count = [sum(c in "0123456789" for c in completion) for completion in completions]
    return [n / 6 + (a in completion) for n, a, completion in zip(count, answer, completions, strict=True)]


def train(shop, output, **changes):
    arguments = {
        "algorithm": "rloo",
        "model": shop.model,
        "data": PROMPTS,
        "reward": score,
        "steps": 3,
        "options": OPTIONS,
    }
    return rlhf.train(**{**arguments, "output": output and shop.folder / output, **changes})


def finished(result) -> Finished:
    return Finished(result.output, 0)


def test_rlhf_train_gives_the_numbers_of_the_run_file(shop):
    """Rows and functions of both forms give bit-equal metrics and weights."""
    command = shop.train("rloo", "command")
    for name, reward in {"by_sample": score, "by_group": digits}.items():
        result = train(shop, name, reward={"reward": reward})
        assert finished(result).lines() == command.lines()
        assert finished(result).weights == command.weights
        assert '"state":"finished"' in (result.output / "report.html").read_text()
    assert (result.status, result.reason) == ("finished", "")
    assert result.metrics == read_metrics(command.path.parent / "by_group" / "metrics.jsonl")


def test_the_run_folder_equals_that_of_its_run_file(shop):
    """``rlhf train OUTPUT/config.toml`` in another folder gives the same run, with the same checkpoints."""
    file = shop.file("reward.py", "async def score(prompt, completion, row): return len(set(completion)) / 9")
    result = train(shop, "python", data=iter(PROMPTS), reward=f"file:{file}", eval_data=PROMPTS[:2])
    config = result.output / "config.toml"
    output = str(shop.folder / "again")
    rerun = shop.command("train", str(config), "--output", output, output=output)
    assert rerun.code == 0, rerun.said
    assert_same_run(finished(result), rerun)


def test_the_manifest_holds_hashes_of_rows_and_functions(shop):
    result = train(shop, "out", eval_data=PROMPTS[:2], steps=1)
    [start] = json.loads((result.output / "manifest.json").read_text())["starts"]
    train_rows, eval_rows = start["data"]["train"]["train"], start["data"]["eval"]["eval"]
    assert (train_rows["rows"], eval_rows["rows"]) == (12, 2)
    assert len({train_rows["fingerprint"], eval_rows["fingerprint"]}) == 2
    assert [len(p["sha256"]) for p in start["plugins"] if p["kind"] == "reward"] == [64]
    assert start["ended"]["status"] == "finished"


def test_a_resume_with_the_same_objects_equals_an_uninterrupted_run(shop):
    baseline = train(shop, "whole", steps=4, options={**OPTIONS, "checkpoint.every": 2})
    train(shop, "parts", steps=2, data=iter(PROMPTS))
    retry = train(shop, "parts", steps=4, data=iter(PROMPTS), resume=True, options={**OPTIONS, "checkpoint.every": 2})
    assert finished(retry).lines() == finished(baseline).lines()
    assert finished(retry).weights == finished(baseline).weights
    assert len(list((retry.output / "objects").iterdir())) == 1


def test_a_resume_with_other_rows_is_refused_and_leaves_the_run_as_it_was(shop):
    first = train(shop, "out", steps=1)
    with pytest.raises(CheckpointError, match=r"data\.train\.0\.path: was "):
        train(shop, "out", steps=2, data=PROMPTS[:5], resume=True)
    assert len(list((first.output / "objects").iterdir())) == 1
    assert train(shop, "out", steps=2, resume=True).metrics[-1]["step"] == 2


def test_a_model_object_is_saved_once_and_left_alone(shop):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (c.from_pretrained(str(shop.model)) for c in (AutoModelForCausalLM, AutoTokenizer))
    initial = [p.detach().clone() for p in model.parameters()]
    result = train(shop, "out", model=model, tokenizer=tokenizer)
    assert finished(result).weights == finished(train(shop, "path")).weights
    assert all(torch.equal(a, b) for a, b in zip(initial, model.parameters(), strict=True))
    assert result.config.policy.model.startswith(str(result.output / "objects" / "model-"))


def test_an_offline_algorithm_needs_no_reward(shop):
    command = shop.train("sft", "command")
    options = {name: value for name, value in OPTIONS.items() if not name.startswith("sampling")}
    result = train(shop, "out", algorithm="sft", reward=None, options=options)
    assert finished(result).weights == command.weights


def test_arguments_override_the_run_file(shop):
    words = shop.arguments(shop.config("rloo", "command"))
    result = rlhf.train(run_file=words[1], output=shop.folder / "out", steps=2, options={"trainer.lr": 2e-3})
    assert [row["policy/lr"] for row in result.metrics] == [2e-3, 2e-3]


def test_several_rewards_have_weights(shop):
    rewards = {"right": score, "short": lambda completions: [-len(c) for c in completions]}
    result = train(shop, "out", reward=rewards, steps=1, options={**OPTIONS, "reward.short.weight": 0.5})
    row = result.metrics[0]
    assert row["reward/mean"] == pytest.approx(row["reward/right/mean"] + 0.5 * row["reward/short/mean"])


def test_the_trained_model_answers(shop):
    result = train(shop, "out", steps=1)
    answers = result.generate(["1+1=", "2+1="], max_new_tokens=3)
    assert [len(a) for a in answers] == [3, 3]
    run = shop.command("generate", "--model", str(result.model_path), "--policy.dtype", "fp32", "--prompt", "1+1=",
                            "--sampling.max_new_tokens", "3")  # fmt: skip
    assert run.out.splitlines() == [f"1+1={answers[0]}"]
    with pytest.raises(ConfigError, match=r"prompts must be a list of texts or conversations, got str '1\+1='"):
        result.generate("1+1=")
    with pytest.raises(ConfigError, match=r"prompt 1 is str ''; allowed: a text or a list of messages, not empty"):
        result.generate(["1+1=", ""])
    with pytest.raises(ConfigError, match="max_new_tokens: should be greater than 0, got integer 0"):
        result.generate(["1+1="], max_new_tokens=0)


def test_the_samples_of_a_step_are_objects(shop):
    result = train(shop, "out", steps=2)
    for step in (1, 2):
        samples = result.samples(step)
        assert sum(s.reward for s in samples) / len(samples) == pytest.approx(result.metrics[step - 1]["reward/mean"])
        answers = {row["prompt"]: row["answer"] for row in PROMPTS}
        assert [s.reward for s in samples] == [digits([s.completion], [answers[s.prompt]])[0] for s in samples]
    assert result.samples() == samples
    with pytest.raises(ConfigError, match="It holds samples of steps 1 to 2"):
        result.samples(3)


def test_metrics_are_a_table_in_a_notebook(shop):
    metrics = train(shop, "out", steps=2).metrics
    table = metrics._repr_html_()
    assert "<caption>2 of 2 steps" in table
    assert f"<td>{metrics[0]['reward/mean']:.4g}</td>" in table
    assert isinstance(metrics, list)


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"options": {"trainer.lrr": 1}}, ConfigError, r"trainer\.lrr \(option 'trainer\.lrr'\).*Did you mean"),
        ({"options": {"run.seed": "1"}}, ConfigError, r"run\.seed \(option 'run\.seed'\).*got"),
        ({"options": {"trainer.lr": 1, "run.steps": 5}}, ConfigError, r"'run\.steps' is also an argument"),
        ({"options": {3: 1}}, ConfigError, r"options: a name must be a string like 'trainer\.lr', got int 3"),
        ({"algorithm": "rlo"}, PluginNotFound, r"no algorithm named 'rlo'\. Did you mean 'rloo'\?"),
        ({"algorithm": None}, ConfigError, r"algorithm: required, but not set"),
        ({"data": {"prompt": ["1"]}}, ConfigError, r"data: rows must be a list of dicts, got dict"),
        (
            {"data": 3},
            ConfigError,
            r"data: expected a list of dicts, a datasets\.Dataset, an iterable or a path, got int 3",
        ),
        ({"data": []}, DataError, r"train data: no rows"),
        ({"eval_data": [1]}, DataError, r"eval data, row 0: a row must be a dict of columns, got int 1"),
        ({"data": [{"level": 1}]}, DataError, r"data\.train 'train' \(.*train-.*\.jsonl\)"),
        ({"tokenizer": "x"}, ConfigError, r"tokenizer: it was passed with the path of a model"),
        ({"model": object()}, ConfigError, r"model: a object object is not a transformers model"),
        ({"reward": lambda sample: 1.0}, ConfigError, r"`def f\(completions, \*\*columns\)`"),
        ({"learning_rate": 1}, ConfigError, r"no argument 'learning_rate'\. Did you mean trainer\.lr\? The arg"),
        ({"rewards": 1}, ConfigError, r"no argument 'rewards'\. Did you mean 'reward'\?.*options={\"trainer\.lr\""),
        ({"observers": [3]}, ConfigError, r"observers: got int 3\. An observer is a function `def f\(step, metrics, c"),
    ],
)
def test_wrong_arguments_are_refused_before_any_file_is_written(shop, changes, error, problem):
    files = sorted(shop.folder.rglob("*"))
    with pytest.raises(error, match=problem):
        train(shop, "out", **changes)
    assert sorted(shop.folder.rglob("*")) == files


def test_only_the_algorithm_may_be_given_without_its_name(shop):
    with pytest.raises(ConfigError, match=r"got 2 positional arguments; only algorithm may be positional"):
        rlhf.train("rloo", shop.model)


def test_a_folder_with_a_run_is_refused_before_objects_are_written(shop):
    first = train(shop, "out", steps=1)
    with pytest.raises(ConfigError, match=r"already holds a run"):
        train(shop, "out", data=PROMPTS[:3])
    assert len(list((first.output / "objects").iterdir())) == 1
    rerun = train(shop, "out", data=PROMPTS[:6], steps=1, overwrite=True)
    assert rerun.metrics[0]["epoch"] == pytest.approx(4 / 6)
    assert [str(path) for path in (rerun.output / "objects").iterdir()] == [rerun.config.data.train[0].path]


def test_starts_at_the_same_time_have_their_rows(shop, monkeypatch):
    """The second start begins after the first has written its rows, and before the run of the first begins."""
    monkeypatch.chdir(shop.folder)
    runs = []

    def eval_rows(refusal):
        with pytest.raises(ConfigError, match="another run of this process is using") if refusal else nullcontext():
            runs.append(train(shop, refusal, steps=1))
        yield from PROMPTS[:2]

    for output in (None, "out"):
        runs.append(train(shop, output, steps=1, eval_data=eval_rows(output)))
    assert [run.output.name for run in runs] == ["2", "1", "out"]
    assert [path.exists() for run in runs if (path := Path(run.config.data.train[0].path))] == [True] * 3


def test_a_reward_that_fails_ends_the_run_with_its_error(shop):
    def broken(completions):
        return [1 / 0]

    with pytest.raises(RlhfError, match=r"reward 'broken' \(in process\).*ZeroDivisionError"):
        train(shop, "out", reward=broken)
    lock = threading.Lock()
    with pytest.raises(RewardError, match=r"cannot be copied"):
        train(shop, "copied", reward=lambda completions: [float(lock.locked())])
    assert not (shop.folder / "copied").exists(), "the run has not started"


def test_a_start_that_fails_leaves_a_link_to_a_folder_which_the_next_start_uses(shop, monkeypatch):
    monkeypatch.chdir(shop.folder)
    with monkeypatch.context() as patch:
        patch.setattr(build, "launch_roles", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(shop, None, steps=1)
    assert list(Path("runs/latest").iterdir()) == [Path("runs/latest/.lock")]
    assert train(shop, None, steps=1).output == Path("runs/1").absolute()


def test_the_command_names_the_place_of_a_python_function(shop):
    result = train(shop, "out", steps=1)
    run = shop.command("train", str(result.output / "config.toml"), "--output", str(shop.folder / "again"))
    assert run.code == 2
    assert "'in process/score' is a function or class of the Python process that started the run" in run.err
    assert "'file:PATH.py'" in run.err


def test_importing_rlhf_imports_no_torch_until_train_is_used():
    text = (
        "import rlhf, sys; assert 'torch' not in sys.modules; assert 'train' in dir(rlhf)\nprint(rlhf.train.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("train\n", "")


def test_without_the_runtime_the_error_names_the_distribution_to_install():
    text = """
import sys, rlhf
class NotInstalled:
    def find_spec(self, name, *_):
        if name == "rlhf_runtime":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
rlhf.train
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: rlhf.train is part of the distribution rlhf-runtime, which is not in")
    assert "pip install rlhf-runtime" in last


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'rlhf' has no attribute 'trian'"):
        rlhf.trian  # noqa: B018
