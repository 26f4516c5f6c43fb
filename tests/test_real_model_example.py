"""The tasks of examples/real_model with a tiny model: rows, rewards, run files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rlhf_cli.main import main as rlhf
from rlhf_testing.tiny import CHARS, tiny_model, tiny_tokenizer

from examples.real_model import json_reward, make_rows

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = Path("examples/real_model")
RUN_FILES = sorted(path.name for path in (ROOT / EXAMPLE).glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in place of the repository's root, with rows and a tiny model whose tokenizer knows ChatML's marks."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("real_model")
    shutil.copytree(ROOT / EXAMPLE, folder / EXAMPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_rows.main(["runs/real_model/rows"])
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(folder / "tiny", CHARS))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(str(folder / "tiny"))
    tiny_model(folder / "tiny")
    return folder


def words(name: str, *more: str) -> list[str]:
    """A tiny tokenizer has a token for each character, so rows are longer."""
    return ["train", str(EXAMPLE / name), "--model", "tiny", "--data.max_tokens", "2048", *more]


@pytest.mark.parametrize("name", RUN_FILES)
def test_every_run_file_passes_the_checks_before_a_run(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert rlhf(words(name, "--dry-run")) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", RUN_FILES)
def test_every_run_file_trains(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    small = ("--sampling.max_new_tokens", "8", "--eval.max_rows", "2")
    assert rlhf(words(name, "--run.steps", "2", "--run.output", name, *small)) == 0
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    assert (folder / name / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"name": "Maria", "age": 34}', 1.0),
        ('\n{"age": 34, "name": "Maria"} ', 1.0),
        ('{"name": "Maria", "age": "34"}', 0.5),
        ('{"name": "Maria", "age": 34, "city": "Rome"}', 2 / 3),
        ('{"name": "Maria", "age": 34} Done.', 0.0),
        ('```json\n{"name": "Maria", "age": 34}\n```', 0.0),
        ('["Maria", 34]', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_the_reward_of_json_is_the_share_of_right_keys_of_an_object_alone(answer: str, value: float) -> None:
    assert json_reward.score([], answer, {"answer": {"name": "Maria", "age": 34}}) == pytest.approx(value)


def test_no_held_out_row_is_trained_on_and_new_kinds_have_new_keys(folder: Path) -> None:
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "runs/real_model/rows/json").glob("*.jsonl")
    }
    prompts = {name: {row["prompt"] for row in group} for name, group in rows.items()}
    assert {name: len(texts) for name, texts in prompts.items()} == {"train": 600, "held_out": 100, "new_kinds": 100}
    assert not prompts["train"] & (prompts["held_out"] | prompts["new_kinds"])
    keys = {name: {tuple(row["answer"]) for row in group} for name, group in rows.items()}
    assert keys["held_out"] == keys["train"]
    assert not keys["new_kinds"] & keys["train"]
