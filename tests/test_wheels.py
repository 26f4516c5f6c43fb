"""The wheels of ``make wheels``, installed with pip: each distribution works with what it requires and nothing else.

Light plugins need an environment without torch. What the README shows works where only wheels are installed.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
import rlhf
from packaging.requirements import Requirement

from tests.environments import Environment, all_third_parties, build_wheels, files_of, third_parties
from tests.members import BY_NAME, MEMBERS, ROOT, ROOT_PROJECT, Member, name_of, required
from tests.pages import blocks, commands, read

LIGHT = ("rlhf-plugin-length", "rlhf-plugin-format", "rlhf-plugin-number-game", "rlhf-plugin-turns", "rlhf-plugin-math")
"""They must not need torch."""
SHORT = ("rlhf-plugin-length", "rlhf-plugin-math")
"""`make test` installs these, one without and one with a third party, and `make test-all` every distribution."""
HEAVY = ("torch", "transformers", "datasets")
LOOK = """
import importlib.metadata, importlib.util, json, sys
import rlhf
from rlhf.plugins import Plugins

plugins, resolved, slots = Plugins.discover(), [], set()
for entry in plugins.list():
    assert entry.status == "ok", entry
    if entry.distribution == sys.argv[1]:
        cls = plugins.resolve(entry.kind, entry.name).cls
        resolved.append([entry.kind, cls.name])
        slots |= {plugins.resolve(slot.kind, slot.use).distribution for slot in getattr(cls, "slots", {}).values()}
ours = sorted(d.name for d in importlib.metadata.distributions() if d.name.startswith("rlhf"))
heavy = [name for name in sys.argv[2:] if importlib.util.find_spec(name)]
print(json.dumps({"rlhf": rlhf.__file__, "ours": ours, "resolved": resolved, "slots": sorted(slots), "heavy": heavy}))
"""
SCORE = """
import asyncio, inspect
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn

length = Plugins.discover().resolve("reward", "length").cls
reward = length(length.Config(high=2, per_token=0.25))
row = Row({}, "train", 0)
answers = [Trajectory(row, [Turn([5], False), Turn([7] * tokens, True)], (0, i)) for i, tokens in enumerate((1, 4))]
scores = reward.score(Group(row, 0, answers))
scores = asyncio.run(scores) if inspect.isawaitable(scores) else scores
print([score.value for score in scores])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels") / "dist")


def test_there_is_one_wheel_for_each_distribution(wheels: Path) -> None:
    names = [f"{name.replace('-', '_')}-{rlhf.__version__}-py3-none-any.whl" for name in (*BY_NAME, "rlhf-kit")]
    assert sorted(file.name for file in wheels.iterdir()) == sorted(names)


def test_a_wheel_contains_only_its_package(wheels: Path) -> None:
    for member in MEMBERS:
        stem = f"{member.name.replace('-', '_')}-{rlhf.__version__}"
        names = zipfile.ZipFile(wheels / f"{stem}-py3-none-any.whl").namelist()
        assert {name.partition("/")[0] for name in names} == {member.package, f"{stem}.dist-info"}


@pytest.mark.parametrize(
    "member",
    [pytest.param(m, marks=() if m.name in SHORT else pytest.mark.full) for m in MEMBERS],
    ids=name_of,
)
def test_a_distribution_works_with_what_it_requires(member: Member, wheels: Path, tmp_path: Path) -> None:
    links = {file for name in third_parties(member.name) for file in files_of(name)}
    environment = Environment.make(tmp_path / "venv", wheels, links)
    environment.install(member.name)
    facts = json.loads(environment.run("python", "-c", LOOK, member.name, *HEAVY))
    assert facts["rlhf"] == str(environment.site / "rlhf" / "__init__.py"), "of the wheel, not of the checkout"
    assert facts["ours"] == sorted(m.name for m in required(member))
    assert sorted(facts["resolved"]) == sorted([kind, name] for kind, name, _ in member.entry_points)
    assert set(facts["slots"]) <= {m.name for m in required(member)}
    if member.name in LIGHT:
        assert facts["heavy"] == []
    if member.name == "rlhf-plugin-length":
        assert environment.run("python", "-c", SCORE) == "[0.0, -0.5]\n"
    if BY_NAME["rlhf-cli"] in required(member):
        plugins = json.loads(environment.run("rlhf", "plugins", "list", "--json"))
        assert {row["distribution"] for row in plugins} == {m.name for m in required(member) if m.entry_points}


