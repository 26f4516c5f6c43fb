"""Units are planned with the tokens that a trainer computes for them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.ops import prefixes as rules
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Image
from rlhf_runtime.models.dispatch import unit_prefixes

rows_of_ids = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def share_all(monkeypatch):
    """Share all prefixes, also short ones."""
    monkeypatch.setattr(rules, "MIN_TOKENS", 1)
    monkeypatch.setattr(rules, "GAIN", 0.0)


@pytest.fixture
def as_it_is(share_all, monkeypatch):
    monkeypatch.undo()


def prefixes(rows):
    return {tuple(r[: i + 1]) for r in rows for i in range(len(r))}


def make_unit(*images):
    return UnitData([SequenceData([1, 9, 9, 2, 3], images=images), SequenceData([4, 5])])


@settings(max_examples=100, deadline=None)
@given(st.lists(rows_of_ids, min_size=1, max_size=6), st.data())
def test_the_cost_of_units_is_at_least_what_the_trainer_computes(units, data):
    batch = pack([UnitData([SequenceData(r, role=i) for i, r in enumerate(rows)]) for rows in units])
    result = unit_prefixes(batch)
    assert result.tokens == [len(prefixes(rows)) for rows in units]
    assert sorted(result.order) == list(range(len(units)))
    start = data.draw(st.integers(0, len(units) - 1))
    end = data.draw(st.integers(start + 1, len(units)))
    joint = prefixes([r for u in result.order[start:end] for r in units[u]])
    planned = sum(result.tokens[u] for u in result.order[start:end]) - sum(result.shared[start + 1 : end])
    assert len(joint) <= planned
    if all(len(rows) == 1 for rows in units):
        assert len(joint) == planned


def test_short_prefixes_are_not_counted(as_it_is):
    units = unit_prefixes(pack([UnitData([SequenceData([1, 2, 3, 4, *[n] * 300])]) for n in (5, 6)]))
    assert (units.tokens, units.shared) == ([304, 304], [0, 0])


def test_prefixes_are_shared_where_the_images_are_equal(as_it_is):
    red, blue = Image(b"red", 1, 2, [9]), Image(b"blue", 1, 2, [9])
    assert sum(unit_prefixes(pack([make_unit(), make_unit()])).shared) == 5
    assert sum(unit_prefixes(pack([make_unit(red), make_unit(red)])).shared) == 5
    assert sum(unit_prefixes(pack([make_unit(red), make_unit(blue)])).shared) == 0
    assert sum(unit_prefixes(pack([make_unit(red), make_unit()])).shared) == 0
