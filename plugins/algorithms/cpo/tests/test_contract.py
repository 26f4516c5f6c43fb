"""The conformance suites of algorithms and losses."""

import torch
from rlhf_plugin_cpo import CPO, CPOLoss
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestCPO(AlgorithmContract):
    algorithm = CPO


class TestCPOLoss(LossContract):
    loss = CPOLoss
    configs = (
        CPOLoss.Config(),
        CPOLoss.Config(label_smoothing=0.2, nll_reduce="seq_mean_token_mean"),
        CPOLoss.Config(loss_type="hinge", nll_reduce="seq_mean_token_sum"),
        CPOLoss.Config(loss_type="ipo", beta=0.3, nll_coef=0.5),
        CPOLoss.Config(loss_type="simpo", beta=2.0, nll_coef=0.0),
        CPOLoss.Config(loss_type="simpo", beta=2.5, gamma=1.0, alpha=0.25, nll_coef=0.0),
        CPOLoss.Config(loss_type="sigmoid", alpha=-0.1),
    )

    def statement(self, x_BT):
        """Pair by pair, with probabilities where AlphaPO has them."""
        c, pairs, sums, means, counts = x_BT.config, [], [], [], []
        for u in range(int(x_BT.unit_B.max()) + 1):
            rows = (x_BT.unit_B == u).nonzero()[:, 0]
            if not x_BT.mask_BT[rows].any():
                continue
            answers = {int(x_BT.role_B[b]): x_BT["logprobs"][b][x_BT.mask_BT[b]] for b in rows}
            lp = {r: a.mean() if c.loss_type in ("ipo", "simpo") else a.sum() for r, a in answers.items()}
            r = {k: (1 - v.exp() ** -c.alpha) / c.alpha if c.alpha else v for k, v in lp.items()}
            d = r[0] - r[1]
            if c.loss_type == "ipo":
                pairs.append((d - 0.5 / c.beta) ** 2)
            elif c.loss_type == "hinge":
                pairs.append(torch.clamp(1 - c.beta * d, min=0))
            else:
                m = c.beta * d - (c.gamma if c.loss_type == "simpo" else 0)
                right, wrong = torch.log1p(torch.exp(-m)), torch.log1p(torch.exp(m))
                pairs.append((1 - c.label_smoothing) * right + c.label_smoothing * wrong)
            sums.append(-answers[0].sum())
            means.append(-answers[0].mean())
            counts.append(len(answers[0]))
        nll = {
            "token_mean": sum(sums) / sum(counts),
            "seq_mean_token_mean": sum(means) / len(means),
            "seq_mean_token_sum": sum(sums) / len(sums),
        }
        return sum(pairs) / len(pairs) + c.nll_coef * nll[c.nll_reduce]
