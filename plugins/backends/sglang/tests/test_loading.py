"""Loads into a model that takes tensors as SGLang's models do, without SGLang."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.weights.bucket import Bucket, buckets
from rlhf.weights.fingerprint import marks
from rlhf_plugin_sglang.loading import ModelLoad, differing
from torch import nn

TENSORS = {
    "q_proj": torch.randn(4, 3),
    "k_proj": torch.randn(2, 3),
    "norm": torch.randn(3),
    "embedding": torch.randn(5, 3),
}


class Model(nn.Module):
    """Two tensors are packed into one parameter, and the embedding is padded. Names that it does not have are
    ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = nn.Parameter(torch.zeros(6, 3))
        self.norm = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.embedding = nn.Parameter(torch.zeros(8, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            match name:
                case "q_proj":
                    self.qk_proj.data[:4].copy_(tensor)
                case "k_proj":
                    self.qk_proj.data[4:].copy_(tensor)
                case "norm":
                    self.norm.data.copy_(tensor)
                case "embedding":
                    self.embedding.data[: len(tensor)].copy_(tensor)
                    self.embedding.data[len(tensor) :].fill_(0)


def bucket(**tensors: torch.Tensor) -> Bucket:
    return Bucket(tuple(tensors.items()), tuple(marks(list(tensors.values()))))


def load_all(model: Model) -> ModelLoad:
    load, fingerprints = ModelLoad(model), {}
    for part in buckets(TENSORS.items(), 40, fingerprints):
        load.take(part)
    assert load.received == fingerprints
    assert load.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    return load


def test_a_complete_load_is_proven_and_read_back():
    model = Model()
    assert load_all(model).end() == []
    assert torch.equal(model.qk_proj, torch.cat([TENSORS["q_proj"], TENSORS["k_proj"]]))
    assert differing(model, bucket(**TENSORS)) == []
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    other = {name: tensor + (name in ("k_proj", "norm")) for name, tensor in TENSORS.items()}
    assert differing(model, bucket(**other)) == ["k_proj", "norm"]
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("name", "parameter"), [("k_proj", "qk_proj"), ("norm", "norm"), ("embedding", "embedding")])
def test_a_tensor_that_does_not_arrive_is_found_although_the_model_had_one(name, parameter):
    model = Model()
    load_all(model)
    load = ModelLoad(model)
    load.take(bucket(**{other: tensor for other, tensor in TENSORS.items() if other != name}))
    assert load.end() == [f"a part of {parameter}"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"nothing": torch.ones(3)}, "Model does not take the tensors nothing. The generator's model is not"),
        ({"k_proj": torch.ones(7, 3)}, "cannot load one of the received tensors k_proj"),
    ],
)
def test_a_tensor_that_the_model_does_not_take_is_refused(tensors, message):
    with pytest.raises(SyncError, match=message):
        ModelLoad(Model()).take(bucket(**tensors))
