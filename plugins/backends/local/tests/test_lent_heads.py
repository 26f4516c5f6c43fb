"""Hidden states as an output, and another model's output head lent to a trainer."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import ModelError, TrainingError
from rlhf.ops.heads import HIDDEN, LOGPROBS, OutputHead
from rlhf_modeling import heads as head_ops
from rlhf_testing import fabricate
from rlhf_testing.suite_losses import LentLoss
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM

[CROSS_ENTROPY] = LentLoss().outputs()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"tied": True}),
        ("qwen3", {"tied": False}),
        ("gemma2", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    ],
)
def test_hidden_states_through_the_lent_head_are_the_models_logits(
    tmp_path, make_trainer, make_batch, architecture, options
):
    path, batch = tiny_model(tmp_path, architecture=architecture, std=0.3, **options), make_batch([6, 9])
    trainer = make_trainer(path, trained=False)
    [head] = trainer.lend_head()
    hidden_NH = trainer.forward([batch], ("hidden",))[0]["hidden"]
    model = AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="eager").eval()
    with torch.no_grad():
        want = [model(ids[None]).logits[0] for ids in batch.ids_N.split(batch.lens_B.tolist())]
    assert head.softcap == options.get("final_logit_softcapping")
    for n in batch.tok["loss_mask"].nonzero()[:, 0].tolist():
        sequence, position = int(batch.seq_N[n]), int(batch.position_N[n])
        logits = head.logits(hidden_NH[n][None])[0]
        torch.testing.assert_close(logits, want[sequence][position - 1], rtol=0, atol=1e-5)
    assert not bool(hidden_NH[~batch.tok["loss_mask"]].any())


def test_a_head_is_lent_by_reference_in_one_process(tmp_path, make_trainer):
    trainer, lender = make_trainer(), make_trainer(tiny_model(tmp_path, seed=3), trained=False)
    trainer.borrow_head("lender", *lender.lend_head())
    assert trainer.borrowed["lender"].weight_VH.data_ptr() == lender.loaded_model.head.weight.data_ptr()
    assert not trainer.borrowed["lender"].weight_VH.requires_grad


def test_the_lent_head_is_in_bf16_if_logits_are(make_trainer):
    head = fabricate.output_head("lender", 0)
    wide = OutputHead(head.weight_VH.repeat(4, 1))
    for precision, head_fp32, dtype in (
        ("bf16", True, torch.float32),
        ("bf16", False, torch.bfloat16),
        ("fp32", False, torch.float32),
    ):
        trainer = make_trainer(dtype=precision, head_fp32=head_fp32)
        trainer.borrow_head("lender", wide)
        borrowed = trainer.borrowed["lender"]
        assert borrowed.weight_VH.dtype == dtype
        assert borrowed.logits(torch.zeros(1, fabricate.HIDDEN)).dtype == torch.float32


def test_a_larger_lent_head_is_cut_and_a_smaller_one_refused(make_trainer):
    """The tokenizer has 99 tokens, and so has the student's vocabulary."""
    trainer = make_trainer()
    vocabulary = trainer.loaded_model.head.out_features
    assert vocabulary == len(trainer.tokenizer) == 99
    wide_head = OutputHead(torch.randn(vocabulary + 13, 8), torch.randn(vocabulary + 13))
    trainer.borrow_head("lender", wide_head)
    borrowed = trainer.borrowed["lender"]
    assert (borrowed.vocabulary, tuple(borrowed.bias_V.shape)) == (vocabulary, (vocabulary,))
    assert torch.equal(borrowed.weight_VH, wide_head.weight_VH[:vocabulary])
    with pytest.raises(
        ModelError, match=r"'lender' has logits for 98 tokens, but role 'policy' .* with a tokenizer of 99"
    ):
        trainer.borrow_head("lender", OutputHead(torch.randn(vocabulary - 1, 8)))


def test_rows_of_the_embedding_beyond_the_tokenizer_need_no_logits(tmp_path, make_trainer):
    trainer = make_trainer(tiny_model(tmp_path, vocab_size=112))
    trainer.borrow_head("lender", OutputHead(torch.randn(100, 8)))
    assert trainer.borrowed["lender"].vocabulary == 100


def test_a_head_that_was_not_lent_is_an_error(make_trainer, make_batch):
    with pytest.raises(
        TrainingError, match=r"output head of lender, which was not lent to role 'policy'.*Needs\.loans"
    ):
        make_trainer().forward([make_batch([5])], (CROSS_ENTROPY,))


def test_no_logits_are_computed_if_only_hidden_states_are_read(make_batch):
    batch, hidden = make_batch([6, 9]), torch.randn(15, 8)

    def logits(hidden_CH):
        raise AssertionError("nobody reads logits")

    options = {"tempered": True, "chunk": 2, "head_fp32": True}
    out = head_ops.compute(hidden, batch, [HIDDEN], logits, **options)["hidden"]
    assert torch.equal(out, hidden[batch.tok["loss_mask"].nonzero()[:, 0] - 1])


@pytest.mark.parametrize("chunk", [2, 10**6])
def test_hidden_states_beside_log_probs_are_not_tempered(make_batch, chunk):
    batch, hidden, weight = make_batch([6, 9]), torch.randn(15, 8), torch.randn(97, 8)
    hot = batch.with_column("tok", "temperature", torch.full((15,), 2.0))
    options = {"tempered": True, "chunk": chunk, "head_fp32": True}
    cold, out = (
        head_ops.compute(hidden, b, [LOGPROBS, HIDDEN], lambda h: h @ weight.t(), **options) for b in (batch, hot)
    )
    assert torch.equal(cold["hidden"], out["hidden"])
    assert not torch.allclose(cold["logprobs"], out["logprobs"])
