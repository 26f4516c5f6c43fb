"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_simpo import SimPO, SimPOLoss
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestSimPO(AlgorithmContract):
    algorithm = SimPO


class TestSimPOLoss(LossContract):
    loss = SimPOLoss
    configs = (
        SimPOLoss.Config(),
        SimPOLoss.Config(beta=10.0, gamma=3.0, label_smoothing=0.1),
        SimPOLoss.Config(loss_type="hinge", gamma=0.0),
        SimPOLoss.Config(nll_coef=0.7),
    )

    def statement(self, x_BT):
        """Pair by pair; the logistic function of the probability that the chosen answer is preferred."""
        c, pairs, nll, tokens = x_BT.config, [], 0.0, 0
        for u in range(int(x_BT.unit_B.max()) + 1):
            rows = (x_BT.unit_B == u).nonzero()[:, 0]
            if not x_BT.mask_BT[rows].any():
                continue
            answers = {int(x_BT.role_B[b]): x_BT["logprobs"][b][x_BT.mask_BT[b]] for b in rows}
            m = c.beta * answers[0].mean() - c.beta * answers[1].mean() - c.gamma
            if c.loss_type == "hinge":
                pairs.append(torch.clamp(1 - m, min=0))
            else:
                e = c.label_smoothing
                pairs.append((1 - e) * torch.log1p(torch.exp(-m)) + e * torch.log1p(torch.exp(m)))
            nll, tokens = nll - answers[0].sum(), tokens + len(answers[0])
        return sum(pairs) / len(pairs) + c.nll_coef * nll / tokens
