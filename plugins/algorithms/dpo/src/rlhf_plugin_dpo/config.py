"""Options of the loss ``dpo``, and the loss types that use them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig

from rlhf_plugin_dpo.objectives import Divergence

LossType = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
"""Loss types that read ``label_smoothing``."""
MARGIN_ONLY = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
"""Loss types for which divergences other than the reverse KL are defined."""
SORTED = ("aot", "aot_unpaired")
"""Loss types that compare the sorted values of the whole optimizer batch."""


class DPOConfig(ComponentConfig):
    """The loss to minimise: one type, or a weighted sum of several."""

    loss_type: LossType | tuple[LossType, ...] = "sigmoid"
    """``sigmoid``, ``ipo``, ``hinge``, ``robust``, ``exo_pair``, ``nca_pair``, ``bco_pair``, ``sppo_hard``, ``aot``,
    ``aot_unpaired``, ``apo_zero``, ``apo_down``, ``discopop``, ``sft``, ``sigmoid_norm``; a list adds several."""
    loss_weights: tuple[float, ...] | None = None
    """One factor per type. Default: 1 each."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the regularisation towards the reference; for ``ipo`` the paper's tau."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of wrong preferences, for ``sigmoid`` (conservative DPO), ``robust``, ``aot``,
    ``aot_unpaired`` and ``exo_pair``, which needs it (e.g. 1e-3)."""
    reference_free: bool = False
    """Treat the reference as uniform: its log-probs are 0 and no reference model is loaded."""
    ipo: Literal["mean", "sum"] = "mean"
    """``ipo`` compares log-ratios averaged over an answer's tokens (paper, TRL) or their sums (OpenRLHF)."""
    discopop_tau: float = Field(default=0.05, gt=0, le=1)
    """Temperature of the blend in ``discopop``."""
    bco_shift: Literal["none", "running"] = "none"
    """What ``bco_pair`` subtracts from rewards: nothing (TRL 1.16), or their running mean over all earlier steps."""
    f_divergence: Divergence = "reverse_kl"
    """Divergence of policy and reference: ``reverse_kl``, ``forward_kl``, ``js_divergence``, ``alpha_divergence``. All
    but ``reverse_kl`` need a reference."""
    f_alpha: float = 0.5
    """alpha of the alpha-divergence: 1 is the reverse KL, 0 the forward KL, as in TRL."""
    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """LD-DPO: weight of the longer answer's tokens beyond the length of the shorter one. Default: 1."""
    wpo: bool = False
    """WPO: weigh each pair by the probability that the policy generates its answers. Not with ``aot``, ``aot_unpaired``
    and ``sft``."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Coefficient of an additional term: the mean over pairs of the chosen answer's mean NLL per token (OpenRLHF's
    ``nll_loss_coef``). The type ``sft`` is TRL's form: the mean over all chosen tokens."""

    @property
    def types(self) -> dict[LossType, float]:
        """{loss type: weight}."""
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        return dict(zip(names, self.loss_weights or (1.0,) * len(names), strict=True))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        if not names or len(set(names)) < len(names):
            raise ValueError(f"loss_type needs at least one loss type, each only once, got {list(names)}")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ValueError(f"loss_weights needs one number for each of {list(names)}, got {list(self.loss_weights)}")
        if "exo_pair" in names and self.label_smoothing == 0:
            raise ValueError(
                "exo_pair needs label_smoothing above 0 (1e-3 in its paper), because the loss takes its logarithm"
            )
        other_losses = [n for n in names if n not in MARGIN_ONLY]
        if self.f_divergence != "reverse_kl" and other_losses:
            raise ValueError(
                f"f_divergence = {self.f_divergence!r} is defined for losses of the margin alone "
                f"({', '.join(MARGIN_ONLY)}); {', '.join(other_losses)} need reverse_kl"
            )
        if self.f_divergence != "reverse_kl" and self.reference_free:
            raise ValueError(
                f"f_divergence = {self.f_divergence!r} cannot be combined with reference_free: the probability that a "
                "uniform reference gives an answer cancels only in the margin of reverse_kl, and 0 in place of its "
                "logarithm makes the scores of long answers exp(40). Use reverse_kl, or a reference"
            )
        unweighted = [n for n in names if n in (*SORTED, "sft")]
        if self.wpo and unweighted:
            raise ValueError(
                f"wpo weights pairs, but {', '.join(unweighted)} has no value for a single pair; remove one of the two"
            )
        if self.ld_alpha is not None and names == ("sft",):
            raise ValueError(
                f"ld_alpha = {self.ld_alpha:g} weights log-ratios, which sft does not read; remove ld_alpha"
            )
        self._refuse_idle(names)
        return self

    def _refuse_idle(self, names: tuple[str, ...]) -> None:
        """Refuse options that have no effect."""
        readers = {
            "label_smoothing": SMOOTHED,
            "ipo": ("ipo",),
            "discopop_tau": ("discopop",),
            "bco_shift": ("bco_pair",),
        }
        for option, losses in readers.items():
            value = getattr(self, option)
            if value != type(self).model_fields[option].default and not set(losses) & set(names):
                raise ValueError(f"{option} = {value!r} is read by {', '.join(losses)} only, not by {', '.join(names)}")
        if self.f_alpha != 0.5 and self.f_divergence != "alpha_divergence":
            raise ValueError(f"f_alpha = {self.f_alpha:g} is read with f_divergence = 'alpha_divergence' only")
