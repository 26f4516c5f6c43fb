"""Losses: model outputs and batch columns become plain values; the core weighs and adds them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from rlhf.interfaces.component import Component
from rlhf.types import Annotation, Head, LossOutput, OnlineShape, Reduce

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput


class Loss(Component):
    """A loss declares what it reads and how its terms reduce, and returns values without masks or denominators.

    Complete example (supervised fine-tuning)::

        class NLL(Loss):
            name = "nll"

            def outputs(self):
                return ("logprobs",)

            def reduce(self):
                return {"nll": Reduce("token_mean")}

            def __call__(self, x):
                return LossOutput({"nll": -x["logprobs"]})
    """

    correction_option: str = ""
    """The setting that turns on importance weights for samples of an older policy, below the loss's own section:
    ``correction.preset NAME``. Empty where the loss has no such option. A warning at the start of a run names it."""

    @property
    def generator_logprobs(self) -> bool:
        """Whether it cannot do without the log-probs that the generator reports (column ``gen_logprobs``)."""
        return False

    @abstractmethod
    def outputs(self) -> tuple[str | Head, ...]:
        """Model outputs it reads with gradient: ``logprobs``, ``entropy``, ``values``, ``scores`` or a Head."""

    def columns(self) -> tuple[str, ...]:
        """Batch columns it reads. Anything undeclared raises; nothing else travels to the ranks. A column that may
        be absent is asked for with ``x.has(name)`` first."""
        return ()

    @abstractmethod
    def reduce(self) -> dict[str, Reduce]:
        """{term: how it is reduced}, declared before the first forward pass. All terms share one ``over`` mask."""

    def misfits(self, shape: OnlineShape) -> list[str]:
        """Which options could not do what they say in an online run of this shape, one sentence each, with what to set.
        Asked before a model is loaded."""
        return []

    def prepass(self) -> tuple[Annotation, ...]:
        """Columns computed with the live weights immediately before each optimizer step."""
        return ()

    def prepare(self, batch: Batch) -> Batch:
        """On the driver, with the whole optimizer batch: batch statistics become columns."""
        return batch

    @abstractmethod
    def __call__(self, x: LossInput) -> LossOutput:
        """Pure. ``x[name]`` is [A, ...] for token outputs and columns (A = the micro-batch's tokens under the
        mask, in order), [B] for sequence columns, [U] for unit columns; masked tokens do not exist here.

        A sequence or unit without any such token (an empty answer) keeps its place in [S], [B] and [U], with weight 0.
        What is computed for it must be finite all the same: 0 x infinity is not 0."""
