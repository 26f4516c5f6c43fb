"""The conformance suites of the loss, for every type, and of the algorithms."""

from __future__ import annotations

import torch
from rlhf_plugin_dpo import DPO, DPOLoss, OnlineDPO
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract

Config = DPOLoss.Config


class DPOContract(LossContract):
    """The statement is on padded rows, in plain exponentials and logarithms of float64."""

    loss = DPOLoss
    data = "pairs"
    levels = {"aot_reference": "unit", "aot_rejected": "unit", "aot_chosen": "unit"}

    def column(self, name, size, seed):
        return fabricate.values("logprobs" if name == "now_logprobs" else name, size, seed)

    def statement(self, x):
        c, chosen_B = x.config, x.role_B == 0
        tokens_B = x.mask_BT.sum(1)
        live_U = (tokens_B[chosen_B] + tokens_B[~chosen_B]) > 0
        counted_BT = x.mask_BT * (1.0 if c.ld_alpha is None else tail(x, c.ld_alpha))
        plain_B, logp_B = (x["logprobs"] * x.mask_BT).sum(1), (x["logprobs"] * counted_BT).sum(1)
        ref_B = torch.zeros_like(logp_B) if c.reference_free else (x["ref_logprobs"] * counted_BT).sum(1)

        def sides(values_B):
            return values_B[chosen_B][live_U], values_B[~chosen_B][live_U]

        score_B = score(logp_B - ref_B, c)
        total = 0.0
        for name, weight in c.types.items():
            if name == "sft":
                value = -plain_B[chosen_B].sum() / tokens_B[chosen_B].sum()
            else:
                value = formula(name, c, sides(logp_B), sides(ref_B), sides(score_B), sides(tokens_B.clamp(min=1)))
                value = (value * own_weight(x, sides)).mean() if c.wpo else value.mean()
            total = total + weight * value
        if c.nll_coef:
            nll_U = -plain_B[chosen_B] / tokens_B[chosen_B].clamp(min=1)
            total = total + c.nll_coef * nll_U[tokens_B[chosen_B] > 0].mean()
        return total


def tail(x, alpha):
    """[B, T]: alpha at trained tokens beyond as many as the pair's other answer has."""
    weight_BT = torch.ones(x.mask_BT.shape, dtype=torch.float64)
    for b in range(len(x.role_B)):
        (other,) = ((x.unit_B == x.unit_B[b]) & (x.role_B != x.role_B[b])).nonzero()[0].tolist()
        weight_BT[b, x.mask_BT[b].nonzero()[x.mask_BT[other].sum() :, 0]] = alpha
    return weight_BT


def own_weight(x, sides):
    """[pairs]: the product of both answers' geometric means of p(token) / sum of p^2."""
    mean_B = ((x["logprobs"] - x["log_sum_squares"]).detach() * x.mask_BT).sum(1) / x.mask_BT.sum(1).clamp(min=1)
    chosen, rejected = sides(mean_B)
    return chosen.exp() * rejected.exp()


def score(u_B, c):
    if c.f_divergence == "forward_kl":
        return 1 - (-u_B).exp()
    if c.f_divergence == "js_divergence":
        return (2 * u_B.exp() / (1 + u_B.exp())).log()
    if c.f_divergence == "alpha_divergence":
        return (u_B.exp() ** (c.f_alpha - 1) - 1) / (c.f_alpha - 1)
    return u_B


def log_sigmoid(x):
    return -(1 + (-x).exp()).log()


def smoothed(x, eps):
    return -(1 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x)


