"""Divergences against numbers worked out by hand, and against whole distributions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from rlhf_plugin_distill import Distill
from rlhf_plugin_distill.divergence import TOP_IDS, TOP_LOGPROBS, divergence, divergence_head, top_head
from rlhf_testing import fabricate

KINDS = ("forward_kl", "reverse_kl", "jsd")
P, Q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("kind", "beta", "expected"),
    [
        # sum p ln(p/q) = 0.5 ln 2 + 0 - 0.25 ln 2
        ("forward_kl", 0.5, 0.25 * LN2),
        ("reverse_kl", 0.5, 0.25 * LN2),
        # m = (3/8, 1/4, 3/8): KL(p, m) = 1/2 ln(4/3) + 1/4 ln(2/3), and KL(q, m) is the same by symmetry
        ("jsd", 0.5, 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        # m = p/4 + 3q/4 = (5/16, 1/4, 7/16)
        (
            "jsd",
            0.25,
            0.25 * (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 7))
            + 0.75 * (0.25 * math.log(4 / 5) + 0.5 * math.log(8 / 7)),
        ),
    ],
)
def test_by_hand(kind, beta, expected):
    assert float(divergence(P, Q, kind, beta, 1.0)) == pytest.approx(expected, rel=1e-6)


def test_the_direction_of_each():
    """Two tokens: the teacher is sure to 0.9, the student undecided."""
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert float(divergence(p.log(), q.log(), "forward_kl", 0.5, 1.0)) == pytest.approx(forward, rel=1e-6)
    assert float(divergence(p.log(), q.log(), "reverse_kl", 0.5, 1.0)) == pytest.approx(reverse, rel=1e-6)
    assert abs(forward - reverse) > 0.1


def test_the_temperature_divides_the_logits_of_both():
    """Logits (2 ln 3, 0) and (0, 0) at temperature 2: the teacher's distribution is (3/4, 1/4)."""
    teacher, student = torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(divergence(teacher, student, "forward_kl", 0.5, 2.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 49, 50, 80])
def test_the_teachers_top_tokens_and_the_rest_as_one(kind, k):
    """Sorted probabilities and 1 minus their sum, in float64; with all tokens but one, or more, the whole. So are the
    tokens that a teacher sends."""
    g = torch.Generator().manual_seed(1)
    teacher, student = (3 * torch.randn(20, 50, generator=g, dtype=torch.float64) for _ in range(2))
    exact, leaf = student.clone().requires_grad_(), student.clone().requires_grad_()
    order = teacher.argsort(1, descending=True)[:, :k]
    p, q = (values.softmax(1).gather(1, order) for values in (teacher, exact))
    if k < 50:
        p, q = (torch.cat([values, 1 - values.sum(1, keepdim=True)], 1) for values in (p, q))
    m = 0.3 * p + 0.7 * q
    want = {
        "forward_kl": (p * (p / q).log()).sum(1),
        "reverse_kl": (q * (q / p).log()).sum(1),
        "jsd": 0.3 * (p * (p / m).log()).sum(1) + 0.7 * (q * (q / m).log()).sum(1),
    }[kind]
    result, full_divergence = divergence(teacher, leaf, kind, 0.3, 1.0, k), divergence(teacher, student, kind, 0.3, 1.0)
    assert torch.allclose(result, want, rtol=1e-9, atol=1e-11)
    assert bool((result <= full_divergence + 1e-12).all())
    assert torch.allclose(result, full_divergence) == (k >= 49)
    result.sum().backward()
    want.sum().backward()
    assert torch.allclose(leaf.grad, exact.grad, rtol=1e-6, atol=1e-9)
    teachers, students = top_head(k, 2.0), divergence_head(kind, 0.3, 2.0, by_ids=True)
    top, twin = teachers.fn(2 * teacher, None, {}, teachers.constants), student.clone().requires_grad_()
    columns = {TOP_IDS: top[:, : min(k, 49)].int(), TOP_LOGPROBS: top[:, min(k, 49) :]}
    d, agree = students.fn(2 * twin, None, columns, students.constants).unbind(1)
    assert torch.allclose(d, want, rtol=1e-9, atol=1e-11)
    assert torch.equal(agree, (teacher.argmax(1) == student.argmax(1)).to(d.dtype))
    d.sum().backward()
    assert torch.allclose(twin.grad, exact.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_probabilities_in_float64(kind):
    g = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(40, 50, generator=g) for _ in range(2))
    exact, leaf = student.double().requires_grad_(), student.clone().requires_grad_()
    p, q, beta = (teacher.double() / 1.7).softmax(1), (exact / 1.7).softmax(1), 0.2
    m = beta * p + (1 - beta) * q
    want = {
        "forward_kl": (p * (p.log() - q.log())).sum(1),
        "reverse_kl": (q * (q.log() - p.log())).sum(1),
        "jsd": beta * (p * (p.log() - m.log())).sum(1) + (1 - beta) * (q * (q.log() - m.log())).sum(1),
    }[kind]
    result = divergence(teacher, leaf, kind, beta, 1.7)
    assert torch.allclose(result.double(), want, rtol=1e-5, atol=1e-6)
    (a,), (b,) = torch.autograd.grad(result.sum(), leaf), torch.autograd.grad(want.sum(), exact)
    assert (a.double() - b).norm() <= 1e-6 * b.norm()


