"""Commands with actions, and what `rlhf data preview` shows."""

from __future__ import annotations

import io
import json

import pytest
from rlhf_cli.data import DataCommand
from rlhf_cli.main import main
from rlhf_cli.plugins import PluginsCommand
from rlhf_cli.rewards.command import RewardsCommand
from rlhf_runtime.data.preview import token_texts
from rlhf_testing.tiny import tiny_model


@pytest.mark.parametrize(
    ("group", "word", "problem"),
    [
        (DataCommand, "previw", "unknown action 'previw'; allowed actions: preview, export. Did you mean 'preview'?"),
        (
            PluginsCommand,
            "lst",
            "unknown action 'lst'; allowed actions: list, show, new, check, isolate. Did you mean 'list'?",
        ),
        (RewardsCommand, "tyr", "unknown action 'tyr'; allowed actions: try. Did you mean 'try'?"),
    ],
)
def test_actions_are_named_and_known(capsys, group, word, problem):
    with pytest.raises(SystemExit, match="0"):
        main([group.name, "--help"])
    out = capsys.readouterr().out
    assert f"usage: rlhf {group.name} ACTION ..." in out
    assert all(f"  {action.name} " in out for action in group.actions)
    assert main([group.name, word]) == 2
    assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([group.name])


def test_the_help_of_an_action(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["data", "preview", "--help"])
    out = capsys.readouterr().out
    assert "usage: rlhf data preview" in out
    assert "--rows" in out


# ------------------------------------------------------------------------------------------ preview


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a tokenizer (one token a character) and no weights: a preview loads none."""
    folder = tmp_path_factory.mktemp("models")
    for name, template in (("plain", None), ("chat", "default")):
        (tiny_model(folder / name, chat_template=template) / "model.safetensors").unlink()
    return folder


@pytest.fixture
def show(models, tmp_path, capsys):
    """What ``rlhf data preview`` prints for rows; with ``--json``, as an object."""

    def make(algo, rows, *flags, model="plain", code=0):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["data", "preview", "--algo", algo, "--model", str(models / model), "--data", str(path), *flags]
        status = main(words)
        output = capsys.readouterr()
        assert status == code, output.err
        return json.loads(output.out) if "--json" in flags else output.out

    return make


PAIRS = [
    {"q": 1, "prompt": "a:", "chosen": "bc", "rejected": "d", "by": 1.5},
    {"q": 2, "prompt": "a:", "chosen": "d", "rejected": "d", "by": 1},
    {"q": 3, "prompt": "a" * 30, "chosen": "bc", "rejected": "d", "by": 1},
]


def test_an_end_token_that_the_chat_template_does_not_write(show, tmp_path):
    """The preview says so, and shows the tokenizer's in its place."""
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}")
    text = show("sft", [{"prompt": "a", "response": "b"}], "--data.chat_template", str(tmp_path / "chat.jinja"))
    assert "note: the chat template writes no end token after an answer" in text
    assert "b<eos>⟧" in text
    assert show("sft", [{"prompt": "a", "response": "b"}], "--json", model="chat")["end_note"] == ""


def test_a_pair_as_json(show):
    flags = ("--json", "--data.margin", "by", "--data.max_tokens", "20", "--data.too_long", "drop")
    report = show("dpo", PAIRS, *flags, code=1)
    assert (report["form"], report["template"]) == ("pairs", "plain")
    (source,) = report["sources"]
    assert (source["name"], source["use"], source["rows"], source["unused"]) == ("rows", "train", 3, ["q"])
    assert source["columns"] == {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "by"}
    first, second, third = report["shown"]
    assert first["where"].endswith("rows.jsonl, line 1")
    assert (first["status"], first["why"], first["margin"]) == ("ok", "", 1.5)
    chosen, rejected = first["sequences"]
    assert (chosen["name"], chosen["tokens"], chosen["trained"]) == ("chosen", 5, 3)
    assert chosen["texts"] == ["a", ":", "b", "c", "<eos>"]
    assert chosen["mask"] == [False, False, True, True, True]
    assert (rejected["name"], rejected["texts"]) == ("rejected", ["a", ":", "d", "<eos>"])
    assert (second["status"], second["sequences"]) == ("refused", [])
    assert second["why"].startswith("the chosen and the rejected answer have the same tokens")
    assert (third["status"], third["why"]) == (
        "left out", "the prompt has 30 tokens; data.max_tokens = 20 leaves no room to answer"
    )  # fmt: skip
    assert [s["tokens"] for s in third["sequences"]] == [33, 32]


