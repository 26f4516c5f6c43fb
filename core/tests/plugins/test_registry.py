import json
import os
import pickle
import re
import shutil
import signal
import sys

import pytest
from rlhf.errors import (
    ConfigError,
    PluginConflict,
    PluginImportFailed,
    PluginInvalid,
    PluginNotFound,
    PluginVersionMismatch,
)
from rlhf.interfaces import Backend, ComponentConfig, Loss, Observer, Reward
from rlhf.plugins import Entry, Plugins, importing, installed
from rlhf.plugins.installed import entries
from rlhf.plugins.requirements import unmet_optional
from rlhf.types import RewardResult


class Mine(Reward):
    name = "mine"

    async def score(self, group):
        return [RewardResult(0.0) for _ in group.trajectories]


def body(text, returns="[Thing]", hook="rlhf_register_reward"):
    return (
        "from rlhf import hookimpl\nfrom rlhf.interfaces import Algorithm, Loss, Reward\n"
        f"{text}\n@hookimpl\ndef {hook}():\n    return {returns}\n"
    )


NAMELESS = """
class Meta(type(Reward)):
    @property
    def name(cls):
        raise RuntimeError("no name today")
class Thing(Reward, metaclass=Meta):
    async def score(self, group): return []
"""
"""A class of which no attribute ``name`` can be read."""
THING = "class Thing(Reward):\n    name = 'x'\n    async def score(self, group): return []\n"

# ------------------------------------------------------------------------------------- listing


def test_metadata_is_read_once_until_a_distribution_comes_or_goes(site):
    site.reward("first")
    path = [str(site.path)]
    os.utime(site.path, (1, 1))  # what changed within a second is read again
    (entry,) = entries(path)
    assert entries(path)[0] is entry
    site.reward("second")
    assert sorted(e.name for e in entries(path)) == ["first", "second"]
    shutil.rmtree(next(site.path.glob("rlhf_plugin_first*.dist-info")))
    assert [e.name for e in site.plugins().list()] == ["second"]
    entries(path).clear()
    assert [e.name for e in entries(path)] == ["second"], "a list of one's own"


def test_list_reads_metadata_and_imports_nothing(site):
    site.reward("broken", source="raise RuntimeError('imported')")
    site.reward("good", version="2.1")
    assert site.plugins().list() == [
        Entry("reward", "broken", "rlhf-plugin-broken", "0.1.0", "throwaway_rlhf_plugin_broken", "ok"),
        Entry("reward", "good", "rlhf-plugin-good", "2.1", "throwaway_rlhf_plugin_good", "ok"),
    ]
    assert site.plugins().list("loss") == []
    assert not any(m.startswith("throwaway") for m in sys.modules)


def test_list_refuses_an_unknown_kind(site):
    with pytest.raises(ConfigError, match=r"no kind of plugin is called 'rewads'.*Did you mean 'reward'"):
        site.plugins().list("rewads")


def test_list_shows_an_entry_point_group_that_no_kind_reads(site):
    site.add("rlhf-plugin-lost", {"rlhf.rewards": {"lost": "throwaway_lost"}})
    assert [e.status for e in site.plugins().list()] == ["no kind is called 'rewards'. Did you mean 'reward'?"]


def test_the_first_of_two_copies_of_a_distribution_is_used(site, tmp_path):
    site.reward("twice")
    info = tmp_path / "later" / "rlhf_plugin_twice-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-plugin-twice\nVersion: 9\n")
    (info / "entry_points.txt").write_text("[rlhf.reward]\ntwice = other\n")
    assert [e.version for e in Plugins.discover([str(tmp_path), str(tmp_path / "later")]).list()] == ["0.1.0"]


# ----------------------------------------------------------------------------------- resolving


def test_resolve_gives_the_class_and_where_it_came_from(site):
    site.reward("good")
    plugin = site.plugins().resolve("reward", "plugin:good")
    assert issubclass(plugin.cls, Reward)
    assert (plugin.name, plugin.distribution, plugin.version, plugin.ref) == (
        "good", "rlhf-plugin-good", "0.1.0", "plugin:good",
    )  # fmt: skip
    assert str(plugin) == "reward 'good' (rlhf-plugin-good 0.1.0)"


