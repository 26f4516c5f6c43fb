"""Which heads may be lent, how one is handed over, and columns with a further dimension on their way to ranks."""

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ModelSpec, TrainerFacts
from rlhf.ops.batch import concat
from rlhf.ops.heads import HIDDEN, OutputHead
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Annotation, Head, Lent, RoleSpec
from rlhf_runtime.checks.parts import lending_problems
from rlhf_runtime.models.roles import Role, lend

from tests.support.parts import RanksHere

WIDTH = 3
ROLES = {r.name: r for r in (RoleSpec("policy", trained=True), RoleSpec("teacher"), RoleSpec("judge", "scalar"))}


class Rank:
    """Its hidden states are the token's id, its position and what came before it."""

    def __init__(self, number):
        self.number, self.borrowed, self.received = number, {}, []

    def facts(self):
        return TrainerFacts()

    def forward(self, micros, heads, view):
        self.received += micros
        results = []
        for micro in micros:
            values = torch.stack([micro.ids_N, micro.position_N, micro.ids_N.roll(1)], 1).float()
            results.append({h.name: values * micro.tok["loss_mask"][:, None] for h in heads})
        return results

    def lend_head(self, view):
        if self.number == 0:
            yield OutputHead(torch.eye(WIDTH))

    def borrow_head(self, role, head):
        self.borrowed[role] = head


def role(name, size):
    return Role(ModelSpec(ROLES[name], ""), RanksHere([Rank(n) for n in range(size)]), budget=12)


def batch(units=7):
    parts = []
    for u in range(units):
        ids = [10 * u + i for i in range(2 + u % 4)]
        parts.append(UnitData([SequenceData(ids, {"loss_mask": [i > u % 2 for i in range(len(ids))]})]))
    return pack(parts)


@pytest.mark.parametrize("lenders", [1, 3])
def test_one_object_reaches_every_rank_that_borrows(lenders):
    roles = {"policy": role("policy", 2), "teacher": role("teacher", lenders)}
    lend([Lent("teacher")], roles)
    heads = [w.borrowed["teacher"] for w in roles["policy"].group.workers]
    assert heads[0] is heads[1]
    assert torch.equal(heads[0].weight_VH, torch.eye(WIDTH))


def test_a_trainer_that_lends_nothing_is_an_error(monkeypatch):
    roles = {"policy": role("policy", 1), "teacher": role("teacher", 1)}
    monkeypatch.setattr(Rank, "lend_head", lambda self, view: iter(()))
    with pytest.raises(TrainingError, match="role 'teacher' lent 0 output heads"):
        lend([Lent("teacher")], roles)


@pytest.mark.parametrize(
    ("loan", "settings", "message"),
    [
        (Lent("nobody"), {}, "the run has no such role; its roles are policy, teacher, judge"),
        (Lent("judge"), {}, "it has a 'scalar' head"),
        (Lent("policy", borrower="judge"), {}, "its weights change during the run"),
        (Lent("teacher"), {"snapshots": {"teacher"}}, "its weights change during the run"),
        (Lent("teacher"), {"precomputed": ["teacher"]}, "teacher.precompute = true unloads its model"),
    ],
)
def test_heads_that_cannot_be_lent(loan, settings, message):
    [problem] = lending_problems([loan], ROLES, settings.get("snapshots", ()), settings.get("precomputed", ()))
    assert message in problem
    assert f"{loan.borrower!r} needs the output head of {loan.role!r}" in problem


def test_a_frozen_language_model_lends():
    assert lending_problems([Lent("teacher")], ROLES, (), ()) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_column_of_vectors_comes_back_in_order_and_travels_on(ranks):
    data = batch()
    result = role("teacher", ranks).annotate(data, [Annotation("teacher", "hidden", "teacher_hidden")])
    column = result.tok["teacher_hidden"]
    assert column.shape == (data.tokens, WIDTH)
    mask_N = data.tok["loss_mask"]
    assert torch.equal(column[mask_N][:, 0].long(), data.ids_N[mask_N])
    assert torch.equal(column[mask_N][:, 1].long(), data.position_N[mask_N])
    assert not bool(column[~mask_N].any())

    borrower = role("policy", ranks)
    reads = Head("reads", HIDDEN.fn, columns=("teacher_hidden",))
    borrower.forward(result, [reads])
    for micro in (m for worker in borrower.group.workers for m in worker.received):
        mask = micro.tok["loss_mask"]
        assert micro.tok["teacher_hidden"].shape == (micro.tokens, WIDTH)
        assert torch.equal(micro.tok["teacher_hidden"][mask][:, 0].long(), micro.ids_N[mask])


def test_a_batch_keeps_vectors_with_their_tokens():
    data = batch()
    data = data.with_column("tok", "vectors", torch.stack([data.ids_N, -data.ids_N], 1).float())
    mask_N = data.tok["loss_mask"]
    for other in (
        data.select([4, 0, 2]),
        data.keep(torch.arange(data.sequences) % 2 == 0),
        data.select_columns(["vectors", "loss_mask"]),
        concat([data.select([1]), data.select([5, 3])]),
        data.to("cpu"),
    ):
        mask = other.tok["loss_mask"]
        assert torch.equal(other.tok["vectors"][:, 0], -other.tok["vectors"][:, 1])
        assert torch.equal(other.tok["vectors"][mask][:, 0].long(), other.ids_N[mask])
    assert not bool(data.tok["vectors"][~mask_N].any())
    poisoned = data.with_column("tok", "vectors", torch.full((data.tokens, 2), float("nan")))
    assert not bool(poisoned.tok["vectors"][~mask_N].isnan().any())
