"""``rlhf plugins new``: what it writes installs and passes its own tests, for every kind."""

import ast
import json
import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
import torch
from rlhf.plugins.entry import KINDS
from rlhf_cli.main import main
from rlhf_cli.scaffold import LIKE
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM

SCAFFOLDS = {f"my_{kind}": (kind, None) for kind in KINDS} | {f"like_{like}": ("algorithm", like) for like in LIKE}
"""{name: (kind, --like)}: everything that the command can write."""


def new(output, name, kind, like=None):
    return main(["plugins", "new", name, "--kind", kind, "--output", str(output), *(["--like", like] if like else [])])


def test_the_command_prints_the_folder_and_the_next_commands(tmp_path, capsys):
    assert new(tmp_path, "my_score", "reward") == 0
    folder = tmp_path / "rlhf-plugin-my-score"
    assert capsys.readouterr().out == (
        f"wrote {folder}; next:\n  pip install -e {folder}\n  pytest {folder}\n"
        "  rlhf plugins show my_score --kind reward\n"
    )
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "README.md",
        "pyproject.toml",
        "src/rlhf_plugin_my_score/__init__.py",
        "src/rlhf_plugin_my_score/reward.py",
        "tests/test_my_score.py",
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"rlhf.reward": {"my_score": "rlhf_plugin_my_score"}}
    assert project["dependencies"] == ["rlhf-core>=0.1,<0.2"]


@pytest.mark.parametrize(
    ("name", "class_name"), [("brevity", "BrevityReward"), ("my_reward", "MyReward"), ("reward", "RewardReward")]
)
def test_the_class_says_its_kind_once(tmp_path, name, class_name):
    new(tmp_path, name, "reward")
    source = (tmp_path / f"rlhf-plugin-{name.replace('_', '-')}/src/rlhf_plugin_{name}/reward.py").read_text()
    assert [n.name for n in ast.parse(source).body if isinstance(n, ast.ClassDef)] == [class_name]


BASES = {
    None: "Algorithm[Example]",
    "supervised": "Algorithm[Example]",
    "policy_gradient": "PolicyGradient",
    "pairs": "PairLearning",
}


@pytest.mark.parametrize("like", [None, *LIKE])
def test_an_algorithm_begins_as_what_was_named_and_else_as_a_supervised_one(tmp_path, like):
    assert new(tmp_path, "x", "algorithm", like) == 0
    source = (tmp_path / "rlhf-plugin-x/src/rlhf_plugin_x/algorithm.py").read_text()
    assert f"class XAlgorithm({BASES[like]}):" in source


def test_like_is_for_algorithms_and_says_what_is_allowed(tmp_path, capsys):
    assert new(tmp_path, "x", "reward", "pairs") == 2
    assert capsys.readouterr().err == (
        "rlhf: --like pairs was given with --kind reward, but only --kind algorithm has several templates (supervised, "
        "policy_gradient, pairs). Omit --like, or set --kind algorithm\n"
    )
    assert new(tmp_path, "x", "algorithm", "pair") == 2
    assert capsys.readouterr().err == (
        "rlhf: --like pair: there is no such template. Did you mean 'pairs'? Allowed: supervised, policy_gradient, "
        "pairs\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "like"), SCAFFOLDS.values())
@pytest.mark.parametrize("name", ["class", "a_b_c"])
def test_any_name_gives_valid_python_without_gaps(tmp_path, kind, like, name):
    assert new(tmp_path, name, kind, like) == 0
    for path in (tmp_path / f"rlhf-plugin-{name.replace('_', '-')}").rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "@NAME@" not in text
            assert "@CLASS@" not in text
            assert text.endswith("\n")
            assert not text.endswith("\n\n")
            if path.suffix == ".py":
                ast.parse(text)
                assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(("kind", "like"), SCAFFOLDS.values())
def test_every_distribution_that_the_code_imports_is_required(tmp_path, kind, like):
    assert new(tmp_path, "x", kind, like) == 0
    folder = tmp_path / "rlhf-plugin-x"
    required = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    trees = [ast.parse(path.read_text()) for path in (folder / "src").rglob("*.py")]
    modules = {node.module for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    libraries = {m.split(".")[0] for m in modules if m.startswith("rlhf_")} - {"rlhf_plugin_x"}
    assert libraries <= {r.split(">")[0].replace("-", "_") for r in required}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "My-Score",
            "reward",
            "'My-Score' is not a valid name of a plugin: expected a letter, then lower case letters, digits and '_'",
        ),
        ("1x", "reward", "'1x' is not a valid name of a plugin"),
        ("x", "rewards", "no kind of plugin is called 'rewards'"),
    ],
)
def test_what_is_refused(tmp_path, capsys, name, kind, message):
    assert new(tmp_path, name, kind) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, capsys):
    assert new(tmp_path, "x", "reward") == 0
    assert new(tmp_path, "x", "loss") == 2
    assert "rlhf-plugin-x exists already; remove it, or choose another name or --output" in capsys.readouterr().err