def test_a_reference_may_carry_options(site):
    site.reward("model")
    plugin = site.plugins().resolve("reward", "model:org/judge")
    assert (plugin.name, plugin.options) == ("model", {"model": "org/judge"})


def test_one_module_may_serve_several_names_and_kinds(site):
    source = body(
        "class A(Reward):\n    name = 'a'\n    async def score(self, group): return []\n"
        "class B(A):\n    name = 'b'\n"
        "class L(Loss):\n    name = 'a'\n    def outputs(self): return ()\n    def reduce(self): return {}\n"
        "    def __call__(self, x): ...\n"
        "@hookimpl\ndef rlhf_register_loss(): return [L]\n",
        "[A, B]",
    )
    site.add(
        "rlhf-plugin-many",
        {"rlhf.reward": {"a": "throwaway_many", "b": "throwaway_many"}, "rlhf.loss": {"a": "throwaway_many"}},
        {"throwaway_many": source},
    )
    plugins = site.plugins()
    assert [plugins.resolve("reward", n).cls.__name__ for n in "ab"] == ["A", "B"]
    assert plugins.resolve("loss", "a").cls.__name__ == "L"


PUBLISHED = ["rlhf-core>=0.1", "rlhf-plugin-math>=0.1", 'rlhf-plugin-number-game>=0.1; extra == "game"']


@pytest.fixture
def published(site):
    """The distribution that requires the others."""
    site.add("rlhf-kit", {}, requires=PUBLISHED)


def not_found(site, reference, kind="reward"):
    with pytest.raises(PluginNotFound) as error:
        site.plugins().resolve(kind, reference)
    return str(error.value)


def test_a_misspelt_name_gets_a_suggestion_and_no_advice_to_install(site, published):
    """Anybody could publish a package of the misspelt name."""
    site.reward("math_1")
    site.reward("format")
    expected = "no reward named 'math_2'. Did you mean 'math_1'? Installed: format, math_1."
    assert not_found(site, "math_2") == expected
    expected = (
        "reward 'rlhf-plugin-fomat/x': the distribution rlhf-plugin-fomat is not installed, or offers no plugins."
    )
    assert not_found(site, "rlhf-plugin-fomat/x") == f"{expected} Did you mean 'rlhf-plugin-format'?"


def test_only_a_distribution_that_exists_is_suggested_for_installation(site):
    for reference in ("math", "x", "rlhf-plugin-math/math", "http://h/s"):
        assert "pip" not in not_found(site, reference), "what exists is unknown where `rlhf-kit` is not installed"
    assert not_found(site, "math").endswith("in rlhf-kit; a plugin of this name would be in rlhf-plugin-math.")
    site.add("rlhf-kit", {}, requires=PUBLISHED)
    assert not_found(site, "math") == "no reward named 'math'. Installed: none. Try: pip install rlhf-plugin-math"
    assert not_found(site, "number_game", "env").endswith("Try: pip install rlhf-plugin-number-game")
    assert not_found(site, "rlhf-plugin-math/x").endswith("offers no plugins. Try: pip install rlhf-plugin-math")
    assert not_found(site, "x", "loss") == "no loss named 'x'. Installed: none."
    site.reward("math")
    assert "pip" not in not_found(site, "math", "loss"), "it is installed, and offers a reward"


