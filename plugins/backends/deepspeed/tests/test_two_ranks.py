"""Two ranks give the numbers of the trainer ``torch`` in every stage, and resume from checkpoints of one or two ranks.

All tests are in one file, so that one pair of processes serves them (``pytest --dist loadfile``).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf.errors import CheckpointError
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf_modeling.sharded.optimizer import build_optimizer
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.image_batches import image_batch, image_shares
from rlhf_testing.suite_losses import LentLoss, NllLoss, TokenLoss, ValueLoss
from rlhf_testing.token_parts import CASES as CASES_ON_PARTS
from rlhf_testing.token_parts import check_case
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from zero_cases import STEPS, apart, batch, shares, spec, trainer
from zero_pair_names import IMAGES, ONLY_FULL, PARTS_ALWAYS, STAGES, VARIANTS

pytestmark = pytest.mark.slow

GRADIENT = 1e-5
LOSS = 1e-4


class Reference:
    """The trainer ``torch`` in one process on whole batches."""

    def __init__(
        self, folder, loss: Loss, steps: int, head: str = "lm", dtype="fp32", storage="fp32", muon=False, **options
    ):
        self.trainer = TorchTrainer(
            TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}),
            spec(folder, head=head, dtype=dtype, storage=storage),
        )
        if muon:
            self.trainer.optimizer = TorchMuon(self.trainer)
        self.trainer.accumulate([batch(0, loss)], loss, {}, {})
        self.gradients = self.trainer.gradients()
        self.trainer.zero_grad()
        self.steps = [self.trainer.update([batch(n, loss)], loss, {}, {}) for n in range(steps)]
        self.weights = {n: t.clone() for n, t in self.trainer.weights()}


class TorchMuon:
    """torch's Muon and AdamW, each for the parameters that the trainer's optimizer gives to it."""

    def __init__(self, trainer: TorchTrainer) -> None:
        outside = {id(p) for m in (trainer.module.get_input_embeddings(), trainer.loaded.head) for p in m.parameters()}
        config = DeepSpeedTrainerConfig(lr=1e-3, weight_decay=0.1, optimizer="muon")
        shapes = {name: p.shape for name, p in trainer.parameters.items()}
        matrices, *rest = build_optimizer(trainer.parameters, shapes, outside, config).param_groups
        keep = ("params", "weight_decay")
        muon = torch.optim.Muon(matrices["params"], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([{k: g[k] for k in keep} for g in rest], lr=1e-3, betas=(0.9, 0.95))
        self.both = (muon, adamw)
        self.param_groups = [*muon.param_groups, *adamw.param_groups]

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


def check_steps(found: tuple[dict, dict], reference: Reference, loss_within: float = LOSS, norm_within: float = 1e-4):
    first, second = (rank["steps"] for rank in found)
    assert len(first) == len(second) <= len(reference.steps)
    for a, b, (sums, result) in zip(first, second, reference.steps, strict=False):
        assert a[1:] == b[1:]  # norm, rate and reason are the same on every rank
        assert a[0] + b[0] == pytest.approx(sums["loss"][0], rel=loss_within, abs=loss_within)
        assert a[1] == pytest.approx(result.grad_norm, rel=norm_within)
        assert (a[2], a[3]) == (result.lr, "")


@pytest.fixture(scope="module")
def reference(ranks):
    return Reference(ranks.folder, TokenLoss(), STEPS, ema_decay=0.9, weight_decay=0.1)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_and_five_steps(ranks, reference, stage):
    found = ranks(f"equal-{stage}")
    assert apart(load_file(ranks.folder / f"gradients-{stage}.safetensors"), reference.gradients) < GRADIENT
    assert found[1]["names"] == []  # only rank 0 has whole gradients
    assert found[0]["micros"] == found[1]["micros"] > 1
    check_steps(found, reference)
    assert apart(load_file(ranks.folder / f"weights-{stage}.safetensors"), reference.weights) < 1e-4
    average = {n: t.clone() for n, t in reference.trainer.weights("ema")}
    assert apart(load_file(ranks.folder / f"average-{stage}.safetensors"), average) < 1e-4
    assert apart(average, reference.weights) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("variant", IMAGES)
def test_images_that_one_rank_has(ranks, variant):
    found, path = ranks(f"images-{variant}"), ranks.folder / "images"
    options = {"lr": 1e-3, "device": "cpu", **{k: v for k, v in IMAGES[variant].items() if k != "stage"}}
    one = TorchTrainer(TorchTrainer.Config(**options), replace(spec(ranks.folder), path=str(path), images=True))
    micros = image_shares(image_batch(path, "qwen3_vl"), 1)[0]
    one.accumulate(micros, NllLoss(), {}, {})
    assert apart(ranks.tensors(f"gradients-images-{variant}"), one.gradients()) < GRADIENT
    one.zero_grad()
    norms = [one.update(micros, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
    assert [rank["norms"] for rank in found] == [pytest.approx(norms)] * 2
    assert apart(ranks.tensors(f"weights-images-{variant}"), dict(one.weights())) < 1e-4
    assert all(rank["resumed"] for rank in found)


@pytest.mark.parametrize("stage", STAGES)
def test_scores_evaluation_and_coverage(ranks, reference, stage):
    found, dealt = ranks(f"equal-{stage}"), shares(batch(9), 2)
    for rank in (0, 1):
        got = load_file(ranks.folder / f"scores-{stage}-{rank}.safetensors")
        for n, want in enumerate(reference.trainer.forward(dealt[rank], ("logprobs",))):
            torch.testing.assert_close(got[str(n)], want["logprobs"], atol=1e-3, rtol=0)  # after five steps of Adam
    want = reference.trainer.evaluate([batch(9)], TokenLoss(), {}, {})["loss"][0]
    assert found[0]["evaluated"] + found[1]["evaluated"] == pytest.approx(want, rel=1e-3)
    assert found[0]["coverage"] == found[1]["coverage"] == reference.trainer.coverage()


def test_the_base_of_adapters_keeps_a_head_that_is_trained_with_them(ranks):
    """In stage 2, and in stage 3 after a resume."""
    for rank, trainers in enumerate(ranks("base")):
        for found in trainers:
            assert found.pop("off") < 1e-5
            assert found.pop("moved") == (0 if rank else 2 * 7 + 1), "seven matrices of two layers, the tied embedding"
            assert all(found.values()), found


def test_ranks_have_different_dropout_masks(ranks):
    """The masks equal those of one rank that computes all micro-batches in the order of their distribution."""
    dealt = shares(batch(0), 2)
    assert ranks("dropout") == [len(dealt[0]), len(dealt[1])]
    found = load_file(ranks.folder / "gradients-dropout.safetensors")
    config = TorchTrainer.Config(lora={"rank": 2, "dropout": 0.5}, device="cpu")

    def alone(micros: list[Batch]) -> dict[str, torch.Tensor]:
        one = TorchTrainer(config, spec(ranks.folder))
        one.accumulate(micros, TokenLoss(), {}, {})
        return one.gradients()

    assert apart(found, alone([micro for pair in zip(*dealt, strict=True) for micro in pair])) < GRADIENT
    assert apart(found, alone([*dealt[0], *dealt[1]])) > 0.1, "another order has other masks"


@pytest.mark.full
def test_several_roles_of_one_process_can_have_second_copies(ranks):
    """DeepSpeed itself fails with an assertion at the second model with ZeRO++."""
    found = ranks("hpz")
    reference = Reference(ranks.folder, ValueLoss(), 2, head="scalar")
    assert apart(load_file(ranks.folder / "weights-hpz-critic.safetensors"), reference.weights) < 1e-4
    for rank in found:
        assert rank["same"]
        assert rank["unmoved"]
        assert rank["left"] < 1e-6
        assert rank["copies"] == [0, *rank["parameters"][1:]], "the first role has no second copies"


def test_experts_are_sent_and_loaded_one_by_one(ranks):
    want = load_file(ranks.folder / "experts" / "model.safetensors")
    once, twice = (load_file(ranks.folder / f"{name}.safetensors") for name in ("experts", "experts-twice"))
    assert once.keys() == twice.keys() == want.keys()
    assert all(torch.equal(once[n], t) and torch.equal(twice[n], 2 * t) for n, t in want.items())
    assert ranks("experts")[0] < len(want)


def test_a_recurrent_model_is_computed_one_length_at_a_time(ranks):
    """Stage 3 gathers weights in every call, so a rank with fewer lengths makes additional calls with weight zero."""
    (layout, first), (_, second) = ranks("alone")
    assert layout == "alone"
    assert first != second, "the ranks must have different lengths for this test"
    one = TorchTrainer(
        TorchTrainer.Config(device="cpu"), replace(spec(ranks.folder), path=str(ranks.folder / "recurrent"))
    )
    one.accumulate([batch(0)], TokenLoss(), {}, {})
    assert apart(load_file(ranks.folder / "gradients-alone.safetensors"), one.gradients()) < GRADIENT


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if f"variant-{n}" in ONLY_FULL else n for n in VARIANTS]
)
def test_options_change_no_number(ranks, name):
    options = VARIANTS[name]
    muon, dtype = options.get("optimizer") == "muon", options.get("dtype", "fp32")
    other = {"weight_decay": 0.1} if muon else {key: options[key] for key in ("lora",) if key in options}
    storage = options.get("storage", "fp32")
    reference = Reference(ranks.folder, TokenLoss(), 3, dtype=dtype, storage=storage, muon=muon, **other)
    gradients = load_file(ranks.folder / f"gradients-{name}.safetensors")
    if dtype == "bf16":  # another order of rounding; bf16 differs from fp32 by 9 % in this measure
        exact = Reference(ranks.folder, TokenLoss(), 0, **other)
        assert apart(gradients, reference.gradients) < 0.03
        assert 1e-3 < apart(gradients, exact.gradients) < 0.2
        check_steps(ranks(f"variant-{name}"), reference, 0.02, 0.02)
        return
    assert apart(gradients, reference.gradients) < GRADIENT
    check_steps(ranks(f"variant-{name}"), reference)
    weights = load_file(ranks.folder / f"weights-{name}.safetensors")
    assert apart(weights, reference.weights) < 1e-4


def test_a_critic_and_a_rank_with_filler_units_only(ranks):
    found, loss = ranks("critic"), ValueLoss()
    assert found[0]["fillers"] == [False, False]
    assert found[1]["fillers"] == [False, True]
    reference = Reference(ranks.folder, loss, 3, head="scalar")
    reference_of_few = TorchTrainer(TorchTrainer.Config(device="cpu"), spec(ranks.folder, head="scalar"))
    reference_of_few.accumulate([batch(4, loss, units=3)], loss, {}, {})
    gradients = load_file(ranks.folder / "gradients-critic.safetensors")
    assert apart(gradients, reference_of_few.gradients()) < GRADIENT
    check_steps(found, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_a_non_finite_loss_or_gradient_on_one_rank_skips_the_step_on_both(ranks, stage):
    found = ranks(f"skip-{stage}")
    assert found[0] == found[1]
    reason, unchanged, skipped, coverage = found[0]["suite_infinite"]
    assert reason.startswith("non-finite loss (nan) of 'suite_infinite'")
    assert reason.endswith("on rank 1")
    assert (unchanged, skipped, coverage) == (True, 1, {})
    reason, unchanged, skipped, coverage = found[0]["suite_infinite_gradient"]
    assert reason.startswith("non-finite gradient (norm ")
    assert (unchanged, skipped, coverage) == (True, 2, {})
    assert found[0]["after"] == ["", True]  # the step after the skipped ones is as without them


def test_roles_that_are_not_trained(ranks):
    for rank in ranks("frozen"):
        for stage, found in rank.items():
            assert found["moved"] > 1e-2
            assert found["left"] < 1e-5
            assert found["saved"]
            assert (found["divided"] == 0) == (stage == "3")


@pytest.mark.parametrize("stage", STAGES)
def test_a_lent_head_is_whole_on_every_rank(ranks, stage):
    """Also if the lent head is divided over the ranks, and tied to the embedding."""
    found = ranks(f"lent-{stage}")
    assert [rank["heads"] for rank in found] == [1, 0]
    lender = TorchTrainer(
        TorchTrainer.Config(device="cpu"), replace(spec(ranks.folder, trained=False), path=str(ranks.folder / "lender"))
    )
    one = TorchTrainer(TorchTrainer.Config(device="cpu"), spec(ranks.folder))
    one.borrow_head("lender", *lender.lend_head())
    whole = batch(0, LentLoss())
    [hidden] = lender.forward([whole], ("hidden",))
    sums = one.accumulate([whole.with_column("tok", "lent_hidden", hidden["hidden"])], LentLoss(), {}, {})
    assert found[0]["loss"] + found[1]["loss"] == pytest.approx(sums["loss"][0], rel=1e-5)
    assert apart(load_file(ranks.folder / f"gradients-lent-{stage}.safetensors"), one.gradients()) < GRADIENT


def test_groups_with_another_size_or_other_roles_are_refused(ranks):
    for rank, found in enumerate(ranks("refused")):
        alone, elsewhere, more, differ = found
        for text in (alone, elsewhere, more):
            assert text.startswith("CapabilityError: role 'policy', rank ")
            assert "is a rank of a group of 2 already" in text
        assert f"rank {rank} of 2" in elsewhere
        assert "the ranks that met at" in differ
        assert "'scalar'" in differ


def test_a_rank_that_meets_no_other_rank_is_an_error(ranks):
    for rank, message in enumerate(ranks("nobody")):
        assert message.startswith(f"role 'policy', rank {rank} of 2 did not meet the others at tcp://127.0.0.1:")
        assert "within 2 s" in message


def test_a_rank_that_makes_no_call_is_an_error_after_the_timeout(ranks):
    message = ranks("timeout")[0]
    assert message.startswith("role 'policy', rank 0 of 2: accumulate() lost the other ranks")
    assert "trainer.timeout is 120 s" in message


# -------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("stage", STAGES)
def test_resume_with_the_same_number_of_ranks_is_exact(ranks, stage):
    for found in ranks(f"resume-{stage}"):
        assert found["bits"]
        assert found["steps"][0] == found["steps"][1]
        assert found["files"] == ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "trainer.json"]
        assert found["updates"] == 5


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_writes_its_part_only(ranks, stage):
    sizes = [(ranks.folder / f"saved-{stage}" / f"rank-{rank}-of-2.safetensors").stat().st_size for rank in (0, 1)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    weights = load_file(ranks.folder / f"saved-{stage}" / "rank-0-of-2.safetensors")
    kinds = {name.partition("/")[0] for name in weights}
    assert kinds == {"weight", "average", "optimizer.exp_avg", "optimizer.exp_avg_sq"}


@pytest.mark.parametrize("saved", STAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_resume_as_one_in_any_stage(ranks, saved, stage):
    one = trainer(spec(ranks.folder), stage=stage, ema_decay=0.9, schedule="cosine")
    one.load(ranks.folder / f"saved-{saved}")
    want = [found["steps"][0] for found in ranks(f"resume-{saved}")]
    for number in range(2, 5):
        sums, result = one.update([batch(number)], TokenLoss(), {}, {})
        a, b = (steps[number - 2] for steps in want)
        assert sums["loss"][0] == pytest.approx(a[0] + b[0], rel=1e-6)
        assert result.grad_norm == pytest.approx(a[1], rel=1e-5)
        assert result.lr == a[2]


def test_one_rank_resumes_as_two_in_any_stage(ranks):
    one = trainer(spec(ranks.folder), stage=2, ema_decay=0.9)
    one.load(ranks.folder / "from_one")
    want = [one.update([batch(number)], TokenLoss(), {}, {}) for number in range(2, 5)]
    a, b = ranks("from_one")
    for stage in map(str, STAGES):
        for (sums, result), x, y in zip(want, a[stage], b[stage], strict=True):
            assert x[0] + y[0] == pytest.approx(sums["loss"][0], rel=1e-6)
            assert x[1] == pytest.approx(result.grad_norm, rel=1e-5)


def test_export_in_several_files_loads_in_transformers(ranks, tmp_path):
    assert ranks("export")[1]["names"] == []
    folder, want = ranks.folder / "export", load_file(ranks.folder / "exported.safetensors")
    for rank in ranks("export"):
        assert rank["whole"] <= max(2000, *(tensor.numel() for tensor in want.values())), (
            "largest number of whole elements on a rank"
        )
    assert 3 * rank["whole"] < sum(tensor.numel() for tensor in want.values())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert all(f.stat().st_size < 30_000 for f in files)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {n: f for f in files for n in load_file(f)} == {n: folder / f for n, f in weight_map.items()}
    model = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in want.items())
    assert torch.equal(model["lm_head.weight"], want["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    average = AutoModelForCausalLM.from_pretrained(ranks.folder / "export_ema").state_dict()
    assert not torch.equal(average["model.norm.weight"], model["model.norm.weight"])
    TorchTrainer(TorchTrainer.Config(device="cpu"), spec(ranks.folder)).export(tmp_path / "torch")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (tmp_path / "torch" / name).read_text()


def test_a_missing_rank_is_named(ranks, tmp_path):
    shutil.copytree(ranks.folder / "saved-3", tmp_path / "saved")
    first, second = (tmp_path / "saved" / f"rank-{rank}-of-2.safetensors" for rank in (0, 1))
    second.write_bytes(first.read_bytes())
    one = trainer(spec(ranks.folder), stage=3, ema_decay=0.9)
    with pytest.raises(
        CheckpointError, match=r"does not hold the \d+ elements of 'model.embed_tokens.weight' \(weight\)"
    ):
        one.load(tmp_path / "saved")


# -------------------------------------------------------------------------------- rows that are divided over ranks


@pytest.mark.parametrize(
    "name", [name if name in PARTS_ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in CASES_ON_PARTS]
)
def test_rows_that_two_ranks_divide_give_the_numbers_of_one(ranks, name):
    check_case(name, one_rank, ranks, 2, 0.03 if name == "bf16" else 1e-5)


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