def test_steps_and_labels(show):
    rows = [{"prompt": "Q\n", "completions": ["ab", "c"], "labels": [1, 0.25]}]
    (row,) = show("prm", rows, "--json")["shown"]
    assert row["sequences"][0]["steps"] == [[4, 1.0], [6, 0.25]]
    out = show("prm", rows)
    assert "row: 7 tokens, 5 trained on, 2 steps\nQ↵\n⟦ab↵\n⟨1⟩c↵\n⟨0.25⟩⟧\n" in out
    rows = [{"prompt": "p", "response": "r", "label": v} for v in (True, False)]
    assert [r["label"] for r in show("kto", rows, "--json")["shown"]] == [True, False]
    assert "line 2 (train), label False\nrow: 3 tokens, 2 trained on\np⟦r<eos>⟧\n" in show("kto", rows)


def test_rows_conversations_and_prompts(show):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    rows = [{"conversations": turns, "id": 1}] * 4
    out = show("sft", rows, "--rows", "2", model="chat")
    assert "demonstrations, chat template" in out
    assert "'rows': 4 rows, read as messages = 'conversations' (from/value turns as messages); not used: id" in out
    assert out.count("<|user|>hi<eos><|assistant|>⟦yo<eos>⟧") == 2
    report = show("grpo", rows, "--rows", "1", "--json", model="chat")
    (prompt,) = report["shown"][0]["sequences"]
    assert "".join(prompt["texts"]) == "<|user|>hi<eos><|assistant|>"
    assert (prompt["trained"], any(prompt["mask"])) == (0, False)
    out = show("grpo", rows, model="chat")
    assert "The policy answers where the text ends." in out
    assert "(from/value turns as messages); for rewards and environments only: id\n" in out


def test_given_answers_that_are_learnt_from_are_shown_and_judged(show):
    """A share of the rows is learnt from by its own answer, which must be there and fit, as in a run."""
    turns = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": turns, "response": r} for r in ("yo", "", "y" * 30)]
    flags = ("--algorithm.sampled", "0.4", "--data.max_tokens", "20", "--data.too_long", "drop", "--check")
    report = show("distill_on_policy", rows, "--json", *flags, model="chat", code=1)
    assert (report["form"], report["answers"]) == ("prompts", True)
    assert report["sources"][0]["columns"] == {"prompt": "prompt", "response": "response"}
    first, second, third = report["shown"]
    prompt, answer = first["sequences"]
    assert (prompt["name"], answer["name"], answer["trained"]) == ("prompt", "given answer", 3)
    assert "".join(prompt["texts"]) == "<|user|>hi<eos><|assistant|>"
    assert answer["texts"] == ["<|user|>", "h", "i", "<eos>", "<|assistant|>", "y", "o", "<eos>"]
    assert answer["mask"] == [False] * 5 + [True] * 3
    assert (second["status"], second["sequences"]) == ("refused", [])
    assert "the answer is empty" in second["why"]
    assert (third["status"], "36 tokens, over data.max_tokens = 20" in third["why"]) == ("left out", True)
    assert [report["all"]["train"][k] for k in ("ok", "too_long", "bad_rows", "longest")] == [1, 1, 1, 36]
    out = show("distill_on_policy", rows[:1], *flags, model="chat")
    assert "Trained tokens are in ⟦brackets⟧." in out
    assert "given answer: 8 tokens, 3 trained on\n<|user|>hi<eos><|assistant|>⟦yo<eos>⟧\n" in out
    (row,) = show("distill_on_policy", rows[1:2], "--json", model="chat")["shown"]  # all answers are sampled
    assert [s["name"] for s in row["sequences"]] == ["prompt"]


