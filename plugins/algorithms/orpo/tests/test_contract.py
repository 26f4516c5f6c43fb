"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_orpo import ORPO, ORPOLoss
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestORPO(AlgorithmContract):
    algorithm = ORPO


class TestORPOOnWholeTexts(AlgorithmContract):
    algorithm = ORPO
    parts = {"loss": lambda: ORPOLoss(ORPOLoss.Config(nll_on="all", beta=1.0))}


class TestORPOLoss(LossContract):
    loss = ORPOLoss
    without_effect = {"nll_on": "the fabricated mask of all text is that of the answers"}
    configs = (ORPOLoss.Config(), ORPOLoss.Config(beta=2.0, nll_on="all"), ORPOLoss.Config(beta=0.0))

    def statement(self, x_BT):
        """Pair by pair, the odds as the paper defines them. (Log-probs are below -0.5 here, so nothing is bounded.)"""
        pairs, nll, tokens = [], 0.0, 0
        for u in range(int(x_BT.unit_B.max()) + 1):
            rows = (x_BT.unit_B == u).nonzero()[:, 0]
            if not x_BT.mask_BT[rows].any():
                continue
            answers = {int(x_BT.role_B[b]): x_BT["logprobs"][b][x_BT.mask_BT[b]] for b in rows}
            p_c, p_r = answers[0].mean().exp(), answers[1].mean().exp()
            ratio = (p_c / (1 - p_c)) / (p_r / (1 - p_r))
            pairs.append(-torch.log(ratio / (1 + ratio)))  # sigma(log r) = r / (1 + r)
            nll, tokens = nll - answers[0].sum(), tokens + len(answers[0])
        return nll / tokens + x_BT.config.beta * sum(pairs) / len(pairs)
