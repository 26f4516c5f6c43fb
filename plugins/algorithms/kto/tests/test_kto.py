"""KTO: mismatched answers, the loss and z by hand, extremes, and batches of one kind, one row, equal rows."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import TrainingError
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.reduce import weigh
from rlhf.types import Image, Row, RunOptions, Snapshot, Update
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_plugin_kto import KTO, KTOLoss, KTOPair


def row(prompt, answer, label=True, index=0, source="data"):
    mask = [False] * len(prompt) + [True] * len(answer)
    return Example(Row({}, source, index), [TokenSequence([*prompt, *answer], mask)], {"label": label})


def pair(prompt, chosen, rejected, index=0):
    sequences = [
        TokenSequence([*prompt, *a], [False] * len(prompt) + [True] * len(a), r)
        for r, a in enumerate((chosen, rejected))
    ]
    return Example(Row({}, "data", index), sequences)


def make(cls=KTO, max_tokens=None, **config):
    return cls(parts={"loss": KTOLoss(KTOLoss.Config(**config))}, run=RunOptions(max_tokens))


def sequences(batch):
    """{unit: [(role, ids, own mask, twin mask), ...]}."""
    units = {}
    for b, (start, n) in enumerate(zip(batch.starts_B.tolist(), batch.lens_B.tolist(), strict=True)):
        part = slice(start, start + n)
        masks = [batch.tok[m][part].int().tolist() for m in ("loss_mask", "twin_mask")]
        answer = (int(batch.role_B[b]), batch.ids_N[part].tolist(), *masks)
        units.setdefault(int(batch.unit_B[b]), []).append(answer)
    return units


def twin_of(batch):
    """[ids of each unit's mismatched sequence, None where it has none]."""
    return [next((ids for role, ids, _, _ in s if role == 1), None) for s in sequences(batch).values()]


# ---------------------------------------------------------------------------------- mismatched answers


def test_a_prompt_gets_the_answer_of_the_row_before_it():
    batch = make().assemble([row([1, 2], [11], index=0), row([3], [12, 13], False, 1), row([4, 5], [14], index=2)])[0]
    assert sequences(batch) == {
        0: [(0, [1, 2, 11], [0, 0, 1], [0, 0, 0]), (1, [1, 2, 14], [0, 0, 0], [0, 0, 1])],
        1: [(0, [3, 12, 13], [0, 1, 1], [0, 0, 0]), (1, [3, 11], [0, 0], [0, 1])],
        2: [(0, [4, 5, 14], [0, 0, 1], [0, 0, 0]), (1, [4, 5, 12, 13], [0, 0, 0, 0], [0, 0, 1, 1])],
    }
    assert batch.unit["label"].tolist() == [True, False, True]


def test_the_order_of_rows_in_a_batch_does_not_matter():
    rows = [row([i], [20 + i], index=i) for i in (3, 0, 2, 1)]
    assert twin_of(make().assemble(rows)[0]) == [[3, 22], [0, 23], [2, 21], [1, 20]]
    other = [row([9], [29], index=0, source="a"), *rows]  # sources one after another
    assert twin_of(make().assemble(other)[0]) == [[9, 23], [3, 22], [0, 29], [2, 21], [1, 20]]


def test_rows_with_the_same_prompt_are_skipped():
    rows = [row([1], [11], index=0), row([1], [12], index=1), row([2], [13], index=2), row([1], [11], index=3)]
    assert twin_of(make().assemble(rows)[0]) == [[1, 13], [1, 13], [2, 12], [1, 13]]


def test_if_all_prompts_are_equal_a_different_answer_is_taken():
    rows = [row([1], [11], index=0), row([1], [12], index=1), row([1], [11], index=2)]
    assert twin_of(make().assemble(rows)[0]) == [[1, 12], [1, 11], [1, 12]]


def test_equal_rows_have_no_mismatched_answer_and_z_is_zero():
    algorithm = make()
    batch, metrics = algorithm.assemble([row([1], [11], index=0), row([1], [11], index=1)])
    assert twin_of(batch) == [None, None]
    assert metrics == {"labels/without_twin": 2.0}
    batch = batch.with_column("tok", "twin_logprobs", torch.ones(4), over="twin_mask")
    batch = batch.with_column("tok", "twin_ref_logprobs", torch.zeros(4), over="twin_mask")
    assert algorithm.parts["loss"].prepare(batch).unit["kl"].tolist() == [0.0, 0.0]


def test_a_mismatched_answer_is_cut_at_the_longest_sequence_allowed_and_counted():
    rows = [row([1, 2, 3], [11], index=0), row([4], [12, 13, 14], index=1), row([5, 6], [15, 16], index=2)]
    batch, metrics = make(max_tokens=4).assemble(rows)
    assert twin_of(batch) == [[1, 2, 3, 15], [4, 11], [5, 6, 12, 13]], "one token of two, all, two of three"
    assert sequences(batch)[0][1] == (1, [1, 2, 3, 15], [0, 0, 0, 0], [0, 0, 0, 1])
    assert [s[0][1] for s in sequences(batch).values()] == [[1, 2, 3, 11], [4, 12, 13, 14], [5, 6, 15, 16]]
    assert metrics == {"labels/cut_twins": 2.0}
    batch, metrics = make(max_tokens=5).assemble(rows)
    assert twin_of(batch) == [[1, 2, 3, 15, 16], [4, 11], [5, 6, 12, 13, 14]]
    assert metrics == {}
    assert max(len(ids) for ids in twin_of(make().assemble(rows)[0])) == 5, "without a limit, whole"


def test_images_after_the_first_answer_go_with_the_answer():
    """With data.loss_on = "assistant" a later message may show an image. 77 is a token of an image of two tokens."""

    def image_row(prompt_image, answer_image, index):
        ids = [77, 77, 1, 11, 77, 77, 12 + index]
        mask = [False, False, False, True, False, False, True]
        images = (Image(prompt_image, 0, 2, [77]), Image(answer_image, 4, 2, [77]))
        return Example(Row({}, "data", index), [TokenSequence(ids, mask, images=images)], {"label": True})

    rows = [image_row(b"a", b"b", 0), image_row(b"c", b"d", 1)]
    batch = make().assemble(rows)[0]
    assert twin_of(batch) == [[77, 77, 1, 11, 77, 77, 13], [77, 77, 1, 11, 77, 77, 12]]
    pictures = [[(image.data, image.start) for image in images] for images in batch.images_B]
    assert pictures == [[(b"a", 0), (b"b", 4)], [(b"a", 0), (b"d", 4)], [(b"c", 0), (b"d", 4)], [(b"c", 0), (b"b", 4)]]
    cut = make(max_tokens=5).assemble(rows)[0]
    assert twin_of(cut) == [[77, 77, 1, 11]] * 2, "no part of an image"
    assert [len(images) for images in cut.images_B] == [2, 1, 2, 1]


def test_an_empty_prompt_gives_no_mask_at_a_first_token():
    batch = make().assemble([row([], [11, 12], index=0), row([], [13, 14, 15], index=1)])[0]
    assert batch.tok["loss_mask"].int().tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 0, 0]
    # without prompts all prompts are equal
    assert sequences(batch)[0][1] == (1, [13, 14, 15], [0, 0, 0], [0, 1, 1])


