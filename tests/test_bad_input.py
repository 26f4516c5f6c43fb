"""Bad input to the command: each is a clear error or handled by the configured policy."""

from __future__ import annotations

import json
import shutil
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_runtime.setup import build
from rlhf_testing.tiny import tiny_model

from tests.runs import PROMPTS, REWARD, Finished, Workshop, merged


def refused(run: Finished, *parts: str, code: int = 2) -> str:
    """The run must end with ``code`` and one error with all ``parts``, without traceback. Returns the error."""
    assert run.code == code, run.said
    assert "Traceback" not in run.said
    error = run.err[run.err.index("rlhf: ") :]
    for part in parts:
        assert part in error
    return error


def nothing_written(run: Finished) -> bool:
    return not run.path.exists()


# ------------------------------------------------------------------------------------------ models


def test_a_missing_model(shop: Workshop) -> None:
    run = shop.run("sft", "run", policy={"model": str(shop.model.parent / "modle")})
    refused(run, "modle does not exist", "there are: ", "model", code=1)
    assert nothing_written(run)


def test_a_row_with_a_token_that_the_embedding_lacks(shop: Workshop) -> None:
    larger = Path(shutil.copytree(shop.model, shop.folder / "larger"))
    tokenizer = json.loads((larger / "tokenizer.json").read_text())
    rows = json.loads((larger / "config.json").read_text())["vocab_size"]
    tokenizer["model"]["vocab"]["ö"] = rows
    (larger / "tokenizer.json").write_text(json.dumps(tokenizer))
    changes = {"policy": {"model": str(larger)}}
    assert shop.run("sft", "run", "--dry-run", **changes).code == 0, "a token that no row has does no harm"
    row = {"prompt": "1+1=", "response": "zwölf"}
    changes["data"] = {"train": str(shop.rows("new.jsonl", [row] * 4))}
    for flags in ((), ("--dry-run",)):
        refused(shop.run("sft", "run", *flags, **changes), "line", f"'ö' with id {rows}", "embedding has", code=1)
    assert shop.command("data", "preview", str(shop.folder / "run.toml")).code == 1


def test_a_model_that_could_not_be_loaded_leaves_the_folder_usable(shop: Workshop) -> None:
    broken = Path(shutil.copytree(shop.model, shop.folder / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:100])
    assert shop.run("sft", "run", policy={"model": str(broken)}).code == 1
    (broken / "model.safetensors").write_bytes(weights)
    shop.train("sft", "run", policy={"model": str(broken)})


def test_no_chat_template_where_one_is_needed(shop: Workshop) -> None:
    run = shop.run("rloo", "run", data={"template": "chat"})
    refused(run, "chat template", 'template = "plain"')
    assert nothing_written(run)
    chat = tiny_model(shop.folder / "chat", hidden=16, heads=2, kv_heads=1, chat_template="default")
    shop.train("rloo", "chat_run", policy={"model": str(chat)}, data={"template": "chat"})


# ------------------------------------------------------------------------------------------ data


@pytest.mark.parametrize(("line", "says"), [("", ""), ('{"prompt": "1+1=", "response"', "not valid JSON")])
def test_a_blank_line_is_no_row_and_a_malformed_one_is_refused(shop: Workshop, line: str, says: str) -> None:
    texts = [json.dumps(row) for row in PROMPTS[:3]]
    path = shop.file("bad.jsonl", "\n".join([*texts, line, *texts]) + "\n")
    run = shop.run("sft", "run", data={"train": str(path)})
    if says:
        refused(run, f"{path}, line 4", says, code=1)
    else:
        assert run.code == 0, run.said


