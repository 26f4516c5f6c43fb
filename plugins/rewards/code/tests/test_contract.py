"""The conformance suites of rewards and checks."""

import shutil

import pytest
from rlhf_plugin_code import reward
from rlhf_plugin_code.checks import CodeCheck
from rlhf_plugin_code.reward import CodeReward
from rlhf_testing.check import CheckContract
from rlhf_testing.reward import RewardContract

ECHO = [{"input": "a\nb\n", "output": "b\na"}]


class TestCode(RewardContract):
    reward = CodeReward
    configs = (CodeReward.Config(),)
    columns = CodeReward.conformance["columns"]
    answers = CodeReward.conformance["answers"]
    cases = (
        ({}, answers[0], 1.0),
        ({}, answers[0].replace("+", "-"), 0.0),
        ({}, "no program", 0.0),
        ({"tests": None}, answers[0], None),
        ({"tests": ECHO}, "```py\nprint(*reversed([input(), input()]), sep='\\n')\n```", 1.0),
        ({"tests": ECHO}, "```py\nprint(input(), input(), sep='\\n')\n```", 0.0),
    )


class TestCodeCheck(CheckContract):
    check = CodeCheck
    finds = ["code"]


def test_as_many_programs_run_as_the_control_group_has_cores(monkeypatch) -> None:
    monkeypatch.setattr(reward, "usable_cores", lambda: 3)
    assert CodeReward().concurrency == 3


def test_the_check_names_the_sandbox_that_runs_use() -> None:
    names = []
    from rlhf_plugin_code.checks import find_sandbox

    find_sandbox(None, names.append)
    assert names == ["bwrap" if shutil.which("bwrap") else "sandlock"]


def test_the_check_warns_where_no_sandbox_is_installed(monkeypatch) -> None:
    from rlhf.interfaces import Examination, ProbeAnswer
    from rlhf_plugin_code import sandboxes

    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandboxes, "find_spec", lambda name: None)

    def ask(probe, argument=None):
        with pytest.raises(Exception, match="pip install sandlock") as error:
            probe(argument, lambda value: None)
        return ProbeAnswer(0.1, str(error.value))

    (finding,) = CodeCheck().examine(Examination(ask=ask))
    assert finding.status == "warn"
    assert "is not installed" in finding.text
