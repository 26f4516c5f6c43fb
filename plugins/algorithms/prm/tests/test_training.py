"""Process reward models: the loss by hand, the two kinds of head, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf.interfaces import Tokens
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.reduce import weigh
from rlhf.types import Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_plugin_prm.algorithm import ProcessRewardModel
from rlhf_plugin_prm.step_labels import StepLabels

WORDS = Tokens(lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)))


def make(loss: StepLabels | None = None, **config) -> ProcessRewardModel:
    return ProcessRewardModel(ProcessRewardModel.Config(**config), {"loss": loss or StepLabels()})


def solution(steps, length: int = 6, index: int = 0) -> Example:
    sequence = TokenSequence([3 + i for i in range(length)], [i > 1 for i in range(length)])
    return Example(Row({}, "data", index), [sequence], {"steps": list(steps)})


def loss_of(logits, examples, **config):
    """(loss, gradient per step, metrics); ``logits`` are the steps' log-odds, in order."""
    loss = StepLabels(StepLabels.Config(**config))
    batch = weigh(make(loss).assemble(examples)[0], loss.reduce())
    logits_A = torch.tensor(logits, requires_grad=True)
    total, sums = evaluate(loss, batch, {"step_logits": logits_A}, {}, {})
    total.backward()
    return float(total), logits_A.grad.tolist(), finish_sums(sums)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_hard_and_soft_labels_by_hand() -> None:
    loss, gradient, metrics = loss_of([2.0, -1.0, 0.5], [solution([(3, 1.0), (5, 0.0)]), solution([(4, 0.25)])])
    soft = -0.25 * math.log(sigma(0.5)) - 0.75 * math.log(sigma(-0.5))
    assert loss == pytest.approx((-math.log(sigma(2)) - math.log(sigma(1)) + soft) / 3, rel=1e-6)
    assert gradient == pytest.approx([(sigma(2) - 1) / 3, sigma(-1) / 3, (sigma(0.5) - 0.25) / 3], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(2 / 3)  # the soft label is wrong rather than right
    assert (metrics["accuracy_right"], metrics["accuracy_wrong"]) == (1.0, 0.5)
    assert metrics["label"] == pytest.approx(1.25 / 3)
    assert metrics["probability"] == pytest.approx((sigma(2) + sigma(-1) + sigma(0.5)) / 3)


def test_a_batch_without_wrong_steps_has_no_accuracy_on_them() -> None:
    _, _, metrics = loss_of([1.0, -1.0], [solution([(2, 1.0), (3, 1.0)])])
    assert metrics["accuracy_right"] == 0.5
    assert "accuracy_wrong" not in metrics


def processbench_f1(solutions) -> dict[str, float]:
    """As QwenLM/ProcessBench computes it, from [(probabilities of the steps, index of the first wrong one or -1)]."""
    matches = {True: [], False: []}
    for probabilities, label in solutions:
        prediction = next((i for i, p in enumerate(probabilities) if p < 0.5), -1)
        matches[label != -1].append(prediction == label)
    wrong, right = (sum(m) / len(m) for m in (matches[True], matches[False]))
    f1 = 2 * wrong * right / (wrong + right) if wrong + right else 0.0
    return {"solution_accuracy_wrong": wrong, "solution_accuracy_right": right, "solution_f1": f1}


def test_the_f1_of_processbench() -> None:
    """Steps after the first wrong one have no label, and the model's judgement of them does not count."""
    solutions = [
        ([0.9, 0.2, 0.7], 1),  # the first wrong step
        ([0.3, 0.2], 1),  # an earlier one
        ([0.8, 0.6, 0.1], 1),  # a later one
        ([0.1], 0),
        ([0.6, 0.9], -1),
        ([0.7, 0.8, 0.4], -1),
        ([0.99], -1),
    ]
    examples, logits = [], []
    for probabilities, label in solutions:
        labelled = len(probabilities) if label == -1 else label + 1
        examples.append(solution([(2 + i, float(i != label)) for i in range(labelled)]))
        logits += [math.log(p / (1 - p)) for p in probabilities[:labelled]]
    _, _, metrics = loss_of(logits, examples)
    expected = processbench_f1(solutions)
    assert expected == pytest.approx(
        {"solution_accuracy_wrong": 0.5, "solution_accuracy_right": 2 / 3, "solution_f1": 4 / 7}
    )
    assert metrics | StepLabels().summary(metrics) == pytest.approx(metrics | expected)


def test_labels_after_the_first_wrong_step_do_not_change_the_f1() -> None:
    """Math-Shepherd's and PRMBench's rows have them."""
    labels = [1.0, 0.0, 1.0, 0.0]
    _, _, metrics = loss_of([1.0, -1.0, -1.0, 1.0], [solution([*zip(range(2, 6), labels, strict=True)])])
    assert (metrics["solution_accuracy_wrong"], metrics["accuracy"]) == (1.0, 0.5)


def test_solutions_of_one_kind_have_no_f1() -> None:
    for label, kind in ((0.0, "wrong"), (1.0, "right")):
        _, _, metrics = loss_of([-1.0], [solution([(2, label)])])
        assert [k for k in metrics if k.startswith("solution")] == [f"solution_accuracy_{kind}"]
        assert StepLabels().summary(metrics) == {}
    assert StepLabels().summary({"solution_accuracy_wrong": 0.0, "solution_accuracy_right": 0.0}) == {
        "solution_f1": 0.0
    }


def test_every_solution_has_equal_weight_if_configured() -> None:
    examples = [solution([(3, 1.0), (4, 1.0), (5, 1.0)]), solution([(4, 0.0)])]
    loss, _, _ = loss_of([1.0, 1.0, 1.0, 2.0], examples, reduce="seq_mean_token_mean")
    assert loss == pytest.approx((-math.log(sigma(1)) - math.log(sigma(-2))) / 2, rel=1e-6)


@pytest.mark.parametrize(("logit", "label", "loss"), [(1e4, 1.0, 0.0), (-1e4, 1.0, 1e4), (1e4, 0.5, 5e3)])
def test_log_odds_that_overflow_an_exponential(logit: float, label: float, loss: float) -> None:
    value, gradient, _ = loss_of([logit], [solution([(4, label)])])
    assert value == pytest.approx(loss)
    assert gradient == pytest.approx([float(logit > 0) - label])


def test_labels_lie_at_the_ends_of_their_steps() -> None:
    batch = make().assemble([solution([(3, 1.0), (5, 0.25)]), solution([], index=1), solution([(2, 0.0)], index=2)])[0]
    assert batch.units == 2, "a solution without a step is left out"
    assert batch.tok["step_end"].nonzero()[:, 0].tolist() == [3, 5, 6 + 2]
    assert batch.tok["step_label"].tolist() == [0, 0, 0, 1.0, 0, 0.25, *[0] * 6]
    assert make().assemble([solution([])]) == (None, {})


def test_label_tokens_are_resolved_before_anything_is_loaded() -> None:
    algorithm = make(head="lm", label_tokens=("+", "-"))
    algorithm.use_tokens(WORDS)
    (head,) = algorithm.parts["loss"].outputs()
    logits_CV = torch.arange(60.0)[None] * 0.5
    assert head.fn(logits_CV, None, {}, head.constants).tolist() == [0.5 * (ord("+") - ord("-"))]
    assert (head.over, head.position) == ("step_end", "at")
    assert algorithm.needs().roles[0].head == "lm"
    assert algorithm.model_config() == {"right_token_id": ord("+"), "wrong_token_id": ord("-")}


def test_two_classes() -> None:
    algorithm = make()
    algorithm.use_tokens(WORDS)
    (head,) = algorithm.parts["loss"].outputs()
    assert head.fn(torch.tensor([[1.0, 4.0]]), None, {}, head.constants).tolist() == [3.0]
    assert algorithm.needs().roles[0].head == "classes:2"
    assert algorithm.model_config()["id2label"] == {"0": "wrong", "1": "right"}


def test_label_tokens_of_an_algorithm_do_not_change_the_default_head() -> None:
    make(head="lm", label_tokens=("+", "-")).use_tokens(WORDS)
    assert StepLabels().head.constants == {"outputs": (1, 0)}


def test_label_tokens_must_be_single_and_different() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.label_tokens: 'good' must be one token .* but is 4 \(103 'g'"):
        make(head="lm", label_tokens=("good", "-")).use_tokens(WORDS)
    with pytest.raises(ConfigError, match=r"\['\+', '\+'\] are the same token \(43\)"):
        make(head="lm", label_tokens=("+", "+")).use_tokens(WORDS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head": "lm"}, "needs label_tokens"),
        ({"label_tokens": ("+", "-")}, 'read only with head = "lm"'),
        ({"head": "lm", "label_tokens": ("+",)}, "label_tokens"),
    ],
)
def test_missing_unread_and_single_label_tokens_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProcessRewardModel.Config(**config)