def test_a_checkout_is_installed_from_its_folders(site, tmp_path):
    """What it has need not be on a package index."""
    checkout = tmp_path / "the checkout"
    for folder, name in (("core", "rlhf-core"), ("plugins/rewards/number_game", "rlhf-plugin-number-game")):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    site.add("rlhf-core", {}, requires=())
    url = {"url": (checkout / "core").as_uri(), "dir_info": {"editable": True}}
    (tmp_path / "rlhf_core-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    site.add("rlhf-kit", {}, requires=PUBLISHED)
    folder = checkout / "plugins" / "rewards" / "number_game"
    assert not_found(site, "number_game").endswith(f"Try: pip install -e '{folder}'")
    assert not_found(site, "math").endswith("Try: pip install rlhf-plugin-math"), "the checkout does not have it"
    with pytest.raises(PluginVersionMismatch, match=rf"Try: pip install -e '{folder}'$"):
        site.plugins().check_requirements(["rlhf-plugin-number-game>=3"])


def test_the_error_for_a_name_of_another_kind_names_that_kind(site):
    site.reward("math")
    with pytest.raises(PluginNotFound, match=r"'math' is of kind reward \(rlhf-plugin-math 0\.1\.0\), not algorithm\."):
        site.plugins().resolve("algorithm", "math")
    site.add("rlhf-plugin-parts", {"rlhf.loss": {"number_game": "throwaway_parts"}})
    assert not_found(site, "number_game", "algorithm").endswith("would be in rlhf-plugin-number-game.")
    site.add("rlhf-kit", {}, requires=PUBLISHED)
    text = not_found(site, "number_game", "algorithm")
    assert "'number_game' is of kind loss (rlhf-plugin-parts" in text
    assert text.endswith("Try: pip install rlhf-plugin-number-game")


def test_the_error_for_a_scheme_without_its_plugin_names_the_plugin(site):
    expected = "reward 'http://h/s' is served by the plugin 'http', which is not installed. Installed: none."
    assert not_found(site, "http://h/s").startswith(expected)


def test_two_distributions_with_one_plugin_name_conflict(site):
    site.reward("math")
    site.reward("math", distribution="rlhf-plugin-fork")
    site.reward("other", requires=())
    plugins = site.plugins()
    assert [e.status for e in plugins.list()] == [
        "conflict with rlhf-plugin-math", "conflict with rlhf-plugin-fork", "ok",
    ]  # fmt: skip
    with pytest.raises(
        PluginConflict,
        match=r"reward 'math' is provided by rlhf-plugin-fork and rlhf-plugin-math; "
        r"pick one: 'rlhf-plugin-fork/math' or 'rlhf-plugin-math/math'",
    ):
        plugins.resolve("reward", "math")
    assert plugins.resolve("reward", "rlhf-plugin-fork/math").distribution == "rlhf-plugin-fork"
    assert plugins.resolve("reward", "RLHF_plugin.math/math").distribution == "rlhf-plugin-math"


def test_the_error_says_whether_the_distribution_lacks_the_name_or_is_absent(site):
    site.reward("math")
    with pytest.raises(PluginNotFound, match="rlhf-plugin-math offers no reward 'x'; it offers: reward math"):
        site.plugins().resolve("reward", "rlhf-plugin-math/x")
    with pytest.raises(PluginNotFound, match=r"rlhf-plugin-no is not installed, or offers no plugins\."):
        site.plugins().resolve("reward", "rlhf-plugin-no/x")


@pytest.mark.parametrize(
    ("requires", "status"),
    [
        (["rlhf-core>=0.9"], "needs rlhf-core>=0.9, found 0.1.0"),
        (["rlhf-plugin-base>=2"], "needs rlhf-plugin-base>=2, found 0.1.0"),
        (["rlhf-plugin-gone>=2"], "needs rlhf-plugin-gone>=2, which is not installed"),
        (["foreign-rewards<0.1"], "needs foreign-rewards<0.1, found 0.1.0"),
        (["!!"], "has the unreadable requirement '!!'"),
    ],
)
def test_version_mismatch_is_found_before_importing(site, requires, status):
    site.reward("base")
    site.reward("foreign", distribution="foreign-rewards")
    site.reward("new", source="raise RuntimeError('imported')", requires=requires)
    plugins = site.plugins()
    assert next(e.status for e in plugins.list() if e.name == "new") == status
    with pytest.raises(PluginVersionMismatch) as raised:
        plugins.resolve("reward", "new")
    assert str(raised.value) == f"reward 'new' (rlhf-plugin-new 0.1.0) {status}"


def test_the_version_of_the_core_is_that_of_the_running_code(site):
    site.add("rlhf-core", {}, version="9")
    site.reward("new", requires=["rlhf-core>=9"])
    assert site.plugins().list()[0].status == "needs rlhf-core>=9, found 0.1.0"


def test_requirements_of_extras_and_other_platforms_are_not_checked(site):
    optional = ["rlhf-core>=9; extra == 'dev'", "rlhf-core>=9; python_version < '3'", "numpy>=99; extra == 'dev'"]
    site.reward("x", requires=optional)
    assert site.plugins().resolve("reward", "x").name == "x"


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        (
            ["pair-of-arms>=2.13"],
            r"needs pair-of-arms>=2\.13, found 2\.11\.0\+cu130\. Try: pip install 'pair-of-arms>=2\.13'",
        ),
        (
            ["pair-of-arms>=2,<3", "no-such-thing>=1"],
            r"needs no-such-thing>=1, which is not installed\. Try: pip install",
        ),
        (
            ["pair-of-arms>=3", "no-such-thing"],
            r"found 2\.11.*; needs no-such-thing, .* 'pair-of-arms>=3' no-such-thing$",
        ),
    ],
)
def test_requirements_on_third_parties_are_checked_when_the_plugin_is_chosen(site, requires, words):
    site.add("pair-of-arms", {}, version="2.11.0+cu130")
    site.reward("new", source="raise RuntimeError('imported')", requires=requires)
    site.reward("other", requires=["pair-of-arms>=2,<3"])
    plugins = site.plugins()
    assert plugins.resolve("reward", "other").name == "other", "plugins that are not chosen do not matter"
    with pytest.raises(PluginVersionMismatch, match=r"reward 'new' \(rlhf-plugin-new 0\.1\.0\) .*" + words):
        plugins.resolve("reward", "new")
    assert plugins.list("reward")[0].status == "ok", "a list reads no metadata of third parties"


