"""The losses of the Tinker protocol: sums over the tokens of all data, never means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.interfaces import Loss
from rlhf.types import Head, LossOutput, Reduce

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput
    from torch import Tensor

TARGETS = "target_tokens"
READS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
"""{loss: its inputs in addition to the target tokens}."""
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""{loss: {option: default}}."""


class BadRequest(Exception):
    """A client's request is wrong or not supported."""


@dataclass(frozen=True)
class LossChoice:
    """The name of a loss, with its options. Equal choices share one loss."""

    name: str
    options: tuple[tuple[str, float], ...] = ()

    @classmethod
    def checked(cls, name: str, options: Mapping[str, Any]) -> LossChoice:
        """Raises BadRequest."""
        if name not in READS:
            raise BadRequest(
                f"loss {name!r} is not supported; allowed: {', '.join(READS)}, and forward_backward_custom for others"
            )
        defaults = OPTIONS.get(name, {})
        for option, value in options.items():
            if option not in defaults:
                raise BadRequest(f"loss {name!r} has no option {option!r}; it has {', '.join(defaults) or 'none'}")
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise BadRequest(f"loss {name!r}: {option} = {value!r} is not a finite number of at least 0")
        chosen = {**defaults, **options}
        if chosen.get("clip_low_threshold", 0.0) > chosen.get("clip_high_threshold", math.inf):
            raise BadRequest(f"loss {name!r}: clip_low_threshold is above clip_high_threshold: {chosen}")
        return cls(name, tuple(sorted((option, float(value)) for option, value in chosen.items())))


def target_logprobs(logits_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Any) -> Tensor:
    """Log-probs of the target tokens: [C], or [C, K] if each position has K targets."""
    targets = columns[TARGETS]
    chosen_CK = logits_CV.gather(1, targets.reshape(len(targets), -1)) - logits_CV.logsumexp(-1, keepdim=True)
    return chosen_CK.reshape(targets.shape)


def head(over: str = "loss_mask") -> Head:
    return Head("target_logprobs", target_logprobs, over=over, columns=(TARGETS,))


def values(choice: LossChoice, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of each target: the shape of ``logprobs``, [A] or [A, K]. ``inputs``: the columns of :data:`READS`.

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses.
    """
    import torch

    if choice.name == "cross_entropy":
        return -inputs["weights"] * logprobs
    options, advantages = dict(choice.options), inputs["advantages"]
    difference = logprobs - inputs["logprobs"]
    if choice.name == "dro":
        return 0.5 * options["beta"] * difference**2 - logprobs * advantages
    ratio = difference.exp()
    if choice.name == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    if choice.name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages)
    return -clipped.detach() * logprobs * advantages


class ProtocolLoss(Loss):
    """The sum of :func:`values` over the tokens of ``trained``.

    Args:
        sequences: number of sequences with such a token, by which the mean over them is multiplied.
    """

    name = "tinker"
    source = "https://tinker-docs.thinkingmachines.ai/tinker/losses"

    def __init__(self, choice: LossChoice, sequences: int) -> None:
        super().__init__(None)
        self._choice, self._sequences = choice, sequences

    def outputs(self) -> tuple[str | Head, ...]:
        return (head("trained"),)

    def columns(self) -> tuple[str, ...]:
        return READS[self._choice.name]

    def reduce(self) -> dict[str, Reduce]:
        return {"sum": Reduce("seq_mean_token_sum", over="trained", coef=float(self._sequences))}

    def __call__(self, x: LossInput) -> LossOutput:
        inputs = {name: x[name] for name in self.columns()}
        values_A = values(self._choice, x["target_logprobs"], inputs)
        return LossOutput({"sum": values_A.reshape(x.tokens, -1).sum(1)})
