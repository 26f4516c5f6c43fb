"""Two ranks give the numbers of the trainer ``torch``, and resume from checkpoints of one or two ranks.

All tests are in one file, so that one pair of processes serves them (``pytest --dist loadfile``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_cases import IMAGES, STORED, VARIANTS, trainer
from rlhf.errors import CheckpointError
from rlhf.interfaces import Loss, ModelSpec
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.image_batches import image_batch, image_shares
from rlhf_testing.rank_batches import STEPS, apart, batch, shares, spec
from rlhf_testing.suite_losses import LentLoss, NllLoss, TokenLoss, ValueLoss
from rlhf_testing.token_parts import CASES as CASES_ON_PARTS
from rlhf_testing.token_parts import IN_EVERY_RUN, check_case
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

GRADIENT, LOSS = 1e-5, 1e-4
"""Only the order of sums differs; AdamW amplifies differences in gradients near zero."""


class Reference:
    """The trainer ``torch`` in one process on whole batches."""

    def __init__(
        self, folder, loss: Loss, steps: int, head: str = "lm", of_role: Mapping[str, Any] | None = None, **options
    ):
        config = TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options})
        self.trainer = TorchTrainer(config, spec(folder, head=head, **(of_role or {})))
        self.trainer.accumulate([batch(0, loss)], loss, {}, {})
        self.gradients = self.trainer.gradients()
        self.trainer.zero_grad()
        self.steps = [self.trainer.update([batch(n, loss)], loss, {}, {}) for n in range(steps)]
        self.weights = {n: t.clone() for n, t in self.trainer.weights()}


def check_steps(found: list[Any], reference: Reference, within: float = LOSS) -> None:
    first, second = (rank["steps"] for rank in found)
    assert len(first) == len(second) <= len(reference.steps)
    for a, b, (sums, result) in zip(first, second, reference.steps, strict=False):
        assert a[1:] == b[1:]  # norm, rate and reason are the same on every rank
        assert a[0] + b[0] == pytest.approx(sums["loss"][0], rel=within, abs=within)
        assert a[1] == pytest.approx(result.grad_norm, rel=within)
        assert (a[2], a[3]) == (result.lr, "")


@pytest.fixture(scope="module")
def reference(models):
    return Reference(models, TokenLoss(), STEPS, ema_decay=0.9, weight_decay=0.1)


def test_gradients_and_five_steps(ranks, reference):
    found = ranks("equal")
    assert apart(ranks.tensors("gradients"), reference.gradients) < GRADIENT
    assert found[1]["names"] == []  # only rank 0 has whole gradients
    assert found[0]["micros"] == found[1]["micros"] > 1
    check_steps(found, reference)
    assert apart(ranks.tensors("weights"), reference.weights) < 1e-4
    average = {n: t.clone() for n, t in reference.trainer.weights("ema")}
    assert apart(ranks.tensors("average"), average) < 1e-4
    assert apart(average, reference.weights) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("variant", IMAGES)
def test_images_that_one_rank_has(ranks, models, variant):
    found, path = ranks(f"images-{variant}"), models / "images"
    options = {"lr": 1e-3, "device": "cpu", **IMAGES[variant]}
    one = TorchTrainer(TorchTrainer.Config(**options), replace(spec(models), path=str(path), images=True))
    micros = image_shares(image_batch(path, "qwen3_vl"), 1)[0]
    one.accumulate(micros, NllLoss(), {}, {})
    assert apart(ranks.tensors(f"gradients-images-{variant}"), one.gradients()) < GRADIENT
    one.zero_grad()
    norms = [one.update(micros, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
    assert [rank["norms"] for rank in found] == [pytest.approx(norms)] * 2
    assert apart(ranks.tensors(f"weights-images-{variant}"), dict(one.weights())) < 1e-4
    assert all(rank["resumed"] for rank in found)


def test_scores_evaluation_and_coverage(ranks, reference):
    found, dealt = ranks("equal"), shares(batch(9), 2)
    for rank in (0, 1):
        got = ranks.tensors(f"scores-{rank}")
        for n, want in enumerate(reference.trainer.forward(dealt[rank], ("logprobs",))):
            torch.testing.assert_close(got[str(n)], want["logprobs"], atol=1e-3, rtol=0)  # after five steps of Adam
    want = reference.trainer.evaluate([batch(9)], TokenLoss(), {}, {})["loss"][0]
    assert found[0]["evaluated"] + found[1]["evaluated"] == pytest.approx(want, rel=1e-3)
    assert found[0]["coverage"] == found[1]["coverage"] == reference.trainer.coverage()


def test_a_rank_holds_its_part_only(ranks, reference):
    whole = sum(p.numel() for p in reference.trainer.parameters.values())
    parts = [found["elements"] for found in ranks("equal")]
    assert sum(parts) == whole
    assert parts[0] == pytest.approx(whole / 2, rel=0.02)
    assert [bool(found["streamed"]) for found in ranks("equal")] == [True, False]
    sizes = [(ranks.folder / "saved" / f"rank-{rank}-of-2.safetensors").stat().st_size for rank in (0, 1)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


@pytest.mark.full
def test_the_base_of_adapters_keeps_a_head_that_is_trained_with_them(ranks):
    for found in ranks("base"):
        assert found.pop("off") < 1e-5
        assert found.pop("moved") == 2 * 7 + 1, "seven matrices of two layers, and the tied embedding"
        assert all(found.values()), found


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_options_change_no_number(ranks, name):
    options = VARIANTS[name]
    of_role = {key: options[key] for key in ("dtype", "storage") if key in options}
    shared = ("lora", "optimizer", "weight_decay", "head_fp32")
    other = {key: options[key] for key in shared if key in options}
    reference = Reference(ranks.folder, TokenLoss(), 3, of_role=of_role, **other)
    gradients = ranks.tensors(f"gradients-{name}")
    if of_role:  # bf16: another order of rounding; it differs from fp32 by 9 % in this measure
        exact = Reference(ranks.folder, TokenLoss(), 0, lora=options.get("lora"))
        assert apart(gradients, reference.gradients) < 0.03
        assert 1e-3 < apart(gradients, exact.gradients) < 0.2
        check_steps(ranks(f"variant-{name}"), reference, 0.02)
        return
    assert apart(gradients, reference.gradients) < GRADIENT
    check_steps(ranks(f"variant-{name}"), reference)
    assert apart(ranks.tensors(f"weights-{name}"), reference.weights) < 1e-4


@pytest.mark.full
def test_a_critic_whose_head_is_on_one_rank(ranks):
    found, loss = ranks("critic"), ValueLoss()
    small = TorchTrainer(TorchTrainer.Config(device="cpu"), spec(ranks.folder, head="scalar"))
    small.accumulate([batch(4, loss, units=3)], loss, {}, {})
    assert apart(ranks.tensors("gradients-critic"), small.gradients()) < GRADIENT
    check_steps(found, Reference(ranks.folder, loss, 3, head="scalar"))
    assert all(rank["resumed"] for rank in found)


@pytest.mark.full
def test_a_non_finite_loss_or_gradient_on_one_rank_skips_the_step_on_both(ranks):
    found = ranks("skip")
    assert found[0] == found[1]
    reason, *rest = found[0]["suite_infinite"]
    assert reason.startswith("non-finite loss (nan) of 'suite_infinite'")
    assert reason.endswith("on rank 1")
    assert rest == [True, 1, {}]
    reason, *rest = found[0]["suite_infinite_gradient"]
    assert reason.startswith("non-finite gradient (norm ")
    assert rest == [True, 2, {}]
    assert found[0]["after"] == ["", True]  # the step after the skipped ones is as without them


@pytest.mark.full
def test_roles_that_are_not_trained(ranks):
    for found in ranks("frozen"):
        assert found["moved"] > 1e-2
        assert found["left"] < 1e-5
        assert found["saved"]


@pytest.mark.full
def test_a_lent_head_is_whole_on_every_rank(ranks):
    found = ranks("lent")
    assert [rank["heads"] for rank in found] == [1, 0]
    config = TorchTrainer.Config(device="cpu")
    lender = TorchTrainer(config, replace(spec(ranks.folder, trained=False), path=str(ranks.folder / "lender")))
    one = TorchTrainer(config, spec(ranks.folder))
    one.borrow_head("lender", *lender.lend_head())
    whole = batch(0, LentLoss())
    [hidden] = lender.forward([whole], ("hidden",))
    sums = one.accumulate([whole.with_column("tok", "lent_hidden", hidden["hidden"])], LentLoss(), {}, {})
    assert found[0]["loss"] + found[1]["loss"] == pytest.approx(sums["loss"][0], rel=1e-5)
    assert apart(ranks.tensors("gradients-lent"), one.gradients()) < GRADIENT


@pytest.mark.full
def test_experts_are_sent_and_loaded_one_by_one(ranks):
    want = load_file(ranks.folder / "experts" / "model.safetensors")
    once, twice = ranks.tensors("experts"), ranks.tensors("experts-twice")
    assert once.keys() == twice.keys() == want.keys()
    assert all(torch.equal(once[n], t) and torch.equal(twice[n], 2 * t) for n, t in want.items())
    assert ranks("experts")[0] < len(want)


@pytest.mark.full
def test_a_recurrent_model_is_computed_one_length_at_a_time(ranks):
    """Layers gather weights in every call, so a rank with fewer lengths makes additional calls with weight zero."""
    (layout, first), (_, second) = ranks("alone")
    assert layout == "alone"
    assert first != second, "the ranks must have different lengths for this test"
    of = replace(spec(ranks.folder), path=str(ranks.folder / "recurrent"))
    one = TorchTrainer(TorchTrainer.Config(device="cpu"), of)
    one.accumulate([batch(0)], TokenLoss(), {}, {})
    assert apart(ranks.tensors("gradients-alone"), one.gradients()) < GRADIENT


@pytest.mark.full
def test_a_rank_that_makes_no_call_is_an_error_after_the_timeout(ranks):
    message = ranks("timeout")[0]
    assert message.startswith("role 'policy', rank 0 of 2: accumulate() lost the other ranks")
    assert "trainer.timeout is 120 s" in message


# -------------------------------------------------------------------------------------- state


def test_resume_with_the_same_number_of_ranks_is_exact(ranks):
    for found in ranks("resume"):
        assert found["bits"]
        assert found["steps"][0] == found["steps"][1]
        assert found["files"] == ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "trainer.json"]


def test_two_ranks_resume_as_one(ranks):
    one = trainer(spec(ranks.folder), ema_decay=0.9, schedule="cosine")
    one.load(ranks.folder / "saved")
    first, second = (found["steps"][0] for found in ranks("resume"))
    for number, a, b in zip(range(2, 5), first, second, strict=True):
        sums, result = one.update([batch(number)], TokenLoss(), {}, {})
        assert sums["loss"][0] == pytest.approx(a[0] + b[0], rel=1e-6)
        assert result.grad_norm == pytest.approx(a[1], rel=1e-5)
        assert result.lr == a[2]


@pytest.mark.full
def test_one_rank_resumes_as_two(ranks):
    one = trainer(spec(ranks.folder), ema_decay=0.9)
    one.load(ranks.folder / "from_one")
    for number, a, b in zip(range(2, 5), *ranks("from_one"), strict=True):
        sums, result = one.update([batch(number)], TokenLoss(), {}, {})
        assert a[0] + b[0] == pytest.approx(sums["loss"][0], rel=1e-6)
        assert a[1] == pytest.approx(result.grad_norm, rel=1e-5)


def test_masters_are_resumed_exactly_on_two_ranks_and_on_one(ranks):
    for found in ranks("resume-stored"):
        assert found["bits"]
        assert found["steps"][0] == found["steps"][1]
    one = trainer(spec(ranks.folder, **STORED), ema_decay=0.9)
    for name, folder in (("masters", "saved-stored"), ("masters-from-one", "from_one_stored")):
        one.load(ranks.folder / folder)
        masters = {flat.names[0]: flat.data for flat in one.partition.flats}
        seen = dict.fromkeys(masters, 0)
        for rank in (0, 1):
            for key, part in ranks.tensors(f"{name}-{rank}").items():
                of, _, start = key.rpartition(":")
                assert part.dtype == torch.float32
                assert torch.equal(part, masters[of][int(start) : int(start) + part.numel()])
                seen[of] += part.numel()
        assert seen == {of: tensor.numel() for of, tensor in masters.items()}


@pytest.mark.full
def test_weights_in_bf16_are_gathered_and_sent_in_half_the_bytes(ranks):
    for found in ranks("bytes"):
        assert all(found["fp32"])
        assert found["fp32"] == [2 * count for count in found["bf16"]]


@pytest.mark.full
def test_adapters_are_views_of_one_model(ranks):
    """Two ranks save adapters, one rank loads them: the same merged weights."""
    assert ranks("lora") == [{"base": True, "merged": True}] * 2
    want = ranks.tensors("lora-weights")
    one = trainer(spec(ranks.folder), lora={"rank": 4}, ema_decay=0.5)
    one.load(ranks.folder / "lora-saved")
    found = dict(one.weights())
    assert found.keys() == want.keys()
    assert all(torch.equal(found[n], t) for n, t in want.items())
    exported = AutoModelForCausalLM.from_pretrained(ranks.folder / "lora-exported").state_dict()
    assert all(torch.equal(exported[n], t) for n, t in want.items())


@pytest.mark.full
def test_export_in_several_files_gathers_one_tensor_at_a_time(ranks, tmp_path):
    folder, want = ranks.folder / "export", ranks.tensors("exported")
    largest = max(tensor.numel() for tensor in want.values())
    for rank in ranks("export"):
        assert rank["whole"] == largest
    assert ranks("export")[1]["names"] == []
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {n: f for f in files for n in load_file(f)} == {n: folder / f for n, f in weight_map.items()}
    model = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in want.items())
    average = AutoModelForCausalLM.from_pretrained(ranks.folder / "export_ema").state_dict()
    assert not torch.equal(average["model.norm.weight"], model["model.norm.weight"])
    TorchTrainer(TorchTrainer.Config(device="cpu"), spec(ranks.folder)).export(tmp_path / "torch")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (tmp_path / "torch" / name).read_text()


def test_a_missing_rank_is_named(ranks, tmp_path):
    shutil.copytree(ranks.folder / "saved", tmp_path / "saved")
    (tmp_path / "saved" / "rank-1-of-2.safetensors").unlink()
    one = trainer(spec(ranks.folder), ema_decay=0.9)
    with pytest.raises(CheckpointError, match=r"rank-1-of-2\.safetensors"):
        one.load(tmp_path / "saved")


# -------------------------------------------------------------------------------- rows that are divided over ranks


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.full) for name in CASES_ON_PARTS]
)
def test_rows_that_two_ranks_divide_give_the_numbers_of_one(ranks, name):
    check_case(name, one_rank, ranks, 2, 0.03 if name == "bf16" else 1e-5)


@pytest.mark.full
def test_a_rank_keeps_half_of_the_activations(ranks):
    for whole, half in ranks("parts-kept"):
        assert half == pytest.approx(whole / 2, rel=0.1)


def one_rank(of: ModelSpec, **options: Any) -> TorchTrainer:
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), of)


@pytest.mark.full
def test_a_checkpoint_continues_with_divided_rows_and_back(ranks):
    one = trainer(spec(ranks.folder), ema_decay=0.9)
    one.load(ranks.folder / "from_one")
    norms = [one.update([batch(number)], TokenLoss(), {}, {})[1].grad_norm for number in (2, 3)]
    assert ranks("parts-resume") == [pytest.approx(norms, rel=1e-5)] * 2
    one.load(ranks.folder / "saved_parts")
    saved = ranks.tensors("resumed-parts")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in one.weights())
