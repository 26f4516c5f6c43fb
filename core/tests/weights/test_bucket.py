"""Unusual tensors arrive unchanged in a bucket: empty tensors, scalars, tensors larger than the limit, views of other
tensors, and every width of dtype, for both ways between processes."""

import pickle

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.weights.bucket import Bucket, buckets
from rlhf.weights.fingerprint import WORDS, marks
from rlhf_workers.links.link import BucketLayout

BASE = torch.arange(48, dtype=torch.float32).reshape(6, 8)
TENSORS = [
    ("empty", torch.empty(0, 4)),
    ("scalar", torch.tensor(3.0)),
    ("bf16", torch.tensor([[1.5, float("nan"), -0.0]], dtype=torch.bfloat16)),
    ("transposed", BASE.t()),
    ("slice", BASE[1:3, 2:5]),
    ("bool", torch.tensor([True, False, True])),
    ("buffer", torch.arange(7)),
    ("large", torch.randn(1000, generator=torch.Generator().manual_seed(0))),
    ("fp8", torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)),
    ("expanded", torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3)),
    ("bytes", torch.arange(3, dtype=torch.uint8)),
]


def over_the_store(bucket):
    return pickle.loads(pickle.dumps(bucket, protocol=5))


def over_a_link(bucket):
    layout = BucketLayout.of(bucket)
    flat = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write(bucket, flat)
    return layout.read(flat)


@pytest.mark.parametrize("way", [over_the_store, over_a_link])
def test_every_kind_of_tensor_arrives(way):
    fingerprints = {}
    parts = list(buckets(TENSORS, 100, fingerprints))
    assert [[name for name, _ in b.tensors] for b in parts] == [
        ["empty", "scalar", "bf16"], ["transposed"], ["slice", "bool", "buffer"], ["large"],
        ["fp8", "expanded", "bytes"],
    ]  # fmt: skip
    arrived = [way(bucket) for bucket in parts]
    assert {name: mark for b in arrived for name, mark in b.received().items()} == fingerprints
    assert list(fingerprints) == [name for name, _ in TENSORS]
    tensors = [tensor for b in arrived for _, tensor in b.tensors]
    for (name, want), tensor in zip(TENSORS, tensors, strict=True):
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), name
    assert marks(tensors, WORDS) == marks([tensor for _, tensor in TENSORS], WORDS)


def test_a_bucket_holds_at_most_the_limit_or_one_tensor():
    assert list(buckets([], 10, {})) == []
    pair = [("a", torch.zeros(6)), ("b", torch.zeros(2))]
    assert [[len(b.tensors) for b in buckets(pair, limit, {})] for limit in (32, 31)] == [[2], [1, 1]]
    with pytest.raises(TrainingError, match="a bucket of 0 bytes holds nothing"):
        list(buckets(TENSORS, 0, {}))


def test_a_bucket_pickles_without_a_copy_of_its_bytes():
    out_of_band = []
    bucket = Bucket((("a", torch.zeros(1000)),), ("",))
    stream = pickle.dumps(bucket, protocol=5, buffer_callback=out_of_band.append)
    assert len(stream) < 500
    assert sum(b.raw().nbytes for b in out_of_band) == 4000
