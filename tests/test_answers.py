"""`rlhf eval` and `rlhf generate`: the rollouts, rewards and data of training, without learning."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rlhf_cli.main import main, split_dotted

from tests.runs import Workshop

SHORT = ("--sampling.max_new_tokens", "4", "--data.max_tokens", "16", "--policy.dtype", "fp32")
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(w) for w in words])
        return code, *capsys.readouterr()

    return run


def test_eval_scores_every_row_and_saves_the_answers(shop: Workshop, say: Say) -> None:
    reward = shop.file("reward.py", "def score(prompt, completion, row):\n    return float(len(completion) > 2)\n")
    saved = shop.folder / "answers.jsonl"
    words = ("eval", "--model", shop.model, "--data", shop.data, "--reward", f"file:{reward}", *SHORT)
    code, out, _ = say(*words, "--eval.samples", 4, "--eval.temperature", 1, "--json", "--save", saved)
    assert code == 0
    metrics = json.loads(out)
    answers = [json.loads(line) for line in saved.read_text().splitlines()]
    assert metrics["prompts"] == 12
    assert len(answers) == 48
    assert metrics["reward"] == pytest.approx(sum(a["reward"] for a in answers) / 48)
    assert metrics["avg@4"] <= metrics["pass@4"]
    again = json.loads(say(*words, "--eval.samples", 4, "--eval.temperature", 1, "--json")[1])
    assert again == metrics, "the same weights, rows and seed give the same evaluation"


def test_eval_takes_a_run_file_and_ignores_its_algorithm(shop: Workshop, say: Say) -> None:
    _, path = shop.arguments(shop.config("grpo", "unused"))
    code, out, _ = say("eval", path, "--data", shop.data, "--eval.max_rows", "3")
    assert code == 0
    assert "prompts" in out
    assert not (shop.folder / "unused").exists(), "nothing is trained and no run directory is made"


def test_generate_answers_prompts_in_order(shop: Workshop, say: Say) -> None:
    code, out, _ = say("generate", "--model", shop.model, "--prompt", "1+1=", "--prompt", "2+2=", *SHORT)
    assert code == 0
    assert [line[:4] for line in out.splitlines() if line[1:2] == "+"] == ["1+1=", "2+2="]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "--data", "x.jsonl", "--reward", "math"), "no model is named. Set --model"),
        (("eval", "--model", "m", "--reward", "math"), "no data is named. Set --data"),
        (("eval", "--model", "m", "--data", "x.jsonl"), "no reward is named"),
        (("generate", "--model", "m"), "either as --prompt TEXT"),
        (("generate", "--model", "m", "--prompt", "a", "--data", "b"), "either as --prompt TEXT"),
        (("generate", "--model", "m", "--prompt", "a", "--tepm", "1"), "no flag --tepm"),
        (("generate", "--model", "m", "--prompt", "a", "--eval.samples"), "--eval.samples needs a value"),
    ],
)
def test_what_is_missing_is_named(say: Say, words: tuple[str, ...], message: str) -> None:
    code, _, err = say(*words)
    assert code == 2
    assert message in err


def test_values_of_dotted_flags_are_never_taken_for_the_run_file() -> None:
    others, dotted = split_dotted(["run.toml", "--run.seed", "3", "--algo", "x", "--run.name=y", "--a.b", "--json"])
    assert others == ["run.toml", "--algo", "x", "--json"]
    assert dotted == ["--run.seed", "3", "--run.name=y", "--a.b"]