def test_requirements_are_read_once_until_a_distribution_comes_or_goes(site, monkeypatch):
    site.reward("new", requires=["pair-of-arms>=2"])
    os.utime(site.path, (1, 1))
    with pytest.raises(PluginVersionMismatch, match="pair-of-arms"):
        site.plugins().resolve("reward", "new")
    site.add("pair-of-arms", {}, version="2")
    assert site.plugins().resolve("reward", "new").name == "new"
    os.utime(site.path, (2, 2))  # the import may have written bytecode
    monkeypatch.setattr(sys, "path", [str(site.path)])  # nothing else changes it
    assert site.plugins().resolve("reward", "new").name == "new"
    monkeypatch.setattr(installed, "unmet_requirements", lambda *_: pytest.fail("read again"))
    assert site.plugins().resolve("reward", "new").name == "new"


def test_a_command_looks_for_what_is_wrong_also_where_a_requirement_is_not_met(site):
    source = """
from rlhf import hookimpl
from rlhf.interfaces import Command
class Look(Command):
    name = "look"
    def add_arguments(self, parser): pass
    def run(self, arguments): return 0
@hookimpl
def rlhf_register_command(): return [Look]
"""
    points = {"rlhf.command": {"look": "throwaway_look"}}
    site.add("rlhf-plugin-look", points, {"throwaway_look": source}, requires=["no-such-thing>=1"])
    assert site.plugins().resolve("command", "look").name == "look"


def test_a_version_that_an_extra_excludes_is_named(site):
    site.reward("x", requires=["Pair_of.arms>=2,<3; extra == 'two'"])
    assert unmet_optional("rlhf-plugin-x", "pair-of-arms", "2.5+cpu") == ""
    assert unmet_optional("rlhf-plugin-x", "pair-of-arms", "1.9").startswith(
        "needs Pair_of.arms<3,>=2, found 1.9. Try: "
    )
    assert unmet_optional("rlhf-plugin-gone", "pair-of-arms", "1.9") == "", "a checkout that is not installed"


# ---------------------------------------------------------------------------- broken plugins


