import ast
import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf.errors import ConfigError, PluginConflict, PluginImportFailed, PluginInvalid, RewardError
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn

CLASSES = '''
from rlhf.interfaces import Env, Loss, Reward
from rlhf.types import EnvStep, RewardResult
class Base(Reward):
    """Abstract, so it is not a candidate."""
class One(Base):
    async def score(self, group):
        return [RewardResult(1.0) for _ in group.trajectories]
class Game(Env):
    name = "game"
    async def reset(self, row, seed): return ""
    async def step(self, action): return EnvStep(done=True)
def helper(): ...
'''


def group():
    row = Row({"prompt": "2+2=", "answer": "4"}, "train", 0)

    def sample(n, text):
        return Trajectory(row, [Turn([1], False, text="2+2="), Turn([2], True, text=text)], (0, n))

    return Group(row, 0, [sample(0, "4"), sample(1, "5")])


def values(resolved):
    scored = resolved.cls().score(group())
    return [r.value for r in (asyncio.run(scored) if asyncio.iscoroutine(scored) else scored)]


def test_the_one_class_of_a_kind_is_found_and_named_after_the_file(site, write):
    path = write("My-Score.py", CLASSES)
    plugin = site.plugins().resolve("reward", f"file:{path}")
    assert (plugin.cls.__name__, plugin.name, plugin.cls.name, plugin.distribution) == (
        "One",
        "my_score",
        "my_score",
        "file",
    )
    assert values(plugin) == [1.0, 1.0]
    assert site.plugins().resolve("env", f"file:{path}").name == "game"
    assert site.plugins().resolve("reward", f"file:{path}:One").cls is plugin.cls


def test_a_file_whose_import_was_interrupted_is_imported_again(site, write, monkeypatch):
    path = write("slow.py", "import os\nif 'INTERRUPT' in os.environ: raise KeyboardInterrupt\n" + CLASSES)
    monkeypatch.setenv("INTERRUPT", "1")
    with pytest.raises(KeyboardInterrupt):
        site.plugins().resolve("reward", f"file:{path}")
    monkeypatch.delenv("INTERRUPT")
    assert values(site.plugins().resolve("reward", f"file:{path}")) == [1.0, 1.0]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_scores_each_trajectory_with_the_whole_row(site, write, prefix):
    path = write(
        "exact.py",
        f"{prefix}def anything(prompt, completion, row):\n"
        "    assert prompt == '2+2='\n    return float(completion == row['answer'])\n",
    )
    plugin = site.plugins().resolve("reward", f"file:{path}")
    assert values(plugin) == [1.0, 0.0]
    assert asyncio.iscoroutinefunction(plugin.cls.score) is bool(prefix), "plain functions run where they can be killed"
    assert plugin.name == "exact"


def test_an_attribute_names_a_function_by_whose_parameters_its_form_is_known(site, write):
    """Three parameters of other names may be those of another framework, in another order."""
    forms = "async def a(prompt, completion, row): return None\ndef b(completions): return [1.0] * len(completions)\n"
    rest = (
        "c = 3\ndef d(x): ...\ndef e(answer, question, truth): return 1.0\ndef f(queries, prompts, labels): return 1.0"
    )
    path = write("two.py", forms + rest)
    assert values(site.plugins().resolve("reward", f"file:{path}:a")) == [None, None]
    assert values(site.plugins().resolve("reward", f"file:{path}:b")) == [1.0, 1.0]
    for attribute in "cdef":
        with pytest.raises(
            PluginInvalid, match=r"expected one subclass of rlhf.interfaces.Reward, or one function `def f\("
        ):
            site.plugins().resolve("reward", f"file:{path}:{attribute}")


@pytest.mark.parametrize("value", ["'good'", "float('nan')", "[1.0]", "10**1000", "10**9999"])
def test_a_function_that_returns_no_number_is_an_error_not_a_zero(site, write, value):
    path = write("bad.py", f"def score(prompt, completion, row): return {value}")
    with pytest.raises(RewardError, match=r"reward function 'score' of .*bad.py returned .*; expected a finite number"):
        values(site.plugins().resolve("reward", f"file:{path}"))


