"""`rlhf score` scores given answers like a run, and writes a file that `rlhf data export` reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_cli.jobs import score_answers as score
from rlhf_testing.tiny import tiny_model

from tests.runs import Say, Workshop

ROWS = [
    {"prompt": "1+2=", "answer": "3", "responses": ["3", "12", "3!"]},
    {"prompt": "2+2=", "answer": "4", "responses": ["5", "4"]},
    {"prompt": "5+2=", "answer": "7", "responses": ["7", "7"]},
]
LENGTH = "def score(prompt, completion, row):\n    return float(len(completion))\n"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_several_rewards_score_every_answer_and_exports_read_them(shop: Workshop, say: Say) -> None:
    data, out, pairs = shop.rows("rows.jsonl", ROWS), shop.folder / "scored.jsonl", shop.folder / "pairs.jsonl"
    right = "async def score(prompt, completion, row):\n    return float(completion == row['answer'])\n"
    rewards = (f"file:{shop.file('right.py', right)}", f"file:{shop.file('size.py', LENGTH)}")
    words = ("score", "--model", shop.model, "--data", data, "--reward", rewards[0], "--reward", rewards[1])
    code, stdout, err = say(*words, "--reward.size.weight", "-0.5", "-o", out, "--json")
    assert code == 0, err
    samples = lines(out)
    assert [(s["group"], s["sample"], s["turns"][1]["text"]) for s in samples] == [
        *((0, n, text) for n, text in enumerate(("3", "12", "3!"))),
        *((1, n, text) for n, text in enumerate(("5", "4"))),
        *((2, n, text) for n, text in enumerate(("7", "7"))),
    ]
    assert [s["rewards"]["right"]["value"] for s in samples] == [1, 0, 0, 0, 1, 1, 1]
    assert [s["rewards"]["size"]["value"] for s in samples] == [1, 2, 2, 1, 1, 1, 1]
    assert [s["reward"] for s in samples] == [0.5, -1, -1, -0.5, 0.5, 0.5, 0.5]
    assert [s["prompt"] for s in samples[:4]] == ["1+2="] * 3 + ["2+2="]
    means = {"right": 4 / 7, "size": 9 / 7, "reward": -0.5 / 7}
    assert json.loads(stdout) == {"rows": 3, "answers": 7, "means": pytest.approx(means), "left_out": {}}
    assert "scoring answers" in err.splitlines()
    assert say("data", "export", out, "--form", "pairs", "-o", pairs)[0] == 0
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in lines(pairs)] == [
        ("1+2=", "3", "12"),
        ("2+2=", "4", "5"),
    ]
    assert say("data", "export", out, "--form", "best", "-o", pairs, "--force")[0] == 0
    assert [r["completion"] for r in lines(pairs)] == ["3", "4", "7"]


def test_a_reward_may_have_the_name_of_their_sum(shop: Workshop, say: Say) -> None:
    data, reward = shop.rows("rows.jsonl", ROWS), shop.file("reward.py", LENGTH)
    words = ("score", "--model", shop.model, "--data", data, "--reward", f"file:{reward}", "--json")
    code, stdout, err = say(*words, "--reward.reward.weight", "2", "-o", shop.folder / "scored.jsonl")
    assert code == 0, err
    assert json.loads(stdout)["means"] == pytest.approx({"reward": 9 / 7, "weighted sum": 18 / 7})


@pytest.mark.parametrize("words", [("score", "-o", "scored.jsonl"), ("rewards", "try", "--html", "page.html")])
def test_the_columns_that_were_found_are_said_once(shop: Workshop, say: Say, words: tuple[str, ...]) -> None:
    data = shop.rows("rows.jsonl", [{"instruction": "1+2=", "input": "", "response": "3"}])
    command = (*words[:-1], shop.folder / words[-1], "--model", shop.model, "--data", data)
    code, _, err = say(*command, "--reward", f"file:{shop.file('reward.py', LENGTH)}")
    assert code == 0, err
    assert err.count("is read as") == err.count("data.eval 'rows'") == 1


def test_a_trainer_whose_weights_no_generator_takes_scores(shop: Workshop, say: Say) -> None:
    """Nothing is generated."""
    judge = tiny_model(shop.folder / "judge", head="scalar", hidden=16, heads=2, kv_heads=1)
    data = shop.rows("rows.jsonl", ROWS)
    rewards = []
    for trainer in ("torch", "fsdp"):
        out = shop.folder / f"{trainer}.jsonl"
        words = ("score", "--reward", f"model:{judge}", "--data", data, "-o", out, "--roles.reward_model.dtype", "fp32")
        code, _, err = say(*words, "--trainer.use", trainer, "--trainer.device", "cpu")
        assert code == 0, err
        rewards.append([sample["reward"] for sample in lines(out)])
    assert rewards[1] == pytest.approx(rewards[0], rel=1e-5)


def test_the_first_rows_of_each_source_are_scored(shop: Workshop, say: Say) -> None:
    files = [str(shop.rows(f"{name}.jsonl", ROWS)) for name in ("one", "two")]
    sources = tuple(word for n, file in enumerate(files) for word in (f"--data.eval.{n}.path", file))
    words = ("score", "--model", shop.model, *sources, "--reward", f"file:{shop.file('size.py', LENGTH)}")
    code, stdout, err = say(*words, "--eval.max_rows", 2, "-o", shop.folder / "scored.jsonl", "--json")
    assert code == 0, err
    assert (json.loads(stdout)["rows"], json.loads(stdout)["answers"]) == (4, 10)
    rows = dict.fromkeys((s["row"]["source"], s["row"]["index"]) for s in lines(shop.folder / "scored.jsonl"))
    assert list(rows) == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]


def test_a_reward_model_reads_prompt_and_answer_with_its_end_token(shop: Workshop, say: Say) -> None:
    """Scores equal those of transformers, one sequence at a time. Without --model its tokenizer is used."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = tiny_model(shop.folder / "rm", hidden=16, heads=2, kv_heads=1, head="scalar", std=0.3)
    out = shop.folder / "scored.jsonl"
    pairs = shop.rows(
        "pairs.jsonl", [{"prompt": "1+2=", "chosen": "3", "rejected": "12"}, ROWS[1] | {"chosen": "4", "rejected": "5"}]
    )
    code, stdout, err = say(
        *("score", "--reward", f"model:{model}", "--data", pairs, "--answers", "chosen", "--answers", "rejected"),
        *("--roles.reward_model.dtype", "fp32", "-o", out),
    )
    assert code == 0, err
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    texts = ["1+2=3", "1+2=12", "2+2=4", "2+2=5"]
    for text, line in zip(texts, lines(out), strict=True):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            expected = float(scorer(torch.tensor([ids])).logits[0, 0])
        assert line["reward"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert "4 answers of 2 rows" in stdout
    assert f"{out}.partial" not in {str(p) for p in shop.folder.iterdir()}


def test_a_model_reads_rows_together_and_its_time_does_not_count_towards_deadlines(
    shop: Workshop, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rewards get the rows at once. The time in which a reward waits for a model does not count towards its
    deadline."""
    from rlhf_runtime.models.roles import Role

    model = tiny_model(shop.folder / "rm", hidden=16, heads=2, kv_heads=1, head="scalar", std=0.3)
    data = shop.rows("many.jsonl", [{"prompt": f"{n}+1=", "response": "7" * (n % 5 + 1)} for n in range(70)])
    words = ("score", "--reward", f"model:{model}", "--roles.reward_model.dtype", "fp32", "--data", data)
    passes: list[tuple[int, int]] = []
    begin = Role.begin_forward

    def slow(self, batch, heads, view="live"):
        longest = max(sum(int(batch.lens_B[i]) for i in units) for rank in self._plan(batch) for units in rank)
        passes.append((batch.sequences, longest))
        time.sleep(0.6)
        return begin(self, batch, heads, view)

    monkeypatch.setattr(Role, "begin_forward", slow)
    batch_file, single_file = shop.folder / "together.jsonl", shop.folder / "apart.jsonl"
    code, _, err = say(
        *words, "--reward.model.deadline", 0.5, "--roles.reward_model.micro_tokens", 40, "-o", batch_file
    )
    assert code == 0, err
    assert [count for count, _ in passes] == [64, 6], "not as many at once as go to the disk at once"
    assert all(0 < longest <= 40 for _, longest in passes)
    monkeypatch.setattr(Role, "begin_forward", begin)
    monkeypatch.setattr(score, "_AT_ONCE", 1)
    assert say(*words, "-o", single_file)[0] == 0
    values = [[line["reward"] for line in lines(file)] for file in (batch_file, single_file)]
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6)
    assert len(set(values[1])) > 5


def test_a_failed_call_is_continued_and_nothing_is_scored_twice(shop: Workshop, say: Say) -> None:
    data = shop.rows("many.jsonl", [{"prompt": f"{n}+1=", "response": str(n)} for n in range(150)])
    marker, log, out, baseline = (shop.folder / name for name in ("down", "log", "scored.jsonl", "whole.jsonl"))
    text = (
        "import os\nasync def score(prompt, completion, row):\n"
        f"    open({str(log)!r}, 'a').write(completion + ' ')\n"
        f"    assert not (completion == '100' and os.path.exists({str(marker)!r})), 'server is down'\n"
        "    return len(completion) / 3\n"
    )
    reward = f"file:{shop.file('down.py', text)}"
    words = ("score", "--model", shop.model, "--data", data, "--reward", reward)
    assert say(*words, "-o", baseline)[0] == 0
    log.unlink()
    marker.touch()
    code, _, err = say(*words, "-o", out)
    assert code == 1
    assert "answer 0 of row 100 of 'many' could not be scored" in err
    assert "server is down" in err
    assert "kept in" in err
    assert not out.exists()
    code, _, err = say(*words, "-o", out, "--run.seed", 5)
    assert (code, "was started with different values of seed" in err) == (2, True), err
    marker.unlink()
    log.unlink()
    code, stdout, err = say(*words, "-o", out, "--json")
    assert code == 0, err
    assert "continuing after 64 of 150 rows" in err
    assert sorted(map(int, log.read_text().split())) == list(range(64, 150)), "earlier answers are not scored again"
    assert out.read_bytes() == baseline.read_bytes()
    assert json.loads(stdout)["means"]["reward"] == pytest.approx((10 + 90 * 2 + 50 * 3) / 3 / 150)


def test_scores_of_a_model_that_changed_under_its_path_are_not_continued(shop: Workshop, say: Say) -> None:
    data = shop.rows("many.jsonl", [{"prompt": f"{n}+1=", "response": str(n)} for n in range(70)])
    marker, judge, out = shop.folder / "down", shop.folder / "judge", shop.folder / "scored.jsonl"
    text = (
        "import os\nasync def score(prompt, completion, row):\n"
        f"    assert not (completion == '69' and os.path.exists({str(marker)!r})), 'server is down'\n    return 0.0\n"
    )
    text_of_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template = shop.file("chat.jinja", text_of_template)
    rewards = ("--reward", f"model:{judge}", "--reward", f"file:{shop.file('down.py', text)}")
    words = ("score", *rewards, "--data", data, "-o", out, "--roles.reward_model.dtype", "fp32")
    words = (*words, "--data.chat_template", template)
    tiny_model(judge, head="scalar", hidden=16, heads=2, kv_heads=1)
    marker.touch()
    assert "server is down" in say(*words)[2]
    marker.unlink()
    template.write_text(f"{text_of_template}{{# #}}")
    code, _, err = say(*words)
    assert (code, "was started with different values of chat template" in err) == (2, True), err
    template.write_text(text_of_template)
    tiny_model(judge, head="scalar", hidden=16, heads=2, kv_heads=1, seed=1)
    code, _, err = say(*words)
    assert (code, "was started with different values of model files" in err) == (2, True), err
    tiny_model(judge, head="scalar", hidden=16, heads=2, kv_heads=1)
    code, _, err = say(*words)
    assert (code, "continuing after 64 of 70 rows" in err) == (0, True), err


def test_rewards_come_from_a_run_file_and_unusable_answers_are_counted(shop: Workshop, say: Say) -> None:
    rows = [*ROWS[:2], {"prompt": "1+1=", "answer": "2", "responses": ["2", ""]}, {"prompt": "1", "responses": []}]
    data, out = shop.rows("rows.jsonl", rows), shop.folder / "scored.jsonl"
    online = {"stream": {"staleness": 1}, "generator": {"max_batch": 4}, "eval": {"samples": 2, "temperature": 1.0}}
    online["curriculum"] = {"use": "pass_rate"}
    run = shop.config("grpo", "unused", **online, data={"bad_rows": "drop"})
    _, path = shop.arguments(run)
    code, stdout, err = say("score", path, "--data", data, "-o", out)
    assert code == 0, err
    assert "6 answers of 4 rows" in stdout
    assert "left out: 1 answers that cannot be used" in stdout
    assert "left out: 1 rows whose answers cannot be read" in stdout
    assert not (shop.folder / "unused").exists()
    _, path = shop.arguments(shop.config("grpo", "unused"))
    code, _, err = say("score", path, "--data", data, "-o", out, "--force")
    assert code == 1
    assert "rows.jsonl, line 3, answer 1: the answer is empty" in err
    assert len(lines(out)) == 6, "a failed call does not change the existing file"


def test_a_run_file_for_score_needs_no_algorithm(shop: Workshop, say: Say) -> None:
    path, data = shop.file("score.toml", 'reward = ["math"]\n'), shop.rows("rows.jsonl", ROWS)
    code, stdout, err = say("score", path, "--data", data, "--model", shop.model, "-o", shop.folder / "scored.jsonl")
    assert code == 0, err
    assert "7 answers of 3 rows" in stdout


def test_answers_to_conversations_are_scored_and_exported_as_messages(shop: Workshop, say: Say) -> None:
    from transformers import AutoTokenizer

    model = tiny_model(shop.folder / "talks", hidden=16, heads=2, kv_heads=1, chat_template="default")
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2="}]
    answers = ["12", [{"role": "assistant", "content": "3"}]]
    data, out, best = (
        shop.rows("rows.jsonl", [{"prompt": messages, "completions": answers}]),
        *(shop.folder / name for name in ("scored.jsonl", "best.jsonl")),
    )
    reward = f"file:{shop.file('short.py', LENGTH.replace('float', '-float'))}"
    code, _, err = say("score", "--model", model, "--data", data, "--reward", reward, "-o", out)
    assert code == 0, err
    assert [(s["turns"][1]["text"], s["reward"]) for s in lines(out)] == [("12", -2), ("3", -1)]
    text = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    ids = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]
    assert [s["turns"][0]["ids"] for s in lines(out)] == [ids, ids]
    assert say("data", "export", out, "--form", "best", "-o", best)[0] == 0
    assert lines(best) == [{"prompt": messages, "completion": [{"role": "assistant", "content": "3"}], "reward": -1}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "DATA", "--model", "MODEL"), "no reward is named"),
        (("--reward", "REWARD", "--model", "MODEL"), "no data is named"),
        (("--data", "DATA", "--reward", "REWARD"), "no tokenizer is named, and no reward has a model"),
        (("--data", "DATA", "--reward", "REWARD", "--model", "MODEL", "--env.use", "x"), "env 'x' is set"),
        (("--data", "DATA", "--reward", "REWARD", "--model", "MODEL", "-o", "THERE"), "exists; --force replaces it"),
        (("--data", "DATA", "--reward", "REWARD", "--model", "MODEL", "-o", "no/f.jsonl"), "there is no folder no"),
        (("--data", "DATA", "--reward", "REWARD", "--model", "MODEL", "-o", ".", "--force"), "--output . is a folder"),
        (("--data", "DATA", "--reward", "REWARD", "--model", "MODEL", "--algo", "ppo"), "no flag --algo"),
    ],
)
def test_what_is_missing_is_named(shop: Workshop, say: Say, words: tuple[str, ...], message: str) -> None:
    placeholders: dict[str, Any] = {"DATA": shop.rows("rows.jsonl", ROWS), "MODEL": shop.model}
    placeholders |= {"REWARD": f"file:{shop.file('size.py', LENGTH)}", "THERE": shop.file("there.jsonl", "")}
    arguments = [placeholders.get(word, word) for word in words]
    code, _, err = say("score", *arguments, *([] if "-o" in words else ["-o", shop.folder / "out.jsonl"]))
    assert code == 2
    assert message in " ".join(err.split()), err
    assert not (shop.folder / "out.jsonl").exists()
    assert not (shop.folder / "out.jsonl.partial").exists()
