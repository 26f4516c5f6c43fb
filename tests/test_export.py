"""`rlhf data export`: what a run or an evaluation sampled, as data that the project itself reads without options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_testing.tiny import tiny_model

from tests.runs import Finished, Say, Workshop

FORMS = {"pairs": "pairs", "best": "demonstrations", "labels": "labels", "demonstrations": "demonstrations"}
"""{--form: the data form that reads it}."""
SHORT = ("--sampling.max_new_tokens", "4", "--data.max_tokens", "32", "--policy.dtype", "fp32")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory, tiny: Workshop) -> Workshop:
    """The workshop with a model that has a chat template."""
    folder = tmp_path_factory.mktemp("talking")
    model = tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1, chat_template="default")
    return Workshop(folder, model, tiny.data)


@pytest.fixture(scope="module")
def plain_run(tiny: Workshop) -> Finished:
    return tiny.train("grpo", "exported")


@pytest.fixture(scope="module")
def chat_run(talking: Workshop) -> Finished:
    return talking.train("grpo", "exported", data={"system": "add"})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("kind", ["plain_run", "chat_run"])
@pytest.mark.parametrize(("form", "read_as"), FORMS.items())
def test_exported_prompts_are_read_back_as_the_sampled_tokens(
    request: pytest.FixtureRequest, say: Say, tmp_path: Path, kind: str, form: str, read_as: str
) -> None:
    """Each exported row has the prompt's tokens as they were sampled from, and an answer that was given to them."""
    from transformers import AutoTokenizer

    run: Finished = request.getfixturevalue(kind)
    path = tmp_path / "rows.jsonl"
    code, out, err = say("data", "export", run.path, "--form", form, "--truncated", "-o", path)
    assert code == 0, err
    prompts = rows(path)
    assert f"{len(prompts)} rows of 36 answers to 12 prompts" in out
    section = DataSection(train=(SourceSection(path=str(path)),), shuffle=False)
    data = TrainData(section, AutoTokenizer.from_pretrained(run.path / "model"), read_as, 0)
    sampled: dict[tuple[int, ...], set[str]] = {}
    for sample in run.samples():
        prompt, answer = sample["turns"]
        sampled.setdefault(tuple(prompt["ids"]), set()).add(answer["text"])
    for example, row in zip(data.examples(data.take(len(prompts))), prompts, strict=True):
        columns = ("chosen", "rejected") if form == "pairs" else ("completion",)
        for sequence, column in zip(example.sequences, columns, strict=True):
            prompt_ids = tuple(sequence.ids[: sequence.loss_mask.index(True)])
            text = row[column] if isinstance(row[column], str) else row[column][0]["content"]
            assert text in sampled[prompt_ids]
            assert data.template.decode(sequence.ids[len(prompt_ids) :]).strip() == text.strip()


def test_answers_of_eval_and_generate_are_exported_too(shop: Workshop, say: Say) -> None:
    reward = shop.file("reward.py", "def score(prompt, completion, row):\n    return float(len(completion) % 3)\n")
    scored, unscored, out = (shop.folder / name for name in ("scored.jsonl", "unscored.jsonl", "rows.jsonl"))
    words = ("--model", shop.model, "--data", shop.data, *SHORT, "--eval.samples", 4, "--eval.temperature", 1, "--save")
    assert say("eval", "--reward", f"file:{reward}", *words, scored)[0] == 0
    assert say("generate", *words, unscored)[0] == 0
    code, stdout, _ = say("data", "export", scored, "--form", "conditional", "--truncated", "-o", out, "--json")
    counts = json.loads(stdout)
    assert (code, counts["answers"], counts["prompts"], counts["rows"]) == (0, 48, 12, len(rows(out)))
    assert all("= <rm_score>: " in row["prompt"] for row in rows(out))
    equal = shop.folder / "equal.jsonl"
    equal.write_text("".join(json.dumps({**row, "reward": 1.0}) + "\n" for row in rows(scored)))
    cut = sum(row["status"] == "truncated" for row in rows(equal))
    code, _, err = say("data", "export", equal, "--form", "conditional", "-o", out, "--force")
    assert (code, cut > 0) == (1, True)
    assert "cannot be normalised" in err
    assert f"--truncated includes answers that were cut off. Left out:\n  {cut} answers cut off\n" in err
    code, stdout, _ = say("data", "export", unscored, "--form", "demonstrations", "--truncated", "-o", out, "--force")
    assert code == 0
    code, stdout, err = say("data", "export", unscored, "--form", "best", "--truncated", "-o", out, "--force")
    assert code == 1
    assert "nothing to write: none of the 48 answers gives a row" in err
    assert "answers without a reward" in err
    assert len(rows(out)) > 12, "a failed export leaves what was there"


def test_wrong_usage_is_refused_with_what_to_do(plain_run: Finished, say: Say, tmp_path: Path) -> None:
    target = tmp_path / "there.jsonl"
    target.write_text("")
    export = ("data", "export", plain_run.path, "-o")
    for words, message in (
        ((*export, target, "--form", "pairs"), "there.jsonl exists; --force replaces it"),
        ((*export, tmp_path / "no" / "f.jsonl", "--form", "pairs"), "there is no folder"),
        ((*export, tmp_path, "--form", "pairs", "--force"), "is a folder"),
        ((*export, tmp_path / "f.jsonl", "--form", "pairs", "--keep", 2), "--keep is for --form best; --form pairs"),
        ((*export, tmp_path / "f.jsonl", "--form", "best", "--keep", 0), "--keep must be at least 1, got 0"),
        ((*export, tmp_path / "f.jsonl", "--form", "pairs", "--min-gap", -1), "--min-gap must be at least 0, got -1"),
    ):
        code, _, err = say(*words)
        assert (code, message in err) == (2, True), err
    assert target.read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.jsonl"]
