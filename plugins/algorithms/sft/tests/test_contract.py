"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_sft import DFT, NLL, SFT
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestSFT(AlgorithmContract):
    algorithm = SFT


class TestNLL(LossContract):
    loss = NLL
    configs = (
        NLL.Config(),
        NLL.Config(reduce="seq_mean_token_mean"),
        NLL.Config(label_smoothing=0.1),
        NLL.Config(label_smoothing=0.5, reduce="seq_mean_token_mean"),
    )

    def statement(self, x_BT):
        e = x_BT.config.label_smoothing
        if not e:
            return mean(-x_BT["logprobs"], x_BT)
        spread_BT = -torch.log_softmax(x_BT.read_by("mean_logprob"), -1).mean(-1)
        return mean(-(1 - e) * x_BT["logprobs"] + e * spread_BT, x_BT)


class TestDFT(LossContract):
    loss = DFT
    configs = (DFT.Config(), DFT.Config(reduce="seq_mean_token_mean"))

    def statement(self, x_BT):
        return mean(-x_BT["logprobs"].exp().detach() * x_BT["logprobs"], x_BT)


def mean(values_BT, x_BT):
    m = x_BT.mask_BT
    if x_BT.config.reduce == "token_mean":
        return values_BT[m].mean()
    return torch.stack([row[mask_T].mean() for row, mask_T in zip(values_BT, m, strict=True) if mask_T.any()]).mean()
