"""Arguments and results of calls: their sizes, sharing, and new memory."""

from __future__ import annotations

import pickle

import pytest
import torch
from rlhf.ops.packing import SequenceData, UnitData
from rlhf.ops.packing import pack as pack_units
from rlhf_workers.process.payload import Payload, pack, unpack


def through(payload: Payload | None) -> Payload | None:
    """The payload as the store returns it: with read-only buffers outside of the pickle stream."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(b.raw()) for b in buffers])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.rand(3, 4, dtype=torch.float64),
        torch.rand(7).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.rand(4, 6)[:, ::2],
        torch.rand(4, 6).T,
    ],
    ids=["int64", "float64", "bfloat16", "bool", "empty", "scalar", "strided", "transposed"],
)
def test_tensors_arrive_unchanged(tensor):
    payload = through(pack([(tensor,)]))
    [result] = unpack(payload)
    assert result.dtype == tensor.dtype
    assert torch.equal(result, tensor)
    result.fill_(1)  # writes to its own memory, not to the store's
    assert torch.equal(unpack(payload)[0], tensor)


def test_a_view_is_sent_without_the_rest_of_its_storage():
    big = torch.zeros(100_000)
    assert pack([(big[10:20],)]).nbytes < 1000


def test_shared_arguments_are_stored_once():
    shared, parts = torch.rand(1000), [torch.full((10,), float(n)) for n in range(3)]
    payload = pack([(parts[n], shared, {"rank": n}) for n in range(3)])
    assert payload.nbytes < 4000 + 3 * 1000
    for n in range(3):
        a, b, c = unpack(through(payload), n)
        assert torch.equal(a, parts[n])
        assert torch.equal(b, shared)
        assert c == {"rank": n}


def test_a_call_of_one_rank_and_a_call_without_arguments():
    assert pack([(), ()]) is None
    assert unpack(None, 1) == ()
    assert unpack(through(pack([(1, "two", None)]))) == (1, "two", None)


def test_functions_can_be_sent():
    offset = 3
    [f] = unpack(through(pack([(lambda x: x + offset,)])))
    assert f(1) == 4


def test_a_batch_takes_at_most_twice_its_columns():
    """The columns of a policy-gradient step over 16 x 8 samples of 70 tokens, in micro-batches for two ranks."""
    units = [
        UnitData([SequenceData([1] * 70, {"loss_mask": [True] * 70, "old": [0.5] * 70, "advantage": [0.1] * 70})])
        for _ in range(128)
    ]
    batch = pack_units(units)
    micros = [[batch.select(range(s, s + 16)) for s in range(r, 128, 32)] for r in (0, 16)]
    columns = sum(
        t.nbytes
        for rank in micros
        for m in rank
        for t in (m.ids_N, m.lens_B, m.unit_B, m.role_B, *m.tok.values(), *m.seq.values(), *m.unit.values())
    )
    payload = pack([(rank, "loss", {"coef": 1.0}) for rank in micros])
    assert columns > 100_000
    assert payload.nbytes < 1.2 * columns