@pytest.mark.parametrize("content", ["", [{"type": "text", "text": "\n"}]])
def test_an_empty_message_as_a_prompt(shop: Workshop, content: Any) -> None:
    chat = tiny_model(shop.folder / "chat", hidden=16, heads=2, kv_heads=1, chat_template="default")
    row = {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": content}], "answer": "1"}
    path = shop.rows("empty.jsonl", [*PROMPTS[:2], row])
    changes: dict[str, Any] = {"data": {"train": str(path)}, "policy": {"model": str(chat)}}
    refused(shop.run("rloo", "run", "--dry-run", **changes), f"{path}, line 3: the prompt is empty: ", code=1)
    played = shop.run("rloo", "run", "--dry-run", **merged(env(shop, "pass"), changes))
    assert played.code == 0, played.said  # the environment's first observation is what the policy answers


def test_a_name_with_a_control_character(shop: Workshop) -> None:
    run = shop.run("sft", "run", run={"name": "a\nb"})
    refused(run, "run.name", "a control character")
    run = shop.run("sft", "run", data={"train": [{"path": str(shop.data), "name": "\x1b[2J"}]})
    refused(run, "data.train.0.name", "a control character")
    assert nothing_written(run)


def test_a_missing_column(shop: Workshop) -> None:
    run = shop.run("sft", "run", data={"response": "respnse"})
    refused(run, "no column 'respnse'", "columns present: prompt, answer, response", "Did you mean 'response'?", code=1)
    assert nothing_written(run)


def test_missing_and_empty_data(shop: Workshop) -> None:
    refused(shop.run("sft", "run", data={"train": str(shop.folder / "nothing.jsonl")}), "nothing.jsonl", code=1)
    refused(shop.run("sft", "run", data={"train": str(shop.file("e.jsonl", ""))}), "holds no rows", code=1)


def test_a_prompt_longer_than_allowed(shop: Workshop) -> None:
    long = {"prompt": "9" * 40 + "=", "answer": "1", "response": "1"}
    data = {"train": str(shop.rows("long.jsonl", [*PROMPTS[:5], long])), "max_prompt_tokens": 30, "batch_size": 2}
    refused(
        shop.run("rloo", "refused", data=data),
        f"{shop.folder / 'long.jsonl'}, line 6",
        "the prompt has 41 tokens, over data.max_prompt_tokens = 30",
        'data.too_long = "drop"',
        code=1,
    )
    run = shop.train("rloo", "dropped", data={**data, "too_long": "drop"}, run={"steps": 6})
    dropped_counts = [line["data/dropped"] for line in run.lines()]
    assert dropped_counts == sorted(dropped_counts)
    assert dropped_counts[-1] >= 2
    assert 5 not in {sample["row"]["index"] for sample in run.samples()}


# ------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(("algorithm", "samples"), [("rloo", 8), ("reinforce_pp", 1)])
def test_the_default_group_is_that_of_the_algorithm(shop: Workshop, algorithm: str, samples: int) -> None:
    run = shop.run(algorithm, "run", "--dry-run", sampling={"samples_per_prompt": None})
    assert run.code == 0
    assert tomllib.loads(run.out)["sampling"]["samples_per_prompt"] == samples


TOO_LONG = "a" * 300


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("run.output", "/a" * 2020),  # long enough only with what a run makes below it
        ("run.output", "~no_such_user/run"),
        ("policy.model", "a\0b"),
        ("data.train", TOO_LONG),
        ("data.chat_template", TOO_LONG),
        ("roles.judge.model", TOO_LONG),
        ("reward", f"file:{TOO_LONG}.py"),
        ("reward", f"model:{TOO_LONG}"),
        ("reward.0.model", TOO_LONG),
        ("rollout.path", TOO_LONG),
        ("observer.0.folder", TOO_LONG),
        ("observer.0.tracking_uri", TOO_LONG),
    ],
)
def test_an_invalid_path_is_refused(shop: Workshop, flag: str, value: str) -> None:
    chosen: dict[str, dict[str, Any]] = {
        "reward.0.model": {"reward": [{"use": "prm"}]},
        "rollout.path": {"rollout": {"use": "replay"}},
        "observer.0.folder": {"observer": [{"use": "tensorboard"}]},
        "observer.0.tracking_uri": {"observer": [{"use": "mlflow"}]},
    }
    run = shop.run("rloo", "run", "--dry-run", f"--{flag}", value, **chosen.get(flag, {}))
    refused(run, "the path ", " cannot be used: ", "Give another path.")
    assert nothing_written(run)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("run.seed", "9223372036854775808", "integers are from -2^63 to 2^63 - 1, got integer 9223372036854775808"),
        (
            "data.template_kwargs.a",
            f"[{'9' * 60}]",
            "data.template_kwargs.a.0 (flag --data.template_kwargs.a): integers",
        ),
        ("run.seed", "9" * 5000, "should be a valid integer"),
        ("run.seed", "[" * 5000, "should be a valid integer"),
        ("run." + ".".join("a" * 3000), "1", "nests tables and lists more than 100 levels deep"),
        ("reward.².weight", "1", "reward has no entry"),
        ("run.requires", f'["rlhf-core>={"9" * 5000}"]', "is not a requirement"),
        ("run.steps", "10000001", "should be less than or equal to 10000000, got integer 10000001"),
    ],
)
def test_invalid_numbers_and_depths_are_refused(shop: Workshop, flag: str, value: str, says: str) -> None:
    refused(shop.run("rloo", "run", "--dry-run", f"--{flag}", value), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"seed = {'9' * 5000}", "is not valid TOML: Exceeds the limit (4300 digits)"),
        (f"seed = {'[' * 5000}{']' * 5000}", "is not valid TOML: maximum recursion depth exceeded"),
        (f"[trainer.{'.'.join('a' * 900)}]", "nests tables and lists more than 100 levels deep"),
    ],
    ids=["digits", "brackets", "header"],
)
def test_a_run_file_that_a_parser_never_finishes_is_refused(shop: Workshop, text: str, says: str, capsys) -> None:
    path = shop.file("run.toml", f"[run]\n{text}\n")
    assert main(["train", str(path), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_more_passes_than_a_run_can_have_steps(shop: Workshop) -> None:
    run = shop.run("rloo", "run", "--dry-run", "--run.epochs", "1e308", run={"steps": None})
    refused(run, "need inf steps; a run has at most 10000000. Lower run.epochs, or set run.steps.")


def test_an_output_folder_already_used(shop: Workshop) -> None:
    first = shop.train("sft", "run")
    weights = first.weights
    for flags in ((), ("--dry-run",)):
        refused(shop.run("sft", "run", *flags), "already holds a run", "--resume", "Nothing was changed")
        assert first.weights == weights
        refused(shop.run("sft", "new", *flags, "--resume"), "there is no run to resume")
    assert shop.run("sft", "run", "--resume", "--dry-run").code == 0


def test_a_checkpoint_from_another_config(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shop.train("rloo", "run")
    files = {path: path.read_bytes() for path in sorted(first.path.rglob("*")) if path.is_file()}
    other = shop.run("rloo", "run", "--resume", run={"seed": 2}, data={"batch_size": 2})
    refused(
        other, "was saved with a different config", "run.seed: was 1, now 2", "data.batch_size: was 4, now 2", code=1
    )
    assert {path: path.read_bytes() for path in files} == files
    dry = shop.run("rloo", "run", "--resume", "--dry-run", run={"seed": 2})
    refused(dry, "was saved with a different config", "run.seed: was 1, now 2", code=1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "launch_roles", lambda *_: pytest.fail("models are loaded"))
        refused(shop.run("grpo", "run", "--resume"), "algorithm", code=1)
    running = set(threading.enumerate())
    refused(shop.run("grpo", "run", "--resume"), "algorithm", code=1)
    assert set(threading.enumerate()) <= running, "everything that was started is closed again"


def test_a_reward_file_that_changed_is_a_different_run(shop: Workshop) -> None:
    shop.train("rloo", "run")
    config = shop.config("rloo", "run", run={"steps": 4})
    shop.file("reward.py", REWARD.replace("/ 6", "/ 7"))
    resumed = shop.train_config(config, "--resume")
    assert "continues as a different run" in resumed.said
    assert "plugins.reward:reward: was 'file " in resumed.said


def test_observers_with_too_few_samples_or_steps() -> None:
    for name in ("mlflow", "swanlab", "tensorboard", "trackio", "wandb"):
        with pytest.raises(ValidationError, match=r"(?s)samples\n  Input should .*samples_every\n  Input should"):
            Plugins.discover().resolve("observer", name).cls.Config(samples_every=0, samples=-1)


# ------------------------------------------------------------------------------------------ rewards

REWARDS = {
    "raises": ("raise KeyError('no key')", "score() raised KeyError: 'no key'"),
    "nan": ("return [RewardResult(float('nan')), *results[1:]]", "score() returned RewardResult(value=nan)"),
}
SPOILED = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult


class Spoiled(Reward):
    name = "spoiled"

    async def score(self, group):
        results = [RewardResult(t.sampled_tokens + t.index[1] / 7) for t in group.trajectories]
        if group.row.index == 3:
            BODY
        return results
"""


@pytest.mark.parametrize("fault", REWARDS)
def test_a_reward_that_fails(shop: Workshop, fault: str) -> None:
    body, says = REWARDS[fault]
    changes: dict[str, Any] = {
        "reward": [{"use": f"file:{shop.file('spoiled.py', SPOILED.replace('BODY', body))}"}],
        "data": {"shuffle": False},
        "run": {"steps": 2},
    }
    error = refused(shop.run("rloo", "abort", **changes), says, 'stream.on_failed_sample is "abort"', code=1)
    assert "row 3" in error

    groups = shop.train("rloo", "groups", stream={"on_failed_sample": "drop_group"}, **changes)
    assert [line["stream/failed_groups"] for line in groups.lines()] == [1.0, 0.0]
    assert [line["stream/short"] for line in groups.lines()] == [0.0, 0.0], "the dropped group was replaced"
    assert 3 not in {sample["row"]["index"] for sample in groups.samples()}

    samples = shop.train("rloo", "samples", stream={"on_failed_sample": "drop_sample"}, **changes)
    is_single = fault == "nan"  # the other two samples of the group were scored
    assert samples.lines()[0]["stream/failed_samples"] == (1.0 if is_single else 3.0)
    assert [s["reward"] is None for s in samples.samples()].count(True) == 0
    assert len([s for s in samples.samples() if s["row"]["index"] == 3]) == (2 if is_single else 0)


# ------------------------------------------------------------------------------------------ environments

ENV = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep, Sampling


class Spoiled(Env):
    name = "spoiled"

    async def reset(self, row, seed):
        self.row = row
        return ""

    async def step(self, action):
        if self.row.index == 3:
            BODY
        return EnvStep(" more: ", reward=len(action) / 7)
"""


def env(shop: Workshop, body: str) -> dict[str, Any]:
    return {
        "env": {"use": f"file:{shop.file('env.py', ENV.replace('BODY', body))}", "max_turns": 3},
        "rollout": {"use": "multi_turn"},
        "reward": None,
        "data": {"shuffle": False},
        "run": {"steps": 2},
    }


def test_an_environment_that_samples_in_another_way(shop: Workshop) -> None:
    changes = env(shop, "return EnvStep('a', sampling=Sampling(4, top_k=2))")
    refused(shop.run("rloo", "abort", **changes), "with top_k = 2, but [sampling] has top_k = 0", "row 3", code=1)


def test_an_environment_that_fails(shop: Workshop) -> None:
    changes = env(shop, "raise ValueError('broken')")
    refused(shop.run("rloo", "abort", **changes), "step() raised ValueError: broken", "on_failed_sample", code=1)
    run = shop.train("rloo", "groups", stream={"on_failed_sample": "drop_group"}, **changes)
    assert [line["stream/failed_groups"] for line in run.lines()] == [1.0, 0.0]
    run = shop.train("rloo", "samples", stream={"on_failed_sample": "drop_sample"}, **changes)
    assert run.lines()[0]["stream/failed_samples"] == 3.0


def test_an_environment_that_never_ends(shop: Workshop) -> None:
    run = shop.train("rloo", "run", **env(shop, "pass"))
    for sample in run.samples():
        turns = [turn for turn in sample["turns"] if turn["sampled"]]
        assert len(turns) == 3 or sample["status"] == "truncated"
    assert any(len([t for t in s["turns"] if t["sampled"]]) == 3 for s in run.samples())


# ------------------------------------------------------------------------------------------ plugins

UNDECLARED = """
from rlhf.interfaces import Algorithm, Slot
from rlhf.ops.rows import pack_rows
from rlhf.types import Annotation

class Undeclared(Algorithm):
    name = "undeclared"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "nll")}

    def assemble(self, examples):
        return pack_rows(examples), {}

    def annotations(self, step):
        return [Annotation("reference", "logprobs", "ref_logprobs")] if step >= FROM else []
"""


BATCH_ALONE = """
from rlhf_plugin_rloo import RLOO

class BatchAlone(RLOO):
    name = "batch_alone"

    def assemble(self, examples):
        return super().assemble(examples)[0]
"""


def test_a_batch_without_metrics_is_an_error_with_a_message(shop: Workshop) -> None:
    run = shop.run("rloo", "run", algorithm={"use": f"file:{shop.file('batch_alone.py', BATCH_ALONE)}"})
    message = "assemble() of algorithm 'batch_alone' returned Batch"
    refused(run, message, "It must return a tuple of two", "write `return batch, {}`", code=1)


@pytest.mark.parametrize(
    ("first", "subject"), [(0, "annotations() of algorithm 'undeclared'"), (1, "annotations() of 'undeclared'")]
)
def test_an_undeclared_role_is_an_error_with_a_message(shop: Workshop, first: int, subject: str) -> None:
    path = shop.file("undeclared.py", UNDECLARED.replace("FROM", str(first)))
    run = shop.run("sft", "run", algorithm={"use": f"file:{path}"})
    refused(run, f"{subject} names the role 'reference'", "policy. ", "RoleSpec('reference')", code=1)
    assert nothing_written(run) == (first == 0)
