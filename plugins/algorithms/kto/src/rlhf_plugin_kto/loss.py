"""The KTO loss: an answer's log-ratio to the reference, compared with the policy's average log-ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import Annotation, Head, LossOutput, Reduce

from rlhf_plugin_kto.twins import ANSWER, TWIN, TWIN_MASK

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput
    from torch import Tensor

RISE = 2.0
"""Nats by which the policy's log-prob exceeds the reference's at each token of a mismatched answer."""


def twin_tokens(unit: int) -> int:
    """Number of tokens of a unit's mismatched answer; 0 for the first unit."""
    return 1 + unit % 3 if unit else 0


def with_twins(suite: Any, batch: Batch, seed: int) -> Batch:
    """The suite's units. Each except the first gets a mismatched answer after a prompt of one token (``assembled`` of
    :class:`rlhf_testing.loss.LossContract`)."""
    import torch
    from rlhf.ops.packing import SequenceData, UnitData, pack

    units = []
    for u in range(batch.units):
        single, n = batch.select([u]), twin_tokens(u)
        columns = {name: values.tolist() for name, values in single.tok.items()}
        sequences = [SequenceData(single.ids_N.tolist(), {**columns, TWIN_MASK: [False] * single.tokens})]
        if n:
            tok = {name: [values[0]] * (n + 1) for name, values in columns.items()}
            masks = {"loss_mask": [False] * (n + 1), TWIN_MASK: [False] + [True] * n}
            sequences.append(SequenceData([7] * (n + 1), {**tok, **masks}, TWIN))
        units.append(UnitData(sequences, {"label": bool(single.unit["label"][0])}))
    twin_batch = pack(units)
    reference_N = -1.0 - torch.arange(twin_batch.tokens) % 4
    twin_batch = twin_batch.with_column("tok", "twin_ref_logprobs", reference_N, over=TWIN_MASK)
    return twin_batch.with_column("tok", "twin_logprobs", reference_N + RISE, over=TWIN_MASK)