def test_a_broken_import_names_plugin_and_first_cause_and_affects_no_other_plugin(site):
    site.reward(
        "broken",
        source="try:\n    import no_such_thing\nexcept ImportError as e:\n    raise RuntimeError('dead') from e\n",
    )
    site.reward("good")
    plugins = site.plugins()
    assert plugins.resolve("reward", "good").name == "good"
    assert "throwaway_rlhf_plugin_broken" not in sys.modules
    with pytest.raises(
        PluginImportFailed,
        match=r"^reward 'broken' \(rlhf-plugin-broken 0\.1\.0\) failed to import 'throwaway_rlhf_plugin_broken': "
        r"ModuleNotFoundError: No module named 'no_such_thing' \(.*throwaway_rlhf_plugin_broken\.py:2\)$",
    ) as raised:
        plugins.resolve("reward", "broken")
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("source", ["import sys\nsys.exit(3)", "def broken(:\n"])
def test_every_exception_of_an_import_is_attributed_to_the_plugin(site, source):
    site.reward("broken", source=source)
    with pytest.raises(PluginImportFailed, match=r"reward 'broken' .* failed to import .*: (SystemExit|SyntaxError)"):
        site.plugins().resolve("reward", "broken")


def test_a_hook_that_exits_is_the_plugins_error(site):
    source = body(THING).replace("return [Thing]", "raise SystemExit(0)")
    assert "SystemExit" in source
    site.reward("broken", source=source)
    with pytest.raises(PluginInvalid, match=r"reward 'broken' .* rlhf_register_reward raised SystemExit: 0"):
        site.plugins().resolve("reward", "broken")


@pytest.mark.parametrize(
    "source", ["import os\nos._exit(0)", body(THING).replace("return [Thing]", "__import__('os')._exit(0)")]
)
def test_an_import_cannot_end_the_process(site, source):
    site.reward("broken", source=source)
    with pytest.raises(PluginImportFailed, match=r"reward 'broken' .*os\._exit\(0\)"):
        site.plugins().resolve("reward", "broken")
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_process_that_an_import_forks_can_end(site):
    fork = "import os\nchild = os.fork() or os._exit(7)\nassert os.waitpid(child, 0)[1] == 7 << 8\n"
    site.reward("x", source=fork + body(THING))
    assert site.plugins().resolve("reward", "x").cls.name == "x"


def test_an_import_that_does_not_end_is_named_and_ended(site, monkeypatch, capsys):
    monkeypatch.setattr(importing, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(importing, "LIMIT_SECONDS", 0.5)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    site.reward("broken", source="import threading\nthreading.Event().wait(60)")
    with pytest.raises(PluginImportFailed, match=r"reward 'broken' .*more than 0\.5 s, at .*throwaway_.*\.py:2"):
        site.plugins().resolve("reward", "broken")
    assert re.search(r"note: reward 'broken' .*has taken 0\.1 s; .*throwaway_.*\.py:2", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (body(THING, hook="rlhf_register_rewards"), PluginInvalid,
         r"there is no hook 'rlhf_register_rewards'\. Did you mean 'rlhf_register_reward'\?"),
        (body(THING + "@hookimpl\ndef rlhf_register_los(): return []\n"), PluginInvalid,
         r"there is no hook 'rlhf_register_los'\. Did you mean 'rlhf_register_loss'\?"),
        (body(THING).replace("rlhf_register_reward()", "rlhf_register_reward(extra)"), PluginInvalid,
         r"Argument\(s\) {'extra'} are declared in the hookimpl but can not be found in the hookspec"),
        (body(THING).replace("@hookimpl\n", ""), PluginInvalid,
         "has no hook 'rlhf_register_reward'. The function exists but is not marked as a hook: write '@hookimpl'"),
        ("x = 1", PluginInvalid, r"has no hook 'rlhf_register_reward'. Define it there: @hookimpl def"),
        (body(THING, "1 / 0"), PluginInvalid, "rlhf_register_reward raised ZeroDivisionError: division by zero"),
        (body(THING, "__import__('no_such_thing')"), PluginImportFailed, "rlhf_register_reward failed to import: Mod"),
        (body(THING, "Thing"), PluginInvalid, "rlhf_register_reward must return a list of classes, got <class"),
        (body(THING, "[Thing()]"), PluginInvalid,
         r"expected a subclass of rlhf.interfaces.Reward, got .*\(an instance: return the class itself\)"),
        (body(THING, "['x']"), PluginInvalid, "expected a subclass of rlhf.interfaces.Reward, got 'x'"),
        (body(NAMELESS), PluginInvalid, "raised RuntimeError: no name today"),
        (body("class Thing:\n    name = 'x'"), PluginInvalid, "Thing derives from object; kind reward needs a sub"),
        (body("class Thing(Loss):\n    name = 'x'"), PluginInvalid,
         r"Thing is of kind loss; kind reward needs a subclass of rlhf.interfaces.Reward"),
        (body(THING.replace("'x'", "'other'")), PluginInvalid,
         r"registers no reward class with name = 'x', .* It registers: Thing \(name = 'other'\)"),
        (body(THING, "[Thing, type('T', (Thing,), {})]"), PluginInvalid, r"registers 2 classes named 'x': "),
        (body("class Thing(Reward):\n    name = 'x'"), PluginInvalid,
         "Thing does not define score, which every reward must have"),
        (body(THING + "    Config = dict"), PluginInvalid,
         r"Thing.Config must be a subclass of rlhf.interfaces.ComponentConfig, got <class 'dict'>"),
    ],
)  # fmt: skip
def test_invalid_registrations_are_refused(site, source, error, message):
    site.reward("x", source=source)
    with pytest.raises(error, match=message) as raised:
        site.plugins().resolve("reward", "x")
    assert str(raised.value).startswith("reward 'x' (rlhf-plugin-x 0.1.0)")