def test_every_row_is_counted_on_request(show):
    flags = ("--check", "--rows", "0", "--data.max_tokens", "20")
    report = show("dpo", PAIRS * 2, "--json", *flags, code=1)
    counts = report["all"]["train"]
    assert [counts[k] for k in ("ok", "too_long", "bad_rows", "longest")] == [2, 2, 2, 33]
    assert [line.split(": ")[0].rsplit(" ", 1)[1] for line in counts["named"]] == ["2", "3", "5", "6"]
    assert report["shown"] == []
    out = show("dpo", PAIRS * 5, *flags, code=1)
    assert "data.train: 5 of 15 rows can be used, 5 are too long, 5 are bad; the longest has 33 tokens" in out


def test_the_exit_code_says_whether_a_row_is_refused(show):
    """Rows that are left out do not count. Without ``--check`` only the rows that are shown do."""
    drop = ("--data.bad_rows", "drop", "--data.too_long", "drop", "--data.max_tokens", "20")
    show("dpo", PAIRS, *drop, "--check")
    show("dpo", PAIRS, "--rows", "1")
    show("dpo", PAIRS, "--rows", "2", code=1)
    show("dpo", PAIRS, "--rows", "1", "--check", code=1)
    show("dpo", PAIRS[::2], "--rows", "1", "--check", *drop[-2:], code=1)


def test_colours_tell_tokens_apart(show, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = show("dpo", PAIRS[:1])
    assert "\x1b[2ma\x1b[0m\x1b[2;4m:\x1b[0m\x1b[30;42mb\x1b[0m\x1b[30;102mc\x1b[0m" in out
    assert "⟦" not in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_the_terminal_cannot_show_is_escaped(show, monkeypatch, encoding):
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding=encoding))
    show("sft", [{"prompt": "1+1=", "response": "\N{SNOWMAN}\ud800"}], code=1)
    assert "1+1=" in buffer.getvalue().decode(encoding)


def test_no_row_controls_the_terminal(show, models):
    (tiny_model(models / "control", chars="ab\x1b") / "model.safetensors").unlink()
    rows = [{"prompt": "a\x1b", "response": "b\x1b", "\x1b[31m": 1}]
    out = show("sft", rows, model="control")
    assert "not used: \\x1b[31m" in out
    assert "a\\x1b⟦b\\x1b<eos>⟧" in out
    assert "\x1b" not in out


def test_long_sequences_are_cut_in_the_middle(show):
    rows = [{"prompt": "p" * 500, "response": "r" * 500}]
    out = show("sft", rows)
    assert "p" * 300 + " ... 401 tokens ... " + "⟦" + "r" * 299 + "<eos>⟧" in out
    assert len(show("sft", rows, "--json")["shown"][0]["sequences"][0]["texts"]) == 1001


def test_missing_inputs_of_a_preview_are_named(models, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"a": 1}) + "\n")
    assert main(["data", "preview", "--algo", "sft", "--data", str(rows)]) == 2
    assert "no model is named, but the model's tokenizer is needed" in capsys.readouterr().err
    words = ["data", "preview", "--algo", "sft", "--model", str(models / "plain"), "--data", str(rows)]
    assert main(words) == 1
    assert "has no column 'prompt' or 'response'; columns present: a." in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--rows", "-1"])


def test_options_that_no_run_accepts_are_refused(models, tmp_path, capsys):
    """A file that a run refuses for what it says of the data is refused in the same words."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + "\n")
    words = ["data", "preview", "--algo", "dpo", "--model", str(models / "plain"), "--data", str(path)]
    assert main([*words, "--data.loss_on", "all"]) == 2
    assert (
        "data.loss_on = 'all' applies to demonstrations, but dpo learns from pairs. Remove it."
        in capsys.readouterr().err
    )


def test_characters_of_several_tokens():
    """A text is the last token's; spaces that a tokenizer drops from the first token of a text are kept."""
    data = "é→x".encode()
    assert token_texts(list(data), lambda ids: bytes(list(ids)).decode(errors="replace")) == ["", "é", "", "", "→", "x"]
    words = ["The", " cat", " sat"]
    assert token_texts([0, 1, 2], lambda ids: "".join(words[i] for i in ids).lstrip()) == words
