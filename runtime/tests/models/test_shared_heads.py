"""Which heads may be lent, how one is handed over, and columns with a further dimension on their way to ranks."""

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ModelSpec, TrainerFacts, WorkerGroup
from rlhf.ops.batch import concat
from rlhf.ops.heads import HIDDEN, OutputHead
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Annotation, Head, Lent, RoleSpec
from rlhf_runtime.checks.parts import lending_problems
from rlhf_runtime.models.roles import Role, lend

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


class Ranks(WorkerGroup):
    def __init__(self, size):
        self.size, self.workers = size, [Rank(n) for n in range(size)]

    def call(self, method, per_rank):
        return [getattr(w, method)(*a) for w, a in zip(self.workers, per_rank, strict=True)]

    def stream(self, method, *arguments, timeout=None):
        first, *others = [list(getattr(w, method)(*arguments)) for w in self.workers]
        assert not any(others)
        return iter(first)


def role(name, size):
    return Role(ModelSpec(ROLES[name], ""), Ranks(size), budget=12)


def batch(units=7):
    made = []
    for u in range(units):
        ids = [10 * u + i for i in range(2 + u % 4)]
        made.append(UnitData([SequenceData(ids, {"loss_mask": [i > u % 2 for i in range(len(ids))]})]))
    return pack(made)


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
    ("lent", "given", "said"),
    [
        (Lent("nobody"), {}, "there is no such role; there are policy, teacher, judge"),
        (Lent("judge"), {}, "it has a 'scalar' head"),
        (Lent("policy", borrower="judge"), {}, "its weights change during the run"),
        (Lent("teacher"), {"snapshots": {"teacher"}}, "its weights change during the run"),
        (Lent("teacher"), {"precomputed": ["teacher"]}, "teacher.precompute = true unloads its model"),
    ],
)
def test_heads_that_cannot_be_lent(lent, given, said):
    [problem] = lending_problems([lent], ROLES, given.get("snapshots", ()), given.get("precomputed", ()))
    assert said in problem
    assert f"{lent.borrower!r} is to compute with the output head of {lent.role!r}" in problem


def test_a_frozen_language_model_lends():
    assert lending_problems([Lent("teacher")], ROLES, (), ()) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_column_of_vectors_comes_back_in_order_and_travels_on(ranks):
    whole = batch()
    made = role("teacher", ranks).annotate(whole, [Annotation("teacher", "hidden", "teacher_hidden")])
    column = made.tok["teacher_hidden"]
    assert column.shape == (whole.tokens, WIDTH)
    mask_N = whole.tok["loss_mask"]
    assert torch.equal(column[mask_N][:, 0].long(), whole.ids_N[mask_N])
    assert torch.equal(column[mask_N][:, 1].long(), whole.position_N[mask_N])
    assert not bool(column[~mask_N].any())

    again = role("policy", ranks)
    reads = Head("reads", HIDDEN.fn, columns=("teacher_hidden",))
    again.forward(made, [reads])
    for micro in (m for worker in again.group.workers for m in worker.received):
        own = micro.tok["loss_mask"]
        assert micro.tok["teacher_hidden"].shape == (micro.tokens, WIDTH)
        assert torch.equal(micro.tok["teacher_hidden"][own][:, 0].long(), micro.ids_N[own])


def test_a_batch_keeps_vectors_with_their_tokens():
    made = batch()
    made = made.with_column("tok", "vectors", torch.stack([made.ids_N, -made.ids_N], 1).float())
    mask_N = made.tok["loss_mask"]
    for other in (
        made.select([4, 0, 2]),
        made.keep(torch.arange(made.sequences) % 2 == 0),
        made.select_columns(["vectors", "loss_mask"]),
        concat([made.select([1]), made.select([5, 3])]),
        made.to("cpu"),
    ):
        own = other.tok["loss_mask"]
        assert torch.equal(other.tok["vectors"][:, 0], -other.tok["vectors"][:, 1])
        assert torch.equal(other.tok["vectors"][own][:, 0].long(), other.ids_N[own])
    assert not bool(made.tok["vectors"][~mask_N].any())
    poisoned = made.with_column("tok", "vectors", torch.full((made.tokens, 2), float("nan")))
    assert not bool(poisoned.tok["vectors"][~mask_N].isnan().any())
