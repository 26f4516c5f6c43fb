"""What is examined, in which order. `cli/tests/test_doctor.py` runs all of it."""

import sys

import pytest
from rlhf_plugin_doctor import Request, examine
from rlhf_plugin_doctor.examine import run_plugins


@pytest.fixture
def module(monkeypatch):
    """The module of ``examine``, without the checks of the installation."""
    module = sys.modules[examine.__module__]
    monkeypatch.setattr(module, "_installation", lambda request: [])
    return module


def test_flags_of_the_launcher_alone_make_no_run_of_it():
    assert not Request().is_run
    assert not Request(overrides=[("launcher.address", "here:1")]).is_run
    assert Request(overrides=[("launcher.address", "here:1"), ("algorithm.use", "x")]).is_run
    assert Request("run.toml").is_run


def test_a_check_that_fails_itself_leaves_the_others(module, monkeypatch):
    steps = [("one", lambda: 1 / 0), ("two", list)]
    monkeypatch.setattr(module, "_installation", lambda request: steps)
    announced = []
    one, cluster = examine(Request(), announced.append)
    assert (one.name, one.status) == ("one", "fail")
    assert one.found == "the check itself failed: ZeroDivisionError: division by zero"
    assert cluster.status == "skipped"
    assert announced == ["one", "two", "ray cluster"]


def test_the_address_and_the_places_come_from_the_run_file(module, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(module.cluster, "cluster", lambda *args: asked.append(args) or [])
    monkeypatch.setattr(module, "run_plugins", lambda request: [])
    (tmp_path / "model").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(
        f'algorithm = "x"\n[policy]\nmodel = "{tmp_path}/model"\n[critic]\nmodel = "org/name"\n'
        f'[run]\noutput = "{tmp_path}/runs/a/b"\n[launcher]\nuse = "ray"\naddress = "auto"\n'
    )
    list(examine(Request(str(path), timeout=7)))
    assert asked.pop() == ("auto", [f"{tmp_path}/model", str(tmp_path)], 7)
    list(examine(Request(str(path), [("launcher.address", "10.0.0.1:6379")])))
    assert asked.pop()[0] == "10.0.0.1:6379"
    list(examine(Request(overrides=[("launcher.address", "1")])))
    assert asked.pop() == ("1", [], 120)


def test_the_address_in_the_environment_is_asked_and_not_shown(module, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "run_plugins", lambda request: [])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    cluster, _ = examine(Request())
    assert (cluster.status, cluster.found) == ("fail", "$RAY_ADDRESS: Connection refused")
    run = [("algorithm.use", "x"), ("run.output", str(tmp_path / "out"))]
    found = {check.name: check for check in examine(Request(overrides=run))}
    assert found["ray cluster"].found == "the run's launcher is 'local'"
    found = {check.name: check for check in examine(Request(overrides=[*run, ("launcher.use", "ray")]))}
    assert found["ray cluster"].status == "fail"
    monkeypatch.delenv("RAY_ADDRESS")
    found = {check.name: check for check in examine(Request(overrides=[*run, ("launcher.use", "ray")]))}
    assert found["ray cluster"].status == "skipped"


OPTIMUM = """
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig

class Optimum(Algorithm):
    name = "optimum"
    data = "demonstrations"
    class Config(ComponentConfig):
        depth: int = 1
        "How deep."
    def __init__(self, config, parts=None):
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
    assert check.status == "ok", check.found
    assert "algorithm optimum" in check.found
    check = run_plugins(Request(overrides=[choice, ("algorithm.dept", "3")]))
    assert check.status == "fail"
    assert "algorithm.dept (flag --algorithm.dept): unknown key. Did you mean 'depth'?" in check.found
    check = run_plugins(Request(overrides=[choice, ("run.requires", '["rlhf-core>=9"]')]))
    assert "needs rlhf-core>=9, found" in check.found
