"""Records of experts: checked, cut where they repeat each other, laid out as a column of the batch."""

import numpy as np
import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.ops.experts import check_records, choices_of, distinct_ids, drop_repeated, expert_column, record_of
from rlhf.ops.trajectories import assemble
from rlhf.types import ExpertLayers, Group, Row, Trajectory, Turn

MODEL = ExpertLayers((0, 2), 8, 2)
FINE = ExpertLayers((0,), 300, 1)


def record(first, tokens, model=MODEL):
    """Choices that name their token: ``first``, ``first + 1``, ..."""
    numbers = (np.arange(first, first + tokens) % model.experts)[:, None, None]
    return record_of(np.broadcast_to(numbers, (tokens, len(model.layers), model.chosen)), model)


def turns():
    """A context of 3, an answer of 2, an observation of 2, an answer of 2, each answer with a whole record."""
    return [
        Turn([5, 6, 7], False),
        Turn([8, 9], True, [0.0, 0.0], experts=record(0, 4)),
        Turn([1, 2], False),
        Turn([3, 4], True, [0.0, 0.0], experts=record(0, 8)),
    ]


def test_large_and_small_numbers_of_experts_come_back():
    assert choices_of(record(254, 4, FINE))[:, 0, 0].tolist() == [254, 255, 256, 257]
    assert (record(0, 4, FINE).token_bytes, record(0, 4).token_bytes, record(0, 4).tokens) == (2, 4, 4)


def test_each_token_is_kept_once_and_the_last_one_is_not_known():
    dialogue = turns()
    drop_repeated(dialogue)
    assert [t.experts.tokens for t in dialogue if t.experts] == [4, 4]
    assert choices_of(dialogue[3].experts)[:, 0, 0].tolist() == [4, 5, 6, 7]
    drop_repeated(dialogue)
    assert [t.experts.tokens for t in dialogue if t.experts] == [4, 4]
    assert expert_column(dialogue)[:, 1, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    fresh = [*turns(), Turn([5], False, fresh=True), Turn([6, 6], True, [0.0, 0.0], experts=record(3, 2))]
    drop_repeated(fresh)
    assert fresh[-1].experts.tokens == 2


def test_the_record_of_the_pass_that_sampled_a_token_counts():
    dialogue = turns()
    dialogue[3].experts = record(1, 8)
    assert expert_column(dialogue)[:, 0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 0, -1]
    assert expert_column([Turn([5], False), Turn([6], True, [0.0])]) is None


def test_a_batch_has_the_column_if_a_sample_has_a_record():
    row = Row({}, "data", 0)
    bare = [Turn([5, 6], False), Turn([8, 9], True, [0.0, 0.0])]
    samples = [Trajectory(row, dialogue, (0, n), reward=0.0) for n, dialogue in enumerate((bare, turns()))]
    batch = assemble([Group(row, 0, samples)])
    assert batch.tok["experts"].dtype == torch.int16
    assert batch.tok["experts"][:, 0, 1].tolist() == [-1] * 4 + [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert "experts" not in assemble([Group(row, 0, samples[:1])]).tok
    samples[0].turns[1].experts = record(0, 3, FINE)
    with pytest.raises(TrainingError, match="records of experts come from different models"):
        assemble([Group(row, 0, samples)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts": record(0, 9)}, "36 bytes, 4 for each token; allowed: at most 8 whole tokens"),
        ({"fresh": True}, "allowed: at most 1 whole tokens"),
        ({"sampled": False}, "turn 3 has a record of experts, but it was not sampled"),
        (
            {"experts": record(0, 3, FINE)},
            "with 1 layers of 300 experts, 1 for each token; the policy has 2 layers of 8",
        ),
        (
            {"experts": record_of(np.full((2, 2, 2), 8), MODEL)},
            "names an expert that does not exist; the model has 8 per layer",
        ),
    ],
)
def test_records_that_cannot_be_right_are_refused(change, words):
    dialogue = turns()
    check_records(dialogue, MODEL)
    for name, value in change.items():
        setattr(dialogue[3], name, value)
    with pytest.raises(ValueError, match=words):
        check_records(dialogue, MODEL)


def test_ids_with_other_records_are_distinct():
    ids_N, experts_NLK = torch.tensor([5, 5, 5, 6, 5]), torch.tensor([1, 1, 2, 1, -1], dtype=torch.int16)[:, None, None]
    a, b, *rest = distinct_ids(ids_N, experts_NLK).tolist()
    assert a == b
    assert len({a, *rest}) == 4
    assert max(a, *rest) < 5