# ------------------------------------------------------------------------------------- the README

FILLED = {"RUN.TOML": "run.toml", "NAME": "brevity", "KIND": "reward"}
"""What stands for the words that a reader of the README replaces."""
NAMES = (["chat"], ["rewards", "try"], ["serve-training"])
"""Commands that the README names without arguments, as links to their pages."""
SMALL = ["--steps", "1", "--eval.at_start", "false", "--data.batch_size", "8", "--sampling.samples_per_prompt", "2"]
SMALL += ["--trainer.warmup_steps", "0", "--launcher.cpus", "2", "--generator.kv_cache_gib", "0.25"]


@pytest.fixture(scope="module")
def kit(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """``pip install rlhf-kit``; beside it are a checkout's examples, the tiny task, and its model after a few steps."""
    folder = tmp_path_factory.mktemp("kit")
    environment = Environment.make(folder / "venv", wheels, all_third_parties())
    environment.install("rlhf-kit")
    shutil.copytree(ROOT / "examples", folder / "venv" / "examples")
    environment.run("python", "examples/quickstart/tiny_task.py", "runs/quickstart-tiny/task")
    few = ("--steps", "20", "--trainer.warmup_steps", "5")
    environment.run("rlhf", "train", "examples/quickstart/tiny_sft.toml", *few)
    shutil.copy(ROOT / "examples" / "quickstart" / "tiny_rloo.toml", folder / "venv" / "run.toml")
    return environment


@pytest.mark.full
def test_the_kit_brings_every_plugin_that_it_requires(kit: Environment) -> None:
    distributions = {row["distribution"] for row in json.loads(kit.run("rlhf", "plugins", "list", "--json", "--check"))}
    assert distributions == {
        r.name for r in map(Requirement, ROOT_PROJECT["dependencies"]) if BY_NAME[r.name].entry_points
    }


@pytest.mark.full
def test_the_commands_of_the_readme_work(kit: Environment) -> None:
    argument_lists = [words for words in commands(ROOT / "README.md") if "ray" not in words and words not in NAMES]
    assert [words[:2] for words in argument_lists].count(["train", "--algo"]) == 1, "the one that trains is among them"
    for words in argument_lists:
        few = ["--steps", "2", "--trainer.warmup_steps", "0", "--output", "runs/from-file"]
        extra_arguments = few if words == ["train", "run.toml"] else []
        content = (kit.folder / "run.toml").read_bytes()
        if words[0] == "init":
            (kit.folder / "run.toml").unlink()
        kit.run("rlhf", *[FILLED.get(word, word) for word in words], *extra_arguments)
        if words[0] == "init":  # the reader fills in the model and the data
            (kit.folder / "run.toml").write_bytes(content)
        if words[:2] == ["plugins", "new"]:
            kit.install("./rlhf-plugin-brevity")
    metrics = (kit.folder / "runs" / "by-flags" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 100
    assert (kit.folder / "runs" / "by-flags" / "model" / "model.safetensors").is_file()


@pytest.mark.full
def test_the_python_of_the_readme_works(kit: Environment) -> None:
    [code] = [b.text for b in blocks(ROOT / "README.md", "python") if "rlhf.train" in b.text]
    reward, model = kit.run("python", "-W", "ignore", "-c", code).split()[-2:]
    assert 0.0 <= float(reward) <= 1.0
    assert (Path(model) / "model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.cluster
def test_the_command_of_the_readme_for_a_cluster_works(kit: Environment) -> None:
    for module in ("ray", "deepspeed", "vllm"):
        pytest.importorskip(module)
    [extra] = re.findall(r"pip install --find-links dist '(rlhf-kit\[\w+\])'", read(ROOT / "README.md"), re.MULTILINE)
    kit.install(extra)
    [words] = [words for words in commands(ROOT / "README.md") if "ray" in words]
    kit.run("rlhf", *words, *SMALL)
    config = tomllib.loads((kit.folder / "runs" / "quickstart-tiny" / "rloo" / "config.toml").read_text())
    parts = [config[section]["use"] for section in ("launcher", "trainer", "generator")]
    assert parts == ["ray", "deepspeed", "vllm"]
