"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_reward_model import PairwiseLoss, RewardModel
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestRewardModel(AlgorithmContract):
    algorithm = RewardModel
    configs = (RewardModel.Config(), RewardModel.Config(moments_decay=0.0))


class TestPairwise(LossContract):
    loss = PairwiseLoss
    levels = {"margin": "unit"}
    configs = (
        PairwiseLoss.Config(),
        PairwiseLoss.Config(loss_type="logexp"),
        PairwiseLoss.Config(center_coef=0.5),
        PairwiseLoss.Config(loss_type="logexp", center_coef=0.01),
    )

    def statement(self, x_BT):
        """Pair by pair, with the definition log(1 + exp(-d)) in the form that cannot overflow."""
        total, live = 0.0, 0
        for u in range(int(x_BT.unit_B.max()) + 1):
            rows = (x_BT.unit_B == u).nonzero()[:, 0]
            if not x_BT.mask_BT[rows].any():
                continue
            scores = {int(x_BT.role_B[b]): x_BT["scores"][b] for b in rows}
            d = scores[0] - scores[1] - x_BT["margin"][u]
            total = total + torch.logaddexp(torch.zeros_like(d), -d)
            total = total + x_BT.config.center_coef * (scores[0] + scores[1]) ** 2
            live += 1
        return total / live
