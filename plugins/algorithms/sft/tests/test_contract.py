"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_sft import DFT, NLL, SFT
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestSFT(AlgorithmContract):
    algorithm = SFT


class TestSFTByRows(AlgorithmContract):
    algorithm = SFT
    parts = {"loss": lambda: NLL(NLL.Config(reduce="seq_mean_token_mean"))}


class TestNLL(LossContract):
    loss = NLL
    configs = (NLL.Config(), NLL.Config(reduce="seq_mean_token_mean"))

    def statement(self, x_BT):
        nll_BT = -x_BT["logprobs"] * x_BT.mask_BT
        tokens_B = x_BT.mask_BT.sum(1)
        if x_BT.config.reduce == "token_mean":
            return nll_BT.sum() / tokens_B.sum()
        live_B = tokens_B > 0
        return (nll_BT.sum(1)[live_B] / tokens_B[live_B]).mean()


class TestSmoothed(LossContract):
    loss = NLL
    configs = (NLL.Config(label_smoothing=0.1), NLL.Config(label_smoothing=0.5, reduce="seq_mean_token_mean"))

    def statement(self, x_BT):
        e, logits_BTV = x_BT.config.label_smoothing, x_BT.read_by("mean_logprob")
        spread_BT = -torch.log_softmax(logits_BTV, -1).mean(-1)
        return mean(-(1 - e) * x_BT["logprobs"] + e * spread_BT, x_BT)


class TestDFT(LossContract):
    loss = DFT
    configs = (DFT.Config(), DFT.Config(reduce="seq_mean_token_mean"))

    def statement(self, x_BT):
        return mean(-x_BT["logprobs"].exp().detach() * x_BT["logprobs"], x_BT)


class TestSFTSmoothed(AlgorithmContract):
    algorithm = SFT
    parts = {"loss": lambda: NLL(NLL.Config(label_smoothing=0.1))}


def mean(values_BT, x_BT):
    m = x_BT.mask_BT
    if x_BT.config.reduce == "token_mean":
        return values_BT[m].mean()
    return torch.stack([row[mask_T].mean() for row, mask_T in zip(values_BT, m, strict=True) if mask_T.any()]).mean()
