"""Fingerprints of different tensors differ, and the fingerprint for devices is the same on every device."""

from __future__ import annotations

import pytest
import torch
from rlhf.weights.bucket import Bucket
from rlhf.weights.fingerprint import WORDS, _sum_of_words, fingerprint, marks


def words(tensor: torch.Tensor) -> str:
    return marks([tensor], WORDS)[0]


@pytest.mark.parametrize("mark", [fingerprint, words])
def test_the_fingerprint_depends_on_values_order_shape_and_dtype(mark):
    x = torch.arange(12.0)
    variants = [x.flip(0), x.view(3, 4), x.double(), x + 1e-6, x.view(torch.int32), torch.zeros(12), torch.zeros(0)]
    assert len({mark(x), *map(mark, variants)}) == 8
    assert mark(x.view(3, 4).t()) == mark(x.view(3, 4).t().contiguous())


def test_the_fingerprint_depends_on_the_order_of_words():
    x = torch.arange(1000, dtype=torch.int64)
    y = x.clone()
    y[3], y[500] = x[500], x[3]
    assert words(x) != words(y)


def test_the_fingerprint_depends_on_every_bit():
    x = torch.randn(33, generator=torch.Generator().manual_seed(0)).bfloat16()  # 66 bytes: a last word of two
    fingerprints = {words(x)}
    for position in range(66):
        for bit in range(8):
            y = x.clone()
            y.view(torch.uint8)[position] ^= 1 << bit
            fingerprints.add(words(y))
    assert len(fingerprints) == 1 + 66 * 8


def test_the_sum_over_words_equals_a_plain_loop():
    x = torch.tensor([5, -7, 2**62], dtype=torch.int64)
    golden, first, second, all_ = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64

    total = 0
    for p, w in enumerate(x.tolist()):
        z = (w % all_) ^ ((p + 1) * golden % all_)
        z = (z ^ (z >> 30)) * first % all_
        z = (z ^ (z >> 27)) * second % all_
        total += z ^ (z >> 31)
    assert int(_sum_of_words(x)) % all_ == total % all_


def test_unaligned_and_large_tensors_have_the_same_fingerprint_as_aligned_ones(monkeypatch):
    x = torch.randn(1001)
    expected = words(x[1:])
    assert expected == words(x[1:].clone())
    monkeypatch.setattr("rlhf.weights.fingerprint._CHUNK", 64)
    assert words(x[1:]) == expected


def test_a_receiver_computes_the_senders_kind_of_fingerprint():
    tensors = (("a", torch.randn(5)), ("b", torch.randn(7)))
    for mark in (words, fingerprint):
        fingerprints = {name: mark(tensor) for name, tensor in tensors}
        assert Bucket(tensors, tuple(fingerprints.values())).received() == fingerprints
        assert Bucket(tensors[1:], tuple(fingerprints.values())).received() == {"b": fingerprints["b"]}, (
            "one that was lost on the way"
        )
    assert Bucket((), ()).received() == {}
    assert Bucket((), (words(tensors[0][1]),)).received() == {}
