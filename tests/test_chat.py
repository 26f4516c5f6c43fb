"""`rlhf chat`: conversations in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
from pathlib import Path

import pytest
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model

from tests.runs import Workshop

FLAGS = ("--policy.dtype", "fp32", "--max-tokens", "8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a chat template, and one without."""
    folder = tmp_path_factory.mktemp("chat")
    small = {"hidden": 16, "heads": 2, "kv_heads": 1}
    return tiny_model(folder / "talks", chat_template="default", **small), tiny_model(folder / "plain", seed=3, **small)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(lines: str, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        code = main(["chat", *map(str, words), *FLAGS])
        return code, *capsys.readouterr()

    return run


def test_a_line_of_a_pipe_is_answered_in_a_line(chat, models, capsys) -> None:
    code, out, err = chat("Hello\n\nAnd?\n/template\n/reset\nHello\n/quit\nnot read\n", models[0], "--system", "Be.")
    assert code == 0, err
    first, _, prompt, second = out.split("\n")[:-1]
    assert first == second, "a reset forgets the conversation"
    assert prompt.startswith("<|system|>Be.<eos><|user|>Hello<eos><|assistant|>")
    assert prompt.endswith("<eos><|user|>And?<eos><|assistant|>")
    words = ("--model", str(models[0]), "--prompt", "Hello", "--data.system", "Be.", "--policy.dtype", "fp32")
    assert main(["generate", *words, "--sampling.max_new_tokens", "8"]) == 0
    answer = capsys.readouterr().out.split("[assistant] ")[1].removesuffix("\n")
    assert answer == first.replace("\\n", "\n").replace("\\\\", "\\"), "the embedded generator draws both"


def test_two_models_are_asked_the_same(chat, models) -> None:
    code, out, err = chat("Hello\n/template\n", *models)
    assert code == 0, err
    assert [line.partition("\t")[0] for line in out.splitlines()] == ["talks", "plain"] * 2
    assert out.splitlines()[3] == "plain\tHello", "a model without a template gets plain text"


def test_the_model_of_a_run_is_talked_to_with_its_system_message(chat, models, shop: Workshop) -> None:
    data = {"system": "Add.", "max_tokens": 128}
    run = shop.train("sft", "run", policy={"model": str(models[0])}, data=data, run={"steps": 1})
    code, out, err = chat("1+1=\n/template\n", run.path)
    assert code == 0, err
    assert "<|system|>Add.<eos><|user|>1+1=" in out
    code, out, err = chat("1+1=\n/template\n", run.path, "--system", "Sub.")
    assert "<|system|>Sub.<eos>" in out
    adapted = shop.train("sft", "lora", trainer={"lora": {"rank": 2}}, run={"steps": 1})
    code, out, err = chat("1+1=\n", adapted.path / "model", adapted.path / "model" / "adapter")
    answers = [line.partition("\t")[2] for line in out.splitlines()]
    assert (code, answers[0]) == (0, answers[1]), err


@pytest.mark.parametrize("columns", [120, 60])
def test_on_a_terminal_answers_are_side_by_side_or_one_below_the_other(monkeypatch, models, columns: int) -> None:
    controller, device = pty.openpty()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(device, "r+b", buffering=0) as file:
        terminal = io.TextIOWrapper(file, write_through=True)
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("sys.stdout", terminal)
        os.write(controller, b"Hello\n/nothing\n/quit\n")
        assert main(["chat", *map(str, models), *FLAGS]) == 0
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal whose other side is closed
        while True:
            output += os.read(controller, 2**16)
    text = output.decode(errors="replace")
    assert "unknown command /nothing" in text
    heads = [line for line in text.splitlines() if "talks" in line]
    assert ("plain" in heads[0]) == (columns == 120), text


def test_what_cannot_be_answered_is_said(chat, models, tmp_path: Path) -> None:
    code, _, err = chat("Hello, how are you?\n", models[0], "--data.max_tokens", "20")
    assert (code, "exceeds the limit of 20" in err) == (2, True), err
    (tmp_path / "config.toml").write_text("")
    code, _, err = chat("Hello\n", tmp_path)
    assert (code, "has not written a model yet" in err) == (2, True), err
    code, _, err = chat("Hello\n", tmp_path / "gone")
    assert (code, "gone does not exist" in err) == (1, True), err
