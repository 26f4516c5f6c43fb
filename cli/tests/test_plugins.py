import asyncio
import json
from types import SimpleNamespace

import pytest
from rlhf.plugins import Plugins
from rlhf.types import Row
from rlhf_cli.main import main
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes

REWARD = '''
from rlhf import hookimpl
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import RewardResult, RoleSpec

class Inner(ComponentConfig):
    weight: float = 0.5
    """A weight."""

class Probe(Reward):
    """Scores by probing."""
    name = "probe"
    source = "Someone et al. 2026"

    class Config(ComponentConfig):
        path: str
        """Where to
        look."""
        limit: int | None = 3
        """A limit."""
        inner: Inner = Inner()
        """A section."""

    def roles(self):
        return (RoleSpec("judge", head="scalar"),)

    async def score(self, group):
        return [RewardResult(1.0) for _ in group.trajectories]

@hookimpl
def rlhf_register_reward():
    return [Probe]
'''


REWARD_WITH_DEFAULT = REWARD.replace("path: str\n", "path: str = 'x'\n")
"""No option is required."""


@pytest.fixture
def installed(site, monkeypatch):
    """installed(name, source): a distribution with the reward ``name``, the only one that `rlhf plugins` finds."""
    stub = SimpleNamespace(discover=lambda: Plugins.discover([str(site.path)]))
    monkeypatch.setattr("rlhf_cli.plugins.Plugins", stub)
    return site.reward


def run(capsys, *words):
    code = main(["plugins", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_is_a_table(installed, capsys):
    installed("probe", REWARD)
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert out == (
        "KIND    NAME   DISTRIBUTION       VERSION  STATUS\n"
        "reward  probe  rlhf-plugin-probe  0.1.0    ok\n"
    )  # fmt: skip


def test_list_json_and_kind(installed, capsys):
    installed("probe", REWARD)
    row = {"kind": "reward", "name": "probe", "distribution": "rlhf-plugin-probe", "version": "0.1.0", "status": "ok"}
    assert json.loads(run(capsys, "list", "reward", "--json")[1]) == [row]
    assert json.loads(run(capsys, "list", "loss", "--json")[1]) == []
    assert run(capsys, "list", "loss")[1] == "KIND  NAME  DISTRIBUTION  VERSION  STATUS\n"
    code, _, err = run(capsys, "list", "rewad")
    assert code == 2
    assert "no kind of plugin is called 'rewad'" in err


def test_list_check_imports_each_and_fails_if_any_is_broken(installed, capsys):
    installed("probe", REWARD)
    assert run(capsys, "list", "--check")[0] == 0
    installed("dead", "import no_such_thing")
    assert run(capsys, "list")[0] == 0, "without --check nothing is imported"
    code, out, _ = run(capsys, "list", "--check", "--json")
    assert code == 1
    status = {row["name"]: row["status"] for row in json.loads(out)}
    assert status["probe"] == "ok"
    assert status["dead"].startswith(
        "failed to import 'throwaway_dead': ModuleNotFoundError: No module named 'no_such_"
    )


def test_show_says_what_it_is(installed, capsys):
    installed("probe", REWARD)
    code, out, _ = run(capsys, "show", "probe", "--json")
    assert code == 0
    (entry,) = json.loads(out)
    assert entry["file"].endswith("throwaway_probe.py")
    assert {k: entry[k] for k in ("kind", "name", "distribution", "version", "summary", "source", "class")} == {
        "kind": "reward",
        "name": "probe",
        "distribution": "rlhf-plugin-probe",
        "version": "0.1.0",
        "summary": "Scores by probing.",
        "source": "Someone et al. 2026",
        "class": "throwaway_probe.Probe",
    }
    assert entry["options"] == [
        {"name": "path", "type": "text", "required": True, "default": None, "doc": "Where to look."},
        {"name": "limit", "type": "integer", "required": False, "default": 3, "doc": "A limit."},
        {"name": "inner.weight", "type": "number", "required": False, "default": 0.5, "doc": "A weight."},
    ]
    assert entry["declares"]["calls"] == "async def: on the event loop"
    assert entry["declares"]["roles"] == "depends on options that must be set: path"


def test_show_separates_the_tables_inside_of_a_declaration(capsys):
    lines = run(capsys, "show", "ppo", "--kind", "algorithm")[1].splitlines()
    (slots,) = [line for line in lines if line.startswith("  slots: ")]
    assert "value_loss=(kind=loss, use=value, defaults=(clip=0.5))" in slots
    (needs,) = [line for line in lines if line.startswith("  needs: ")]
    assert needs.startswith("  needs: roles=[(name=policy, ")
    assert "), (name=critic, " in needs
    assert "  data: prompts" in run(capsys, "show", "ppo", "--kind", "loss")[1].splitlines()


def test_show_names_all_options_that_must_be_set(installed, capsys):
    installed("probe", REWARD.replace("limit: int | None = 3", "limit: int"))
    assert "  roles: depends on options that must be set: path, limit" in run(capsys, "show", "probe")[1].splitlines()


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (
            '    def model_post_init(self, _):\n            raise ValueError("give x")',
            "options that must be set: give x",
        ),
        ('def __init__(self, config):\n        raise ValueError("broken")', "its options (broken)"),
    ],
)
def test_show_says_why_default_options_are_refused(installed, capsys, added, reason):
    installed("probe", REWARD_WITH_DEFAULT.replace("    def roles", f"    {added}\n\n    def roles"))
    assert f"  roles: depends on {reason}" in run(capsys, "show", "probe")[1].splitlines()