def test_rows_without_a_trained_token_are_left_out_and_counted():
    algorithm = make()
    batch, metrics = algorithm.assemble(
        [row([1], [], index=0), row([2], [12], index=1), row([], [13], index=2), row([3], [14], index=3)]
    )
    assert (batch.units, metrics) == (2, {"labels/left_out": 2.0})
    assert twin_of(batch) == [[2, 14], [3, 12]]


@pytest.mark.parametrize("cls", [KTO, KTOPair])
def test_one_row_gives_no_batch_if_answers_are_mismatched(cls):
    """This happens at the end of an evaluation. The answers of one pair are not mismatched with each other."""
    example = row([1], [11]) if cls is KTO else pair([1], [11], [12])
    assert make(cls).assemble([example]) == (None, {})
    assert make(cls).assemble([]) == (None, {})
    assert make(cls, loss_type="apo_zero_unpaired").assemble([example])[0].units == (1 if cls is KTO else 2)


def test_two_rows_a_step_are_needed_where_answers_are_mismatched():
    assert make().needs().rows_min == 2
    assert make(loss_type="vanilla").needs().rows_min == 1
    assert make(loss_type="apo_zero_unpaired").needs().rows_min == 1
    assert "twin_mask" not in make(loss_type="vanilla").assemble([row([1], [11]), row([2], [12])])[0].tok


def test_a_pair_is_a_desirable_and_an_undesirable_row():
    batch = make(KTOPair).assemble([pair([1], [11], [12], 0), pair([2], [13], [14], 1), pair([3], [15], [16], 2)])[0]
    assert batch.unit["label"].tolist() == [True, False] * 3
    ids = [s[0][1] for s in sequences(batch).values()]
    assert ids == [[1, 11], [1, 12], [2, 13], [2, 14], [3, 15], [3, 16]]
    # chosen answers, then rejected ones, in a circle: each answer is somebody's mismatched one
    assert twin_of(batch) == [[1, 16], [1, 15], [2, 11], [2, 12], [3, 13], [3, 14]]


# ------------------------------------------------------------------------------------------- the loss


