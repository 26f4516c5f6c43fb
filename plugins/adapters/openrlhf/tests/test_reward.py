"""reward_func files in OpenRLHF's documented style, written for these tests and run like in a run."""

from __future__ import annotations

import re
import sys

import pytest
from rlhf.errors import PluginImportFailed, PluginInvalid
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn

from tests.support.scoring import score_groups


def group(*answers: str, **columns) -> Group:
    row = Row(columns, "unit", 2)
    turns = [[Turn([1], False, text="2+2="), Turn([2], True, text=a)] for a in answers]
    return Group(row, 0, [Trajectory(row, t, (0, i)) for i, t in enumerate(turns)])


DOCUMENTED = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    assert len(queries) == len(prompts) == len(labels) == 2
    print("scoring", queries)
    correct = torch.tensor([float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": correct - 0.5, "scores": correct, "extra_logs": {"correct": correct, "mean": correct.mean()}}
"""


def test_a_documented_reward_func(file, capfd) -> None:
    samples = group("4", "5", label="4")
    score_groups(file(DOCUMENTED), samples, deadline=60.0)
    assert [t.error for t in samples.trajectories] == ["", ""]
    assert [(t.reward, t.score) for t in samples.trajectories] == [(0.5, 1.0), (-0.5, 0.0)]
    results = [next(iter(t.rewards.values())) for t in samples.trajectories]
    assert [result.info for result in results] == [{"correct": 1.0, "mean": 0.5}, {"correct": 0.0, "mean": 0.5}]
    assert "scoring ['2+2=4', '2+2=5']" in capfd.readouterr().err


NORMALISED = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    raw = torch.tensor([float(q[len(p):]) for q, p in zip(queries, prompts)])
    return {"rewards": (raw - raw.mean()) / raw.std(), "scores": raw}
"""


def test_a_function_may_compare_the_samples_of_a_prompt(file) -> None:
    samples = group("1", "2", "3")
    score_groups(file(NORMALISED), samples)
    assert [(t.reward, t.score) for t in samples.trajectories] == [(-1.0, 1.0), (0.0, 2.0), (1.0, 3.0)]


@pytest.mark.parametrize(("answers", "options"), [(("1",), {}), (("1", "2"), {"batch": "sample"})])
def test_a_comparison_of_one_sample_says_what_it_needs(file, answers: tuple[str, ...], options: dict) -> None:
    samples = group(*answers)
    score_groups(file(NORMALISED), samples, options=options)
    for trajectory in samples.trajectories:
        assert re.search(r"ValueError: rewards is nan.*samples_per_prompt.*eval\.samples.*batch", trajectory.error)


ONE_SAMPLE = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(queries[0][-1])]}\n"


def test_a_function_for_one_sample_needs_an_option(file) -> None:
    samples = group("1", "2")
    score_groups(file(ONE_SAMPLE), samples)
    for trajectory in samples.trajectories:
        assert re.search(r"rewards is .*expected 2 numbers.*batch = \"sample\"", trajectory.error)
    samples = group("1", "2")
    score_groups(file(ONE_SAMPLE), samples, options={"batch": "sample"})
    assert [t.reward for t in samples.trajectories] == [1.0, 2.0]


MATH = r"""
from typing import List
from openrlhf.utils import extract_boxed_answer, grade_answer
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)

def reward_func(queries: List[str], prompts: List[str], labels: List[str], **kwargs) -> dict:
    responses = [q[len(p):] for q, p in zip(queries, prompts)]
    correct = [1.0 if grade_answer(extract_boxed_answer(r), l) else 0.0 for r, l in zip(responses, labels)]
    return {"rewards": correct, "scores": correct, "extra_logs": {"math_accuracy": sum(correct) / len(correct)}}
"""


def test_names_of_openrlhf_exist_only_while_a_file_is_imported(file) -> None:
    reference = file(MATH)
    samples = group(r"\boxed{\frac{8}{2}}", r"\boxed{5}", "no box", r"\boxed{4", answer="4")
    score_groups(reference, samples)
    assert [t.error for t in samples.trajectories] == [""] * 4
    assert [t.reward for t in samples.trajectories] == [1.0, 0.0, 0.0, 0.0]
    Plugins.discover().resolve("reward", reference)
    assert not [name for name in sys.modules if name.split(".")[0] == "openrlhf"]


