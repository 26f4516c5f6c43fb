"""The order of the checks, and checks of plugins. `test_command.py` runs the whole command."""

import sys
from types import SimpleNamespace

import pytest
from rlhf.errors import RlhfError
from rlhf.interfaces import Check, Finding
from rlhf.plugins import Plugins
from rlhf_cli.doctor import probes
from rlhf_cli.doctor.examine import Request, examine, run_plugins


@pytest.fixture
def module(monkeypatch):
    """The module of ``examine`` without checks of the installation, and only with the plugins' checks that ``offer``
    registers."""
    module = sys.modules[examine.__module__]
    plugins = Plugins()
    monkeypatch.setattr(module, "_installation", lambda request: [])
    monkeypatch.setattr(module, "Plugins", SimpleNamespace(discover=lambda: plugins))
    return SimpleNamespace(module=module, offer=lambda cls: plugins.register("check", cls))


def looking(look, name="other"):
    """A check whose ``examine`` is this function."""
    attributes = {"name": name, "examine": lambda self, examination: look(examination), "__doc__": "Made up."}
    return type("Made", (Check,), attributes)


def test_flags_of_the_launcher_alone_do_not_make_a_run():
    assert not Request().is_run
    assert not Request(overrides=[("launcher.address", "here:1")]).is_run
    assert Request(overrides=[("launcher.address", "here:1"), ("algorithm.use", "x")]).is_run
    assert Request("run.toml").is_run


def test_a_check_that_raises_leaves_the_others(module, monkeypatch):
    steps = [("one", lambda: 1 / 0), ("two", list)]
    monkeypatch.setattr(module.module, "_installation", lambda request: steps)
    module.offer(looking(lambda examination: 1 / 0))
    announced = []
    first, other = examine(Request(), announced.append)
    assert (first.name, first.status, first.remedy) == ("one", "fail", "please report this")
    assert first.text == "the check itself failed: ZeroDivisionError: division by zero"
    assert (other.name, other.status, other.text) == ("other", "fail", first.text)
    assert other.remedy == "report this to the authors of in process"
    assert announced == ["one", "two", "other"]


def test_a_wrong_run_file_leaves_the_checks_of_the_installation(module, monkeypatch):
    installation = [("disk", lambda: Finding("disk", "ok", "some"))]
    monkeypatch.setattr(module.module, "_installation", lambda request: installation)
    disk, run_file = examine(Request(overrides=[("algorithm.use", "x"), ("run.sed", "3"), ("nonsense", "3")]))
    assert (disk.name, run_file.name, run_file.status) == ("disk", "run file", "fail")
    assert "run.sed (flag --run.sed): unknown key. Did you mean 'seed'?" in run_file.text
    assert "no flag --nonsense" in run_file.text


def test_a_result_that_is_not_a_finding_is_refused(module):
    module.offer(looking(lambda examination: ["fine"]))
    [finding] = examine(Request())
    assert finding.status == "fail"
    assert finding.text.endswith(
        "examine() of check 'other' (in process) gives 'fine'; expected rlhf.interfaces.Finding"
    )


def test_a_finding_of_a_plugin_shows_no_secret(module, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "quite-secret-77")
    module.offer(looking(lambda examination: [Finding("other", "ok", "the key is quite-secret-77")]))
    assert [finding.text for finding in examine(Request())] == ["the key is $MY_API_KEY"]


def test_a_check_that_cannot_be_imported_is_a_failed_line(module, monkeypatch, site):
    site.module("throwaway_broken", "raise ImportError('no such library')")
    site.distribution("rlhf-plugin-broken", entry_points="[rlhf.check]\nbroken = throwaway_broken\n")
    stub = SimpleNamespace(discover=lambda: Plugins.discover([str(site.path)]))
    monkeypatch.setattr(module.module, "Plugins", stub)
    findings = {finding.name: finding for finding in examine(Request())}
    assert findings["broken"].status == "fail"
    assert findings["broken"].text.startswith(
        "check 'broken' (rlhf-plugin-broken 0.1.0) failed to import 'throwaway_broken': ImportError: no such library"
    )
    assert findings["broken"].remedy == "repair or uninstall rlhf-plugin-broken; the other checks are not affected"


def test_a_check_is_given_the_launcher_of_the_run_and_the_places_that_it_shares(module, monkeypatch, tmp_path):
    examinations = []
    module.offer(looking(lambda examination: examinations.append(examination) or []))
    monkeypatch.setattr(module.module, "run_plugins", lambda request: [])
    (tmp_path / "model").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(
        f'algorithm = "x"\n[policy]\nmodel = "{tmp_path}/model"\n[critic]\nmodel = "org/name"\n'
        f'[run]\noutput = "{tmp_path}/runs/a/b"\n[launcher]\nuse = "ray"\naddress = "auto"\n'
    )
    list(examine(Request(str(path), start=True, timeout=7)))
    list(examine(Request(str(path), [("launcher.address", "10.0.0.1:6379")])))
    list(examine(Request(overrides=[("launcher.address", "1")])))
    list(examine(Request()))
    assert [(e.launcher, dict(e.launcher_options)) for e in examinations] == [
        ("ray", {"address": "auto"}), ("ray", {"address": "10.0.0.1:6379"}), (None, {"address": "1"}), (None, {}),
    ]  # fmt: skip
    assert [(e.start, e.timeout) for e in examinations] == [(True, 7), (False, 120), (False, 120), (False, 120)]
    assert examinations[0].shared_paths == (f"{tmp_path}/model", str(tmp_path))
    assert examinations[2].shared_paths == ()


OPTIMUM = """
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig

class Optimum(Algorithm):
    name = "optimum"
    data = "demonstrations"
    class Config(ComponentConfig):
        depth: int = 1
        "How deep."
    def __init__(self, config, parts=None, run=None):
        self.config = config
    def needs(self): ...
    def assemble(self, examples, tokenize): ...
    def annotations(self, step): ...
    def credit(self, batch): ...
    def updates(self, step, batch=None): ...
"""


def test_the_options_of_a_runs_plugins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "optimum.py").write_text(OPTIMUM)
    choice = ("algorithm.use", "file:optimum.py")
    check = run_plugins(Request(overrides=[choice, ("algorithm.depth", "3")]))
    assert check.status == "ok", check.text
    assert "algorithm optimum" in check.text
    check = run_plugins(Request(overrides=[choice, ("algorithm.dept", "3")]))
    assert check.status == "fail"
    assert "algorithm.dept (flag --algorithm.dept): unknown key. Did you mean 'depth'?" in check.text
    too_new = {"path": None, "overrides": [choice, ("run.requires", '["rlhf-core>=9"]')]}
    with pytest.raises(RlhfError, match="needs rlhf-core>=9, found"):
        probes.run_plugins(too_new, print)
