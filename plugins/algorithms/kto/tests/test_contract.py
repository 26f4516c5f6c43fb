"""The conformance suites of algorithms and losses."""

import torch
from rlhf.ops.batch import SequenceData, UnitData, pack
from rlhf.testing import fabricate
from rlhf.testing.algorithm import AlgorithmContract
from rlhf.testing.loss import LossContract
from rlhf_plugin_kto import KTO, KTOLoss, KTOPair


def loss(**config):
    return lambda: KTOLoss(KTOLoss.Config(**config))


class TestKTO(AlgorithmContract):
    algorithm = KTO
    parts = {"loss": loss(desirable_weight=1.3)}


class TestKTOVanilla(AlgorithmContract):
    algorithm = KTO
    parts = {"loss": loss(loss_type="vanilla")}


class TestKTOPair(AlgorithmContract):
    algorithm = KTOPair


class TestKTOPairApo(AlgorithmContract):
    algorithm = KTOPair
    parts = {"loss": loss(loss_type="apo_zero_unpaired")}


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
    data = "labels"
    levels = {"kl": "unit"}
    configs = (KTOLoss.Config(), KTOLoss.Config(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5))

    def assembled(self, batch, seed):
        """With a mismatched answer of one to three tokens behind each unit but the first, on which the policy has moved
        up by 2 nats a token."""
        units = []
        for u in range(batch.units):
            one = batch.select([u])
            own = {name: values.tolist() for name, values in one.tok.items()}
            blank = [False] * one.tokens
            sequences = [SequenceData(one.ids_N.tolist(), {**own, "twin_mask": blank})]
            if u:
                n = 1 + u % 3
                tok = {
                    "loss_mask": [False] * (n + 1),
                    "twin_mask": [False] + [True] * n,
                    "temperature": [1.0] * (n + 1),
                }
                sequences.append(SequenceData([7] * (n + 1), tok, role=1))
            units.append(UnitData(sequences, {"label": bool(one.unit["label"][0])}))
        made = pack(units)
        reference_N = fabricate.values("twin_ref_logprobs", made.tokens, seed)
        made = made.with_column("tok", "twin_ref_logprobs", reference_N, over="twin_mask")
        return made.with_column("tok", "twin_logprobs", reference_N + 2.0, over="twin_mask")

    def statement(self, x_BT):
        z = 2.0 * sum(1 + u % 3 for u in range(1, len(x_BT["label"]))) / (len(x_BT["label"]) - 1)
        return held_against(x_BT, {True: z, False: z})


class TestVanillaLoss(LossContract):
    loss = KTOLoss
    data = "labels"
    levels = {"kl": "unit"}
    configs = (KTOLoss.Config(loss_type="vanilla"), KTOLoss.Config(loss_type="vanilla", desirable_weight=2.0))

    def statement(self, x_BT):
        """An answer without tokens has not moved, and counts."""
        h = ((x_BT["own_logprobs"] - x_BT["ref_logprobs"]) * x_BT.mask_BT).sum(1)
        label = x_BT["label"].bool()
        return held_against(x_BT, {True: h[~label].mean().clamp(min=0), False: h[label].mean().clamp(min=0)})


class TestApoLoss(LossContract):
    loss = KTOLoss
    data = "labels"
    configs = (KTOLoss.Config(loss_type="apo_zero_unpaired", undesirable_weight=1.5),)

    def statement(self, x_BT):
        return held_against(x_BT, {True: 0.0, False: 0.0})