def test_jensen_shannon_lies_between_the_kls_and_is_bounded():
    g = torch.Generator().manual_seed(1)
    teacher, student = (torch.randn(30, 20, generator=g, dtype=torch.float64) for _ in range(2))
    for kind, beta in (("forward_kl", 1e-7), ("reverse_kl", 1 - 1e-7)):
        limit = divergence(teacher, student, "jsd", beta, 1.0) / 1e-7
        assert torch.allclose(limit, divergence(teacher, student, kind, 0.5, 1.0), rtol=1e-3)
    far = divergence(40 * teacher, 40 * student, "jsd", 0.5, 1.0)
    assert bool((far <= LN2 + 1e-12).all())
    assert float(far.max()) > 0.99 * LN2
    assert float(divergence(teacher, teacher, "jsd", 0.3, 1.0).abs().max()) <= 1e-12


def test_a_vocabulary_that_is_padded_further_is_compared_where_both_have_tokens():
    """The student's head has 6 more rows, one of them with the highest logit; the teacher's head has 29."""
    g = torch.Generator().manual_seed(2)
    head, hidden = fabricate.output_head("teacher", 0), torch.randn(5, fabricate.HIDDEN, generator=g)
    student = torch.randn(5, fabricate.VOCABULARY + 6, generator=g)
    student[:, -1] = 50.0
    divergences = divergence_head("forward_kl", 0.5, 1.0)
    out = divergences.fn(student, None, {"teacher_hidden": hidden}, {**divergences.constants, "teacher": head})
    p, logq = head.logits(hidden).softmax(1), student[:, : fabricate.VOCABULARY].log_softmax(1)
    assert torch.allclose(out[:, 0], (p * (p.log() - logq)).sum(1), atol=1e-6)
    assert out[:, 1].tolist() == (p.argmax(1) == logq.argmax(1)).float().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.3}, "beta = 0.3 applies only to divergence = 'jsd', got 'forward_kl'"),
        ({"divergence": "jsd", "beta": 1.0}, "less than 1"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"temperature": 0.0}, "greater than 0"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Distill.Config(**options)


def test_the_teacher_alone_reads_no_log_probs():
    assert [getattr(o, "name", o) for o in Distill(Distill.Config(alpha=1.0)).outputs()] == ["divergence"]
    assert list(Distill(Distill.Config(alpha=1.0)).reduce()) == ["divergence"]
    mixed = Distill(Distill.Config(alpha=0.3)).reduce()
    assert {name: term.coef for name, term in mixed.items()} == {"nll": 0.7, "divergence": 0.3}