def loss_of(h, labels, kl, parts=None, **config):
    """(loss, gradient per answer, metrics) of answers of one token with these log-ratios, the reference at -3."""
    loss = KTOLoss(KTOLoss.Config(**config))
    algorithm = make(loss_type="apo_zero_unpaired")
    batch = algorithm.assemble([row([1], [5], label, i) for i, label in enumerate(labels)])[0]
    reference_N = torch.full((batch.tokens,), -3.0)
    batch = batch.with_column("tok", "ref_logprobs", reference_N)
    if kl is not None:
        batch = batch.with_column("unit", "kl", torch.tensor(kl, dtype=torch.float64))
    batch = weigh(batch, loss.reduce())
    leaf = torch.tensor(h) - 3.0
    leaf.requires_grad_()
    sums = []
    for part in parts or [list(range(len(h)))]:
        total, metric_sums = evaluate(loss, batch.select(part), {"logprobs": leaf[part]}, {}, {})
        total.backward()
        sums.append(metric_sums)
    from rlhf.ops.loss_value import add_sums

    metrics = finish_sums(add_sums(sums))
    return metrics["loss"], leaf.grad.tolist(), metrics


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("parts", [None, [[0], [1], [2]], [[2, 0], [1]]])
def test_the_loss_by_hand(parts):
    h, labels, kl, weight = (
        [2.0, -1.0, 0.5],
        [True, False, True],
        [1.0] * 3,
        {"desirable_weight": 2.0, "undesirable_weight": 3.0},
    )
    loss, gradient, metrics = loss_of(h, labels, kl, parts, beta=0.5, **weight)
    values = [2 * (1 - sigma(0.5)), 3 * (1 - sigma(1.0)), 2 * (1 - sigma(-0.25))]
    assert loss == pytest.approx(sum(values) / 3, rel=1e-6)
    slope = [w * 0.5 * sigma(v) * sigma(-v) / 3 for w, v in ((-2, 0.5), (3, 1.0), (-2, -0.25))]
    assert gradient == pytest.approx(slope, rel=1e-5)
    expected = {"desirable_reward": 0.625, "undesirable_reward": -0.5, "desirable_logprobs": -1.75,
                "undesirable_logprobs": -4.0, "accuracy": 2 / 3, "desirable": 2 / 3, "kl": 1.0}  # fmt: skip
    assert metrics == pytest.approx({"loss": loss, "loss/kto": loss, **expected}, rel=1e-6)


def test_apo_has_z_zero_and_reports_no_kl():
    loss, _, metrics = loss_of([2.0, -1.0], [True, False], None, loss_type="apo_zero_unpaired", beta=0.5)
    assert loss == pytest.approx((1 - sigma(1.0) + sigma(-0.5)) / 2, rel=1e-6)
    assert "kl" not in metrics


def test_an_answer_at_z_is_half_right():
    labels = [True, False, True, False]
    assert loss_of([0.0, 0.0, 1.0, 1.0], labels, [0.0] * 4)[2]["accuracy"] == (0.5 + 0.5 + 1 + 0) / 4


@pytest.mark.parametrize(
    ("label", "present", "absent"), [(True, "desirable", "undesirable"), (False, "undesirable", "desirable")]
)
def test_a_batch_may_have_one_label_only(label, present, absent):
    """The other kind's metrics are absent rather than zero."""
    _, gradient, metrics = loss_of([1.0, 2.0], [label] * 2, [0.5] * 2)
    assert all((g < 0) == label for g in gradient)
    assert {f"{present}_reward", f"{present}_logprobs"} <= set(metrics)
    assert not {f"{absent}_reward", f"{absent}_logprobs"} & set(metrics)
    assert metrics["desirable"] == float(label)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("h", [-1e4, -88.0, 0.0, 88.0, 1e4])
@pytest.mark.parametrize("label", [True, False])
def test_log_ratios_at_the_extremes(loss_type, h, label):
    kl = [0.0] if loss_type == "kto" else None
    loss, (slope,), metrics = loss_of([h], [label], kl, loss_type=loss_type, beta=1.0)
    assert all(math.isfinite(v) for v in (slope, *metrics.values()))
    assert loss == pytest.approx(
        sigma(-h if label else h) if abs(h) < 100 else float((h < 0) == label), rel=1e-5, abs=1e-30
    )
    assert slope * (1 if label else -1) <= 0


def test_one_minus_sigma_keeps_its_digits():
    """At 30, 1 - sigma is 9.4e-14, below the precision of fp32 near 1."""
    assert loss_of([30.0], [True], [0.0], beta=1.0)[0] == pytest.approx(math.exp(-30), rel=1e-4)


# ------------------------------------------------------------------------------------------------ z


