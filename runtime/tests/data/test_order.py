"""The order of rows: seeded, complete, mixed as asked, exact over a restart."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from rlhf.errors import CheckpointError, DataError
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.loading import load_source
from rlhf_runtime.data.row_order import RowOrder, permutation


@pytest.fixture
def make(tmp_path):
    def source(name: str, rows: int, probability: float | None = None, offset: int = 0):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"x": i + offset}) + "\n" for i in range(rows)))
        return load_source(SourceSection(path=str(path), probability=probability))

    return source


def ids(rows):
    return [(r.source, r.index) for r in rows]


def test_each_pass_has_every_row_once_in_another_order(make):
    order = RowOrder([make("a", 7), make("b", 4)], seed=3)
    passes = [ids(order.take(11)) for _ in range(3)]
    assert all(len(set(p)) == 11 for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert (order.rows_per_epoch, order.epoch) == (11, 3.0)


def test_no_tail_is_dropped_and_batch_sizes_do_not_matter(make):
    first, other = (RowOrder([make("a", 7)], seed=0) for _ in range(2))
    assert ids(first.take(20)) == [i for n in (3, 3, 3, 11) for i in ids(other.take(n))]


def test_the_seed_decides_and_shuffle_false_keeps_the_files_order(make):
    first, second, other = (ids(RowOrder([make("a", 50)], seed=s).take(50)) for s in (1, 1, 2))
    assert first == second != other
    assert [i for _, i in ids(RowOrder([make("a", 5)], seed=1, shuffle=False).take(7))] == [0, 1, 2, 3, 4, 0, 1]


def test_draws_follow_the_probabilities_and_use_every_row_of_a_source(make):
    order = RowOrder([make("a", 10, 0.2), make("b", 10, 0.8)], seed=5)
    rows = ids(order.take(2000))
    assert abs(sum(s == "a" for s, _ in rows) - 400) < 60
    for name in ("a", "b"):
        indices = [i for s, i in rows if s == name]
        for start in range(0, len(indices) - 10, 10):
            assert sorted(indices[start : start + 10]) == list(range(10))


@pytest.mark.parametrize("shares", [(None, None), (0.3, 0.7)])
@pytest.mark.parametrize("count", [0, 3, 11, 26])
def test_resume_is_exact(make, shares, count):
    def fresh():
        return RowOrder([make("a", 7, shares[0]), make("b", 4, shares[1])], seed=9)

    straight = fresh()
    straight.take(count)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert ids(resumed.take(30)) == ids(straight.take(30))
    assert resumed.epoch == straight.epoch


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([("a", 8, 0.5), ("b", 7, 0.5)], {}, r"training data 'a' .* changed .*7 rows then, 8 now"),
        ([("a", 7, 0.5, 1), ("b", 7, 0.5)], {}, "changed since the checkpoint"),
        ([("b", 7, 0.5), ("a", 7, 0.5)], {}, "made with the training data a, b, but this run has b, a"),
        ([("a", 7, 0.4), ("b", 7, 0.6)], {}, r"probabilities = \[0\.5, 0\.5\], but this run has \[0\.4, 0\.6\]"),
        ([("a", 7, 0.5), ("b", 7, 0.5)], {"seed": 1}, "seed = 0"),
        ([("a", 7, 0.5), ("b", 7, 0.5)], {"shuffle": False}, "shuffle = True"),
    ],
)
def test_other_data_and_another_order_are_refused(make, sources, options, message):
    state = RowOrder([make("a", 7, 0.5), make("b", 7, 0.5)]).state_dict()
    with pytest.raises(CheckpointError, match=message):
        RowOrder([make(*source) for source in sources], **options).load_state_dict(state)


def test_no_sources_and_wrong_probabilities(make):
    with pytest.raises(DataError, match="no training data is named"):
        RowOrder([])
    with pytest.raises(DataError, match="sum to 1"):
        RowOrder([make("a", 2, 0.5), make("b", 2, 0.4)])


def test_permutations_are_uniform_enough_and_never_change():
    assert sorted(permutation(1000, 1).tolist()) == list(range(1000))
    assert permutation(8, 12345).tolist() == [2, 6, 0, 3, 1, 5, 7, 4]
    first = Counter(int(permutation(4, seed)[0]) for seed in range(4000))
    assert all(abs(n - 1000) < 120 for n in first.values())
