"""What is laid out with whole arrays equals what plain loops over tokens give."""

from __future__ import annotations

import math
import random

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weights
from rlhf.ops.trajectories import assemble
from rlhf.types import Group, Reduce, RewardResult, Row, Trajectory, Turn

ROW = Row({}, "data", 0)


def random_groups(seed: int, with_logprobs: bool) -> list[Group]:
    """Samples of up to 6 turns, some without tokens, some on a rewritten context, some failed or without a reward."""
    rng, groups = random.Random(seed), []
    for number in range(3):
        samples = []
        for sample in range(4):
            turns = [Turn(ids(rng, 1), False, fresh=rng.random() < 0.5)]
            for _ in range(rng.randint(0, 5)):
                tokens, sampled = ids(rng), rng.random() < 0.5
                logprobs = [-rng.random() for _ in tokens] if sampled and with_logprobs else None
                temperature = rng.choice((0.5, 0.7, 1.0))
                fresh = not sampled and rng.random() < 0.3
                turns.append(Turn(tokens, sampled, logprobs, (), "stop", temperature, fresh=fresh))
            places = [(n, i) for n, turn in enumerate(turns) if turn.sampled for i in range(len(turn.ids))]
            steps = tuple((*place, rng.random()) for place in rng.choices(places, k=3)) if places else ()
            rewards = {"steps": RewardResult(None, steps=steps)} if rng.random() < 0.7 else {}
            reward = rng.choice((None, rng.random(), rng.random()))
            status = rng.choice(("ok", "ok", "truncated", "failed"))
            score = rng.choice((None, 0.25))
            samples.append(Trajectory(ROW, turns, (number, sample), status, rewards, reward, score))
        groups.append(Group(ROW, number, samples))
    return groups


def ids(rng: random.Random, low: int = 0) -> list[int]:
    return [rng.randrange(2**31) for _ in range(rng.randint(low, 4))]


def plain(groups: list[Group], weight: float, scored: bool) -> list[dict[str, list]] | None:
    """Each sequence of the batch by loops: its unit, its columns, and whether tokens are the last action of a unit."""
    trajectories = [
        t for g in groups for t in g.trajectories if t.status != "failed" and (t.reward is not None or not scored)
    ]
    if not any(turn.sampled and turn.ids for t in trajectories for turn in t.turns):
        return None
    has_logprobs = all(turn.logprobs is not None for t in trajectories for turn in t.turns if turn.sampled)
    result = []
    for unit, t in enumerate(trajectories):
        steps: dict[tuple[int, int], float] = {}
        for n, i, value in t.rewards["steps"].steps if "steps" in t.rewards else ():
            steps[n, i] = steps.get((n, i), 0.0) + weight * value
        sequences: list[list[tuple]] = []
        for n, turn in enumerate(t.turns):
            if turn.fresh or not sequences:
                sequences.append([])
            for i, token in enumerate(turn.ids):
                logprob = turn.logprobs[i] if has_logprobs and turn.sampled else 0.0
                temperature = turn.temperature if turn.sampled else 1.0
                sequences[-1].append((n, token, turn.sampled, logprob, temperature, steps.get((n, i), 0.0)))
        trimmed = []
        for sequence in sequences:
            while sequence and not sequence[-1][2]:
                sequence.pop()
            if sequence:
                trimmed.append(sequence)
        if not trimmed:
            first = t.turns[0]
            trimmed = [[(0, token, False, 0.0, 1.0, 0.0) for token in first.ids]]
        actions = [(b, i) for b, s in enumerate(trimmed) for i, token in enumerate(s) if token[2] and i > 0]
        for b, sequence in enumerate(trimmed):
            columns = {
                "unit": [unit] * len(sequence),
                "ids": [token for _, token, *_ in sequence],
                "loss_mask": [token[2] and i > 0 for i, token in enumerate(sequence)],
                "temperature": [token[4] for token in sequence],
                "step_reward": [token[5] for token in sequence],
                "last_action": [bool(actions) and actions[-1] == (b, i) for i in range(len(sequence))],
            }
            result.append(columns | ({"gen_logprobs": [token[3] for token in sequence]} if has_logprobs else {}))
    return result


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_assemble_equals_plain_loops(with_logprobs, scored):
    count = 0
    for seed in range(100):
        groups = random_groups(seed, with_logprobs)
        batch, expected = assemble(groups, {"steps": 0.3}, scored), plain(groups, 0.3, scored)
        if expected is None:
            assert batch is None
            continue
        count += 1
        assert batch.lens_B.tolist() == [len(sequence["ids"]) for sequence in expected]
        assert batch.unit_B.tolist() == [sequence["unit"][0] for sequence in expected]
        flat = {name: [v for sequence in expected for v in sequence[name]] for name in expected[0]}
        assert batch.ids_N.tolist() == flat.pop("ids")
        assert batch.unit_N.tolist() == flat.pop("unit")
        assert set(batch.tok) == set(flat)
        for name, values in flat.items():
            column = batch.tok[name]
            kind = torch.bool if isinstance(values[0], bool) else torch.float32
            assert (column.dtype, torch.equal(column, torch.tensor(values, dtype=kind))) == (kind, True), name
    assert count > 75


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_found(wrong):
    groups = random_groups(1, True)
    trajectory = groups[1].trajectories[0]
    trajectory.turns = [Turn([1], False), Turn([2, 3], True, [-0.5, -0.5]), Turn([4, 5], True, [-0.5, wrong])]
    trajectory.rewards, trajectory.reward, trajectory.status = {}, 1.0, "ok"
    message = (
        r"^sample 0 of group 1 \(row 0 of 'data'\): turn 2 needs 2 finite log-probs from the generator, got 2, of "
    )
    with pytest.raises(TrainingError, match=message + "which 1 finite$"):
        assemble(groups)