def test_a_class_whose_name_cannot_be_read_is_refused_in_files_and_in_process(site, write):
    path = write("nameless.py", body(NAMELESS))
    with pytest.raises(PluginInvalid, match=r"reward 'file:.*nameless.py' raised RuntimeError: no name today"):
        site.plugins().resolve("reward", f"file:{path}")
    namespace: dict = {}
    exec(body(NAMELESS), namespace)
    with pytest.raises(PluginInvalid, match="no name today"):
        Plugins().register("reward", namespace["Thing"])


def test_an_entry_point_with_an_attribute_is_refused(site):
    site.reward("x", module="throwaway_attr")
    site.add("rlhf-plugin-y", {"rlhf.reward": {"y": "throwaway_attr:Thing"}})
    with pytest.raises(PluginInvalid, match=r"its entry point is 'throwaway_attr:Thing'; it must name a module"):
        site.plugins().resolve("reward", "y")


# ------------------------------------------------------------------------------------ in process


def test_register_offers_a_class_without_installing_it(site):
    plugins = site.plugins()
    assert plugins.register("reward", Mine) is Mine
    assert plugins.register("reward", Mine) is Mine  # a notebook's cell run twice
    plugin = plugins.resolve("reward", "mine")
    assert (plugin.cls, plugin.distribution, plugin.version) == (Mine, "in process", "")
    assert plugins.list("reward")[0].module == __name__
    assert not Plugins.discover([]).list(), "a value, not a global"


def test_a_registered_class_conflicts_like_a_distribution(site):
    site.reward("mine")
    plugins = site.plugins()
    plugins.register("reward", Mine)
    with pytest.raises(PluginConflict, match="'in process/mine' or 'rlhf-plugin-mine/mine'"):
        plugins.resolve("reward", "mine")
    assert plugins.resolve("reward", "in process/mine").cls is Mine
    with pytest.raises(
        PluginConflict, match=r"reward 'mine' of 'in process' is already the class .*Mine; give .* another"
    ):
        plugins.register("reward", type("Other", (Mine,), {}))


class Late(Observer):
    name = "late"

    async def step_finished(self, step, metrics):
        pass


