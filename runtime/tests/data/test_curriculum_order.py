"""The order that a curriculum decides: which rows it sees, what it may choose, and what a checkpoint holds of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rlhf.errors import CheckpointError, DataError, PluginError
from rlhf.interfaces import Curriculum
from rlhf.types import Group, Row, Trajectory
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.row_order import CurriculumOrder


class Says(Curriculum):
    """Chooses what it is told to."""

    name = "says"

    def setup(self, rows, seed, total_steps):
        self.rows, self.given = rows, (seed, total_steps)
        self.answer = lambda n, step: range(n)

    def choose(self, n, step):
        return self.answer(n, step)


@pytest.fixture
def make(tmp_path, chars):
    def data(curriculum=Says, lengths=((1, 9, 2), (3, 1)), **section):
        sources = []
        for name, prompts in zip("ab", lengths, strict=True):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"prompt": "x" * n, "n": n}) + "\n" for n in prompts))
            sources.append(SourceSection(path=str(path)))
        train_data = TrainData(DataSection(train=tuple(sources), **section), chars, "prompts", 7)
        train_data.choose_by(curriculum(), 5)
        assert isinstance(train_data.curriculum, CurriculumOrder)
        return train_data, train_data.curriculum.plugin

    return data


def ids(rows):
    return [(r.source, r.index) for r in rows]


def test_rows_are_counted_over_the_sources(make):
    data, says = make()
    assert says.given == (7, 5)
    assert [(s.name, s.positions, s.columns) for s in says.rows.sources] == [
        ("a", range(3), ("prompt", "n")),
        ("b", range(3, 5), ("prompt", "n")),
    ]
    assert (len(says.rows), list(says.rows.values("n"))) == (5, [1, 9, 2, 3, 1])
    assert list(says.rows.values("other")) == [None] * 5
    assert says.rows.location(3).endswith("b.jsonl, line 1")
    says.answer = lambda n, step: [4, 0, 4]
    rows = data.take(3, 0)
    assert ids(rows) == [("b", 1), ("a", 0), ("b", 1)]
    assert [data.curriculum.rows.position(row) for row in rows] == [4, 0, 4]
    assert data.epoch == 3 / 5


def test_rows_that_are_left_out_have_no_position(make):
    data, says = make(max_prompt_tokens=2, too_long="drop")
    assert data.dropped == 2
    assert [(s.name, s.positions) for s in says.rows.sources] == [("a", range(2)), ("b", range(2, 3))]
    assert list(says.rows.values("n")) == [1, 2, 1]
    assert says.rows.location(1).endswith("a.jsonl, line 3")
    assert ids(data.take(3)) == [("a", 0), ("a", 2), ("b", 1)]
    assert [data.curriculum.rows.position(Row({}, *key)) for key in (("a", 2), ("b", 1))] == [1, 2]


def test_a_source_without_usable_rows_is_none(make):
    _, says = make(lengths=((9, 9), (1,)), max_prompt_tokens=2, too_long="drop")
    assert [(s.name, s.first, s.rows) for s in says.rows.sources] == [("b", 0, 1)]
    with pytest.raises(DataError, match=r"no row of data\.train is left to train on\. The last one: the prompt has 8"):
        make(lengths=((9, 9), (8,)), max_prompt_tokens=2, too_long="drop")


def test_a_row_that_does_not_fit_is_refused_when_it_comes(make):
    data, _ = make(max_prompt_tokens=2)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the prompt has 9 tokens, over"):
        data.take(3)


def test_shuffles_depend_on_the_seed_and_the_counters_alone(make):
    rows = make()[1].rows
    assert sorted(rows.shuffled(50, 1)) == list(range(50))
    assert rows.shuffled(50, 1) == make()[1].rows.shuffled(50, 1) != rows.shuffled(50, 2)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ([0], r"choose\(2, 4\) of curriculum 'says' chose 1 rows instead of exactly 2"),
        ([0, 1, 2], "chose 3 rows instead of exactly 2"),
        ([0, 5], "chose row int 5; the data has the positions 0 to 4"),
        ([0, -1], "chose row int -1; the data has the positions 0 to 4"),
        ([0, True], "chose row bool True; the data has"),
        ([0, 1.0], r"chose float 1\.0, which is not a position"),
        (None, "returned NoneType None instead of a sequence of positions"),
    ],
)
def test_what_a_curriculum_may_not_choose(make, chosen, says):
    data, curriculum = make()
    curriculum.answer = lambda n, step: chosen
    with pytest.raises(PluginError, match=f"{says}.* This is a bug in the plugin: `rlhf plugins check says`"):
        data.take(2, 4)


def test_positions_may_be_an_array(make):
    data, curriculum = make()
    curriculum.answer = lambda n, step: np.array([2, 3])
    assert ids(data.take(2)) == [("a", 2), ("b", 0)]


@pytest.mark.parametrize("method", ["choose", "finished", "metrics"])
def test_what_a_curriculum_raises_is_attributed_to_it(make, method):
    data, curriculum = make()

    def broken(*arguments):
        raise ZeroDivisionError("no")

    setattr(curriculum, method, broken)
    order = data.curriculum
    calls = {"choose": lambda: data.take(1), "finished": lambda: order.tell([]), "metrics": order.metrics}
    with pytest.raises(PluginError, match=rf"{method}\(\) of curriculum 'says' raised ZeroDivisionError: no"):
        calls[method]()


def test_what_it_is_told_of_a_group(make):
    data, _ = make()
    row = data.row("b", 0)
    samples = [Trajectory(row, [], (4, s)) for s in range(4)]
    for sample, score in zip(samples, (1.0, 0.5, None, 0.0), strict=True):
        sample.score = score
    samples[3].status = "failed"
    result = data.curriculum.finished_group(Group(row, 4, samples), 2, "filtered")
    assert (result.row, result.number, result.step, result.scores, result.outcome) == (3, 4, 2, (1.0, 0.5), "filtered")


def test_the_count_of_rows_is_resumed_and_other_data_refused(make):
    data, _ = make()
    data.take(3)
    state = json.loads(json.dumps(data.state_dict()))
    resumed, _ = make()
    resumed.load_state_dict(state)
    assert resumed.epoch == data.epoch
    other, _ = make(lengths=((1, 9, 2, 1), (3, 1)))
    with pytest.raises(CheckpointError, match=r"training data 'a' .* changed since the checkpoint was made"):
        other.load_state_dict(state)


def test_damaged_results_of_a_checkpoint_are_refused(make):
    order = make()[0].curriculum
    saved = {"row": 4, "number": 0, "step": 0, "scores": [1.0], "outcome": "kept"}
    assert order.restored([saved])[0].scores == (1.0,)
    with pytest.raises(CheckpointError, match="names row 5; the data has the positions 0 to 4"):
        order.restored([{**saved, "row": 5}])
    with pytest.raises(CheckpointError, match="lacks the results of the rows of a batch"):
        order.restored(None)
