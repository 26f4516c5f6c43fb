"""The tasks of examples/real_model with a tiny model: rows, rewards, run files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rlhf_cli.main import main as rlhf
from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_runtime.config.load import load
from rlhf_testing.tiny import CHARS, tiny_model, tiny_tokenizer

from examples.real_model import json_reward, make_rows
from examples.real_model.calculator import calculate

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = Path("examples/real_model")
QUESTION = {"question": "Ann has 3 pens and buys 4. How many has she?", "answer": "3+4 = <<3+4=7>>7\n#### 7"}
RUN_FILES = sorted(path.name for path in (ROOT / EXAMPLE).glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in place of the repository's root, with rows and a tiny model whose tokenizer knows ChatML's marks."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("real_model")
    shutil.copytree(ROOT / EXAMPLE, folder / EXAMPLE)
    data = folder / "data"
    data.mkdir()
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (data / name).write_text((json.dumps(QUESTION) + "\n") * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_rows.main(["runs/real_model/rows", "--data", str(data)])
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(folder / "tiny", CHARS))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(str(folder / "tiny"))
    tiny_model(folder / "tiny")
    return folder


def words(name: str, *flags: str) -> list[str]:
    """A tiny tokenizer has a token for each character, so rows are longer."""
    return ["train", str(EXAMPLE / name), "--model", "tiny", "--data.max_tokens", "2048", *flags]


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


@pytest.mark.parametrize(
    ("answer", "matches"),
    [
        ("3+4 = 7\n#### 7", True),
        ("She buys 3+4 = 7.\nEach costs 300 dollars, so 7*300 = $2,100.\n#### $2,100", True),
        ("3+4 = 7\n#### 7\n#### 7", False),
        ("3+4 = 7\n#### 7 pens", False),
        ("3+4 = 7 #### 7", False),
        ("She has 7.\n#### 7", False),
        ("#### 7", False),
    ],
)
def test_the_form_of_gsm8k_is_an_equation_and_one_line_with_the_number(
    answer: str, matches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (form,) = (r for r in load(str(EXAMPLE / "gsm8k.toml"), [("policy.model", "tiny")]).reward if "format" in r.use)
    assert bool(re.fullmatch(form.options["pattern"], answer, re.DOTALL)) is matches


def text_of(row: dict[str, Any]) -> str:
    """The last request of a prompt, the first of a conversation."""
    if "messages" in row:
        return str(row["messages"][0]["content"])
    return str(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])


def test_no_held_out_row_is_trained_on(folder: Path) -> None:
    rows = folder / "runs/real_model/rows"
    prompts: dict[str, set[str]] = {}
    for path in rows.glob("*/*.jsonl"):
        group = [json.loads(line) for line in path.read_text().splitlines()]
        texts = {text_of(row) for row in group}
        prompts[f"{path.parent.name}/{path.stem}"] = texts
        if path.parent.name != "gsm8k":
            assert len(texts) == len(group), path
    for task, held_out in (("json", ("held_out", "new_kinds")), ("tool", ("held_out", "new_problems"))):
        for name in held_out:
            assert not prompts[f"{task}/{name}"] & prompts[f"{task}/train"]
    for name in ("held_out", "new_kinds"):
        assert prompts[f"json/{name}_example"] == prompts[f"json/{name}"]
    assert not prompts["tool/demonstrations"] & (prompts["tool/train"] | prompts["tool/held_out"])


def test_demonstrations_describe_the_tool_as_the_rollout_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    functions = load(str(EXAMPLE / "tool.toml"), []).rollout.options["functions"]
    tools = load(str(EXAMPLE / "tool_sft.toml"), [("policy.model", "tiny")]).data.template_kwargs["tools"]
    schemas = [PythonFunction(FunctionSource.of(function)).schema for function in functions]
    assert json.dumps(tools) == json.dumps(schemas), "the order is that of the text which the policy reads"


def test_batches_of_the_tool_have_as_many_rows_of_each_operation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    data = load(str(EXAMPLE / "tool.toml"), []).data
    lines = (folder / "runs/real_model/rows/tool/train.jsonl").read_text().splitlines()
    operations = [json.loads(line)["operation"] for line in lines]
    assert not data.shuffle
    for start in range(0, len(operations), data.batch_size):
        batch = operations[start : start + data.batch_size]
        assert {batch.count(operation) for operation in make_rows.PROBLEMS} == {data.batch_size // 3}


def test_the_tool_gives_the_answers_of_the_rows(folder: Path) -> None:
    for name in ("train", "held_out", "new_problems"):
        for line in (folder / f"runs/real_model/rows/tool/{name}.jsonl").read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            assert str(calculate(row["a"], row["operation"], row["b"])) == row["answer"]