def test_show_for_people(installed, capsys):
    installed("probe", REWARD_WITH_DEFAULT)
    out = run(capsys, "show", "probe", "--kind", "reward")[1]
    for line in [
        "reward probe  (rlhf-plugin-probe 0.1.0)", "Scores by probing.", "source  Someone et al. 2026",
        '  path: text  = "x"', "      Where to look.", "  roles: (name=judge, head=scalar, trained=False)",
    ]:  # fmt: skip
        assert line in out.splitlines()


def test_show_reads_files_too(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def score(prompt, completion, row):\n    '''Mine.'''\n    return 1.0\n")
    assert "reward mine  (file)" in run(capsys, "show", f"file:{tmp_path / 'mine.py'}", "--kind", "reward")[1]
    code, _, err = run(capsys, "show", f"file:{tmp_path / 'mine.py'}")
    assert (code, err.endswith("could be of any kind: add --kind, e.g. --kind reward\n")) == (2, True)


def test_show_an_unknown_name(installed, site, capsys):
    installed("probe", REWARD)
    code, _, err = run(capsys, "show", "prob")
    assert code == 2
    assert run(capsys, "show", "rlhf-plugin-probe")[2] == (
        "rlhf: 'rlhf-plugin-probe' is a distribution. Name one of its plugins: probe (--kind reward)\n"
    )
    text = "rlhf: no plugin named 'prob'. Did you mean 'probe'? `rlhf plugins list` shows what is installed."
    assert (
        err
        == f"{text} The plugins of this project are in rlhf-kit; a plugin of this name would be in rlhf-plugin-prob.\n"
    )
    site.distribution("rlhf-kit", requires=["rlhf-plugin-xyz"])
    assert run(capsys, "show", "xyz")[2].endswith("what is installed. Try: pip install rlhf-plugin-xyz\n")
    assert run(capsys, "show", "zyx")[2].endswith("what is installed.\n")


def test_show_every_kind_that_has_the_name(installed, site, capsys):
    source = REWARD + "from rlhf.interfaces import Observer\nclass Watch(Observer):\n    name = 'probe'\n"
    installed("probe", source + "@hookimpl\ndef rlhf_register_observer():\n    return [Watch]\n")
    with (site.path / "rlhf_plugin_probe-0.1.0.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[rlhf.observer]\nprobe = throwaway_probe\n")
    assert [s["kind"] for s in json.loads(run(capsys, "show", "probe", "--json")[1])] == ["reward", "observer"]
    assert [s["kind"] for s in json.loads(run(capsys, "show", "probe", "--kind", "observer", "--json")[1])] == [
        "observer"
    ]


# ------------------------------------------------------------------------------------------ check


def test_check_runs_the_suite_of_the_kind(installed, capsys):
    installed("probe", REWARD_WITH_DEFAULT)
    code, out, _ = run(capsys, "check", "probe")
    lines = out.splitlines()
    assert any(line.startswith("ok        reward probe: results: ") for line in lines), out
    assert any(line.startswith("left out  reward probe: cases: ") for line in lines), (
        "no case was supplied: said, not hidden"
    )
    assert lines[-1] == f"{len(lines) - 1} checks: {len(lines) - 2} passed, 0 failed, 1 left out."
    assert code == 0, out


def test_check_runs_only_the_checks_whose_names_hold_what_was_asked_for_and_says_which_there_are(installed, capsys):
    installed("probe", REWARD_WITH_DEFAULT)
    every = [row["check"] for row in json.loads(run(capsys, "check", "probe", "--json")[1])]
    code, out, _ = run(capsys, "check", "probe", "--json", "-k", "cases")
    assert (code, [row["check"] for row in json.loads(out)]) == (0, ["cases"])
    code, out, err = run(capsys, "check", "probe", "-k", "repeatabel")
    assert (code, out) == (2, "")
    assert err == (
        "rlhf: -k repeatabel: no check of kind reward has this in its name. Did you mean 'repeatable'? "
        f"The checks are {', '.join(every)}\n"
    )


def test_check_fails_where_a_plugin_breaks_a_rule(installed, capsys):
    installed(
        "probe", REWARD_WITH_DEFAULT.replace("[RewardResult(1.0) for _ in group.trajectories]", "[RewardResult(1.0)]")
    )
    code, out, _ = run(capsys, "check", "probe", "--json")
    assert code == 1
    rows = json.loads(out)
    assert {"kind", "name", "check", "outcome", "detail"} == set(rows[0])
    assert "FAILED" in {row["outcome"] for row in rows}


def test_check_says_one_reason_once(tmp_path, capsys):
    source = 'from rlhf.interfaces import Env\nfrom rlhf.types import EnvStep\n\n\nclass Odd(Env):\n    """Odd."""\n\n'
    source += "    async def reset(self, row, seed):\n        raise OSError('no game')\n\n"
    source += "    async def step(self, action):\n        return EnvStep(done=True)\n"
    (tmp_path / "odd.py").write_text(source)
    code, out, _ = run(capsys, "check", f"file:{tmp_path / 'odd.py'}", "--kind", "env")
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert code == 1
    assert len(failed) > 1
    assert "no game" in failed[0]
    assert failed[1].endswith(f"Same reason as {failed[0].split(': ')[1]}.")
    assert "no game" not in failed[1]


def test_check_takes_a_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("async def score(prompt, completion, row):\n    return float(len(completion))\n")
    code, out, err = run(capsys, "check", f"file:{tmp_path / 'mine.py'}", "--kind", "reward")
    assert (code, err) == (0, ""), out


ENV = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep

class Far(Env):
    def reset(self, row, seed):
        return ""
    def step(self, action):
        import cowsay
        return EnvStep(done=True, info={"animals": len(cowsay.char_names)})
"""


def test_isolate_refuses_what_cannot_be_isolated(tmp_path, capsys):
    (tmp_path / "far.py").write_text(ENV)
    words = ["plugins", "isolate", f"file:{tmp_path}/far.py", "--kind", "env", "--output"]
    assert main([*words, str(tmp_path)]) == 2
    assert f"{tmp_path} exists; name a new folder" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "new"), "--python", "no-such-python"]) == 2
    assert "--python no-such-python cannot be started: No such file or directory" in capsys.readouterr().err
    assert main(["plugins", "isolate", "grpo", "--kind", "algorithm", "--output", str(tmp_path / "new")]) == 2
    assert "cannot run in its own Python environment; allowed kinds: env, reward, and roll" in capsys.readouterr().err
    assert main(["plugins", "isolate", "single_turn", "--kind", "rollout", "--output", str(tmp_path / "new")]) == 2
    assert "rollouts that have the option python" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_isolate_hides_the_packages_of_pythonpath_from_pip(tmp_path, capsys, monkeypatch):
    """pip would take a package there for installed, and a worker does not see it."""
    (tmp_path / "far.py").write_text(ENV)
    program, log = tmp_path / "python", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"\nenv >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["plugins", "isolate", f"file:{tmp_path}/far.py", "--kind", "env", "--output", str(tmp_path / "there")]
    assert main([*words, "--python", str(program)]) == 0
    assert f"created {tmp_path}/there with pluggy" in capsys.readouterr().out
    names = [line.partition("=")[0] for line in log.read_text().splitlines()]
    assert (names.count("PATH"), names.count("PYTHONPATH")) == (2, 0)


@pytest.mark.full
def test_isolate_makes_an_environment_in_which_the_plugin_runs(tmp_path, capsys):
    """Asks a package index."""
    (tmp_path / "far.py").write_text(ENV)
    words = ["plugins", "isolate", f"file:{tmp_path}/far.py", "--kind", "env", "--output", str(tmp_path / "there")]
    assert main([*words, "--with", "cowsay==0.0.0.1"]) == 1
    assert "No matching distribution found for cowsay==0.0.0.1" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()
    assert main([*words, "--with", "cowsay==6.1"]) == 0
    assert (
        f'\n\n[env]\nuse = "file:{tmp_path}/far.py"\npython = "{tmp_path}/there/bin/python"\n'
        in capsys.readouterr().out
    )

    async def play():
        resolved = Plugins.discover().resolve("env", f"file:{tmp_path}/far.py")
        episodes = Episodes(resolved, None, EnvSection(use="x", python=f"{tmp_path}/there/bin/python"))
        try:
            await episodes.start()
            episode = episodes.open()
            await episode.reset(Row({}, "unit", 0), 0)
            return await episode.step("")
        finally:
            episodes.close()

    assert asyncio.run(play()).info["animals"] > 10
