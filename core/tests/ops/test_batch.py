"""Batches: packing, columns, selecting and joining units."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rlhf.ops.batch import concat
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf_testing import fabricate


def seq(*ids, mask=None, role=0):
    return SequenceData(ids, {"loss_mask": list(mask or [True] * len(ids))}, role)


def small():
    """Two units: one sequence of 3, and a pair of 1 and 2 tokens."""
    return pack([UnitData([seq(1, 2, 3)], {"x": 1.5}), UnitData([seq(4), seq(5, 6, role=1)], {"x": 2.5})])


def test_pack():
    b = small()
    assert (b.tokens, b.sequences, b.units, b.answers) == (6, 3, 2, 3)
    assert b.ids_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert b.unit_B.tolist() == [0, 1, 1]
    assert b.seq_N.tolist() == [0, 0, 0, 1, 2, 2]
    assert b.unit_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert b.starts_B.tolist() == [0, 3, 4]
    assert b.position_N.tolist() == [0, 1, 2, 0, 0, 1]
    assert b.tok["loss_mask"].tolist() == [False, True, True, False, False, True], "nothing predicts a first token"
    assert b.tokens_per_unit() == [3, 3]
    assert (b.unit["x"].dtype, b.unit["x"].tolist()) == (torch.float64, [1.5, 2.5])


def test_sequences_of_one_unit_and_role_are_one_answer():
    b = pack([UnitData([seq(1, 2), seq(3, 4)]), UnitData([seq(5, 6), seq(7, 8, role=1)])])
    assert b.answer_B.tolist() == [0, 0, 1, 2]


def test_masked_positions_are_zeroed_when_a_column_enters():
    nan = torch.full((6,), float("nan"))
    b = small().with_column("tok", "x2", torch.where(small().tok["loss_mask"], 7.0, nan))
    assert b.tok["x2"].tolist() == [0, 7, 7, 0, 0, 7]
    wide = small().with_column("tok", "w", torch.ones(6, 2))
    assert wide.tok["w"].sum(1).tolist() == [0, 2, 2, 0, 0, 2]
    assert small().with_column("tok", "all", nan, over=None).tok["all"].isnan().all()


def test_select_renumbers_units():
    b = small().with_column("seq", "s", torch.tensor([10, 20, 30]))
    c = b.select([1])
    assert c.ids_N.tolist() == [4, 5, 6]
    assert c.unit_B.tolist() == [0, 0]
    assert c.role_B.tolist() == [0, 1]
    assert c.seq["s"].tolist() == [20, 30]
    assert c.unit["x"].tolist() == [2.5]
    assert (b.select([]).units, b.select([]).answers) == (0, 0)


@pytest.mark.parametrize(("first", "last"), [(0, 6), (0, 1), (2, 5), (5, 6), (3, 3)])
def test_between_is_select_without_a_copy(first, last):
    b = fabricate.batch(1).with_column("unit", "n", torch.arange(6))
    b = b.with_column("seq", "s", torch.arange(b.sequences))
    part, selection = b.between(first, last), b.select(range(first, last))
    for name in ("ids_N", "lens_B", "unit_B", "role_B"):
        assert torch.equal(getattr(part, name), getattr(selection, name)), name
    for level in ("tok", "seq", "unit"):
        assert all(
            torch.equal(values, getattr(selection, level)[name]) for name, values in getattr(part, level).items()
        )
    assert part.ids_N.untyped_storage().data_ptr() == b.ids_N.untyped_storage().data_ptr()


def test_keep_drops_sequences_and_units_without_sequences():
    units = [
        UnitData([SequenceData([1, 2], {"x": [1.0, 2.0]}, 0), SequenceData([3], {"x": [3.0]}, 1)], {"u": 0}),
        UnitData([SequenceData([4], {"x": [4.0]}, 0)], {"u": 1}),
        UnitData([SequenceData([5], {"x": [5.0]}, 0), SequenceData([6, 7], {"x": [6.0, 7.0]}, 1)], {"u": 2}),
    ]
    full = pack(units).with_column("seq", "s", torch.arange(5))
    part = full.keep(torch.tensor([False, True, False, True, True]))
    assert part.ids_N.tolist() == [3, 5, 6, 7]
    assert part.lens_B.tolist() == [1, 1, 2]
    assert part.unit_B.tolist() == [0, 1, 1]
    assert part.role_B.tolist() == [1, 0, 1]
    assert part.tok["x"].tolist() == [3, 5, 6, 7]
    assert part.seq["s"].tolist() == [1, 3, 4]
    assert part.unit["u"].tolist() == [0, 2]


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_select_and_concat_are_inverse(order, cut):
    b = fabricate.batch(1).with_column("unit", "n", torch.arange(6))
    b = b.with_column("seq", "s", torch.arange(b.sequences))
    joined = concat([b.select(order[:cut]), b.select(order[cut:])])
    assert joined.unit_B.tolist() == b.select(order).unit_B.tolist()
    restored = joined.select([order.index(u) for u in range(6)])
    assert torch.equal(restored.ids_N, b.ids_N)
    assert torch.equal(restored.unit_B, b.unit_B)
    assert all(torch.equal(restored.tok[k], b.tok[k]) for k in b.tok)
    assert torch.equal(restored.lens_B, b.lens_B)
    assert torch.equal(restored.role_B, b.role_B)
    assert torch.equal(restored.seq["s"], b.seq["s"])
    assert restored.unit["n"].tolist() == list(range(6))


def test_only_keeps_the_named_columns():
    full = small().with_column("seq", "s", torch.arange(3)).with_column("seq", "t", torch.arange(3))
    full = full.with_column("unit", "y", torch.arange(2)).with_column("tok", "z", torch.arange(6))
    b = full.select_columns(["x", "t", "z"])
    assert (set(b.tok), set(b.seq), set(b.unit)) == ({"z"}, {"t"}, {"x"})
    assert all(b.has(name) for name in ("x", "t", "z"))
    assert not b.has("loss_mask")
    with pytest.raises(KeyError, match="no column 'loss_mask'"):
        b.column("loss_mask")


@pytest.mark.parametrize(
    "units", [[], [UnitData([])], [UnitData([seq(1)]), UnitData([])], [UnitData([SequenceData([])])]]
)
def test_pack_refuses_units_without_tokens(units):
    with pytest.raises(ValueError, match="at least one unit"):
        pack(units)


def test_pack_refuses_columns_of_different_length_or_name():
    with pytest.raises(ValueError, match="different columns"):
        pack([UnitData([seq(1), SequenceData([2])])])
    for columns in ({}, {"y": 1.0}, {"x": 1.0, "y": 1.0}):
        with pytest.raises(ValueError, match="units have different columns"):
            pack([UnitData([seq(1, 2)], columns), UnitData([seq(1, 2)], {"x": 1.0})])
    with pytest.raises(ValueError, match="has 1 values for 2 tokens"):
        pack([UnitData([SequenceData([1, 2], {"loss_mask": [True]})])])
    with pytest.raises(ValueError, match="needs 3 values"):
        small().with_column("seq", "s", torch.zeros(2))
