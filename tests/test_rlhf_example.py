"""The example `examples/rlhf`: its rows, its run files, and the whole pipeline with a tiny model."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rlhf_cli.main import main as rlhf
from rlhf_testing.tiny import tiny_model, tiny_reward_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.rlhf import compare, prepare, run

ROOT = Path(__file__).resolve().parents[1]


def dialogue(number: int, answer: str) -> str:
    return f"\n\nHuman: {number} and {number}?\n\nAssistant: So?\n\nHuman: Add them.\n\nAssistant: {answer}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the repository's root, with data and a model."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    rows = [{"chosen": dialogue(n, f"{n + n}."), "rejected": dialogue(n, f"No, {n}")} for n in range(40)]
    with gzip.open(tmp_path / prepare.FILE, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    tiny_model(tmp_path / "model", chat_template="default", std=0.02)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def prepare_rows() -> None:
    prepare.main(["runs/rlhf/task", "--data", ".", "--model", "model"])


def test_dialogues_become_messages_and_first_messages_are_on_one_side(folder: Path) -> None:
    prepare_rows()
    train, held_out = (lines(f"runs/rlhf/task/{side}.jsonl") for side in ("train", "held_out"))
    assert len(train) + len(held_out) == 40
    assert not {r["prompt"][0]["content"] for r in train} & {r["prompt"][0]["content"] for r in held_out}
    row = next(r for r in (*train, *held_out) if r["chosen"] == "6.")
    assert row["prompt"] == [
        {"role": "user", "content": "3 and 3?"},
        {"role": "assistant", "content": "So?"},
        {"role": "user", "content": "Add them."},
    ]
    assert row["rejected"] == "No, 3"


def test_rows_that_are_no_pair_or_too_long_are_counted_by_the_reason(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("model")
    rows = [
        {"chosen": dialogue(1, "abcd"), "rejected": dialogue(1, "bcde")},
        {"chosen": dialogue(1, "abcde"), "rejected": dialogue(1, "b")},  # 5 tokens and the end token
        {"chosen": dialogue(1, "abc"), "rejected": dialogue(1, "abc")},
        {"chosen": dialogue(1, "abc"), "rejected": dialogue(1, "")},
        {"chosen": dialogue(1, "abc"), "rejected": "\n\nHuman: 2?\n\nAssistant: b"},
        {"chosen": dialogue(100_000, "abc"), "rejected": dialogue(100_000, "b")},
    ]
    prompt = "<|user|>1 and 1?<eos><|assistant|>So?<eos><|user|>Add them.<eos><|assistant|>"
    longest, left_out = len(tokenizer.encode(prompt)), Counter[str]()
    pairs = list(prepare.pairs(rows, tokenizer, longest, 5, left_out))
    assert [pair["chosen"] for pair in pairs] == ["abcd"]
    assert left_out == {
        "long answer": 1, "equal answers": 1, "empty message": 1, "no common prompt": 1, "long prompt": 1,
    }  # fmt: skip


def test_missing_data_and_limits_that_leave_no_row_are_errors(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"--data.*hub"):
        prepare.main(["task", "--data", "nowhere", "--model", "model"])
    with pytest.raises(SystemExit, match="'long prompt': 40"):
        prepare.main(["task", "--data", ".", "--model", "model", "--prompt-tokens", "3"])
    assert not Path("task").exists()


@pytest.mark.parametrize("size", ["small", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", run.STAGES)
def test_every_run_file_passes_a_dry_run(folder: Path, stage: str, size: str) -> None:
    prepare_rows()
    Path("runs/rlhf/sft").mkdir()
    Path("runs/rlhf/sft/model").symlink_to(folder / "model")
    Path("runs/rlhf/reward_model").mkdir()
    tiny_reward_model("runs/rlhf/reward_model/model", chat_template="default")
    config = Path("runs/rlhf/reward_model/model/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "mean": 0.0, "std": 1.0}))
    flags = run.SMALL.get(stage, ()) if size == "small" else ()
    assert rlhf([*run.train(stage, "model", flags)[1:], "--output", "new", "--dry-run"]) == 0


def test_the_measured_kl_is_that_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_rows()
    tiny_model("start", chat_template="default", seed=1)
    exact = ("--policy.dtype", "fp32", "--roles.start.dtype", "fp32")  # whatever this machine's processor computes in
    kl = (*exact, "--reward", "file:examples/rlhf/kl.py", "--reward.kl.model")
    words = ("--data", "runs/rlhf/task/held_out.jsonl", "--eval.temperature", "1", "--sampling.max_new_tokens", "8")
    assert rlhf(["eval", "--model", "model", *kl, "start", *words, "--save", "answers.jsonl"]) == 0
    models = {name: AutoModelForCausalLM.from_pretrained(name) for name in ("model", "start")}
    for answer in lines("answers.jsonl"):
        prompt, completion = (turn["ids"] for turn in answer["turns"])
        sums = {}
        for name, model in models.items():
            with torch.no_grad():
                logprobs_TV = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            sums[name] = sum(logprobs_TV[len(prompt) + n - 1, token].item() for n, token in enumerate(completion))
        assert answer["rewards"]["kl"]["value"] == pytest.approx(sums["model"] - sums["start"], abs=1e-3)
    capsys.readouterr()
    assert rlhf(["eval", "--model", "model", *kl, "model", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == pytest.approx(0, abs=1e-4)


def test_given_answers_have_no_kl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_rows()
    kl = ("--reward", "file:examples/rlhf/kl.py", "--reward.kl.model", "model")
    words = ("--data", "runs/rlhf/task/held_out.jsonl", "--answers", "chosen", "-o", "scored.jsonl")
    assert rlhf(["score", *kl, *words]) == 1
    assert "rlhf eval" in capsys.readouterr().err


def in_this_process(command: Sequence[str]) -> int:
    """Runs in this process what the runner starts as a process."""
    if command[0] == "rlhf":
        return rlhf(command[1:])
    script, words = Path(command[1]).stem, command[2:]
    if script == "prepare":
        prepare.main(words)
    else:
        assert script == "compare"
        compare.main()
    return 0


@pytest.mark.full
def test_the_pipeline_trains_five_models_and_ends_with_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", ".", "--model", "model", "--size", "full", "--steps", "2"]
    prepare_rows()
    assert rlhf([*run.train("sft", "model", ["--run.steps", "2"])[1:], "--run.stop_after", "1"]) == 0
    run.main([*words, "--only", "sft"], in_this_process)
    assert [line["step"] for line in lines("runs/rlhf/sft/metrics.jsonl")] == [0, 1, 2], "the stage goes on"
    assert not Path("runs/rlhf/reward_model").exists()
    capsys.readouterr()
    run.main(words, in_this_process)
    out = capsys.readouterr().out
    assert "runs/rlhf/sft exists" in out
    for stage in run.STAGES:
        assert Path("runs/rlhf", stage, "model", "model.safetensors").exists()
    tables = out[out.index("held-out prompts at temperature 1") :]
    for name in run.RESULTS:
        assert len(lines(run.answers(name))) == len(lines("runs/rlhf/task/held_out.jsonl"))
        assert tables.count(f"\n| {name} | ") == 2
    assert any(line.startswith("| sft | ") and "| 0.00 ± 0.00 |" in line for line in tables.splitlines())

    run.main(words, in_this_process)  # nothing is trained or answered again
    transcript = capsys.readouterr().out
    assert transcript.count(" exists") == 1 + len(run.STAGES) + len(run.RESULTS)
    assert "rlhf train" not in transcript
    assert tables in transcript


def test_more_flags_reach_what_samples_and_nothing_else(folder: Path) -> None:
    prepare_rows()
    commands: list[Sequence[str]] = []
    run.main(
        ["--data", ".", "--model", "model", "--", "--generator", "vllm"], lambda words: commands.append(words) or 0
    )
    with_flags = {command[2] for command in commands if "--generator" in command}
    assert with_flags == {f"examples/rlhf/{name}.toml" for name in ("ppo", "grpo", "eval")}


def test_stages_of_other_settings_are_not_taken_for_these(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", ".", "--model", "model"]
    commands: list[Sequence[str]] = []
    run.main([*words, "--rows", "40", "--steps", "2", "--only", "sft"], lambda command: commands.append(command) or 0)
    commands.clear()
    for other in ([], ["--size", "full", "--rows", "40", "--steps", "2"]):
        with pytest.raises(SystemExit, match=r"holds stages of .*--size small --steps 2 --rows 40.*delete runs/rlhf"):
            run.main([*words, *other], lambda command: commands.append(command) or 0)
    assert not commands
    run.main([*words, "--rows", "40", "--steps", "2", "--only", "dpo"], lambda command: commands.append(command) or 0)
    assert [command[1] for command in commands] == ["examples/rlhf/prepare.py", "train"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["ppo"], "unknown argument 'ppo'"), (["--only", "sft", "--", "--seed", "1"], "--only is sft")],
)
def test_flags_that_nothing_would_read_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(["--data", ".", *words])
    assert message in capsys.readouterr().err


def test_shares_of_preferred_answers_count_ties_as_half() -> None:
    scores, reference_scores = (
        [{"rewards": {"score": {"value": value}}} for value in values] for values in ((1, 2, 3, 4), (0, 2, 4, 3))
    )
    assert compare.preferred(scores, reference_scores) == 0.625
