"""Options that all trainers of transformers models share: learning rate, schedule, clipping, averages, head."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from rlhf.interfaces.component import ComponentConfig

from rlhf_modeling.adapters import LoraOptions
from rlhf_modeling.kernels import Kernels


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class TrainingConfig(ComponentConfig):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    betas: Annotated[tuple[float, float], BeforeValidator(_pair)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled; on matrices only, never on norms and biases."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: orthogonalised momentum for the layers' matrices, AdamW for embeddings, heads and vectors."""
    muon_lr: float | None = Field(None, ge=0)
    """Peak learning rate of the matrices under ``muon``; absent: ``lr``."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """``muon`` only."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm; with a very large one (1e9) never."""
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min", "wsd", "inverse_sqrt"] = "constant"
    """After the warm-up, over the optimizer steps of the whole run. ``wsd``: constant, then linear decay over
    the last ``decay_ratio`` of them (Hu et al. 2024, arXiv:2404.06395). ``inverse_sqrt``: sqrt(w / step), w the step
    after the warm-up (Vaswani et al. 2017, arXiv:1706.03762)."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Warm-up as a share of all optimizer steps; instead of ``warmup_steps``."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """``cosine_with_min`` and ``wsd`` only: where it ends, as a share of ``lr``; where absent 0.1 and 0."""
    decay_ratio: float | None = Field(None, gt=0, le=1)
    """``wsd`` only: the decay as a share of all optimizer steps; 0.1 where absent."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights: ema = decay x ema + (1 - decay) x weights after every
    step. It is what is evaluated (``eval.weights``) and exported; training samples are of the weights themselves.
    Absent: none is kept."""
    lora: LoraOptions | None = None
    """Train low-rank adapters instead of the weights: ``[trainer.lora] rank = 16``. Absent: all weights are trained."""
    neftune_alpha: float | None = Field(None, gt=0)
    """While training, uniform noise of this size over the root of a sequence's elements is added to its embeddings:
    NEFTune (Jain et al. 2023, arXiv:2310.05914; 5 to 15 there). Absent: none."""
    shared_prefixes: bool = True
    """Compute a prefix that sequences of a micro-batch have in common once: the prompt of a group's samples, of a pair.
    Exact; without effect where the model has dropout, or with ``neftune_alpha``. ``false`` is there to compare with."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the auxiliary loss of a mixture of experts, which keeps tokens spread over them; reported as
    ``aux_loss``. A statistic of a micro-batch, so it depends on how batches are split."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """Kernel on a GPU: one call for all sequences (``flash``, bf16), or one per run of equally long ones (``sdpa``).
    ``auto``: ``flash`` where it can be had. A CPU has kernels of its own."""
    kernels: Kernels = "auto"
    """Element-wise work of the layers (norms, rotary embedding, gates): ``own``, forms with fewer passes over memory;
    ``liger``, Liger's kernels, on a GPU (``pip install 'rlhf-kit[liger]'``); ``none``, transformers' statements.
    ``auto``: ``own`` on a CPU where the layers are known, else ``none``."""
    logits_chunk: int = Field(2**24, gt=0)
    """Most logits (tokens x vocabulary) that exist at once; beyond it the head works in chunks that are computed again
    in the backward pass. 2**24 are 64 MiB."""
    head_fp32: bool = True
    """Under bf16, compute the head's logits in fp32 all the same: log-probs then do not carry the rounding of bf16
    logits."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        for name in ("muon_lr", "muon_momentum"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.optimizer != "muon":
                raise ValueError(f"{name} = {value} has no effect with optimizer = {self.optimizer!r}")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} both set the warm-up: "
                "give one of them"
            )
        if self.min_lr_ratio is not None and self.schedule not in ("cosine_with_min", "wsd"):
            raise ValueError(
                f"min_lr_ratio = {self.min_lr_ratio} has no effect with schedule = {self.schedule!r}: "
                "set schedule = 'cosine_with_min' or 'wsd', or leave it out"
            )
        if self.decay_ratio is not None and self.schedule != "wsd":
            raise ValueError(
                f"decay_ratio = {self.decay_ratio} has no effect with schedule = {self.schedule!r}: "
                "set schedule = 'wsd' or leave it out"
            )
        return self
