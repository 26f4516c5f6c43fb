"""What an algorithm returns in a wrong form, and what it raises, is an error that names the method."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf.errors import PluginInvalid, RlhfError, TrainingError
from rlhf.types import Annotation, Needs, RoleSpec, Update
from rlhf_runtime.calls.algorithm_calls import ask, metrics_of, needs_of

POLICY = RoleSpec("policy", trained=True)


def algorithm(**methods: Any) -> Any:
    return SimpleNamespace(name="mine", **methods)


def numbered(step: int) -> Any:
    yield Update("policy", "loss")
    yield {}[step]


@pytest.mark.parametrize("items", [[Update("policy", "loss")], (Update("policy", "loss"),), []])
def test_a_list_or_a_tuple_is_the_answer(items) -> None:
    assert ask(algorithm(updates=lambda step: items), "updates", 0) == [*items]


def test_the_items_of_a_generator_are_the_answer() -> None:
    def annotations(step: int) -> Any:
        yield Annotation("policy", "logprobs", f"step_{step}")

    assert ask(algorithm(annotations=annotations), "annotations", 3)[0].column == "step_3"


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("annotations", lambda step: None, "returned NoneType None; allowed: a list of Annotations, [] for none"),
        ("updates", lambda step: Update("policy", "loss"), "allowed: a list of Updates and Snapshots"),
        ("updates", lambda step: ["policy"], "returned list ['policy']; allowed: a list of Updates and Snapshots"),
        ("conflicts", lambda shape: "no", "returned str 'no'; allowed: a list of sentences"),
        ("columns", lambda source: "answer", "returned str 'answer'; allowed: a list of names of columns"),
    ],
)
def test_another_form_is_refused(method: str, answer: Any, message: str) -> None:
    with pytest.raises(PluginInvalid) as error:
        ask(algorithm(**{method: answer}), method, 0)
    assert str(error.value).startswith(f"{method}() of algorithm 'mine' returned ")
    assert message in str(error.value)


@pytest.mark.parametrize("updates", [lambda step: {}[step], numbered])
def test_an_exception_names_the_method(updates) -> None:
    with pytest.raises(TrainingError, match=r"updates\(\) of algorithm 'mine' raised KeyError: 0 \(.*:\d+\)"):
        ask(algorithm(updates=updates), "updates", 0)


def test_metrics_are_a_dictionary() -> None:
    assert metrics_of("finish() of algorithm 'mine'", {"a": 1.0}) == {"a": 1.0}
    with pytest.raises(PluginInvalid, match=r"^finish\(\) .* returned NoneType None; allowed: metrics, a dictionary"):
        metrics_of("finish() of algorithm 'mine'", None)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (None, r'returned NoneType None; allowed: Needs\(roles=\(RoleSpec\("policy", trained=True\),\)\)'),
        ([POLICY], r"returned list \[RoleSpec.*; allowed: Needs"),
        (Needs(POLICY), "returned Needs .*; allowed: Needs"),  # type: ignore[arg-type]
        (Needs((RoleSpec("actor", trained=True),)), 'declares no role "policy"; add RoleSpec'),
    ],
)
def test_needs_without_a_policy_are_refused(needs: Any, message: str) -> None:
    assert needs_of(algorithm(needs=lambda: Needs((POLICY,)))).roles == (POLICY,)
    with pytest.raises(RlhfError, match=r"^needs\(\) of algorithm 'mine' " + message):
        needs_of(algorithm(needs=lambda: needs))
