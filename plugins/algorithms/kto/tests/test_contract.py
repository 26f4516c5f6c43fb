"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_kto import KTO, KTOLoss, KTOPair
from rlhf_plugin_kto.loss import RISE, twin_tokens, with_twins
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


def loss(**config):
    return lambda: KTOLoss(KTOLoss.Config(**config))


class TestKTO(AlgorithmContract):
    algorithm = KTO
    configs = (KTO.Config(), KTO.Config(snapshot_every=1))
    parts = {"loss": loss(desirable_weight=1.3)}


class TestKTOVanilla(AlgorithmContract):
    algorithm = KTO
    parts = {"loss": loss(loss_type="vanilla")}


class TestKTOPair(AlgorithmContract):
    algorithm = KTOPair


def held_against(x_BT, z_of) -> torch.Tensor:
    """The loss answer by answer; ``z_of[label]``."""
    c, values = x_BT.config, []
    for b in range(len(x_BT.mask_BT)):
        if not x_BT.mask_BT[b].any():
            continue
        desirable = bool(x_BT["label"][b])
        h = ((x_BT["logprobs"][b] - x_BT["ref_logprobs"][b]) * x_BT.mask_BT[b]).sum()
        v = c.beta * (h - z_of[desirable]) * (1 if desirable else -1)
        values.append((c.desirable_weight if desirable else c.undesirable_weight) * (1 - torch.sigmoid(v)))
    return sum(values) / len(values)


class TestKTOLoss(LossContract):
    loss = KTOLoss
    levels = {"kl": "unit"}
    configs = (KTOLoss.Config(), KTOLoss.Config(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5))

    def assembled(self, batch, seed):
        return with_twins(self, batch, seed)

    def statement(self, x_BT):
        tokens = [twin_tokens(u) for u in range(1, len(x_BT["label"]))]
        z = RISE * sum(tokens) / len(tokens)
        return held_against(x_BT, {True: z, False: z})


class TestVanillaLoss(LossContract):
    loss = KTOLoss
    levels = {"kl": "unit"}
    configs = (KTOLoss.Config(loss_type="vanilla"), KTOLoss.Config(loss_type="vanilla", desirable_weight=2.0))

    def statement(self, x_BT):
        """An answer without tokens has not moved, and counts."""
        h = ((x_BT["own_logprobs"] - x_BT["ref_logprobs"]) * x_BT.mask_BT).sum(1)
        label = x_BT["label"].bool()
        return held_against(x_BT, {True: h[~label].mean().clamp(min=0), False: h[label].mean().clamp(min=0)})


class TestApoLoss(LossContract):
    loss = KTOLoss
    configs = (KTOLoss.Config(loss_type="apo_zero_unpaired", undesirable_weight=1.5),)

    def statement(self, x_BT):
        return held_against(x_BT, {True: 0.0, False: 0.0})
