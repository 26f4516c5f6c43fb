"""Cross-entropy of steps against their labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import Head, LossOutput, Reduce

from rlhf_plugin_prm.heads import STEP_END, step_logits

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput
    from torch import Tensor

LABEL = "step_label"


class StepLabelsConfig(ComponentConfig):
    """How the losses of steps are averaged."""

    reduce: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """``token_mean``: every step of the batch counts the same. ``seq_mean_token_mean``: every solution does."""


class StepLabels(Loss):
    """-p log sigma(l) - (1 - p) log sigma(-l) for each step: l the model's log-odds that it is right, p its label.

    p = 1 and p = 0 are hard labels. A value between is a soft label, e.g. the share of continuations with a correct
    result. The gradient with respect to l is sigma(l) - p, so it is finite everywhere.

    A solution counts as judged correctly if its first step with sigma(l) < 0.5 is its first step with p < 0.5, or if
    neither exists (ProcessBench: Zheng et al. 2024, arXiv:2412.06559, and QwenLM/ProcessBench, run_eval_prm_trl.py). A
    step without a label that comes after the first wrong one changes nothing.

    Metrics, per step: ``accuracy`` (sigma(l) and p are on the same side of 0.5; p = 0.5 counts as right),
    ``accuracy_right`` and ``accuracy_wrong`` (over the steps with such a label), ``label`` and ``probability`` (the
    means of p and of sigma(l)). Per solution: ``solution_accuracy_wrong`` and ``solution_accuracy_right`` (over the
    solutions with and without a wrong step), and ``solution_f1``, their harmonic mean 2 a b / (a + b). It is 0 if both
    are 0; ProcessBench's script then divides by 0.
    """

    name = "step_labels"
    source = "Lightman et al. 2023, arXiv:2305.20050; Wang et al. 2023, arXiv:2312.08935"
    Config = StepLabelsConfig
    data = "steps"

    def __init__(self, config: ComponentConfig | None = None, head: Head | None = None) -> None:
        """``head``: the log-odds that a step is right; None reads them from a head of two classes."""
        super().__init__(config)
        self.head = step_logits() if head is None else head

    def outputs(self) -> tuple[Head, ...]:
        return (self.head,)

    def columns(self) -> tuple[str, ...]:
        return (LABEL,)

    def reduce(self) -> dict[str, Reduce]:
        return {"cross_entropy": Reduce(self.config.reduce, over=STEP_END)}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        if not {"solution_accuracy_wrong", "solution_accuracy_right"} <= means.keys():
            return {}
        wrong, right = means["solution_accuracy_wrong"], means["solution_accuracy_right"]
        return {"solution_f1": 2 * wrong * right / (wrong + right) if wrong + right else 0.0}

    def __call__(self, x: LossInput) -> LossOutput:
        from torch.nn import functional

        logit_A, p_A = x[self.head.name], x[LABEL]
        loss_A = -p_A * functional.logsigmoid(logit_A) - (1 - p_A) * functional.logsigmoid(-logit_A)
        right_A = p_A >= 0.5
        same_A = ((logit_A >= 0) == right_A).float()
        first_U = _first(~right_A, x)
        same_U = (_first(logit_A < 0, x) == first_U).float()
        is_wrong_U = first_U < x.tokens
        return LossOutput(
            {"cross_entropy": loss_A},
            {
                "accuracy": ("token", same_A),
                "accuracy_right": ("token", same_A, right_A),
                "accuracy_wrong": ("token", same_A, ~right_A),
                "label": ("token", p_A),
                "probability": ("token", logit_A.sigmoid()),
                "solution_accuracy_wrong": ("unit", same_U, is_wrong_U),
                "solution_accuracy_right": ("unit", same_U, ~is_wrong_U),
            },
        )


def _first(mask_A: Tensor, x: LossInput) -> Tensor:
    """[U]: the position among the A steps of each solution's first step under the mask; A if it has none."""
    import torch

    position_A = torch.arange(x.tokens, device=mask_A.device).masked_fill(~mask_A, x.tokens)
    return position_A.new_full((x.units,), x.tokens).scatter_reduce(0, x.unit_A, position_A, "amin")
