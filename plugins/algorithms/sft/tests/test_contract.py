"""The conformance suites of algorithms and losses."""

from rlhf.testing.algorithm import AlgorithmContract
from rlhf.testing.loss import LossContract
from rlhf_plugin_sft import NLL, SFT


class TestSFT(AlgorithmContract):
    algorithm = SFT


class TestSFTByRows(AlgorithmContract):
    algorithm = SFT
    parts = {"loss": lambda: NLL(NLL.Config(reduce="seq_mean_token_mean"))}


class TestNLL(LossContract):
    loss = NLL
    data = "demonstrations"
    configs = (NLL.Config(), NLL.Config(reduce="seq_mean_token_mean"))

    def statement(self, x_BT):
        nll_BT = -x_BT["logprobs"] * x_BT.mask_BT
        tokens_B = x_BT.mask_BT.sum(1)
        if x_BT.config.reduce == "token_mean":
            return nll_BT.sum() / tokens_B.sum()
        live_B = tokens_B > 0
        return (nll_BT.sum(1)[live_B] / tokens_B[live_B]).mean()
