"""The suites without pytest, as ``rlhf plugins check`` runs them."""

from __future__ import annotations

import asyncio
import inspect
import os
from dataclasses import dataclass
from typing import Any

import pytest
from rlhf.errors import PluginInvalid
from rlhf.interfaces import KINDS, Env, Reward
from rlhf.types import EnvStep, RewardResult
from rlhf_testing.conformance import DECOY, SUITES, CheckResult, check_names, run, suite
from rlhf_testing.contract import Contract, PluginContract

from tests.support.losses import NllLoss


@dataclass
class Selected:
    kind: str
    name: str
    cls: Any
    distribution: str = ""


class Brevity(Reward):
    """Shorter is better."""

    name = "brevity"

    async def score(self, group):
        return [RewardResult(-float(len(t.answer))) for t in group.trajectories]


class Hidden(Env):
    """Needs a column."""

    name = "hidden"
    conformance = {"rows": [{"prompt": "p", "secret": "x"}]}

    async def reset(self, row, seed):
        self.secret = row["secret"]
        return ""

    async def step(self, action):
        return EnvStep(done=True)


class Stated(NllLoss):
    """With a statement."""

    @staticmethod
    def _statement(self, x_BT):
        return -(x_BT["logprobs"] * x_BT.mask_BT).sum() / x_BT.mask_BT.sum()

    conformance = {"statement": _statement.__func__}


def by_name(results):
    return {r.name: r for r in results}


def test_every_kind_has_a_suite_of_its_own():
    assert set(SUITES) == set(KINDS)
    for kind in SUITES:
        contract = suite(kind)
        assert issubclass(contract, PluginContract)
        assert contract.kind == kind
        assert [n for n in dir(contract) if n.startswith("test_") and n not in dir(Contract)], kind


def test_every_check_says_what_it_proves_in_whole_sentences():
    for kind in SUITES:
        for name in dir(suite(kind)):
            if name.startswith("test_"):
                sentence = (inspect.getdoc(getattr(suite(kind), name)) or "").partition("\n\n")[0]
                assert sentence[:1].isupper() or sentence[:2] == "``", f"{kind}.{name}: {sentence}"
                assert sentence.endswith("."), f"{kind}.{name}: {sentence}"


def test_what_a_check_proves_is_reported_whole_and_as_plain_text():
    details = {r.name: r.detail for r in run(Selected("env", "hidden", Hidden))}
    assert details["episodes"] == (
        "Observations are texts and steps are EnvSteps with finite rewards, whichever action comes first. The row is "
        "not changed."
    )
    assert details["methods"] == "`reset`, `step` and `close` are all `async def` or all plain `def`."


@pytest.mark.parametrize("kind", SUITES)
def test_checks_can_be_chosen_by_a_part_of_their_names(kind):
    names = check_names(kind)
    assert len(set(names)) == len(names)
    minimum = 6 if issubclass(suite(kind), Contract) else 5  # parts of a run have a config and state, the others do not
    assert len(names) >= minimum
    assert names[:2] == ["class", "entry_point"]
    assert names[-1] == "secrets"


def test_only_the_chosen_checks_run_and_the_search_for_secrets_sees_all():
    calls = []

    class Telling(Brevity):
        """Prints a secret while it scores."""

        async def score(self, group):
            calls.append(group)
            print(os.environ[DECOY])
            return await super().score(group)

    selected = Selected("reward", "brevity", Telling)
    every = [r.name for r in run(selected)]
    assert every == check_names("reward")
    calls.clear()
    assert [r.name for r in run(selected, name_part="config")] == ["config"]
    assert calls == []
    [secrets] = run(selected, name_part="secrets")
    assert not secrets.passed
    assert secrets.detail == (
        "What it prints or raises shows the whole environment. Logs are kept and shared, so they must not hold secrets."
    )
    assert run(selected, name_part="no such check") == []


def test_good_plugin_passes_and_says_what_was_left_out():
    reports: list[CheckResult] = []
    results = run(Selected("reward", "brevity", Brevity), reports.append)
    assert reports == results
    assert all(r.passed for r in results), results
    assert [r.name for r in results][:2] == ["class", "entry_point"]
    left_out = by_name(results)["cases"]
    assert left_out.skipped
    assert "supply: cases" in left_out.detail


@pytest.mark.parametrize("end", [SystemExit(0), asyncio.CancelledError()])
def test_a_plugin_that_would_end_the_program_fails_its_checks(end):
    class Ends(NllLoss):
        """Ends the program, with the exit code of success."""

        def outputs(self):
            raise end

    results = by_name(run(Selected("loss", "nll", Ends)))
    assert list(results) == check_names("loss")
    assert not results["heads"].passed
    assert results["heads"].detail.startswith(f"{type(end).__name__}: {end}")


def test_failures_are_results_not_exceptions():
    class Broken(Brevity):
        """Returns too few results, then raises."""

        async def score(self, group):
            if len(group.trajectories) == 1:
                raise RuntimeError("no")
            return []

    results = by_name(run(Selected("reward", "brevity", Broken)))
    assert not results["results"].passed
    assert "must return 5 results" in results["results"].detail
    assert not results["every_answer_alone"].passed
    line = inspect.getsourcelines(Broken)[1] + 5  # of the plugin's own file, for what it raised itself
    assert results["every_answer_alone"].detail == f"RuntimeError: no (test_conformance.py:{line})"
    assert results["config"].passed


def test_installed_plugin_must_be_named_in_its_metadata():
    results = by_name(run(Selected("reward", "brevity", Brevity, "some-distribution")))
    assert not results["entry_point"].passed


def test_author_supplies_what_the_suite_cannot_guess():
    assert all(r.passed for r in run(Selected("env", "hidden", Hidden)))
    assert by_name(run(Selected("loss", "nll", NllLoss)))["statement"].skipped
    result = by_name(run(Selected("loss", "nll", Stated)))["statement"]
    assert result.passed
    assert not result.skipped


def test_unknown_attribute_and_unknown_kind_are_errors():
    class Misspelled(Hidden):
        """A typo."""

        conformance = {"row": 1, "rowz": []}

    with pytest.raises(PluginInvalid, match="rowz"):
        run(Selected("env", "hidden", Misspelled))
    with pytest.raises(PluginInvalid, match="kinds are"):
        run(Selected("optimiser", "x", object))