def test_the_text_is_read_once_and_recorded(site, write):
    path = write("score.py", "def score(prompt, completion, row): return 1")
    plugins = site.plugins()
    first = plugins.resolve("reward", f"file:{path}")
    write("score.py", "def score(prompt, completion, row): return 2")
    assert plugins.resolve("reward", f"file:{path}").cls is first.cls, "one run, one content"
    other = site.plugins().resolve("reward", f"file:{path}")
    assert values(other) == [2.0, 2.0]
    assert other.sha256 != first.sha256


def test_a_file_is_parsed_once_whatever_the_number_of_its_functions(site, write, monkeypatch):
    functions = "".join(f"async def f{n}(prompt, completion, row): return {n}\n" for n in range(20))
    path, plugins, parsed, parse = write("twenty.py", functions), site.plugins(), [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda *args: parsed.append(args[1]) or parse(*args))
    for n in range(20):
        assert values(plugins.resolve("reward", f"file:{path}:f{n}")) == [n, n]
    assert parsed.count(path) <= 2, "to see what the file defines, and to execute it"


def test_a_class_of_a_file_pickles_and_another_process_resolves_the_same(site, write, tmp_path):
    path = write("score.py", CLASSES)
    plugin = site.plugins().resolve("reward", f"file:{path}")
    assert pickle.loads(pickle.dumps(plugin.cls)) is plugin.cls
    data = pickle.dumps(plugin)
    Path(path).unlink()  # the text travels with the reference
    code = "import pickle, sys\nr = pickle.loads(sys.stdin.buffer.read())\nprint(r.name, r.cls.__module__, r.sha256)\n"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=tmp_path, check=False)
    assert done.stdout.decode().split() == ["score", plugin.cls.__module__, plugin.sha256], done.stderr.decode()


def test_one_of_several_candidates_must_be_named(site, write):
    path = write("two.py", "def a(prompt, completion, row): ...\ndef b(prompt, completion, row): ...")
    with pytest.raises(
        PluginInvalid, match=r"the file defines 2 plugins of this kind; pick one: file:.*two.py:a, file:.*two.py:b"
    ):
        site.plugins().resolve("reward", f"file:{path}")


def test_a_file_without_a_component_is_refused_with_its_definitions_and_the_expected_ones(site, write):
    path = write("none.py", CLASSES + "def score(a, b): ...")
    with pytest.raises(
        PluginInvalid,
        match=r"^loss 'file:.*none.py': expected one subclass of rlhf.interfaces.Loss\. The file defines: "
        r"class Base \(reward\), class One \(reward\), class Game \(env\), def helper\(\), def score\(a, b\)\.$",
    ):
        site.plugins().resolve("loss", f"file:{path}")


@pytest.mark.parametrize(
    ("ref", "error", "message"),
    [
        ("gone.py", ConfigError, r"'file:.*gone.py' cannot be read: No such file or directory \(/.*gone.py\)\."),
        ("sintax.py", ConfigError, r"'file:.*sintax.py' cannot be read: .* Did you mean 'syntax.py'\?"),
        (
            "none.py:Nine",
            PluginInvalid,
            r"the file defines no 'Nine'. It defines: class Base \(reward\), .*def helper\(\)",
        ),
        ("none.py:Game", PluginInvalid, "Game is of kind env; kind reward needs a subclass of rlhf.interfaces.Reward"),
        ("none.py:Base", PluginInvalid, "Base does not define score, which every reward must have"),
        ("syntax.py", PluginImportFailed, r"'file:.*syntax.py' failed to import: line 2: "),
        (
            "raises.py",
            PluginImportFailed,
            r"'file:.*raises.py' failed to import: ModuleNotFoundError: No module named 'zz'",
        ),
        ("latin.py", ConfigError, r"'file:.*latin.py' is not UTF-8 text"),
    ],
)
def test_unusable_files_are_refused(site, write, tmp_path, ref, error, message):
    write("none.py", CLASSES)
    write("syntax.py", "x = 1\ndef (:\n")
    write("raises.py", "import zz")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(error, match=message):
        site.plugins().resolve("reward", f"file:{tmp_path}{os.sep}{ref}")


