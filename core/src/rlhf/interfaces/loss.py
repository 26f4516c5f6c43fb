"""Losses: compute plain values from model outputs and batch columns. The core weights and sums the values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from rlhf.interfaces.component import Component
from rlhf.types import Annotation, DataForm, Head, LossOutput, OnlineShape, Reduce

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput


class Loss(Component):
    """A loss declares what it reads and how its terms are reduced. It returns values without masks or denominators.

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

    data: ClassVar[DataForm | None] = None
    """What a unit of its batches is: scored samples (``prompts``), answers of the data (``demonstrations``), two
    answers (``pairs``), labelled answers (``labels``), solutions with labelled steps (``steps``). A run is refused if a
    slot of its algorithm names a loss for another form than the slot's default loss. None: never refused."""
    correction_option: str = ""
    """The option, relative to the loss's section, that enables importance weights for samples of an older policy:
    ``correction.preset NAME``. Empty if the loss has no such option. A warning at the start of a run names it."""

    @property
    def generator_logprobs(self) -> bool:
        """Whether the loss needs the log-probs that the generator reports (column ``gen_logprobs``)."""
        return False

    @abstractmethod
    def outputs(self) -> tuple[str | Head, ...]:
        """Model outputs that the loss reads with gradient: ``logprobs``, ``entropy``, ``values``, ``scores`` or a
        Head; and ``top1``, which has no gradient."""

    def columns(self) -> tuple[str, ...]:
        """Batch columns that the loss reads. Only these are sent to the ranks, and reading any other column raises. For
        a column that may be absent, check ``x.has(name)`` first."""
        return ()

    @abstractmethod
    def reduce(self) -> dict[str, Reduce]:
        """{term: its reduction}, declared before the first forward pass. The ``over`` mask of the first term is the
        mask of the loss. A term over other tokens names their mask, and its values come from a :class:`Head` over
        it."""

    def signal(self) -> tuple[str, ...]:
        """Columns of :meth:`columns` that carry the training signal. If all of them are 0 in a unit, each of its values
        under every term and every gradient of these values must be exactly 0. Such units are not computed. They still
        count in all denominators, but the loss's metrics cover only the computed units. Empty (the default): every unit
        is computed.

        A loss whose values all have the advantage as a factor declares ``("advantages",)``. It must not do so if
        another term, such as an entropy bonus, reads all tokens, or if a metric covers all tokens."""
        return ()

    def conflicts(self, shape: OnlineShape) -> list[str]:
        """Options that cannot have their effect in an online run of this shape: one sentence each, with what to set
        instead. Called before a model is loaded."""
        return []

    def prepass(self) -> tuple[Annotation, ...]:
        """Columns computed with the live weights immediately before each optimizer step."""
        return ()

    def prepare(self, batch: Batch) -> Batch:
        """Add columns that are computed from the whole optimizer batch (batch statistics). Called on the driver."""
        return batch

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics computed from the means of other metrics, such as a harmonic mean. A mean that is not reported is
        absent from ``means``. Called on the driver."""
        return {}

    @abstractmethod
    def __call__(self, x: LossInput) -> LossOutput:
        """The values of each term for a micro-batch. A pure function.

        ``x[name]`` is [A, ...] for token outputs and columns (A = the micro-batch's tokens under the mask, in order),
        [B] for sequence columns, [U] for unit columns. Tokens outside the mask are not part of ``x``, except in the
        output of a :class:`Head` over another mask, which has one value for each token under that mask, in order.

        A sequence or unit without any token under the mask (an empty answer) keeps its place in [S], [B] and [U], with
        weight 0. Its values must still be finite, because 0 x infinity is not 0."""