def test_a_name_whose_distribution_is_installed_gets_a_note(tmp_path, capsys):
    assert new(tmp_path, "math", "reward") == 0
    assert "note: rlhf-plugin-math 0.1.0 is installed: installing the new one replaces it." in capsys.readouterr().err
    assert new(tmp_path, "maths", "reward") == 0
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert new(tmp_path / "file", "x", "reward") == 2
    folder = tmp_path / "file" / "rlhf-plugin-x"
    message = f"rlhf: {folder} cannot be created: Not a directory. Choose a folder with --output\n"
    assert capsys.readouterr().err == message


def test_a_new_generator_samples_from_the_module_of_the_default_trainer(tmp_path):
    """Its log-probs are those of transformers."""
    assert new(tmp_path, "x", "generator") == 0
    model = str(tiny_model(tmp_path / "model", hidden=16, heads=2, kv_heads=1))
    rows, reward, answers = (str(tmp_path / name) for name in ("rows.jsonl", "reward.py", "answers.jsonl"))
    Path(rows).write_text('{"prompt": "1+1="}\n')
    Path(reward).write_text("def score(prompt, completion, row): return 1.0\n")
    generator = f"file:{tmp_path}/rlhf-plugin-x/src/rlhf_plugin_x/generator.py"
    words = ["--model", model, "--policy.dtype", "fp32", "--generator", generator, "--data", rows, "--save", answers]
    words += ["--reward", f"file:{reward}", "--eval.temperature", "1", "--sampling.max_new_tokens", "6"]
    assert main(["eval", *words]) == 0
    prompt, answer = (turn["ids"] for turn in json.loads(Path(answers).read_text())["turns"])
    with torch.no_grad():
        logits_LV = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt + answer])).logits[0]
    logprobs_LV = logits_LV[len(prompt) - 1 : -1].log_softmax(-1)
    logprobs = json.loads(Path(answers).read_text())["turns"][1]["logprobs"]
    assert logprobs == pytest.approx(logprobs_LV[range(len(answer)), answer].tolist(), abs=1e-5)


# ------------------------------------------------------------------------ really installed and run


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """(folder of all kinds' distributions, environment in which they are installed, beside what was)."""
    folder, target = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("installed")
    for name, (kind, like) in SCAFFOLDS.items():
        assert new(folder, name, kind, like) == 0
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    folders = sorted(str(p) for p in folder.iterdir())
    done = subprocess.run([*install, "--target", str(target), *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def outcomes(workshop):
    """{name: Counter of outcomes}, and the output, of one pytest over all of them."""
    folder, environment = workshop
    report = folder.parent / "report.xml"
    flags = ["--import-mode=importlib", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull, f"--junitxml={report}"]
    flags += ["-W", "error", "-W", "ignore::DeprecationWarning", "--continue-on-collection-errors"]
    flags += ["--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *flags, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    counts = {name: Counter() for name in SCAFFOLDS}
    for case in ET.parse(report).iter("testcase"):
        place = f"{case.get('classname')} {case.get('name')}"
        name = next(n for n in SCAFFOLDS if f"test_{n}" in place)
        counts[name][next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")] += 1
    return counts, done.stdout[-6000:]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", SCAFFOLDS)
def test_a_new_plugin_passes_its_own_tests_and_the_suite_of_its_kind(outcomes, name):
    counts, output = outcomes
    assert set(counts[name]) == {"passed"}, output
    minimum = 5 if name == "my_backend" else 6
    assert counts[name]["passed"] >= minimum, "its own tests and the conformance suite"


@pytest.mark.full
@pytest.mark.slow
def test_new_backends_observer_and_curriculum_make_a_run_together(workshop, tmp_path):
    _, environment = workshop
    model = tiny_model(tmp_path / "model", hidden=16, heads=2, kv_heads=1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "reward.py").write_text("def score(prompt, completion, row): return len(set(completion)) / 9\n")
    words = ["train", "--algo", "rloo", "--model", str(model), "--data", "rows.jsonl", "--reward", "file:reward.py"]
    words += ["--steps", "2", "--policy.dtype", "fp32", "--data.batch_size", "2", "--data.max_tokens", "32"]
    words += ["--sampling.samples_per_prompt", "2", "--sampling.max_new_tokens", "4", "--output", "run"]
    words += [w for kind in ("launcher", "trainer", "generator", "curriculum") for w in (f"--{kind}.use", f"my_{kind}")]
    code = "import sys; from rlhf_cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words, "--observer", "my_observer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "my_observer.jsonl").read_text().splitlines()) == 2


@pytest.mark.full
@pytest.mark.slow
def test_new_plugins_are_listed_and_import(workshop, monkeypatch, capsys):
    _, environment = workshop
    monkeypatch.syspath_prepend(environment["PYTHONPATH"])
    main(["plugins", "list", "--json", "--check"])
    status = {(row["kind"], row["name"]): row["status"] for row in json.loads(capsys.readouterr().out)}
    assert {name: status[kind, name] for name, (kind, _) in SCAFFOLDS.items()} == dict.fromkeys(SCAFFOLDS, "ok")
