"""The recipes of examples/recipes, each by its one command, with fewer steps."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_runtime.config.load import load

from tests import pages

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
RUNS = Path("runs/recipes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in place of the repository's root. Task and warm start are made once in it."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(RECIPES, folder / "examples" / "recipes")
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """``run.py``, which finds ``make_task.py`` beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        module = pages.script(RECIPES / "run.py")
        sys.modules.pop("make_task")
    return module


@pytest.fixture
def recipe(
    script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    def run(name: str, steps: int) -> str:
        monkeypatch.chdir(folder)
        script.prepare(60)
        script.main([name, "--steps", str(steps)])
        return capsys.readouterr().out.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("name", "versions", "metric"),
    [
        ("rejection_sampling", [0] * 10 + [10] * 2, "reward/best"),
        ("iterative_dpo", [0] * 10 + [10] * 2, "pairs/made"),
        ("online_dpo", list(range(12)), "pairs/made"),
        ("dapo", list(range(12)), "reward/group_std"),
    ],
)
def test_a_recipe_that_samples(recipe: Any, folder: Path, name: str, versions: list[int], metric: str) -> None:
    """The recipe prints its result, and every step trained on samples of the right policy."""
    transcript = recipe(name, 12)
    first, last = map(float, re.search(r"held-out reward: ([\d.]+) .* -> ([\d.]+) ", transcript).groups())  # type: ignore[union-attr]
    assert last > first
    lines = [json.loads(line) for line in (folder / RUNS / name / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["stream/version"] for line in lines] == versions
    assert all(line[metric] > 0 for line in lines)


def test_the_reward_in_the_prompt(recipe: Any, folder: Path) -> None:
    transcript = recipe("conditional_sft", 4)
    pairs = re.findall(r"(-?[\d.]+) -> ([\d.]+)", transcript)
    rows = [json.loads(line) for line in (folder / RUNS / "conditional_sft" / "conditional.jsonl").open()]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards) == pytest.approx(0, abs=1e-9)
    assert sum(r * r for r in rewards) == pytest.approx(len(rewards) - 1)
    assert [target for target, _ in pairs] == [f"{r:.2f}" for r in (min(rewards), 0.0, max(rewards), 5.0)]
    assert all(re.fullmatch(r"\d{4}> <rm_score>: -?\d\.\d\d ", row["prompt"]) for row in rows)


@pytest.mark.parametrize(
    ("learned", "steps", "repeated"), [(None, None, True), (13, None, True), (250, None, False), (60, 12, False)]
)
def test_a_warm_start_with_too_few_steps_is_repeated(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    learned: int | None, steps: int | None, repeated: bool,
) -> None:  # fmt: skip
    """That of a run which was stopped, or of an earlier ``--steps``, has a model too."""
    shutil.copytree(RECIPES, tmp_path / "examples" / "recipes")
    monkeypatch.chdir(tmp_path)
    script.TASK.joinpath("model").mkdir(parents=True)
    if learned is not None:
        script.WARM_START.mkdir(parents=True)
        lines = (json.dumps({"step": step}) + "\n" for step in range(1, learned + 1))
        script.WARM_START.with_name("metrics.jsonl").write_text("".join(lines))
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "run", lambda *words: commands.append(words))
    script.prepare(steps)
    assert [words[1] for words in commands] == ["examples/recipes/warm_start.toml"] * repeated


def test_every_run_file_is_that_of_a_recipe(script: ModuleType) -> None:
    files = {path.stem for path in RECIPES.glob("*.toml")}
    assert files == {"warm_start", *script.RECIPES}
    rounds = load(str(RECIPES / "iterative_dpo.toml"), [])
    assert rounds.stream.round == rounds.algorithm.options["snapshot_every"] == 10
    assert load(str(RECIPES / "online_dpo.toml"), []).stream.round == 1
    dapo = load(str(RECIPES / "dapo.toml"), [])
    assert dapo.algorithm.options["shaping"]["overlong_max"] == dapo.sampling.max_new_tokens


@pytest.mark.parametrize("name", ["agent", "images", "recipes", "tools"])
@pytest.mark.parametrize(("code", "text"), [(130, "^stopped$"), (1, "`rlhf train x.toml` failed")])
def test_an_example_that_a_ctrl_c_ends_did_not_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, text: str
) -> None:
    path = ROOT / "examples" / name / "run.py"
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, "make_task", raising=False)
    module = pages.script(path)
    monkeypatch.delitem(sys.modules, "make_task")
    monkeypatch.setattr(module, "rlhf", lambda words: code)
    with pytest.raises(SystemExit, match=text):
        module.run("train", "x.toml")
