"""The formula of a layer's activations against what autograd keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_cli.plan.model_size import read_size
from rlhf_modeling.activations import Arithmetic, activations, copies, keys_and_values, layer_saved
from rlhf_modeling.adapters import train_adapters_only
from rlhf_modeling.attention import packed
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.fused import LAYERS, restore_layers
from rlhf_modeling.model import load_model
from rlhf_modeling.shared_prefixes import share_prefixes
from rlhf_testing.tiny import tiny_model

from tests.support.saved_tensors import saved_bytes

SMALL = {"hidden": 80, "heads": 5, "kv_heads": 1, "head_dim": 16, "intermediate": 112}
TOLERANCE = 0.1
"""Small tensors (lengths, scales of norms, routing, adapters) are not in the formula."""


def measured_bytes(path: str, lens: list[int], *, fused: bool, bf16: bool, prefix: int = 0, rank: int = 0) -> int:
    """Bytes of all distinct storages that the body keeps for the backward pass, without weights.

    Args:
        prefix: tokens that all sequences have in common, computed once.
        rank: of adapters that are trained; 0: the weights are.
    """
    spec, lora = ModelSpec(RoleSpec("policy", "lm", True), path, dtype="fp32"), LoraOptions(rank=rank) if rank else None
    model = load_model(spec, torch.device("cpu"), lora)
    if rank:
        train_adapters_only(model.module, None)
    if not fused:
        restore_layers([m for m in model.module.modules() if type(m).__name__ in LAYERS and "forward" in vars(m)])
    ids_N = torch.randint(3, 90, (sum(lens),))
    for number, start in enumerate(range(0, len(ids_N) if prefix else 0, lens[0])):
        ids_N[start : start + prefix] = ids_N[:prefix]
        ids_N[start + prefix] = 3 + number  # the answers differ from their first token on
    position_N = torch.cat([torch.arange(n) for n in lens])
    shared = share_prefixes(ids_N, lens) if prefix else None
    if shared is not None:
        ids_N, position_N = shared.ids_M, shared.position_M
        assert len(ids_N) == prefix + sum(lens) - len(lens) * prefix
    model.module.train()
    with packed(lens, shared):
        forward = partial(model.body, input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
        return saved_bytes(model.module, forward, bf16=bf16)


def planned_bytes(path: str, length: int, *, fused: bool, bf16: bool, **options: float) -> float:
    size = read_size(path)
    return layer_saved(size.layers[0], size, Arithmetic(longest=length, fused=fused, bf16=bf16, **options))


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("architecture", "adapters"),
    [
        *((name, 0) for name in ("qwen3", "gemma2", "qwen3_moe")),
        *(pytest.param(name, 0, marks=FULL) for name in ("llama", "mistral", "mixtral")),
        ("qwen3", 2),  # the rank: normed states are not kept
        pytest.param("gemma2", 2, marks=FULL),
    ],
)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_layer_keeps_what_the_formula_states(tmp_path, architecture, adapters, bf16):
    extra = {"moe_intermediate_size": 112} if "moe" in architecture else {}
    paths = [str(tiny_model(tmp_path / f"{n}", architecture=architecture, layers=n, **SMALL, **extra)) for n in (2, 3)]
    for fused in (False, True) if read_size(paths[0]).layer_class in LAYERS else (False,):
        two, three = (measured_bytes(path, [40] * 16, fused=fused, bf16=bf16, rank=adapters) for path in paths)
        measured = (three - two) / (40 * 16)
        expected = planned_bytes(paths[0], 40, fused=fused, bf16=bf16, adapters=adapters)
        assert expected == pytest.approx(measured, rel=TOLERANCE), f"fused={fused}"


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_shared_prefixes_keep_keys_and_values_of_every_sequence(tmp_path, bf16):
    """All other activations are of the computed tokens only."""
    prefix, answer, samples = 96, 32, 8
    paths = [str(tiny_model(tmp_path / f"{n}", layers=n, **SMALL | {"kv_heads": 5})) for n in (2, 3)]
    two, three = (
        measured_bytes(path, [prefix + answer] * samples, fused=True, bf16=bf16, prefix=prefix) for path in paths
    )
    computed = prefix + samples * answer
    measured = (three - two) / computed
    ratio = samples * (prefix + answer) / computed
    single, all_of = (planned_bytes(paths[0], prefix + answer, fused=True, bf16=bf16, repeats=r) for r in (1.0, ratio))
    assert all_of == pytest.approx(measured, rel=0.06)
    assert single < 0.9 * measured


def test_gradient_checkpointing_keeps_the_inputs_of_layers(tmp_path):
    size = read_size(str(tiny_model(tmp_path, layers=3, **SMALL)))
    assert activations(size, Arithmetic(tokens=10, checkpointing=True)) == 10 * (3 + 2) * 80 * 4
    assert activations(size, Arithmetic(tokens=10, checkpointing=True, offloads=True)) == 10 * (2 + 2) * 80 * 4


def test_copies_of_the_logits():
    def of(*outputs, backward=True, device="cpu"):
        return copies(outputs, backward=backward, device=device)

    assert [of("logprobs", backward=b, device=d) for d in ("cuda", "cpu") for b in (False, True)] == [2, 4, 2, 2]
    assert copies(("logprobs", "top1"), backward=True, device="cpu", tempered=False) == 1
    assert [of("logprobs", "entropy", backward=b) for b in (False, True)] == [4, 6]
    assert of("hidden", backward=False) == 0
    assert [of("logprobs", "hidden", "top1", device=d) for d in ("cuda", "cpu")] == [4, 2]
    assert of("logprobs", "of_a_plugin") == 6


def test_in_fp32_on_a_gpu_keys_and_values_are_repeated_for_every_query_head(tmp_path):
    [layer, *_] = read_size(str(tiny_model(tmp_path / "model", **SMALL))).layers
    counts = {
        (device, bf16): keys_and_values(layer, Arithmetic(1, 1, device=device, bf16=bf16))
        for device in ("cpu", "cuda")
        for bf16 in (False, True)
    }
    groups, heads = 2 * 16, 2 * 5 * 16
    assert counts == {("cpu", False): groups, ("cpu", True): groups, ("cuda", False): heads, ("cuda", True): groups}
