"""What a frozen role says is computed once for every row, found again by its tokens, and kept for a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import Algorithm, ModelSpec, TrainerFacts, WorkerGroup
from rlhf.ops.heads import ENTROPY, LOGPROBS
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Annotation, Needs, RoleSpec, Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_runtime.models.precompute import keys, precompute, problems_of
from rlhf_runtime.models.roles import Role

SPEC = ModelSpec(RoleSpec("reference"), "nowhere")
REFERENCE_LOGPROBS = Annotation("reference", "logprobs", "ref_logprobs")


class Counting(WorkerGroup):
    """Log-probs of a token are a function of it and the one before; counts what it computes."""

    size = 1

    def __init__(self):
        self.sequences, self.closed = 0, False

    def call(self, method, per_rank):
        return [getattr(self, method)(*arguments) for arguments in per_rank]

    def stream(self, method, *arguments, timeout=None):
        raise NotImplementedError

    def facts(self):
        return TrainerFacts()

    def forward(self, micros, heads, view):
        self.sequences += sum(m.sequences for m in micros)
        values = [-(m.ids_N + m.ids_N.roll(1)).float() / 7 * m.tok["loss_mask"] for m in micros]
        return [{heads[0].name: value} for value in values]

    def shutdown(self):
        self.closed = True


class Reads(Algorithm):
    name = "reads"
    data = "demonstrations"
    wanted = (REFERENCE_LOGPROBS,)

    def needs(self):
        return Needs((RoleSpec("policy", trained=True), RoleSpec("reference")))

    def assemble(self, examples):
        units = [
            UnitData([SequenceData(s.ids, {"loss_mask": s.loss_mask}, s.role) for s in e.sequences]) for e in examples
        ]
        return pack(units) if units else None, {}

    def annotations(self, step):
        return list(self.wanted)

    def updates(self, step, batch=None):
        return []


def example(*answers):
    sequences = [TokenSequence([5, 6, *a], [False, False, *(True for _ in a)], r) for r, a in enumerate(answers)]
    return Example(Row({}, "data", 0), sequences)


ROWS = [example([7, 8], [9]), example([10], [11, 12, 13]), example([7, 8], [14]), example([15, 16], [9])]


@pytest.fixture
def run(tmp_path):
    groups, notes = [], []

    def go(rows=ROWS, spec=SPEC, part=3):
        def launch():
            groups.append(Counting())
            return Role(spec, groups[-1], budget=5)

        parts = [rows[i : i + part] for i in range(0, len(rows), part)]
        return precompute(
            spec, tmp_path / "precomputed" / "r.safetensors", Reads(), lambda: parts, launch, notes.append
        )

    go.groups, go.notes = groups, notes
    return go


def along(batch):
    return Role(SPEC, Counting(), budget=64).annotate(batch, [REFERENCE_LOGPROBS]).tok["ref_logprobs"]


def test_the_columns_are_those_computed_along_in_any_order_and_split(run):
    role = run()
    assert run.groups[0].closed
    for order in ([0, 1, 2, 3], [3, 1], [2], [1, 0, 3, 2]):
        batch = Reads().assemble([ROWS[i] for i in order])[0]
        assert torch.equal(role.annotate(batch, [REFERENCE_LOGPROBS]).tok["ref_logprobs"], along(batch))
    batch = Reads().assemble(ROWS)[0].select([2, 0])
    assert torch.equal(role.annotate(batch, [REFERENCE_LOGPROBS]).tok["ref_logprobs"], along(batch))
    assert run.notes[0] == "reference: precomputing ref_logprobs of 6 sequences"


def test_a_resume_computes_only_what_is_new(run):
    run(ROWS[:3])
    second = run(ROWS[:3])
    assert len(run.groups) == 1, "nothing is missing, so no model is loaded"
    run(ROWS)
    assert run.groups[1].sequences == 1  # of the fourth row only [15, 16]; its [9] is the first row's
    batch = Reads().assemble(ROWS[:3])[0]
    assert torch.equal(second.annotate(batch, [REFERENCE_LOGPROBS]).tok["ref_logprobs"], along(batch))


def test_values_computed_before_a_failure_are_kept(run, monkeypatch):
    computed = Counting.forward

    def fails_at_the_second_part(self, micros, heads, view):
        if self.sequences >= 6:
            raise RuntimeError("killed")
        return computed(self, micros, heads, view)

    monkeypatch.setattr(Counting, "forward", fails_at_the_second_part)
    with pytest.raises(RuntimeError, match="killed"):
        run()
    monkeypatch.setattr(Counting, "forward", computed)
    run()
    assert run.groups[1].sequences == 1  # all but [15, 16]


def test_values_of_another_model_are_computed_again(run, tmp_path):
    first = ModelSpec(RoleSpec("reference"), str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    run(spec=first)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    run(spec=first)
    (tmp_path / "adapter_config.json").write_text("{}")
    run(spec=first)
    run(spec=replace(first, storage="bf16"))
    assert [g.sequences for g in run.groups] == [7] * 4  # [7, 8] comes twice in the first part


def test_the_mask_is_part_of_the_key_of_values(run):
    role = run()
    ids = ROWS[0].sequences[0].ids
    other = pack([UnitData([SequenceData(ids, {"loss_mask": [False, True, True, True]})])])
    with pytest.raises(TrainingError, match=r"reads it at other tokens.*Remove precompute of 'reference'"):
        role.annotate(other, [REFERENCE_LOGPROBS])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "prompts"}, "learns from samples that do not exist before the run"),
        ({"wanted": ()}, "reads none of its outputs"),
        (
            {"wanted": (Annotation("reference", "logprobs", "twin", per_row=False),)},
            "computes 'twin' on combinations of rows",
        ),
    ],
)
def test_roles_that_cannot_be_precomputed_are_refused(change, message):
    algorithm = type("Other", (Reads,), change)()
    [problem] = problems_of(["reference"], algorithm, {"policy"}, set())
    assert problem.startswith("reference.precompute = true, but reads ")
    assert message in problem


def test_trained_and_replaced_roles_are_refused():
    assert "trains it" in problems_of(["reference"], Reads(), {"reference"}, set())[0]
    assert "replaces its weights during the run" in problems_of(["reference"], Reads(), set(), {"reference"})[0]
    assert problems_of(["reference"], Reads(), {"policy"}, set()) == []


def test_the_key_of_a_value_contains_all_of_its_inputs():
    def build(mask=(False, True, True), ids=(5, 6, 7), **columns):
        tok = {"loss_mask": list(mask), "unread": [1.0, 2.0, 3.0], **columns}
        return pack([UnitData([SequenceData(ids, tok)])])

    plain = keys(build(), LOGPROBS, "live")
    assert plain == keys(build(unread=[4.0, 4.0, 4.0]), LOGPROBS, "live"), "what the head does not read"
    other_keys = [
        keys(build(ids=(5, 6, 8)), LOGPROBS, "live"),
        keys(build(mask=(False, False, True)), LOGPROBS, "live"),
        keys(build(temperature=[1.0, 0.5, 0.5]), LOGPROBS, "live"),
        keys(build(temperature=[1.0, 0.7, 0.7]), LOGPROBS, "live"),
        keys(build(), LOGPROBS, "ema"),
        keys(build(), ENTROPY, "live"),
    ]
    assert len({tuple(key) for key in (plain, *other_keys)}) == 7
