"""The tasks of examples/real_model with a tiny model: rows, rewards, run files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rlhf_cli.main import main as rlhf
from rlhf_plugin_tools.functions import PythonFunction, Source
from rlhf_runtime.config.load import load
from rlhf_testing.tiny import CHARS, tiny_model, tiny_tokenizer

from examples.real_model import json_reward, make_rows
from examples.real_model.calculator import calculate

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
    online = () if name == "tool_sft.toml" else ("--sampling.max_new_tokens", "8", "--eval.max_rows", "2")
    assert rlhf(words(name, "--run.steps", "2", "--run.output", name, *online)) == 0
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


def test_no_held_out_row_is_trained_on(folder: Path) -> None:
    rows = folder / "runs/real_model/rows"
    prompts: dict[str, set[str]] = {}
    for path in rows.glob("*/*.jsonl"):
        group = [json.loads(line) for line in path.read_text().splitlines()]
        texts = {row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in group}
        prompts[f"{path.parent.name}/{path.stem}"] = texts
        assert len(texts) == len(group), path
    for task, held_out in (("json", ("held_out", "new_kinds")), ("tool", ("held_out", "new_problems"))):
        for name in held_out:
            assert not prompts[f"{task}/{name}"] & prompts[f"{task}/train"]
    assert not prompts["tool/demonstrations"] & (prompts["tool/train"] | prompts["tool/held_out"])


def test_demonstrations_describe_the_tool_as_the_rollout_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    functions = load(str(EXAMPLE / "tool.toml"), []).rollout.options["functions"]
    tools = load(str(EXAMPLE / "tool_sft.toml"), [("policy.model", "tiny")]).data.template_kwargs["tools"]
    schemas = [PythonFunction(Source.of(function)).schema for function in functions]
    assert json.dumps(tools) == json.dumps(schemas), "the order is that of the text which the policy reads"


def test_the_tool_gives_the_answers_of_the_rows(folder: Path) -> None:
    for name in ("train", "held_out", "new_problems"):
        for line in (folder / f"runs/real_model/rows/tool/{name}.jsonl").read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            assert str(calculate(row["a"], row["operation"], row["b"])) == row["answer"]
