"""The conformance suites of both algorithms and the loss."""

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf.types import ExpertRecord, Group, Row, Trajectory, Turn
from rlhf_plugin_distill import Distill, DistillDemonstrations, DistillOnPolicy
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestDistill(AlgorithmContract):
    algorithm = DistillDemonstrations
    configs = (DistillDemonstrations.Config(), DistillDemonstrations.Config(hidden="bf16"))


class TestDistillOnPolicy(AlgorithmContract):
    algorithm = DistillOnPolicy
    configs = (DistillOnPolicy.Config(), DistillOnPolicy.Config(sampled=0.5))


class TestChangingTeacher(AlgorithmContract):
    """It sends its most probable tokens."""

    algorithm = DistillOnPolicy
    configs = (DistillOnPolicy.Config(teacher={"weights": "averaged"}),)
    parts = {"loss": lambda: Distill(Distill.Config(divergence="jsd", alpha=1.0, top_k=5))}


def test_rows_that_are_not_sampled_need_answers_in_the_data():
    assert DistillOnPolicy(parts={"loss": Distill(Distill.Config(alpha=1.0))}).needs().demonstration_share == 0
    needs = DistillOnPolicy(DistillOnPolicy.Config(sampled=0.25), {"loss": Distill(Distill.Config(alpha=1.0))}).needs()
    assert (needs.demonstration_share, needs.reward) == (0.75, False)
    with pytest.raises(ValidationError, match="greater than 0"):
        DistillOnPolicy.Config(sampled=0)


def test_given_answers_are_learnt_from_and_lengths_are_of_sampled_ones():
    def group(number, prompt, answer, logprobs=None, finish="stop"):
        row = Row({}, "data", number)
        turns = [Turn(prompt, False), Turn(answer, True, logprobs, finish=finish, is_demonstration=logprobs is None)]
        return Group(row, number, [Trajectory(row, turns, (number, 0))])

    algorithm = DistillOnPolicy(DistillOnPolicy.Config(sampled=0.5), {"loss": Distill(Distill.Config(alpha=1.0))})
    sampled = group(1, [5], [6, 7], [-1.0, -1.0], "length")
    batch, metrics = algorithm.assemble([group(0, [3, 4], [5, 6, 7, 8, 2]), sampled])
    assert batch.ids_N.tolist() == [3, 4, 5, 6, 7, 8, 2, 5, 6, 7]
    assert batch.tok["loss_mask"].tolist() == [False, False, *[True] * 5, False, True, True]
    assert metrics == {"length/mean": 2.0, "length/max": 2.0, "length/truncated": 1.0}
    assert algorithm.assemble([group(0, [3, 4], [5, 6])])[1] == {}
    sampled.trajectories[0].turns[1].experts = ExpertRecord(bytes([1, 0]), layers=1, experts=2, chosen=1)
    assert algorithm.assemble([sampled])[0].tok["experts"].flatten().tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    ("options", "loss", "words"),
    [
        ({"teacher": {"weights": "averaged"}}, {}, "head that is lent once.*--algorithm.loss.top_k 100"),
        (
            {"teacher": {"weights": "averaged"}, "hidden": "bf16"},
            {"top_k": 5},
            "hidden = 'bf16' applies to a teacher's hidden",
        ),
    ],
)
def test_a_changing_teacher_sends_tokens_alone(options, loss, words):
    with pytest.raises(ConfigError, match=words):
        DistillOnPolicy(DistillOnPolicy.Config(**options), {"loss": Distill(Distill.Config(alpha=1.0, **loss))})


class TestLossOnTopTokens(LossContract):
    loss = Distill
    without_effect = {"top_k": "the algorithm reads it, which asks the teacher for so many"}
    configs = (
        Distill.Config(alpha=1.0, top_k=4),
        Distill.Config(divergence="reverse_kl", alpha=1.0, temperature=2.0, top_k=4),
        Distill.Config(divergence="jsd", beta=0.1, alpha=1.0, top_k=4, reduce="seq_mean_token_mean"),
    )

    def build(self, config):
        loss = Distill(config)
        loss.by_ids = True
        return loss

    def column(self, name, size, seed):
        logits = 3 * fabricate.values("teacher", size * fabricate.VOCABULARY, seed).view(size, fabricate.VOCABULARY)
        p, order = logits.softmax(1).sort(1, descending=True)
        if name == "teacher_top_ids":
            return order[:, :4].int()
        return torch.cat([p[:, :4], p[:, 4:].sum(1, keepdim=True)], 1).log()

    def statement(self, x_BT):
        """With probabilities in float64, of the four tokens and 1 minus their sum."""
        c, mask_BT = x_BT.config, x_BT.mask_BT
        q_AV, ids_AK = (
            (x_BT.read_by("divergence")[mask_BT] / c.temperature).softmax(1),
            x_BT["teacher_top_ids"][mask_BT].long(),
        )
        p, q = x_BT["teacher_top_logprobs"][mask_BT].exp(), q_AV.gather(1, ids_AK)
        q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
        m = (c.beta or 0.5) * p + (1 - (c.beta or 0.5)) * q
        d_A = {
            "forward_kl": (p * (p / q).log()).sum(1),
            "reverse_kl": (q * (q / p).log()).sum(1),
            "jsd": (c.beta or 0.5) * (p * (p / m).log()).sum(1) + (1 - (c.beta or 0.5)) * (q * (q / m).log()).sum(1),
        }[c.divergence]
        if c.reduce == "token_mean":
            return d_A.mean()
        row_A = mask_BT.nonzero()[:, 0]
        return torch.stack([d_A[row_A == b].mean() for b in row_A.unique()]).mean()


class TestLoss(LossContract):
    loss = Distill
    configs = (
        Distill.Config(),
        Distill.Config(divergence="reverse_kl", alpha=1.0, temperature=2.0),
        Distill.Config(divergence="jsd", beta=0.1, alpha=0.3, reduce="seq_mean_token_mean"),
    )

    def column(self, name, size, seed):
        assert name == "teacher_hidden"
        return fabricate.values(name, size * fabricate.HIDDEN, seed).view(size, fabricate.HIDDEN)

    def statement(self, x_BT):
        """With the probabilities themselves, in float64."""
        c, head, mask_BT = x_BT.config, fabricate.output_head("teacher", 0), x_BT.mask_BT
        student_BTV = x_BT.read_by("divergence") / c.temperature
        teacher_BTV = x_BT["teacher_hidden"] @ head.weight_VH.double().T / c.temperature
        p, q = teacher_BTV.softmax(2), student_BTV.softmax(2)
        beta = c.beta or 0.5
        m = beta * p + (1 - beta) * q
        d_BT = {
            "forward_kl": (p * (p / q).log()).sum(2),
            "reverse_kl": (q * (q / p).log()).sum(2),
            "jsd": beta * (p * (p / m).log()).sum(2) + (1 - beta) * (q * (q / m).log()).sum(2),
        }[c.divergence]
        value_BT = c.alpha * d_BT
        if c.alpha < 1:
            value_BT = value_BT - (1 - c.alpha) * x_BT["logprobs"]
        value_BT = torch.where(mask_BT, value_BT, torch.zeros_like(value_BT))
        if c.reduce == "token_mean":
            return value_BT.sum() / mask_BT.sum()
        return (value_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).sum() / mask_BT.any(1).sum()