def formula(name, config, logp, ref, scores, lengths):
    """[pairs]: every type's formula once more, from (chosen, rejected) sums of the policy and the reference."""
    beta, eps, tau = config.beta, config.label_smoothing, config.discopop_tau
    c, r = logp[0] - ref[0], logp[1] - ref[1]
    h = scores[0] - scores[1]
    mean_h = scores[0] / lengths[0] - scores[1] / lengths[1]
    p = 1 / (1 + (-beta * h).exp())
    blend = 1 / (1 + (-beta * h / tau).exp())
    shift = 0.3 if config.bco_shift == "running" else 0.0
    formulas = {
        "sigmoid": lambda: smoothed(beta * h, eps),
        "sigmoid_norm": lambda: smoothed(beta * mean_h, 0),
        "hinge": lambda: (1 - beta * h).clamp(min=0),
        "ipo": lambda: ((mean_h if config.ipo == "mean" else h) - 0.5 / beta) ** 2,
        "robust": lambda: (-(1 - eps) * p.log() + eps * (1 - p).log()) / (1 - 2 * eps),
        "exo_pair": lambda: p * (p / (1 - eps)).log() + (1 - p) * ((1 - p) / eps).log(),
        "nca_pair": lambda: -log_sigmoid(beta * c) - log_sigmoid(-beta * c) / 2 - log_sigmoid(-beta * r) / 2,
        "bco_pair": lambda: -log_sigmoid(beta * c - shift) - log_sigmoid(-(beta * r - shift)),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - (beta * c).sigmoid() + (beta * r).sigmoid(),
        "apo_down": lambda: (beta * c).sigmoid() + 1 - (beta * (c - r)).sigmoid(),
        "discopop": lambda: -(1 - blend) * p.log() + blend * (-beta * h).exp(),
        "aot": lambda: smoothed(beta * ((logp[0] - logp[1]).sort().values - (ref[0] - ref[1]).sort().values), eps),
        "aot_unpaired": lambda: smoothed(beta * (c.sort().values - r.sort().values), eps),
    }
    return formulas[name]()


class TestDPOLoss(DPOContract):
    coef = {"bco_shift": 0.3}
    without_effect = {
        "loss_type = 'robust'": "without label_smoothing it is the sigmoid loss",
        "loss_type = 'aot'": "without a reference it is the sigmoid loss",
        "reference_free": "with 'sft' alone, which reads the reference for metrics only",
    }
    configs = (
        Config(),
        Config(beta=0.5, label_smoothing=0.1),
        Config(reference_free=True),
        Config(nll_coef=0.2),
        Config(f_divergence="forward_kl"),
        Config(f_divergence="js_divergence"),
        Config(f_divergence="alpha_divergence", f_alpha=0.3),
        Config(loss_type="sigmoid_norm", beta=2.0),
        Config(loss_type="ipo"),
        Config(loss_type="ipo", beta=0.3, ipo="sum"),
        Config(loss_type="ipo", f_divergence="alpha_divergence"),
        Config(loss_type="hinge"),
        Config(loss_type="robust"),
        Config(loss_type="robust", label_smoothing=0.2),
        Config(loss_type="exo_pair", label_smoothing=0.2, beta=1.0),
        Config(loss_type="discopop"),
        Config(loss_type="discopop", discopop_tau=1.0),
        Config(loss_type="nca_pair"),
        Config(loss_type="bco_pair"),
        Config(loss_type="bco_pair", bco_shift="running"),
        Config(loss_type="sppo_hard"),
        Config(loss_type="apo_zero"),
        Config(loss_type="apo_down", beta=1.0),
        Config(loss_type="aot", label_smoothing=0.2),
        Config(loss_type="aot", reference_free=True),
        Config(loss_type="aot_unpaired", label_smoothing=0.2, beta=1.0),
        Config(ld_alpha=0.4, nll_coef=0.1),
        Config(loss_type=("ipo", "sft"), ld_alpha=0.0),
        Config(loss_type=("aot", "aot_unpaired"), ld_alpha=0.4),
        Config(wpo=True, nll_coef=0.1),
        Config(loss_type=("ipo", "bco_pair"), wpo=True, reference_free=True),
        Config(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0)),
        Config(loss_type=("aot", "ipo", "aot_unpaired", "robust"), label_smoothing=0.1, loss_weights=(1, 0.1, 2, -0.5)),
        Config(loss_type="sft", reference_free=True),
    )


def part(**options):
    return {"loss": lambda: DPOLoss(Config(**options))}


class TestDPO(AlgorithmContract):
    algorithm = DPO
    configs = (DPO.Config(), DPO.Config(snapshot_every=1))


class TestDPOWithSortedLoss(AlgorithmContract):
    algorithm = DPO
    parts = part(loss_type=("aot", "aot_unpaired"), nll_coef=0.1)


class TestDPOWithRunningShift(AlgorithmContract):
    algorithm = DPO
    parts = part(loss_type="bco_pair", bco_shift="running")
    steps = 3


class TestDPOWithoutReference(AlgorithmContract):
    algorithm = DPO
    parts = part(reference_free=True)


class TestDPOWithWeights(AlgorithmContract):
    algorithm = DPO
    parts = part(wpo=True, ld_alpha=0.5)


class TestOnlineDPO(AlgorithmContract):
    algorithm = OnlineDPO
    configs = (OnlineDPO.Config(), OnlineDPO.Config(pairs="all", min_gap=0.1, minibatches=2, snapshot_every=2))
