"""Snapshots copy a role's weights to another, or mix both by the share that is asked for."""

from dataclasses import dataclass, field

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.types import Snapshot
from rlhf.weights.bucket import Bucket, buckets
from rlhf_runtime.loop.learn import snapshot

made_by = {}


@dataclass
class Weights:
    """A role that is nothing but named tensors, sent in buckets of ``limit`` bytes."""

    tensors: dict
    limit: int = 2**20
    changes: int = 0
    view: str = "live"
    group: "Weights" = field(init=False)

    def __post_init__(self):
        self.group = self
        made_by[id(self)] = self

    def stream(self, method, view):
        """Handles, as of a launcher whose ranks are elsewhere."""
        assert (method, view) == ("buckets", "live")
        self.store = dict(enumerate(buckets(self.tensors.items(), self.limit, {})))
        return iter([(id(self), n) for n in self.store])

    def value(self, item):
        owner, n = item
        assert owner == id(self)
        return self.store[n]

    def every(self, method, sent):
        assert method == "load_buckets"
        for bucket in sent:
            if isinstance(bucket, Bucket):  # mixed: it is already in the precision that is overwritten
                assert all(tensor.dtype == self.tensors[name].dtype for name, tensor in bucket.tensors)
            bucket = bucket if isinstance(bucket, Bucket) else made_by[bucket[0]].value(bucket)
            assert bucket.received() == dict(zip(dict(bucket.tensors), bucket.fingerprints, strict=True))
            for name, tensor in bucket.tensors:
                self.tensors[name].copy_(tensor)


class Base(Weights):
    """A role that is the base of a policy with adapters: the policy's live weights are others."""

    def stream(self, method, view):
        return super().stream(method, "live") if view == "base" else iter([])


def roles(dtype=torch.float32):
    policy = Weights({"b": torch.tensor([5.0]), "a": torch.tensor([[1.0, -2.0], [8.0, 0.5]])}, limit=4)
    old = {"a": torch.tensor([[3.0, 2.0], [-4.0, 0.25]], dtype=dtype), "b": torch.tensor([1.0], dtype=dtype)}
    return {"policy": policy, "reference": Weights(old)}


def test_a_whole_snapshot_is_a_copy():
    models = roles()
    snapshot(models, Snapshot("reference", "policy"))
    assert all(torch.equal(models["reference"].tensors[n], models["policy"].tensors[n]) for n in "ab")


def test_the_base_of_a_policy_with_adapters_is_copied_without_them():
    models = {**roles(), "base": Base(roles()["policy"].tensors, view="base")}
    snapshot(models, Snapshot("reference", "base"))
    assert all(torch.equal(models["reference"].tensors[n], models["base"].tensors[n]) for n in "ab")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_mixes_the_old_weights_with_the_sources(dtype):
    """By hand: 0.75 x source + 0.25 x old, tensor by tensor, however each side's buckets are cut."""
    models = roles(dtype)
    old_weights = {name: tensor.clone() for name, tensor in models["policy"].tensors.items()}
    snapshot(models, Snapshot("reference", "policy", 0.75))
    reference = models["reference"].tensors
    assert reference["a"].tolist() == [[1.5, -1.0], [5.0, 0.4375]]
    assert reference["b"].tolist() == [4.0]
    assert reference["a"].dtype == dtype
    assert all(torch.equal(models["policy"].tensors[n], old_weights[n]) for n in "ab"), "the source stays what it is"
    snapshot(models, Snapshot("reference", "policy", 0.5))
    assert reference["b"].tolist() == [4.5], "0.5 x 5 + 0.5 x 4"


def test_mixed_weights_in_bf16_are_rounded_once():
    source, old = torch.linspace(-2, 3, 500), torch.linspace(1, -4, 500).bfloat16()
    models = {"policy": Weights({"a": source}), "reference": Weights({"a": old.clone()})}
    snapshot(models, Snapshot("reference", "policy", 0.3))
    assert torch.equal(models["reference"].tensors["a"], (source * 0.3 + old.float() * 0.7).bfloat16())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2, 2)}, "'b' of shape \\(1,\\): the role lacks it"),
        ({"b": torch.zeros(3)}, "the shape \\(3,\\)"),
    ],
)
def test_roles_of_two_architectures_are_not_mixed(tensors, message):
    models = {**roles(), "reference": Weights(tensors)}
    with pytest.raises(TrainingError, match=f"role 'reference' cannot be mixed with 'policy'.*{message}"):
        snapshot(models, Snapshot("reference", "policy", 0.5))