def test_a_log_prob_too_few_is_found():
    turns = [Turn([1], False), Turn([2, 3], True, [-0.5])]
    with pytest.raises(TrainingError, match=r"turn 1 needs 2 finite log-probs .* got 1, of which 1 finite"):
        assemble([Group(ROW, 0, [Trajectory(ROW, turns, (0, 0), reward=1.0)])])


def test_select_takes_whole_units_in_any_order():
    for seed in range(50):
        batch = assemble(random_groups(seed, True), scored=False)
        if batch is None:
            continue
        batch = batch.with_column("tok", "vector", torch.rand(batch.tokens, 3), over=None)
        order = random.Random(seed).choices(range(batch.units), k=5)
        part = batch.select(order)
        rows = [b for unit in order for b, owner in enumerate(batch.unit_B.tolist()) if owner == unit]
        places = [i for b in rows for i, owner in enumerate(batch.seq_N.tolist()) if owner == b]
        assert torch.equal(part.ids_N, batch.ids_N[places])
        assert part.lens_B.tolist() == [batch.lens_B[b] for b in rows]
        assert all(torch.equal(part.tok[name], values[places]) for name, values in batch.tok.items())
        assert all(torch.equal(part.unit[name], values[order]) for name, values in batch.unit.items())
        assert part.units == len(order)


def test_pack_takes_arrays_and_lists_alike():
    rng = random.Random(0)
    lists, arrays = [], []
    for _ in range(20):
        n = rng.randint(1, 5)
        turn = Turn([rng.randrange(2**31) for _ in range(n)], True, [-rng.random() for _ in range(n)])
        mask = [rng.random() < 0.5 for _ in range(n)]
        arrays.append(UnitData([SequenceData(turn.ids, {"loss_mask": mask, "x": turn.logprobs, "n": turn.ids})]))
        columns = {"loss_mask": mask, "x": turn.logprobs.tolist(), "n": turn.ids.tolist()}
        lists.append(UnitData([SequenceData(turn.ids.tolist(), columns)]))
    from_lists, from_arrays = pack(lists), pack(arrays)
    assert torch.equal(from_lists.ids_N, from_arrays.ids_N)
    for name, values in from_lists.tok.items():
        assert values.dtype == from_arrays.tok[name].dtype
        assert torch.equal(values, from_arrays.tok[name])
    assert {name: values.dtype for name, values in from_lists.tok.items()} == {
        "loss_mask": torch.bool, "n": torch.int64, "x": torch.float32,
    }  # fmt: skip


def test_weights_equal_plain_loops():
    """Bit for bit: each token's weight is computed in float64 and rounded once."""
    for seed in range(50):
        batch = assemble(random_groups(seed, True), scored=False)
        if batch is None or not bool(batch.tok["loss_mask"].any()):
            continue
        answer_N = batch.answer_B[batch.seq_N].tolist()
        mask = batch.tok["loss_mask"].tolist()
        counts = {a: sum(m for m, b in zip(mask, answer_N, strict=True) if b == a) for a in set(answer_N)}
        live = sum(n > 0 for n in counts.values())
        divisors = {
            "token_mean": [sum(mask) for _ in answer_N],
            "seq_mean_token_mean": [max(counts[a], 1) * live for a in answer_N],
            "seq_mean_token_sum": [live for _ in answer_N],
            "seq_sum_constant": [live * 7.0 for _ in answer_N],
        }
        for reduction, divisor_N in divisors.items():
            expected = [float(m) / divisor * -0.3 for m, divisor in zip(mask, divisor_N, strict=True)]
            result = weights(batch, Reduce(reduction, coef=-0.3, constant=7.0))
            assert torch.equal(result, torch.tensor(expected, dtype=torch.float64).float())
