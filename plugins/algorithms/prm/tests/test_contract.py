"""The conformance suites of the algorithm, its loss and the reward."""

from __future__ import annotations

import json
import math

import pytest
import torch
from rlhf_plugin_prm.algorithm import ProcessRewardModel
from rlhf_plugin_prm.heads import step_logits
from rlhf_plugin_prm.reward import ProcessReward
from rlhf_plugin_prm.step_labels import StepLabels
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract
from rlhf_testing.reward import RewardContract


class TestAlgorithm(AlgorithmContract):
    algorithm = ProcessRewardModel
    configs = (
        ProcessRewardModel.Config(),
        ProcessRewardModel.Config(head="lm", label_tokens=("+", "-")),
    )


class TestLoss(LossContract):
    loss = StepLabels
    configs = (StepLabels.Config(), StepLabels.Config(reduce="seq_mean_token_mean"))

    def column(self, name, size, seed):
        """Hard labels, and every third one soft."""
        values = torch.rand(size, generator=torch.Generator().manual_seed(seed))
        return torch.where(torch.arange(size) % 3 == 0, values, (values > 0.5).float())

    def statement(self, x_BT):
        """Softmax over the two outputs, then the cross-entropy against (1 - p, p)."""
        l_BT, p_BT = x_BT["step_logits"], x_BT["step_label"]
        two_BTC = torch.log_softmax(torch.stack([torch.zeros_like(l_BT), l_BT], -1), -1)
        ce_BT = -(1 - p_BT) * two_BTC[..., 0] - p_BT * two_BTC[..., 1]
        ce_BT = torch.where(x_BT.mask_BT, ce_BT, 0.0)
        steps_B = x_BT.mask_BT.sum(1)
        if x_BT.config.reduce == "token_mean":
            return ce_BT.sum() / steps_B.sum()
        live_B = steps_B > 0
        return (ce_BT.sum(1)[live_B] / steps_B[live_B]).mean()


class TestLossOfLabelTokens(TestLoss):
    def build(self, config):
        loss = StepLabels(config)
        loss.head = step_logits(right=7, wrong=3)
        return loss


class Process(RewardContract):
    """Steps end in ``;``; one answer has none, one is empty, one is cut."""

    reward = ProcessReward
    answers = ("1+1=2;2+2=4;", "no step", "", ";; 5;", "a;" * 101)
    settings: dict = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "-", "1": "+"}}
    options: dict = {}

    @pytest.fixture(autouse=True)
    def model(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **self.settings}))
        base = {"model": str(tmp_path), "separator": ";", **self.options}
        variants = ({}, {"role": "judge", "aggregate": "product"}, {"without_steps": "last_token", "baseline": 0.5})
        self.configs = tuple(ProcessReward.Config(**base, **other) for other in variants)

    def probability(self, text: str, right: int, wrong: int, size: int) -> float:
        """Of the suite's stand-in for the model, after ``text``."""
        head = step_logits(right, wrong)
        outputs = fabricate.values(f"process_reward_model/{list(text.encode())}", size, 0)[None]
        return 1 / (1 + math.exp(-float(head.fn(outputs, None, {}, head.constants)[0])))

    def outputs(self) -> tuple[int, int, int]:
        return (1, 0, 2)

    @pytest.fixture(autouse=True)
    def expected(self, model):
        prompt = self.columns["prompt"]
        first, second = (self.probability(prompt + text, *self.outputs()) for text in ("1+1=2;", "1+1=2;2+2=4;"))
        by_value = self.credit == "outcome"
        self.cases = [
            ({}, "1+1=2;2+2=4;", min(first, second) if by_value else None),
            ({}, "no step", None),
            ({}, "", None),
        ]


class TestReward(Process):
    pass


class TestStepCredit(Process):
    credit = "step"


class TestLabelTokens(Process):
    settings = {"architectures": ["Qwen3ForCausalLM"], "right_token_id": 43, "wrong_token_id": 45}

    def outputs(self):
        return (43, 45, 256)


class TestNamedLabelTokens(Process):
    settings = {"architectures": ["Qwen3ForCausalLM"], "right_token_id": 1, "wrong_token_id": 2}
    options = {"label_tokens": ("Y", "N")}

    def outputs(self):
        return (ord("Y"), ord("N"), 256)
