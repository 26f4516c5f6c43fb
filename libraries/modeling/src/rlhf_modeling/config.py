"""Options that all trainers of transformers models share: learning rate, schedule, clipping, averages, head."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig

Kernels = Literal["auto", "own", "liger", "none"]
HeadFp32 = bool | Literal["auto", "sums"]


class LoraOptions(ComponentConfig):
    rank: int = Field(gt=0)
    """Rank of the adapters' two factors."""
    alpha: int | None = Field(None, gt=0)
    """The adapters' product is scaled by ``alpha / rank``; absent: 2 x rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Suffixes of the names of the linear layers that get an adapter (``q_proj``, ``v_proj``); absent: all but the
    head. Experts that are slices of one tensor are not linear layers."""
    vision: bool = False
    """Image-text models: also put adapters on layers of the vision tower and its projector."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the input of an adapter, in training."""
    use_rslora: bool = False
    """Scale the adapters' product by ``alpha / sqrt(rank)`` (Kalajdzievski 2023, arXiv:2312.03732)."""
    use_dora: bool = False
    """Also train the length of every row of an adapted matrix (Liu et al. 2024, arXiv:2402.09353)."""
    modules_to_save: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Suffixes of the names of modules that are fully trained alongside the adapters (``embed_tokens``, ``lm_head``).
    If the head is tied to the embedding, either name trains both. Absent: none. The role's own scalar or classes head
    is always trained."""
    quantization: Literal["nf4", "int8"] | None = None
    """Quantise the frozen linear layers with bitsandbytes: ``nf4``, 4 bits with quantised scales (QLoRA, Dettmers et
    al. 2023, arXiv:2305.14314), or ``int8`` with one scale per row. Absent: fp32."""


class TrainingConfig(ComponentConfig):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW. The default suits training all weights of a model. Adapters (``lora``) and new
    scalar heads usually need ten to a hundred times as much."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices only, not to norms and biases."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: orthogonalised momentum for the layers' matrices, AdamW for embeddings, heads and vectors."""
    muon_lr: float | None = Field(None, ge=0)
    """Peak learning rate of the matrices under ``muon``. Default: ``lr``."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """``muon`` only."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm. A very large value (1e9) turns clipping off."""
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min", "wsd", "inverse_sqrt"] = "constant"
    """Learning rate after the warm-up, over the optimizer steps of the whole run. ``wsd``: constant, then linear decay
    over the share ``decay_ratio`` of the steps at the end (Hu et al. 2024, arXiv:2404.06395). ``inverse_sqrt``:
    sqrt(w / step), where w is the step after the warm-up (Vaswani et al. 2017, arXiv:1706.03762)."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Warm-up as a share of all optimizer steps, instead of ``warmup_steps``."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """``cosine_with_min`` and ``wsd`` only: final learning rate, as a share of ``lr``. Default: 0.1 and 0."""
    decay_ratio: float | None = Field(None, gt=0, le=1)
    """``wsd`` only: length of the decay, as a share of all optimizer steps. Default: 0.1."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights: ema = decay x ema + (1 - decay) x weights after every
    step. The average is evaluated (``eval.weights``) and exported. Training samples are drawn with the weights, not the
    average. Default: no average."""
    lora: LoraOptions | None = None
    """Train low-rank adapters instead of the weights: ``[trainer.lora] rank = 16``. Default: train all weights."""
    quantization: Literal["nf4", "int8"] | None = None
    """Frozen roles only: keep the linear layers in 4 bits (``nf4``) or 8 bits (``int8``), through bitsandbytes. Other
    weights are stored as ``storage`` says. The role's outputs are those of the rounded weights. For a trained role use
    ``lora.quantization``."""
    freeze_vision: bool = False
    """Image-text models: do not train the vision tower and the projector behind it. Adapters never do, unless
    ``lora.vision`` is set."""
    neftune_alpha: float | None = Field(None, gt=0)
    """NEFTune's alpha (Jain et al. 2023, arXiv:2310.05914, who use 5 to 15): in training, uniform noise of size alpha /
    sqrt(number of elements of a sequence's embeddings) is added to the embeddings. Default: no noise."""
    shared_prefixes: bool = True
    """Compute a prefix that sequences of a micro-batch share only once, such as the prompt of a group or of a pair. The
    results are exact. It has no effect if the model has dropout, or with ``neftune_alpha``. ``false`` is for
    comparisons."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the auxiliary loss of a mixture of experts, which keeps tokens spread over them; reported as
    ``aux_loss``. A statistic of a micro-batch, so it depends on how batches are split."""
    router_replay: bool = False
    """For a mixture of experts as policy: in every forward pass, route the tokens of samples to the experts that the
    generator chose (R3, Ma et al. 2025, arXiv:2510.11370). The trainer computes the experts' weights itself. It routes
    tokens without a record and counts them in ``policy/experts_unrecorded``."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """Kernel on a GPU: one call for all sequences (``flash``, bf16), or one per run of sequences of equal length
    (``sdpa``). ``auto``: ``flash`` if available. On a CPU other kernels are used."""
    kernels: Kernels = "auto"
    """Element-wise operations of the layers (norms, rotary embedding, gates): ``own``, versions with fewer passes over
    memory; ``liger``, Liger's kernels, on a GPU (``pip install liger-kernel``); ``none``, transformers' code. ``auto``:
    ``liger`` on a GPU under bf16 if it is installed and supports the layers; else ``own`` if it supports the layers;
    else ``none``. With ``deterministic``, or if the model is divided over ranks, it is ``own`` or ``none``."""
    logits_chunk: int | None = Field(None, gt=0)
    """Largest number of logits (tokens x vocabulary) in memory at once. Beyond it the head computes in chunks of equal
    size, which are recomputed in the backward pass. Default on a GPU: 2**27. On a CPU, for log-probs alone: 2**26 with
    a backward pass, 2**25 without one, and half as many at a temperature other than 1; 2**24 for other outputs."""
    offload_activations: bool = False
    """With ``gradient_checkpointing``: keep the inputs of the layers in host memory between forward and backward,
    pinned on a GPU. Results are bit-equal."""
    deterministic: bool = False
    """Fix the order of sums in the forward and backward passes on a GPU, so that a resume is bit-exact there. This uses
    torch's deterministic algorithms, which are slower. An operation without one raises an error when it is computed. On
    a CPU the order is always fixed."""
    head_fp32: HeadFp32 = "auto"
    """Under bf16, compute the head's logits in fp32, so that log-probs do not have the rounding of bf16 logits.
    ``"sums"``: hidden states and weights are rounded to bf16, sums and logits are fp32. On a GPU this runs on the
    tensor cores. The gradient of the logits is rounded to bf16 too. ``"auto"``: ``"sums"`` on a GPU, ``true`` on a
    CPU."""

    export_masters: bool = False
    """With ``storage = "bf16"``: export the fp32 masters, which take twice the bytes, instead of the weights."""

    @property
    def quantizes(self) -> str | None:
        """The option that enables quantised layers."""
        if self.quantization is not None:
            return "quantization"
        return "lora.quantization" if self.lora is not None and self.lora.quantization is not None else None

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        for name in ("muon_lr", "muon_momentum"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.optimizer != "muon":
                raise ValueError(f"{name} = {value} has no effect with optimizer = {self.optimizer!r}")
        if self.export_masters and self.lora is not None:
            raise ValueError(
                "export_masters cannot be combined with lora: only the adapters have masters, and the model that they "
                "are merged into does not. Remove one of the two options."
            )
        if self.freeze_vision and self.lora is not None:
            raise ValueError(
                "freeze_vision has no effect with lora, which trains only adapters (of the text part, unless "
                "lora.vision is set): remove freeze_vision"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} both set the warm-up: "
                "set only one of them"
            )
        if self.min_lr_ratio is not None and self.schedule not in ("cosine_with_min", "wsd"):
            raise ValueError(
                f"min_lr_ratio = {self.min_lr_ratio} has no effect with schedule = {self.schedule!r}: "
                "set schedule = 'cosine_with_min' or 'wsd', or remove min_lr_ratio"
            )
        if self.decay_ratio is not None and self.schedule != "wsd":
            raise ValueError(
                f"decay_ratio = {self.decay_ratio} has no effect with schedule = {self.schedule!r}: "
                "set schedule = 'wsd' or remove decay_ratio"
            )
        return self


def most_logits(config: TrainingConfig, device: str, copies: int, *, backward: bool) -> int:
    """``trainer.logits_chunk`` on a ``cpu`` or ``cuda`` device. Every chunk reads and writes the head's weights and
    their gradient, which takes longer than a small product on a GPU.

    Args:
        copies: see :func:`rlhf_modeling.activations.copies`.
    """
    if config.logits_chunk is not None or device != "cpu":
        return config.logits_chunk or 2**27
    return max(2**24, (2**26 if backward else 2**25) // max(1, copies))


def rounds_factors(head_fp32: HeadFp32, device: str) -> bool:
    """Whether ``trainer.head_fp32`` means ``"sums"`` on a ``cpu`` or ``cuda`` device."""
    return head_fp32 == "sums" or (head_fp32 == "auto" and device != "cpu")
