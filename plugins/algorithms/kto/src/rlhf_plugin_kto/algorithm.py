"""The algorithms. They convert labelled rows, or both answers of a pair, to units of an answer and a mismatched
answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rlhf.interfaces import Algorithm, Slot
from rlhf.types import Annotation, DataForm, Head, Needs, RoleSpec, Snapshot, Update
from rlhf.types.examples import Example
from rlhf_algorithms.snapshots import SnapshotConfig, snapshots_due

from rlhf_plugin_kto.twins import ANSWER, TWIN, TWIN_MASK, Labelled, twins

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.packing import UnitData


class KTO(Algorithm[Example]):
    """Make desirable answers more likely and undesirable answers less likely than under the reference.

    One optimizer step in every step of the run, on all its rows. A unit is a row's answer (role 0, unit column
    ``label``: whether it is desirable). If the loss reads the policy's drift on mismatched answers, the unit also has
    the row's prompt with another row's answer (role 1, under the mask ``twin_mask``). That answer is truncated if
    prompt and answer are longer than ``data.max_tokens``. With fewer than two rows there are no mismatched answers, and
    the step trains nothing.

    Metrics, if they are not 0: ``labels/left_out`` (answers without a trained token), ``labels/without_twin`` (answers
    without a mismatched one), ``labels/cut_twins`` (mismatched answers that were truncated).
    """

    name = "kto"
    source = "Ethayarajh et al. 2024, arXiv:2402.01306"
    data: ClassVar[DataForm] = "labels"
    slots = {"loss": Slot("loss", "kto")}
    Config = SnapshotConfig

    @property
    def _mismatched(self) -> bool:
        """Whether the loss uses mismatched answers."""
        annotations = self.parts["loss"].prepass()
        return any(isinstance(a.output, Head) and a.output.over == TWIN_MASK for a in annotations)

    def needs(self) -> Needs:
        roles = (RoleSpec("policy", trained=True), RoleSpec("reference", like="policy"))
        return Needs(roles, rows_min=2 if self._mismatched else 1)

    def labelled(self, example: Example) -> list[tuple[int, bool]]:
        """(index of the sequence, whether it is desirable) of each answer of a row."""
        return [(0, example.values["label"])]

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.packing import pack

        rows, answers, sources = [], 0, set()
        for number, example in enumerate(examples):
            for side, (index, desirable) in enumerate(self.labelled(example)):
                answers += 1
                if any(example.sequences[index].loss_mask[1:]):  # nothing predicts a sequence's first token
                    place = (side, example.row.source, example.row.index)
                    rows.append(Labelled.of(example.sequences[index], desirable, place))
                    sources.add(number)
        # Data rows are counted, not answers: both answers of a pair follow the same prompt.
        if not rows or (self._mismatched and len(sources) < 2):
            return None, {}
        left_out = {"labels/left_out": answers - len(rows)}
        units, counts = self._with_twins(rows) if self._mismatched else ([_unit(row) for row in rows], {})
        return pack(units), {name: float(count) for name, count in (left_out | counts).items() if count}

    def _with_twins(self, rows: Sequence[Labelled]) -> tuple[list[UnitData], dict[str, int]]:
        """(a unit per row, counts for the metrics)."""
        chosen = twins(rows)
        units, cut = [], 0
        for row, i in zip(rows, chosen, strict=True):
            twin = None if i is None else rows[i]
            room = None if self.run.max_tokens is None else self.run.max_tokens - len(row.prompt)
            if twin is not None and room is not None and len(twin.answer) > room:
                cut += 1
                twin = twin.cut(room)
            units.append(_unit(row, twin, twinned=True))
        return units, {"labels/without_twin": chosen.count(None), "labels/cut_twins": cut}

    def annotations(self, step: int) -> list[Annotation]:
        annotation = Annotation("reference", "logprobs", "ref_logprobs")
        if not self._mismatched:
            return [annotation]
        from rlhf_plugin_kto.loss import twin_logprobs

        return [annotation, Annotation("reference", twin_logprobs(), "twin_ref_logprobs", per_row=False)]

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        """The snapshot comes last, so the next step computes its columns with the new reference."""
        due = snapshots_due(self.config.snapshot_every, self.config.snapshot_share, step)
        return [Update("policy", "loss"), *due]


class KTOPair(KTO):
    """KTO on pairs: the chosen answer is a desirable row, the rejected one an undesirable row.

    Both are in the same optimizer batch, and neither gets the other's answer as its mismatched one.
    """

    name = "kto_pair"
    data = "pairs"

    def labelled(self, example: Example) -> list[tuple[int, bool]]:
        return sorted(((i, s.role == 0) for i, s in enumerate(example.sequences)), key=lambda pair: not pair[1])


def _unit(row: Labelled, twin: Labelled | None = None, twinned: bool = False) -> UnitData:
    """The unit of a row. ``twinned``: with the column ``twin_mask``, whether or not there is a twin."""
    from rlhf.ops.packing import SequenceData, UnitData

    prompt_mask, answer = [False] * len(row.prompt), list(row.mask)
    masks = {"loss_mask": prompt_mask + answer, **({TWIN_MASK: prompt_mask + [False] * len(answer)} if twinned else {})}
    sequences = [SequenceData(row.prompt + row.answer, masks, ANSWER, row.images_before(row))]
    if twin is not None:
        mask = prompt_mask + list(twin.mask)
        mask[0] = False  # nothing predicts a sequence's first token
        masks = {"loss_mask": [False] * len(mask), TWIN_MASK: mask}
        sequences.append(SequenceData(row.prompt + twin.answer, masks, TWIN, row.images_before(twin)))
    return UnitData(sequences, {"label": row.desirable})
