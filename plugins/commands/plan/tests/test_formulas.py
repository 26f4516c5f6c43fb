"""Each formula against what torch keeps, or against the number on paper."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import Footprint, Sharding
from rlhf.ops.prefixes import share_prefixes
from rlhf.types import RoleSpec
from rlhf_modeling.adapters import LoraOptions, train_adapters_only
from rlhf_modeling.attention import packed
from rlhf_modeling.fused import LAYERS, restore_layers
from rlhf_modeling.model import load_model
from rlhf_plugin_plan import engines, formulas, logits_peak, read_shape
from rlhf_plugin_plan.adapters import adapter_holes
from rlhf_testing.tiny import tiny_model
from torch.autograd.graph import saved_tensors_hooks

ARCHITECTURES = ("qwen3", "llama", "mistral", "gemma2", "mixtral", "qwen3_moe")
SMALL = {"hidden": 80, "heads": 5, "kv_heads": 1, "head_dim": 16, "intermediate": 112}
TOLERANCE = 0.1
"""Small tensors (lengths, norms' scales, routing) are not in the formulas."""


def kept(path: str, lens: list[int], *, fused: bool, bf16: bool, prefix: int = 0, rank: int = 0) -> int:
    """Bytes of all distinct storages that the body keeps for the backward pass, weights left out.

    Args:
        prefix: tokens that all sequences have in common, computed once.
        rank: of adapters that are trained; 0: the weights are.
    """
    spec, lora = ModelSpec(RoleSpec("policy", "lm", True), path, dtype="fp32"), LoraOptions(rank=rank) if rank else None
    loaded = load_model(spec, torch.device("cpu"), lora)
    if rank:
        train_adapters_only(loaded.module, None)
    if not fused:
        layers = [m for m in loaded.module.modules() if type(m).__name__ in LAYERS and "forward" in vars(m)]
        restore_layers(layers)
    weights = {p.untyped_storage().data_ptr() for p in loaded.module.parameters()}
    shapes = {tuple(p.shape) for p in loaded.module.parameters()} | {
        tuple(reversed(p.shape)) for p in loaded.module.parameters()
    }
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        copied = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes  # a cast of a weight
        if storage.data_ptr() not in weights and not copied:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids_N = torch.randint(3, 90, (sum(lens),))
    for number, start in enumerate(range(0, len(ids_N) if prefix else 0, lens[0])):
        ids_N[start : start + prefix] = ids_N[:prefix]
        ids_N[start + prefix] = 3 + number  # no two go on alike
    position_N = torch.cat([torch.arange(n) for n in lens])
    shared = share_prefixes(ids_N, lens) if prefix else None
    if shared is not None:
        ids_N, position_N = shared.ids_M, shared.position_M
        assert len(ids_N) == prefix + sum(lens) - len(lens) * prefix
    loaded.module.train()
    with (
        saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        packed(lens, shared),
    ):
        loaded.body(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
    return sum(found.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lens", [[40] * 16, [600] * 2], ids=["short", "long"])
def test_a_layer_keeps_what_is_said(tmp_path, architecture, bf16, lens):
    extra = {"moe_intermediate_size": 112} if "moe" in architecture else {}
    paths = [str(tiny_model(tmp_path / f"{n}", architecture=architecture, layers=n, **SMALL, **extra)) for n in (2, 3)]
    shape = read_shape(paths[0])
    for fused in (False, True) if shape.fusable else (False,):
        two, three = (kept(path, lens, fused=fused, bf16=bf16) for path in paths)
        how = {"bf16": bf16, "fused": fused, "device": "cpu", "softcap": shape.softcap}
        said = sum(size for size, _ in formulas.layer_saved(shape.layers[0], shape.hidden, lens[0], **how))
        measured = (three - two) / sum(lens)
        assert said == pytest.approx(measured, rel=TOLERANCE), f"fused={fused}: {measured:.0f} bytes a token"


@pytest.mark.parametrize(
    ("architecture", "bf16", "lens"),
    [
        ("qwen3", False, [40] * 16),
        ("qwen3", True, [40] * 16),
        ("qwen3", True, [600] * 2),
        ("gemma2", False, [40] * 16),
        ("gemma2", True, [40] * 16),
    ],
)
def test_a_layer_with_adapters_keeps_their_inner_outputs_and_no_normed_states(tmp_path, architecture, bf16, lens):
    """Beside the same layer whose weights are trained."""
    paths = [str(tiny_model(tmp_path / f"{n}", architecture=architecture, layers=n, **SMALL)) for n in (2, 3)]
    shape = read_shape(paths[0])
    for fused in (False, True) if shape.fusable else (False,):
        said, measured = [], []
        for rank in (0, 12):
            two, three = (kept(path, lens, fused=fused, bf16=bf16, rank=rank) for path in paths)
            measured.append((three - two) / sum(lens))
            how = {"bf16": bf16, "fused": fused, "device": "cpu", "softcap": shape.softcap}
            ranks = formulas.adapters_of(shape, Sharding(adapter_rank=rank))
            saved = formulas.layer_saved(shape.layers[0], shape.hidden, lens[0], **how, adapters=ranks)
            said.append(sum(size for size, _ in saved))
        assert said[1] - said[0] == pytest.approx(measured[1] - measured[0], abs=0.02 * said[0]), f"fused={fused}"
        assert said[1] == pytest.approx(measured[1], rel=TOLERANCE)


def test_adapters_of_a_layer_are_those_of_its_targets(tmp_path):
    shape = read_shape(str(tiny_model(tmp_path, layers=3, **SMALL)))
    assert formulas.adapters_of(shape, Sharding()) == ()
    assert formulas.adapters_of(shape, Sharding(adapter_rank=4)) == (4,) * 7
    some = Sharding(adapter_rank=4, adapter_targets=("q_proj", "down_proj"))
    assert formulas.adapters_of(shape, some) == (4, 4)
    few, all_of = (
        formulas.layer_kept(shape, shape.layers[0], 100, 40, replace(some, fused=True, adapter_targets=t), "cpu", 1.0)
        for t in (("q_proj", "down_proj"), None)
    )
    assert all_of.all - few.all == 100 * 5 * 4 * 4, "five adapters, rank 4, fp32"


def test_adapters_of_layers_that_are_not_fused_leave_holes_in_a_cpus_heap(tmp_path):
    """As much as its linear layers' outputs: 80 and twice 16 for queries, keys and values, 80, twice 112 and 80."""
    shape = read_shape(str(tiny_model(tmp_path, layers=3, **SMALL)))
    plain, fused = (Sharding(adapter_rank=4, fused=f) for f in (False, True))
    outputs = 80 + 2 * 16 + 80 + 2 * 112 + 80
    assert adapter_holes(shape, 100, plain, 4) == 100 * 4 * outputs
    assert adapter_holes(shape, 100, plain, 2) == 100 * 2 * outputs
    assert adapter_holes(shape, 100, replace(plain, adapter_targets=("o_proj",)), 4) == 100 * 4 * 80
    many = 2**23 // 112
    assert adapter_holes(shape, many + 1, plain, 4) == (many + 1) * 4 * (outputs - 2 * 112), "32 MiB each"

    def kept(sharding: Sharding, device: str) -> int:
        return formulas.layer_kept(shape, shape.layers[0], 100, 40, sharding, device, 1.0).all

    without = replace(plain, adapter_rank=0)
    assert kept(plain, "cuda") < kept(without, "cuda"), "no normed states, and no holes"
    assert kept(plain, "cpu") - kept(fused, "cpu") > 100 * 4 * outputs


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("prefix", "answer", "samples"),
    [(96, 32, 8), (520, 80, 6), (150, 450, 3)],
    ids=["short", "long", "queries of the front computed along"],
)
def test_shared_prefixes_keep_keys_and_values_of_every_sequence(tmp_path, bf16, prefix, answer, samples):
    """Everything else is of the computed tokens."""
    paths = [str(tiny_model(tmp_path / f"{n}", layers=n, **SMALL | {"kv_heads": 5})) for n in (2, 3)]
    shape, length = read_shape(paths[0]), prefix + answer
    two, three = (kept(path, [length] * samples, fused=True, bf16=bf16, prefix=prefix) for path in paths)
    computed = prefix + samples * answer
    how = {"bf16": bf16, "fused": True, "device": "cpu"}
    ratio = samples * length / computed
    once, said = (
        sum(size for size, _ in formulas.layer_saved(shape.layers[0], shape.hidden, length, **how, repeats=r))
        for r in (1.0, ratio)
    )
    measured = (three - two) / computed
    assert said == pytest.approx(measured, rel=0.06), f"{measured:.0f} bytes a computed token"
    assert once < 0.9 * measured


def test_state_is_divided_as_each_zero_stage_does():
    count = 8_000
    assert formulas.weights(count, Sharding()) == 32_000
    assert formulas.gradients(count, Sharding()) == 32_000
    assert formulas.optimizer(count, Sharding()) == 64_000
    one = Sharding(optimizer_ranks=4)
    two = replace(one, gradient_ranks=4)
    three = replace(two, weight_ranks=4)
    state = [
        [f(count, s) for f in (formulas.weights, formulas.gradients, formulas.optimizer)] for s in (one, two, three)
    ]
    assert state == [[32_000, 32_000, 16_000], [32_000, 8_000, 16_000], [8_000, 8_000, 16_000]]
    mixed = replace(three, weight_bytes=2.0, gradient_bytes=2.0, master_bytes=4.0, average_bytes=4.0)
    assert [f(count, mixed) for f in (formulas.weights, formulas.gradients, formulas.optimizer)] == [
        4_000,
        4_000,
        32_000,
    ]


def test_an_optimizer_of_matrices_has_a_state_of_its_own_for_them():
    """8000 parameters, 6000 of them in matrices: 4 bytes of momentum for those, 8 for the others."""
    muon = Sharding(matrix_bytes=4.0)
    assert formulas.optimizer(8_000, muon, 6_000) == 6_000 * 4 + 2_000 * 8
    assert formulas.optimizer(8_000, replace(muon, optimizer_ranks=4), 6_000) == (6_000 * 4 + 2_000 * 8) // 4
    more = replace(muon, master_bytes=4.0, average_bytes=4.0)
    assert formulas.optimizer(8_000, more, 6_000) == 6_000 * 12 + 2_000 * 16
    assert formulas.optimizer(8_000, Sharding(), 6_000) == 64_000, "AdamW's is the same for all"


def test_a_step_of_matrices_has_all_updates_and_whole_ones(tmp_path):
    """A layer's are 80 x 80 twice, 16 x 80 twice and 112 x 80 three times; norms and embedding are none."""
    shape = read_shape(str(tiny_model(tmp_path, layers=3, **SMALL)))
    assert (shape.matrices, shape.matrix) == (3 * 80 * (2 * 80 + 2 * 16 + 3 * 112), 112 * 80)
    muon = Sharding(optimizer_ranks=2, matrix_bytes=4.0, step_bytes=4.0, step_matrices=5)
    assert formulas.step(shape, muon, shape.matrices).all == shape.matrices * 4 // 2 + 5 * 4 * 112 * 80
    assert formulas.step(shape, Sharding(), shape.matrices).all == 0


def test_stacked_experts_are_no_matrices_one_tensor_and_not_in_the_file(tmp_path):
    """4 experts of 48: 2 x 48 x 80 and 48 x 80 each, stacked. The router's 4 x 80 is a matrix."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "layers": 3}
    path = tiny_model(tmp_path / "experts", architecture="mixtral", **SMALL | sizes | {"intermediate": 48})
    shape, dense = read_shape(str(path)), read_shape(str(tiny_model(tmp_path / "dense", **SMALL)))
    stacks = 4 * 3 * 48 * 80
    assert shape.merged == 3 * stacks
    assert shape.matrices == 3 * 80 * (2 * 80 + 2 * 16 + 4)
    assert [layer.largest for layer in shape.layers] == [4 * 2 * 48 * 80] * 3
    assert (dense.merged, dense.layers[0].largest) == (0, 112 * 80)
    assert formulas.file_kept(shape, Sharding(keeps_file=True)) == 4 * 3 * stacks
    assert formulas.file_kept(shape, Sharding()) == formulas.file_kept(dense, Sharding(keeps_file=True)) == 0


def test_of_a_checkpoint_in_bf16_nothing_of_the_file_stays(tmp_path):
    path = tiny_model(tmp_path, architecture="mixtral", **SMALL)
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "float32"
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert read_shape(str(path)).merged == 0


def test_an_embedding_that_is_not_the_head_is_not_read_with_the_file(tmp_path):
    tied, own = (str(tiny_model(tmp_path / f"{t}", **SMALL, tied=t)) for t in (True, False))
    size = read_shape(own).embedding
    unread = [read_shape(tied), read_shape(tied, "scalar"), read_shape(own), read_shape(own, "scalar")]
    assert [shape.unread for shape in unread] == [0, size, size, size]
    assert formulas.file_unread(unread[1], Sharding(keeps_file=True)) == 4 * size
    assert formulas.file_unread(unread[1], Sharding()) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: what is mapped is read from /proc")
def test_the_file_of_stacked_experts_stays_resident(tmp_path):
    """What :func:`formulas.file_kept` counts: weights that are views of it keep all of it mapped, stacks are copies."""
    path = tiny_model(tmp_path, architecture="mixtral", **SMALL)
    loaded = load_model(ModelSpec(RoleSpec("policy", "lm", True), str(path), dtype="fp32"), torch.device("cpu"))
    [line] = [
        x for x in Path("/proc/self/maps").read_text().splitlines() if x.endswith(str(path / "model.safetensors"))
    ]
    start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
    inside = {name for name, p in loaded.module.named_parameters() if start <= p.data_ptr() < end}
    copied = {name for name, _ in loaded.module.named_parameters()} - inside
    assert copied == {name for name, _ in loaded.module.named_parameters() if "experts" in name}


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_a_micro_batchs_gradient_of_the_largest_tensor_is_made_whole(tmp_path, architecture):
    """Also of all experts, though no token goes to most of them."""
    path = str(tiny_model(tmp_path, architecture=architecture, **SMALL))
    loaded = load_model(ModelSpec(RoleSpec("policy", "lm", True), path, dtype="fp32"), torch.device("cpu"))
    found: list[int] = []
    for p in loaded.body.layers.parameters():
        p.register_hook(lambda gradient: found.append(gradient.untyped_storage().nbytes()))
    with packed([2]):
        out = loaded.body(input_ids=torch.tensor([[4, 5]]), position_ids=torch.arange(2)[None], use_cache=False)
    out.last_hidden_state.sum().backward()
    shape = read_shape(path)
    assert max(found) == formulas.weight_gradient(shape, Sharding()).all == 4 * shape.layers[0].largest
    assert formulas.weight_gradient(shape, Sharding(adapter_rank=4)).all == 0


def test_ranks_that_divide_layers_hold_a_part_of_each(published):
    """8B: embedding and head of 128256 x 4096 are whole; 32 heads, 8 of them for keys and values, of 128."""
    whole = read_shape(published("8B"))
    assert whole.part(1) is whole
    part, layer = whole.part(4), whole.part(4).layers[0]
    outside = 2 * 128256 * 4096
    assert part.parameters == pytest.approx(outside + (whole.parameters - outside) / 4, rel=1e-4)
    assert (layer.heads, layer.query, layer.key, layer.value, layer.ffn) == (8, 1024, 256, 256, 14336 // 4)
    assert (part.read, part.hidden, part.embedding, part.head) == (whole.parameters, 4096, whole.embedding, whole.head)
    kept = [formulas.activations(s, 1024, 512, Sharding(), "cpu", checkpointing=False).all for s in (whole, part)]
    stays = 1024 * 4 * 4096 * (32 * 6 + 2)  # of each layer two norms in and out and two inputs, and the last norm's
    assert kept[1] - stays == pytest.approx((kept[0] - stays) / 4, rel=1e-3)


def test_a_divided_model_gathers_its_largest_part_and_what_it_keeps(published):
    shape = read_shape(published("8B"))
    assert formulas.gathered(shape, Sharding()).all == 0
    largest = 128256 * 4096
    assert formulas.gathered(shape, Sharding(weight_ranks=8)).all == 4 * largest
    assert formulas.gathered(shape, Sharding(weight_ranks=8, gathered=10**9)).all == 4 * (largest + 10**9)
    assert formulas.gathered(shape, Sharding(host_weights=True)).all == 4 * largest
    everything = formulas.gathered(shape, Sharding(weight_ranks=8, gathered=10**12)).all
    assert everything == 4 * shape.parameters
    coming = formulas.gathered(shape, Sharding(weight_ranks=8, gathered=10**9, in_flight=10**8))
    assert coming.all == 4 * (largest + 10**9 + 10**8)
    assert coming.heap == 4 * shape.small, "norms: all matrices of 8B are blocks of their own"


def test_checkpointing_keeps_inputs_and_one_layer(published):
    shape, s = read_shape(published("0.6B")), Sharding()
    whole = formulas.activations(shape, 1024, 512, s, "cpu", checkpointing=False)
    less = formulas.activations(shape, 1024, 512, s, "cpu", checkpointing=True)
    last = 2 * 1024 * 1024 * 4
    assert less.all == 28 * 1024 * 1024 * 4 + last
    one = formulas.layer_kept(shape, shape.layers[0], 1024, 512, s, "cpu", 1.0)
    assert whole.all == 28 * one.all + last
    assert formulas.activations(shape, 2048, 512, s, "cpu", checkpointing=False).all == 2 * whole.all


def test_tensors_of_32_mib_are_mapped_apart(published):
    """1024 x 3072 in fp32 are 12 MiB: 2048 tokens of the feed-forward layer 24, 4096 tokens 48; hidden states 16."""
    shape, s = read_shape(published("0.6B")), Sharding()
    few, many = (formulas.activations(shape, n, 512, s, "cpu", checkpointing=False) for n in (2048, 4096))
    assert few.heap == few.all
    assert many.heap < many.all
    inputs = formulas.activations(shape, 4096, 512, s, "cpu", checkpointing=True)
    assert inputs.heap == inputs.all
    assert shape.small == shape.parameters - 151936 * 1024
    assert logits_peak.head_gradient(shape).heap == 0


def test_logits_are_chunked():
    shape = Shape(outputs=1000, hidden=10)
    s = Sharding(logits=4000)
    assert logits_peak.logits(shape, 3, s) == 3 * 1000 * 4
    assert logits_peak.logits(shape, 100, s) == 4 * 1000 * 4
    assert logits_peak.copies(["logprobs"], backward=False) == 2
    assert logits_peak.copies(["logprobs", "entropy"], backward=True) == 6
    assert logits_peak.copies(["logprobs", "margin"], backward=True) == 6
    assert logits_peak.head_backward(shape, 3, s, ["logprobs"]).all == 4 * 12_000 + 2 * 3 * 10 * 4
    assert logits_peak.head_backward(shape, 100, s, ["logprobs"]).all == 4 * 16_000 + 2 * 100 * 10 * 4 + 10_000 * 4


class Shape:
    """As much of a model's shape as the head's formulas read."""

    def __init__(self, outputs: int, hidden: int) -> None:
        self.outputs, self.hidden, self.head = outputs, hidden, outputs * hidden


def test_engines_divide_weights_and_cache(published):
    shape = read_shape(published("8B"))
    whole = Footprint(weight_bytes=2.0)
    assert engines.engine_weights(shape, whole) == 2 * 8_030_261_248
    assert engines.cache_per_token(shape, whole) == 2 * 65536
    split = replace(whole, tensor_parallel=4, pipeline_parallel=2)
    assert engines.engine_weights(shape, split) == 2 * 8_030_261_248 // 8
    assert engines.cache_per_token(shape, split) == 2 * 65536 / 8
    wide = replace(whole, tensor_parallel=16)
    assert engines.cache_per_token(shape, wide) == 2 * 65536 / 8, "8 key heads are not split further"
    latent = read_shape(published("671B"))
    assert engines.cache_per_token(latent, wide) == engines.cache_per_token(latent, whole), "a latent cache is not"


def test_a_growing_cache_is_bounded_by_rows_and_tokens(published):
    shape = read_shape(published("0.6B"))
    each = 4 * shape.cache_elements
    grown = Footprint(kv_bytes=4.0, rows=16)
    assert engines.cache_grown(shape, grown, 100, 512) == 16 * 512 * each
    assert engines.cache_grown(shape, grown, 3, 512) == 3 * 512 * each
    assert engines.cache_grown(shape, replace(grown, cache_tokens=1000), 100, 512) == 1000 * each


def test_a_decoding_step_is_its_logits_or_a_copied_layer(published):
    shape = read_shape(published("0.6B"))
    grown = Footprint(kv_bytes=4.0, rows=16)
    assert engines.decoding_step(shape, grown, 100, 512) == 4 * 16 * 151936 * 4
    long = 100_000
    assert engines.decoding_step(shape, grown, 100, long) == engines.cache_grown(shape, grown, 100, long) // 56


def test_an_engine_that_packs_a_tied_head_holds_it_twice(published):
    shape = read_shape(published("0.6B"))
    packed_apart = Footprint(weight_bytes=4.0, own_head=True, kv_space=10**9)
    assert shape.tied
    assert engines.engine_weights(shape, packed_apart) == 4 * (596_049_920 + 151936 * 1024)
    untied = read_shape(published("8B"))
    assert engines.engine_weights(untied, packed_apart) == 4 * untied.parameters
    grown = replace(packed_apart, kv_space=None)
    sizes = [engines.prompt_pass(shape, f, 512, 64, bf16=False, device="cpu") for f in (packed_apart, grown)]
    assert sizes[1] - sizes[0] == 512 * shape.cache_elements * 2, "what a reserved cache holds is in it"
