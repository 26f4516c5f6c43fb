"""`rlhf eval` and `rlhf generate`: the rollouts, rewards and data of training, without learning."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model

from tests.runs import PAIRS, REWARD, Say, Workshop

SHORT = ("--sampling.max_new_tokens", "4", "--data.max_tokens", "16", "--policy.dtype", "fp32")


def test_eval_scores_every_row_and_saves_the_answers(shop: Workshop, say: Say) -> None:
    reward = shop.file(
        "reward.py", "async def score(prompt, completion, row):\n    return float(len(completion) > 2)\n"
    )
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
    repeat = json.loads(say(*words, "--eval.samples", 4, "--eval.temperature", 1, "--json")[1])
    assert repeat == metrics, "the same weights, rows and seed give the same evaluation"


def test_eval_takes_a_run_file_and_ignores_its_algorithm(shop: Workshop, say: Say) -> None:
    _, path = shop.arguments(shop.config("grpo", "unused"))
    code, out, _ = say("eval", path, "--data", shop.data, "--eval.max_rows", "3")
    assert code == 0
    assert "prompts" in out
    assert not (shop.folder / "unused").exists(), "nothing is trained and no run directory is made"


def test_a_run_file_for_eval_needs_no_algorithm(shop: Workshop, say: Say) -> None:
    path = shop.file("eval.toml", f'reward = ["math"]\n[data]\neval = "{shop.data}"\n')
    code, out, err = say("eval", path, "--model", shop.model, *SHORT, "--json")
    assert code == 0, err
    rows = shop.rows("questions.jsonl", [{"question": "1+1=", "answer": "2"}])
    notes = say("eval", path, "--model", shop.model, "--data", rows, *SHORT, "--json")[2]
    assert notes.count("is read as prompt = 'question'") == 1, "the same rows are named once"
    assert json.loads(out)["prompts"] == 12


def test_eval_prints_the_mean_of_each_of_several_rewards(shop: Workshop, say: Say) -> None:
    reward = shop.file("long.py", "async def score(prompt, completion, row):\n    return float(len(completion))\n")
    words = ("eval", "--model", shop.model, "--data", shop.data, *SHORT, "--reward", f"file:{reward}", "--json")
    single = json.loads(say(*words)[1])
    metrics = json.loads(say(*words, "--reward", "math", "--reward.math.weight", 0)[1])
    assert not any(name.startswith("reward/") for name in single), "it is the reward"
    assert metrics["reward"] == metrics["reward/long/mean"] == single["reward"] > 0
    assert metrics["reward/math/mean"] == 0


def test_the_scores_of_a_reward_model_pass_only_a_threshold_that_is_set(shop: Workshop, say: Say) -> None:
    judge = tiny_model(shop.folder / "judge", hidden=16, heads=2, kv_heads=1, head="scalar", seed=3)
    words = ("eval", "--model", shop.model, "--data", shop.data, *SHORT, "--json", "--reward")
    of_model = json.loads(say(*words, f"model:{judge}")[1])
    assert "reward" in of_model
    assert not any("@" in name for name in of_model)
    with_threshold = json.loads(say(*words, f"model:{judge}", "--eval.pass_threshold", "-100")[1])
    assert with_threshold == {**of_model, "pass@1": 1.0}
    metrics = json.loads(say(*words, "math", "--reward", f"model:{judge}")[1])
    assert "pass@1" not in metrics, "the sum of a verdict and a score"
    assert json.loads(say(*words, "math")[1])["pass@1"] == 0
    code, _, err = say(*words[:-2], "--eval.samples", "2", "--eval.temperature", "1", "--reward", f"model:{judge}")
    assert code == 0, err


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("ppo", {"critic": {"dtype": "fp32", "trainer": {"lr": 1e-3}}, "placement": {"critic": {"share": "policy"}}}),
        ("grpo", {"reference": {"dtype": "fp32"}, "algorithm": {"kl": {"coef": 0.1}}}),
        ("ppo", {"checkpoint": {"export_trained": True}, "stream": {"mode": "continuous"}}),
        ("rloo", {"sampling": {"top_p": 0.9}, "algorithm": {"loss": {"correction": {"preset": "tis"}}}}),
        ("rloo", {"stream": {"filter": {"min_std": 0.0}, "staleness": 1}}),
        ("sft", {"data": {"loss_on": "all"}, "sampling": {"max_new_tokens": 4}}),
    ],
    ids=["a critic", "a reference", "exports of a continuous stream", "truncated samples", "a filter", "all tokens"],
)
def test_a_run_file_for_training_can_be_evaluated(
    shop: Workshop, say: Say, algorithm: str, changes: dict[str, Any]
) -> None:
    _, path = shop.arguments(shop.config(algorithm, "unused", **changes))
    words = () if algorithm != "sft" else ("--reward", f"file:{shop.file('reward.py', REWARD)}")
    code, out, err = say("eval", path, "--eval.max_rows", "3", "--json", *words)
    assert code == 0, err
    assert json.loads(out)["prompts"] == 3, "without data.eval and --data the training rows are answered"


def test_a_run_file_on_pairs_is_evaluated_by_its_prompts_with_a_note(shop: Workshop, say: Say) -> None:
    rows = [{"prompt": "1+" * n + "1=", "chosen": "2", "rejected": "3"} for n in (1, 2, 40)]
    columns = {"chosen": "chosen", "rejected": "rejected", "train": str(shop.rows("by_name.jsonl", rows))}
    _, path = shop.arguments(shop.config("dpo", "unused", data={**columns, "too_long": "drop"}))
    length = shop.file("length.py", "async def score(prompt, completion, row):\n    return float(len(completion))\n")
    code, out, err = say("eval", path, "--json", "--reward", f"file:{length}", "--sampling.max_new_tokens", "4")
    assert code == 0, err
    metrics = json.loads(out)
    assert (metrics["prompts"], metrics["left_out"]) == (2, 1)


def test_generate_answers_prompts_in_order(shop: Workshop, say: Say) -> None:
    rows = {
        "data": {"prompt": "question", "images": "image", "eval": [{"path": str(shop.data), "max_rows": 2}]},
        "eval": {"max_rows": 1},
    }
    _, path = shop.arguments(shop.config("grpo", "unused", **rows))
    for words in (["--model", shop.model], [path]):  # of the run file the rows are not read
        code, out, err = say("generate", *words, "--prompt", "1+1=", "--prompt", "2+2=", *SHORT)
        assert code == 0, err
        assert [line[:4] for line in out.splitlines() if line[1:2] == "+"] == ["1+1=", "2+2="]


def test_an_answer_does_not_control_the_terminal(shop: Workshop, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(shop.folder / "control", hidden=16, heads=2, kv_heads=1, chars="1+=\x1b")
    words = ("generate", "--model", model, "--prompt", "1\x1b=", *SHORT)
    code, out, err = say(*words)
    assert code == 0, err
    assert out.startswith("1\x1b="), "a pipe gets the text itself"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, err = say(*words)
    assert code == 0, err
    assert out.startswith("1\\x1b=")


def test_a_prompt_is_the_column_that_the_template_of_the_run_file_names(shop: Workshop, say: Say) -> None:
    def generate(template: str) -> tuple[int, str, str]:
        _, path = shop.arguments(shop.config("grpo", "unused", data={"input_template": template}))
        return say("generate", path, "--prompt", "1+1=", *SHORT)

    code, out, err = generate("Q: {question}, A: ")
    assert code == 0, err
    assert out.startswith("Q: 1+1=, A: ")
    for template in ("{question} {options}", "{options[0]}"):
        code, _, err = generate(template)
        assert code == 2
        assert f"--prompt is one text, but data.input_template = {template!r} makes the prompt of several" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "--data", "x.jsonl", "--reward", "math"), "no model is named. Set --model"),
        (("eval", "--model", "m", "--reward", "math"), "no data is named. Set --data"),
        (("eval", "--model", "m", "--data", "x.jsonl"), "no reward is named"),
        (("eval", "--model", "m", "--data", "b", "--algo", "sft", "--save", "c"), "with --algo no answers are sampled"),
        (("eval", "--model", "m", "--data", "b", "--algo", "sft", "--reward", "math"), "--reward scores answers, but"),
        (("generate", "--model", "m"), "either as --prompt TEXT"),
        (("generate", "--model", "m", "--prompt", "a", "--data", "b"), "either as --prompt TEXT"),
        (("generate", "--model", "m", "--prompt", "a", "--tepm", "1"), "no flag --tepm"),
        (("generate", "--model", "m", "--prompt", "a", "--sampling.temperature", "0.7"), "Set --eval.temperature."),
        (("generate", "--model", "m", "--prompt", "a", "--sampling.top_p", "0.7"), "sampled from all tokens"),
        (("generate", "--model", "m", "--prompt", "a", "--save", "no/where.jsonl"), "there is no folder no"),
        (("eval", "--model", "m", "--data", "b", "--reward", "math", "--save", "."), "is a folder"),
        pytest.param(
            ("eval", "--model", "m", "--data", "b", "--reward", "math", "--save", "/proc/self/a.jsonl"),
            "--save /proc/self/a.jsonl cannot be created",
            marks=pytest.mark.linux("no user can make files in /proc/self"),
        ),
    ],
)
def test_what_is_missing_is_named(say: Say, words: tuple[str, ...], message: str) -> None:
    code, _, err = say(*words)
    assert code == 2
    assert message in err


def test_losses_are_computed_from_the_file_of_a_run_with_a_warm_up_and_an_evaluation_by_answers(
    shop: Workshop, say: Say
) -> None:
    """The held-out rows are fewer than the steps of the warm-up, and nothing is sampled."""
    score = tiny_model(shop.folder / "score", head="scalar", hidden=16, heads=2, kv_heads=1)
    changes: dict[str, Any] = {
        "run": {"steps": None},
        "trainer": {"warmup_steps": 2},
        "data": {"eval": [{"path": str(shop.data), "name": "held_out", "max_rows": 3}]},
        "reward": [{"use": "model", "model": str(score)}],
        "roles": {"reward_model": {"dtype": "fp32"}},
        "sampling": {"max_new_tokens": 4},
        "generator": {"max_batch": 3},
        "eval": {"samples": 2, "temperature": 1.0, "metric": "reward"},
    }
    run = shop.train("sft", "run", **changes)
    words = ("eval", run.path / "config.toml", "--model", run.path / "model", "--algo", "sft", "--json")
    code, out, err = say(*words)
    assert code == 0, err
    assert json.loads(out)["loss"] == pytest.approx(run.lines()[-1]["eval/loss"], rel=1e-5)
    code, _, err = say(*words, "--eval.samples", "3")
    assert code == 2
    assert "--eval.samples applies to answers, but with --algo no answers are sampled" in err


def test_losses_of_a_head_that_nobody_trained_are_refused(shop: Workshop, say: Say) -> None:
    pairs = shop.rows("pairs.jsonl", PAIRS)
    code, out, err = say("eval", "--model", shop.model, "--data", pairs, "--algo", "reward_model")
    assert (code, out) == (2, "")
    assert "has no 'scalar' head, so its losses would be random. Name a model that the algorithm trained" in err


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("grpo", "--algo grpo: this algorithm learns from prompts and has no losses on rows. Omit --algo"),
        (
            "dpo",
            "the role 'reference' would use the model that is evaluated. Name the model that the role used in "
            "training: --ref",
        ),
    ],
)
def test_an_algorithm_without_losses_of_one_model_is_refused(
    shop: Workshop, say: Say, algorithm: str, message: str
) -> None:
    code, _, err = say("eval", "--model", shop.model, "--data", shop.data, "--algo", algorithm)
    assert code == 2
    assert message in err


def test_a_chat_is_shown_message_by_message(shop: Workshop, say: Say) -> None:
    model = tiny_model(shop.folder / "chat", chat_template="default")
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1="}]
    rows = shop.rows("chat.jsonl", [{"prompt": chat}])
    code, out, err = say("generate", "--model", model, "--data", rows, *SHORT[:2], *SHORT[4:])
    assert code == 0, err
    assert out.startswith("[system] be short\n[user] 1+1=\n[assistant] ")
    assert "answering prompts" in err.splitlines()


def test_an_episode_of_a_chat_is_shown_with_roles(shop: Workshop, say: Say) -> None:
    """Also the messages of the environment."""
    chat = tiny_model(shop.folder / "talks", hidden=16, heads=2, kv_heads=1, chat_template="default")
    game = ["--rollout.use", "multi_turn", "--env.use", "number_game", "--env.max_turns", "2"]
    rows = shop.rows("rows.jsonl", [{"prompt": "Play."}])
    code, out, err = say("generate", "--model", chat, "--data", rows, *game, "--sampling.max_new_tokens", "3")
    assert code == 0, err
    roles = [line.split("]")[0] + "]" for line in out.splitlines() if line.startswith(("[user] ", "[assistant] "))]
    assert roles == ["[user]", "[assistant]"] * 2


@pytest.mark.parametrize("command", ["eval", "generate", "score"])
def test_help_says_what_the_command_does_with_a_model_and_that_options_are_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "to train" not in text
    assert "training data" not in text
    assert "Every option of a run file is a flag" in text