def test_labels_come_from_label_answer_or_the_configured_column(file) -> None:
    text = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(len(labels[0]))]}\n"
    samples = [group("a", **columns) for columns in ({"label": "xx", "answer": "y"}, {"answer": "y"}, {})]
    score_groups(file(text), *samples)
    assert [s.trajectories[0].reward for s in samples] == [2.0, 1.0, 0.0]
    gold_group, other_group = group("a", label="xx", gold="zzz"), group("a", answer="y")
    score_groups(file(text), gold_group, other_group, options={"label": "gold"})
    assert gold_group.trajectories[0].reward == 3.0
    assert "no column 'gold'; the row has ['answer']" in other_group.trajectories[0].error


def test_none_means_not_applicable(file) -> None:
    text = """
def reward_func(queries, prompts, labels):
    if labels[0] == "none":
        return {"rewards": None}
    return {"rewards": [None if q.endswith("skip") else 1.0 for q in queries], "extra_logs": {"kind": "x"}}
"""
    samples, other = group("a", "skip", "c"), group("a", "b", label="none")
    score_groups(file(text), samples, other)
    assert [t.reward for t in samples.trajectories] == [1.0, None, 1.0]
    assert [t.reward for t in other.trajectories] == [None, None]
    assert next(iter(samples.trajectories[2].rewards.values())).info == {"kind": "x"}


def test_an_older_file_returns_the_reward_alone_and_may_be_async(file) -> None:
    samples = group("abc")
    score_groups(
        file("async def reward_func(queries, prompts, labels):\n    return [float(len(queries[0]))]\n"), samples
    )
    assert samples.trajectories[0].reward == 7.0


ERRORS = {
    "raise ValueError('service is down')": r"score\(\) raised ValueError: service is down \(.*written_0.py:3\)",
    "return {'rewards': [1.0, 2.0]}": r"raised TypeError: rewards is \[1.0, 2.0\]; expected one number",
    "return {'rewards': 10**1000}": r"rewards is int 1000.*; expected a number that a float can hold",
    "return {'scores': [1.0]}": r"the returned dict has the keys \['scores'\]; expected 'rewards'",
    "return {'rewards': [float('nan')]}": "rewards is nan",
    "return {'rewards': 1.0, 'extra_logs': {'x': [1, 2]}}": r"extra_logs\['x'\] is \[1, 2\]",
    "import time; time.sleep(600)": r"took longer than its deadline of 1 s; its worker process was killed",
}


def test_errors_of_a_reward_fail_the_sample_with_a_message(file) -> None:
    cases = "".join(f"    if labels[0] == '{n}':\n        {body}\n" for n, body in enumerate(ERRORS))
    samples = [group("a", label=str(n)) for n in range(len(ERRORS))]
    reference = file(f"def reward_func(queries, prompts, labels):\n{cases}")
    score_groups(reference, *samples, deadline=1.0)
    for sample, message in zip(samples, ERRORS.values(), strict=True):
        [trajectory] = sample.trajectories
        assert (trajectory.status, trajectory.reward) == ("failed", None)
        assert re.search(message, trajectory.error)


def test_another_function_by_name_and_a_signature_that_does_not_fit(file) -> None:
    text = "def reward_func(queries):\n    pass\ndef other(queries, prompts, labels):\n    return 2.0\n"
    samples = group("a")
    score_groups(file(text) + ":other", samples)
    assert samples.trajectories[0].reward == 2.0
    with pytest.raises(
        PluginInvalid, match=r"reward_func\(queries\) cannot be called as reward_func\(queries, prompts"
    ):
        Plugins.discover().resolve("reward", file(text))


def test_a_name_that_is_not_provided_is_an_import_error(file) -> None:
    text = "from openrlhf.utils import get_tokenizer\ndef reward_func(queries, prompts, labels):\n    return 0.0\n"
    with pytest.raises(PluginImportFailed, match=r"openrlhf.utils.get_tokenizer is not provided.*grade_answer"):
        Plugins.discover().resolve("reward", file(text))
    with pytest.raises(PluginImportFailed, match=r"No module named 'openrlhf.trainer'"):
        Plugins.discover().resolve("reward", file(text.replace("openrlhf.utils", "openrlhf.trainer")))