@pytest.mark.parametrize(
    ("kind", "cls", "message"),
    [
        ("loss", Mine, "is of kind reward; kind loss needs a subclass of rlhf.interfaces.Loss"),
        ("reward", type("BadName", (Mine,), {"name": "Bad-Name"}), "has name = 'Bad-Name'; .* name = 'bad_name'"),
        ("reward", type("NoName", (Mine,), {"name": ""}), "has name = ''; .* name = 'noname'"),
        (
            "backend",
            type("B", (Backend,), {"name": "b", "Config": ComponentConfig}),
            "has a Config, but a backend has no",
        ),
        ("loss", type("L", (Loss,), {"name": "l"}), "does not define __call__, outputs, reduce"),
        ("observer", Late, "Late.step_finished is `async def`, but nothing awaits it: write `def step_finished`"),
    ],
)
def test_register_checks_the_class(kind, cls, message):
    with pytest.raises(PluginInvalid, match=message):
        Plugins().register(kind, cls)


# ----------------------------------------------------------- manifest, workers, requirements


def test_manifest_is_verified_without_importing(site, write):
    site.reward("good")
    path = write("score.py", "def score(prompt, completion, row): return 1.0")
    plugins = site.plugins()
    manifest = [plugins.resolve("reward", ref).manifest() for ref in ("good", f"file:{path}")]
    assert manifest[0] == {
        "kind": "reward", "name": "good", "distribution": "rlhf-plugin-good", "version": "0.1.0",
    }  # fmt: skip
    assert {k: manifest[1][k] for k in ("name", "distribution", "ref")} == {
        "name": "score", "distribution": "file", "ref": f"file:{path}",
    }  # fmt: skip
    assert len(manifest[1]["sha256"]) == 64
    Plugins.discover([str(site.path)]).verify(manifest)

    write("score.py", "def score(prompt, completion, row): return 2.0")
    records = [manifest[0] | {"version": "9"}, manifest[0] | {"name": "gone"}, manifest[1]]
    with pytest.raises(PluginVersionMismatch) as raised:
        site.plugins().verify(records)
    assert "reward 'good' (rlhf-plugin-good 9) is version 0.1.0 here" in str(raised.value)
    assert "reward 'gone' (rlhf-plugin-good 0.1.0) is not installed here" in str(raised.value)
    assert f"file:{path} has changed since (SHA-256 " in str(raised.value)
    with pytest.raises(PluginVersionMismatch, match="cannot be read"):
        site.plugins().verify([manifest[1] | {"ref": "file:gone.py"}])


def test_a_resolved_plugin_pickles_as_its_reference(site):
    site.reward("good")
    data = pickle.dumps(site.plugins().resolve("reward", "good"))
    copy = pickle.loads(data)
    assert copy.cls.__name__ == "Thing"
    assert b"Thing" not in data, "no class travels, only what identifies it"
    upgraded = site.path / "rlhf_plugin_good-0.2.dist-info"
    (site.path / "rlhf_plugin_good-0.1.0.dist-info").rename(upgraded)
    (upgraded / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-plugin-good\nVersion: 0.2\n")
    with pytest.raises(PluginVersionMismatch, match=r"reward 'good' \(rlhf-plugin-good 0\.1\.0\) is version 0\.2 here"):
        pickle.loads(data)


def test_check_requirements_names_all_that_are_unmet(site, published):
    site.reward("math")
    site.plugins().check_requirements(["rlhf-plugin-math>=0.1", "rlhf-core"])
    with pytest.raises(
        PluginVersionMismatch,
        match=r"the run needs rlhf-plugin-math>=3, found 0\.1\.0; needs rlhf-nope, which is not installed\. "
        r"Try: pip install 'rlhf-plugin-math>=3'$",
    ):
        site.plugins().check_requirements(["rlhf-plugin-math>=3", "rlhf-nope", "rlhf-core"])
    with pytest.raises(PluginVersionMismatch, match=r"rlhf-nope, which is not installed\.$"):
        site.plugins().check_requirements(["rlhf-nope"])
    with pytest.raises(
        ConfigError, match=r"run.requires: 'a b' is not a requirement .*write e.g. 'rlhf-plugin-math>=0.1'"
    ):
        Plugins().check_requirements(["a b"])
