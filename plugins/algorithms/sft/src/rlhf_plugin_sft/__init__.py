"""Supervised fine-tuning: completions, conversations, continued pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf.types import Needs, RoleSpec, Update
from rlhf.types.examples import Example

from rlhf_plugin_sft.nll import DFT, NLL

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch


class SFT(Algorithm[Example]):
    """Maximise the likelihood of demonstrations: one optimizer step per step, over all its rows.

    Which tokens are trained on (the last answer, all answers, everything) is decided by ``data.loss_on`` when rows
    are tokenised. A row in which no token is trained on is left out; a step without any row trains nothing.
    """

    name = "sft"
    source = "Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "nll")}

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.rows import pack_rows

        return pack_rows(examples), {}

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:
        return [Update("policy", "loss")]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [SFT]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [NLL, DFT]