def prepared(rows, drift, cls=KTO):
    """A batch after ``prepare``, where the policy is above its reference by ``drift[i]`` at every token of twin i."""
    algorithm = make(cls)
    batch = algorithm.assemble(rows)[0]
    reference_N = -torch.arange(batch.tokens, dtype=torch.float32)
    up_N = torch.tensor(drift)[batch.unit_N]
    batch = batch.with_column("tok", "twin_ref_logprobs", reference_N, over="twin_mask")
    batch = batch.with_column("tok", "twin_logprobs", reference_N + up_N, over="twin_mask")
    return algorithm.parts["loss"].prepare(batch)


ROWS = [row([1], [11], index=0), row([2], [12, 13], False, 1), row([3], [14, 15, 16], index=2)]


def test_z_is_the_mean_over_mismatched_answers_of_their_sums():
    """Mismatched answers of 3, 1 and 2 tokens."""
    batch = prepared(ROWS, [1.0, 0.5, -0.25])
    assert batch.unit["kl"].tolist() == pytest.approx([(3 * 1.0 + 1 * 0.5 - 2 * 0.25) / 3] * 3)


def test_z_is_never_negative():
    assert prepared(ROWS, [-1.0, -0.5, 0.25]).unit["kl"].tolist() == [0.0] * 3


def test_mismatched_answers_are_not_trained_on():
    batch = prepared(ROWS, [1.0, 1.0, 1.0])
    assert (batch.sequences, batch.units, batch.role_B.tolist()) == (3, 3, [0, 0, 0])
    assert batch.ids_N.tolist() == [1, 11, 2, 12, 13, 3, 14, 15, 16]
    assert batch.unit["label"].tolist() == [True, False, True]


def test_a_row_without_a_mismatched_answer_does_not_enter_z():
    loss = KTOLoss()
    batch = make().assemble([row([1], [11], index=0), row([2], [12], index=1)])[0]
    batch = batch.keep(torch.tensor([True, True, True, False]))  # the second row's is gone
    batch = batch.with_column("tok", "twin_ref_logprobs", torch.zeros(batch.tokens), over="twin_mask")
    batch = batch.with_column("tok", "twin_logprobs", torch.full((batch.tokens,), 3.0), over="twin_mask")
    assert loss.prepare(batch).unit["kl"].tolist() == [3.0, 3.0]


def test_the_vanilla_z_of_a_label_is_the_mean_over_the_other_label_or_zero():
    algorithm = make(loss_type="vanilla")
    batch = algorithm.assemble(ROWS)[0]
    up_N = torch.tensor([1.0, 0.5, 2.0])[batch.unit_N]
    batch = batch.with_column("tok", "ref_logprobs", torch.full((batch.tokens,), -2.0))
    batch = batch.with_column("tok", "own_logprobs", up_N - 2.0)
    kl = algorithm.parts["loss"].prepare(batch).unit["kl"]
    assert kl.tolist() == pytest.approx([1.0, (1.0 + 6.0) / 2, 1.0])
    desirable = algorithm.assemble([ROWS[0], ROWS[2]])[0]
    for column in ("ref_logprobs", "own_logprobs"):
        desirable = desirable.with_column("tok", column, torch.ones(desirable.tokens))
    assert algorithm.parts["loss"].prepare(desirable).unit["kl"].tolist() == [0.0, 0.0]


def test_a_batch_without_mismatched_answers_is_refused():
    batch = make(loss_type="apo_zero_unpaired").assemble(ROWS)[0]
    with pytest.raises(TrainingError, match="needs mismatched answers under the mask 'twin_mask'"):
        KTOLoss().prepare(batch)


def test_the_reference_cannot_be_computed_ahead_where_answers_are_mismatched():
    """A mismatched sequence is not a function of one row."""
    assert [(a.column, a.per_row) for a in make().annotations(0)] == [
        ("ref_logprobs", True),
        ("twin_ref_logprobs", False),
    ]
    assert [a.per_row for a in make(loss_type="vanilla").annotations(0)] == [True]


@pytest.mark.parametrize("algorithm", [KTO, KTOPair])
def test_the_reference_is_updated_after_the_policy(algorithm):
    kto = algorithm(algorithm.Config(snapshot_every=2, snapshot_share=0.6), {"loss": KTOLoss()})
    kinds = [[type(u) for u in kto.updates(step)] for step in range(4)]
    assert kinds == [[Update], [Update, Snapshot], [Update], [Update, Snapshot]]
    assert kto.updates(1)[1] == Snapshot("reference", "policy", 0.6)
    with pytest.raises(ValidationError, match="every snapshot_every steps, but snapshot_every is not set"):
        algorithm.Config(snapshot_share=0.5)
