"""The teacher of a policy-gradient algorithm: its columns and sequences in a batch, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import ConfigError, TrainingError
from rlhf.interfaces import Tokens
from rlhf.ops.trajectories import assemble
from rlhf.types import Group, Image, OnlineShape, RewardResult, Row, RunOptions, Trajectory, Turn
from rlhf_algorithms.policy_gradient_config import TeacherConfig
from rlhf_algorithms.teacher import TAUGHT, TEACHER_LOGPROBS, Teacher, with_teacher

PROMPT, HINTED = [1, 2], [1, 2, 8, 9]


def sample(number: int, *turns: Turn, source: str = "a", **columns) -> Group:
    row = Row({"hint": "so", **columns}, source, number)
    return Group(row, number, [Trajectory(row, [Turn(PROMPT, False), *turns], (number, 0), reward=0.0)])


def answered(*ids: int, **turn) -> Turn:
    return Turn(ids, True, **turn)


GROUPS = [
    sample(0, answered(3, 4), Turn([5], False), answered(6, temperature=0.5)),
    sample(1, answered(7), hint=""),
    sample(2, answered(3), source="b"),
]
GROUPS[2].trajectories[0].turns[0].agent = "of several"


def teacher(run: RunOptions | None = None, **options) -> Teacher:
    subject = Teacher(TeacherConfig(coef=1.0, **options), run or RunOptions())
    subject.opening = lambda row, text: {"": PROMPT, "so": HINTED}[text]
    return subject


def annotated(subject: Teacher, groups=GROUPS):
    """The batch with minus its token ids as log-probs of each annotation, and of the policy 0."""
    batch, metrics = subject.prepared(assemble(groups), groups)
    for annotation in subject.annotations():
        values_N = -batch.ids_N.float() - 100 * subject.annotations().index(annotation)
        over = annotation.output if isinstance(annotation.output, str) else annotation.output.over
        batch = batch.with_column("tok", annotation.column, values_N, over=over)
    return batch, metrics


def test_a_context_is_a_sequence_of_its_unit_until_it_was_read():
    subject = teacher(weights="live", context="hint")
    batch, metrics = annotated(subject)
    assert metrics == {"teacher/left_out": pytest.approx(1 / 3)}
    sequences = [part.tolist() for part in batch.ids_N.split(batch.lens_B.tolist())]
    assert sequences == [
        [*PROMPT, 3, 4, 5, 6],
        [*HINTED, 3, 4, 5, 6],
        [*PROMPT, 7],
        [*PROMPT, 3],
        [*HINTED, 3],
    ]
    assert batch.unit_B.tolist() == [0, 0, 1, 2, 2]
    assert batch.tok["temperature"].tolist()[:14] == [*[1] * 5, 0.5, *[1] * 7, 0.5]
    plain = assemble(GROUPS)
    result = subject.read(batch)
    assert result.ids_N.tolist() == plain.ids_N.tolist()
    assert result.tok[TEACHER_LOGPROBS].tolist() == [0, 0, -3, -4, 0, -6, 0, 0, 0, 0, 0, -3]
    for name, values in plain.tok.items():
        assert torch.equal(result.tok[name], values)
    assert set(result.tok) == {*plain.tok, TEACHER_LOGPROBS, TAUGHT}


def test_a_teacher_gives_any_output_and_batches_without_the_samples_that_it_does_not_read():
    subject = Teacher(TeacherConfig(coef=1.0, weights="live", context="hint"), RunOptions(), "hidden", "seen")
    subject.opening = lambda row, text: {"": PROMPT, "so": HINTED}[text]
    batch = subject.only_taught(subject.prepared(assemble(GROUPS), GROUPS)[0])
    [annotation] = subject.annotations()
    assert (annotation.role, annotation.column, annotation.output.name) == ("policy", "seen.teacher", "hidden.teacher")
    values_N2 = torch.stack([batch.ids_N, -batch.ids_N], 1).bfloat16()
    result = subject.read(batch.with_column("tok", annotation.column, values_N2, over=annotation.output.over))
    assert result.unit["group"].tolist() == assemble(GROUPS).unit["group"][[0, 2]].tolist()
    assert result.tok["seen"].tolist() == [[i, -i] for i in (0, 0, 3, 4, 0, 6, 0, 0, 3)]
    assert result.tok["seen"].dtype == torch.bfloat16
    assert subject.only_taught(subject.prepared(assemble(GROUPS[1:2]), GROUPS[1:2])[0]) is None


def test_a_context_has_no_record_of_experts():
    plain = assemble(GROUPS)
    experts_NLK = torch.arange(plain.tokens, dtype=torch.int16)[:, None, None].expand(-1, 2, 3)
    recorded = plain.with_column("tok", "experts", experts_NLK, over=None)
    batch, _ = teacher(weights="live", context="hint").prepared(recorded, GROUPS)
    full, hinted, *_ = batch.tok["experts"].split(batch.lens_B.tolist())
    assert torch.equal(full, experts_NLK[: len(full)])
    assert (hinted == -1).all()


def test_an_empty_answer_gets_no_sequence_of_the_teacher():
    groups = [sample(0, answered()), sample(1, answered(3))]
    subject = teacher(weights="live", context="hint")
    batch, metrics = annotated(subject, groups)
    assert batch.lens_B.tolist() == [len(PROMPT), len(PROMPT) + 1, len(HINTED) + 1]
    assert metrics == {"teacher/left_out": 0.5}
    assert subject.read(batch).ids_N.tolist() == assemble(groups).ids_N.tolist()


def test_a_sample_that_the_teacher_does_not_read_keeps_its_images():
    images = (Image(b"", 0, 1, ()),)
    groups = [GROUPS[0], sample(1, answered(7), hint=""), GROUPS[2]]
    groups[1].trajectories[0].turns[0].images = images
    subject = teacher(weights="live", context="hint")
    batch = annotated(subject, groups)[0]
    assert batch.images_B == ((), (), images, (), ())
    assert subject.read(batch).images_B == assemble(groups).images_B == ((), images, ())


def test_tokens_that_no_teacher_scored_get_no_credit():
    subject = teacher(weights="live", context="hint")
    batch = subject.read(annotated(subject)[0]).with_column("tok", "old_logprobs", torch.full((12,), -2.0))
    batch, metrics = with_teacher(batch, 0.5)
    assert batch.tok["advantages"].tolist() == [0, 0, -0.5, -1, 0, -2, 0, 0, 0, 0, 0, -0.5]
    assert metrics["teacher/kl"] == pytest.approx((1 + 2 + 4 + 1) / 4)


def test_each_source_has_its_role():
    subject = teacher(roles={"a": "first", "b": "second"})
    assert [(role.name, role.trained) for role in subject.roles()] == [("first", False), ("second", False)]
    batch, metrics = annotated(subject)
    assert metrics == {"teacher/left_out": 0}
    assert subject.read(batch).tok[TEACHER_LOGPROBS].tolist() == [0, 0, -3, -4, 0, -6, 0, 0, -7, 0, 0, -103]
    batch, metrics = annotated(teacher(roles={"b": "second"}))
    assert metrics == {"teacher/left_out": pytest.approx(2 / 3)}


def test_rewards_that_teach_are_a_column():
    run = RunOptions(teachers={"one": ("a",), "two": ("b",)}, sources=("a", "b"))
    groups = [replace(group, trajectories=[replace(t, rewards={}) for t in group.trajectories]) for group in GROUPS]
    for group, name, steps in zip(
        groups, ("one", "one", "two"), (((3, 0, -6.0), (1, 0, -3.0), (1, 1, -4.0)), (), ((1, 0, -9.0),)), strict=True
    ):
        group.trajectories[0].rewards[name] = RewardResult(None, steps=steps)
    subject = teacher(run)
    assert (subject.roles(), subject.annotations()) == ([], [])
    batch, metrics = subject.prepared(assemble(groups), groups)
    assert batch.tok[TEACHER_LOGPROBS].tolist() == [0, 0, -3, -4, 0, -6, 0, 0, 0, 0, 0, -9]
    assert metrics == {"teacher/left_out": pytest.approx(1 / 3)}
    groups[0].trajectories[0].rewards["one"] = RewardResult(None, steps=((1, 0, -3.0),))
    with pytest.raises(TrainingError, match="one, two gave 1 log-probs of a teacher for 3 sampled tokens"):
        subject.prepared(assemble(groups), groups)
    assert "sampling.temperature = 0.5" in subject.conflicts(OnlineShape(1, 1, 1, temperature=0.5))[0]
    assert subject.conflicts(OnlineShape(1, 1, 1)) == []


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (sample(0, answered(3), Turn([1, 2, 5], False, fresh=True), answered(4)), "context was rewritten"),
        (sample(0, Turn([5], False), answered(4)), "wrote a different prompt from the row's"),
        (sample(0, Turn([5], False, images=(Image(b"", 0, 1, ()),)), answered(4)), "has images"),
        (sample(0, answered(3), hint=7), "'hint' must hold text, got int 7"),
    ],
)
def test_samples_that_have_no_place_for_a_context_are_refused(group, words):
    with pytest.raises(TrainingError, match=words):
        teacher(weights="live", context="hint").prepared(assemble([group]), [group])


def test_contexts_that_no_run_has_are_refused():
    with pytest.raises(ConfigError, match="an environment writes the prompts"):
        teacher(RunOptions(weights={"env": 1.0}), weights="live", context="hint")
    subject = teacher(weights="live", context="hint")
    subject.opening = Tokens(lambda text: [], lambda ids: "").opening
    with pytest.raises(TrainingError, match="needs the prompts of a run"):
        subject.prepared(assemble(GROUPS), GROUPS)
    short = teacher(RunOptions(max_tokens=7), weights="live", context="hint")
    assert short.prepared(assemble(GROUPS), GROUPS)[1] == {"teacher/left_out": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coef": 0.0, "weights": "base"}, "coef = 0 turns the teacher off"),
        ({"weights": "base", "roles": {"a": "first"}}, "roles are separate models, but weights = 'base' is set"),
        ({"roles": {"a": "policy"}}, "policy already has a task"),
        ({"template": "{context}!"}, "context, which is not set"),
        ({"weights": "live", "context": "hint", "template": "x"}, "must contain {context}"),
        ({"share": 0.5}, "applies only to weights = 'averaged'"),
    ],
)
def test_options_of_a_teacher_that_do_nothing_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        TeacherConfig(**{"coef": 1.0, **options})