# ----------------------------------------------------------------------------------- adapters

ADAPTER = """
import sys
from contextlib import contextmanager
from types import ModuleType
from rlhf import hookimpl
from rlhf.errors import PluginInvalid
from rlhf.interfaces import Adapter, Reward
from rlhf.types import RewardResult

class Foreign(Adapter):
    name = "{name}"

    def recognises(self, kind, text):
        return kind == "reward" and "foreign" in text

    @contextmanager
    def importing(self):
        sys.modules["throwaway_framework"] = ModuleType("throwaway_framework")
        yield
        del sys.modules["throwaway_framework"]

    def adapt(self, kind, module, attribute):
        number = module.NUMBER

        class Adapted(Reward):
            async def score(self, group):
                return [RewardResult(number) for _ in group.trajectories]

        return Adapted

@hookimpl
def rlhf_register_adapter():
    return [Foreign]
"""
FOREIGN = "# foreign\nimport throwaway_framework\nNUMBER = 7.0\n"


def add_adapter(site, name, source=ADAPTER):
    site.add(
        f"rlhf-plugin-{name}",
        {"rlhf.adapter": {name: f"throwaway_{name}"}},
        {f"throwaway_{name}": source.replace("{name}", name)},
    )


def test_an_adapter_takes_a_file_that_defines_no_component(site, write):
    add_adapter(site, "foreign")
    plugin = site.plugins().resolve("reward", f"file:{write('theirs.py', FOREIGN)}")
    assert values(plugin) == [7.0, 7.0]
    assert plugin.name == "theirs"


def test_adapters_are_not_asked_if_the_file_defines_a_component(site, write):
    add_adapter(site, "foreign")
    path = write("ours.py", "# foreign\nNUMBER = 7.0\ndef score(prompt, completion, row): return 1")
    assert values(site.plugins().resolve("reward", f"file:{path}")) == [1.0, 1.0]
    path = write("classes.py", "# foreign\nNUMBER = 7.0\n" + CLASSES)
    assert values(site.plugins().resolve("reward", f"file:{path}")) == [1.0, 1.0]
    assert "throwaway_foreign" not in sys.modules


def test_the_error_for_a_file_that_no_adapter_recognises_lists_the_adapters(site, write):
    add_adapter(site, "foreign")
    add_adapter(site, "dead", "import no_such_thing")
    with pytest.raises(
        PluginInvalid,
        match=r"The file defines: nothing\. No installed adapter \(dead, foreign\) recognises it\. "
        r"Adapters that could not be used: adapter 'dead' \(rlhf-plugin-dead 0\.1\.0\) failed to import",
    ):
        site.plugins().resolve("reward", f"file:{write('x.py', 'NUMBER = 1')}")


def test_a_broken_adapter_does_not_stop_another(site, write):
    add_adapter(site, "dead", "import no_such_thing")
    add_adapter(site, "foreign")
    assert values(site.plugins().resolve("reward", f"file:{write('theirs.py', FOREIGN)}")) == [7.0, 7.0]


def test_two_adapters_that_recognise_one_file_conflict(site, write):
    add_adapter(site, "foreign")
    add_adapter(site, "second")
    with pytest.raises(
        PluginConflict, match=r"is recognised by adapter 'foreign' .* and adapter 'second' .*uninstall one"
    ):
        site.plugins().resolve("reward", f"file:{write('theirs.py', FOREIGN)}")


def test_an_error_of_an_adapter_is_attributed_to_it(site, write):
    add_adapter(site, "foreign")
    with pytest.raises(PluginInvalid, match=r"adapter 'foreign' \(rlhf-plugin-foreign 0\.1\.0\) raised AttributeError"):
        site.plugins().resolve("reward", f"file:{write('theirs.py', '# foreign')}")


def test_plugins_import_no_torch():
    code = "import sys, rlhf.plugins, rlhf.interfaces; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert Plugins is not None
