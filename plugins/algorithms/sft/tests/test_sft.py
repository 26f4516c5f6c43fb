"""Supervised fine-tuning: assembly, and the numbers on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf.types import LossOutput, Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_plugin_sft import DFT, MEAN_LOGPROB, NLL, SFT


def example(mask, index=0):
    return Example(Row({}, "data", index), [TokenSequence([5 + i for i in range(len(mask))], list(mask))])


def test_only_a_policy_is_needed_and_trained_once():
    algorithm = SFT(parts={"loss": NLL()})
    needs, (update,) = algorithm.needs(), algorithm.updates(0)
    assert [(r.name, r.trained) for r in needs.roles] == [("policy", True)]
    assert (update.role, update.loss, update.epochs, update.minibatches) == ("policy", "loss", 1, 1)


@pytest.mark.parametrize("loss", [NLL(), NLL(NLL.Config(label_smoothing=0.1)), DFT()])
def test_metrics_are_the_mean_nll_probability_and_accuracy(loss):
    logprobs, mean_logprobs = torch.tensor([math.log(0.5), math.log(0.25)]), torch.tensor([-3.0, -3.0])
    out = loss({"logprobs": logprobs, "mean_logprob": mean_logprobs, "top1": torch.tensor([1.0, 0.0])})
    assert isinstance(out, LossOutput)
    assert out.metrics["nll"][1].tolist() == pytest.approx([math.log(2), math.log(4)])
    assert out.metrics["token_prob"][1].tolist() == pytest.approx([0.5, 0.25])
    assert out.metrics["token_accuracy"][1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("reduce", ["token_mean", "seq_mean_token_mean"])
def test_the_loss_is_transformers_own_on_the_same_rows(tmp_path, reduce):
    """Three rows of unequal length against the causal-LM loss of transformers, row by row."""
    from rlhf.ops.loss_value import evaluate
    from rlhf.ops.reduce import weigh
    from rlhf_testing.tiny import tiny_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model(tmp_path))).eval()
    rows = [example([False, True]), example([False, False, True, True, True]), example([False] * 3 + [True] * 2)]
    loss = NLL(NLL.Config(reduce=reduce))
    batch = weigh(SFT(parts={"loss": NLL()}).assemble(rows)[0], loss.reduce())
    means, counts, logprobs = [], [], []
    with torch.no_grad():
        for r in rows:
            sequence = r.sequences[0]
            ids, mask = torch.tensor([sequence.ids]), torch.tensor([sequence.loss_mask])
            means.append(float(model(ids, labels=torch.where(mask, ids, -100)).loss))
            counts.append(int(mask.sum()))
            logp = torch.log_softmax(model(ids).logits.float(), -1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            logprobs.append(logp[mask[0, 1:]])
    total, _ = evaluate(loss, batch, {"logprobs": torch.cat(logprobs), "top1": torch.zeros(6)}, {}, {})
    by_token = sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts)
    assert float(total) == pytest.approx(by_token if reduce == "token_mean" else sum(means) / 3, rel=1e-5)


def test_dft_by_hand():
    """p = 1/2 and 1/4: losses log(2) / 2 and log(4) / 4; d loss / d log p is -p, where the likelihood's is -1."""
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    values = DFT()({"logprobs": logprobs, "top1": torch.zeros(2)}).terms["dft"]
    assert values.tolist() == pytest.approx([math.log(2) / 2, math.log(4) / 4])
    values.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.25])


def test_label_smoothing_is_that_of_transformers():
    """The same logits and labels, token mean."""
    from transformers.trainer_pt_utils import LabelSmoother

    logits = torch.randn(1, 6, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 7, 0, 10, 5, 5])
    reference = LabelSmoother(epsilon=0.2)({"logits": logits}, ids[None])
    x = {
        "logprobs": torch.log_softmax(logits[0], -1).gather(1, ids[:, None])[:, 0],
        "mean_logprob": MEAN_LOGPROB.fn(logits[0], ids, {}, {}),
        "top1": torch.zeros(6),
    }
    out = NLL(NLL.Config(label_smoothing=0.2))(x)
    assert float(out.terms["nll"].mean()) == pytest.approx(float(reference), rel=1e-6)
    assert float(out.metrics["nll"][1].mean()) == pytest.approx(-float(x["logprobs"].mean()), rel=1e-6)