class KTOConfig(ComponentConfig):
    loss_type: Literal["kto", "vanilla", "apo_zero_unpaired"] = "kto"
    """The value z that an answer's log-ratio is compared with. ``kto``: the policy's drift on mismatched answers.
    ``vanilla``: the drift on the batch's answers with the other label. ``apo_zero_unpaired``: 0."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the reward beta x log-ratio. A larger beta saturates earlier."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """lambda_D, of desirable answers. With n_D and n_U rows of each kind, the paper recommends that (desirable_weight x
    n_D) / (undesirable_weight x n_U) is between 1 and 4/3."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """lambda_U, of undesirable answers."""


def twin_logprobs() -> Head:
    """Log-probs of the mismatched answers' tokens. The name differs from that of the rows' own log-probs, which are
    annotated too."""
    from rlhf.ops.heads import LOGPROBS

    return Head("twin_logprobs", LOGPROBS.fn, over=TWIN_MASK)


class KTOLoss(Loss):
    """lambda_D (1 - sigma(beta (h - z))) for desirable answers, lambda_U (1 - sigma(beta (z - h))) for others, the mean
    over answers (Ethayarajh et al. 2024, equation 7); h = log pi(y|x) - log pi_ref(y|x), sums over the tokens of y.

    z has no gradient. It is computed with the weights right before the step, over the whole optimizer batch. ``kto``:
    max(0, mean of h over mismatched answers), one number. ``vanilla``: max(0, mean of h over the batch's answers of the
    other kind), 0 if there are none. ``apo_zero_unpaired``: 0 (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    Metrics: ``kl`` (mean of z; not for APO); ``desirable_reward`` and ``undesirable_reward``, beta h, and
    ``desirable_logprobs`` and ``undesirable_logprobs``, means over the answers of a kind and absent where the batch has
    none; ``accuracy``, the share of answers on the right side (h > z for desirable ones, h < z for others; h = z
    is one half);
    ``desirable``, the share of desirable answers.

    Deviations: (1) z is computed over the optimizer batch, however it is split into micro-batches and ranks. (2) No
    gradient flows through z in ``vanilla`` either.
    """

    name = "kto"
    source = "Ethayarajh et al. 2024, arXiv:2402.01306, equation 7"
    Config = KTOConfig
    data = "labels"
    conformance = {"levels": {"kl": "unit"}, "assembled": with_twins}

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        return ("ref_logprobs", "label", *(() if self.config.loss_type == "apo_zero_unpaired" else ("kl",)))

    def reduce(self) -> dict[str, Reduce]:
        return {"kto": Reduce("unit_mean")}

    def prepass(self) -> tuple[Annotation, ...]:
        if self.config.loss_type == "kto":
            return (Annotation("policy", twin_logprobs(), "twin_logprobs", per_row=False),)
        if self.config.loss_type == "vanilla":
            return (Annotation("policy", "logprobs", "own_logprobs"),)
        return ()

    def prepare(self, batch: Batch) -> Batch:
        """Store z in the unit column ``kl``, and drop the mismatched answers: only the rows' own answers are trained
        on."""
        if self.config.loss_type == "kto":
            kl = mismatched_drift(batch)
            batch = batch.keep(batch.role_B == ANSWER)
            return batch.with_column("unit", "kl", batch.unit["label"].double().fill_(kl))
        if self.config.loss_type == "vanilla":
            return batch.with_column("unit", "kl", other_kinds_drift(batch))
        return batch

    def __call__(self, x: LossInput) -> LossOutput:
        import torch

        c, logprobs_A = self.config, x["logprobs"]
        h_U = x.of_role(x.sum_per_sequence(logprobs_A - x["ref_logprobs"]), ANSWER)
        desirable_U = x["label"]
        z_U = torch.zeros_like(h_U) if c.loss_type == "apo_zero_unpaired" else x["kl"].to(h_U.dtype)
        gain_U = torch.where(desirable_U, h_U - z_U, z_U - h_U)
        weight_U = torch.where(desirable_U, c.desirable_weight, c.undesirable_weight)
        loss_U = weight_U * torch.sigmoid(-c.beta * gain_U)  # 1 - sigma(v) = sigma(-v), without the cancellation
        lp_U = x.of_role(x.sum_per_sequence(logprobs_A), ANSWER)
        metrics: dict[str, Any] = {
            "desirable_reward": ("unit", c.beta * h_U, desirable_U),
            "undesirable_reward": ("unit", c.beta * h_U, ~desirable_U),
            "desirable_logprobs": ("unit", lp_U, desirable_U),
            "undesirable_logprobs": ("unit", lp_U, ~desirable_U),
            "accuracy": ("unit", (1 + gain_U.sign()) / 2),
            "desirable": ("unit", desirable_U.float()),
        }
        if c.loss_type != "apo_zero_unpaired":
            metrics["kl"] = ("unit", z_U)
        return LossOutput({"kto": loss_U}, metrics)


def mismatched_drift(batch: Batch) -> float:
    """max(0, mean over the mismatched answers of the sum of log pi - log pi_ref); 0 if there are none.

    Raises TrainingError if the batch was built without mismatched answers.
    """
    from rlhf.errors import TrainingError

    if TWIN_MASK not in batch.tok:
        raise TrainingError(
            f"loss 'kto' with loss_type = 'kto' needs mismatched answers under the mask {TWIN_MASK!r}; the batch has "
            f"the token columns {sorted(batch.tok)}. Use the algorithm kto or kto_pair, or another loss_type"
        )
    mask_N = batch.tok[TWIN_MASK]
    # Not the number of units: a row may have no mismatched answer, or one without a trained token after a cut.
    answers = int(batch.seq_N[mask_N].unique().numel())
    drift = (batch.tok["twin_logprobs"].double() - batch.tok["twin_ref_logprobs"].double())[mask_N].sum()
    return max(0.0, float(drift) / answers) if answers else 0.0


def other_kinds_drift(batch: Batch) -> Tensor:
    """float64 [U]: max(0, mean of log pi - log pi_ref over the answers of the other kind); 0 if there are none."""
    import torch

    mask_N = batch.tok["loss_mask"]
    drift_N = batch.tok["own_logprobs"].double() - batch.tok["ref_logprobs"].double()
    h_U = torch.zeros(batch.units, dtype=torch.float64).index_add_(0, batch.unit_N[mask_N], drift_N[mask_N])
    desirable_U = batch.unit["label"]
    kl_U = torch.zeros_like(h_U)
    for kind_U in (desirable_U, ~desirable_U):
        if bool((~kind_U).any()):
            kl_U[kind_U] = h_U[~kind_U].mean().clamp(min=0)
    return kl_U
