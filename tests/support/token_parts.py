"""Cases for trainers whose ranks divide the tokens of a row (``sequence_parallel``).

Ranks and a trainer on one rank run the same case. Their gradients, steps and outputs must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS, UNKNOWN
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf_testing.optimizer_batch import columns, slim_batch
from rlhf_testing.suite_losses import ContextLoss, TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import save_file
from torch import Tensor

from tests.support.losses import SequenceLoss
from tests.support.rank_batches import apart, batch, shares, spec
from tests.support.rank_processes import Ranks

MODELS: dict[str, dict[str, Any]] = {
    "one key head": {"heads": 4, "kv_heads": 1},
    "three key heads": {"heads": 6, "kv_heads": 3, "head_dim": 8},
    "window and softcap": {"architecture": "gemma2", "sliding_window": 8},
    "experts": {
        "architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "tied": False,
    },
    "three heads": {"heads": 3, "kv_heads": 3, "head_dim": 8},
}  # fmt: skip
"""Models besides ``model`` and ``critic``; the last one is refused on two ranks."""


@dataclass(frozen=True)
class Case:
    path: str = "model"
    loss: Loss = field(default_factory=TokenLoss)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the trainer on any number of ranks."""
    of_role: dict[str, Any] = field(default_factory=dict)
    """Of the :class:`ModelSpec`."""
    rows: tuple[int, ...] = ()
    """Tokens of each micro-batch, one row each; empty: fabricated rows."""
    experts: tuple[int, int, int] | None = None
    """Records of experts for most tokens: of (layers, experts, experts of a token)."""

    @property
    def head(self) -> str:
        return "scalar" if self.path == "critic" else "lm"

    def spec(self, of: ModelSpec, folder: Path) -> ModelSpec:
        return replace(of, role=replace(of.role, head=self.head), path=str(folder / self.path), **self.of_role)

    def micros(self, number: int, groups: int) -> list[list[Batch]]:
        """[group of ranks][micro-batch]."""
        if self.rows:
            return [[_row(length, number, self.loss) for length in self.rows]] * groups
        full_batch = batch(number, self.loss)
        tokens = torch.tensor(full_batch.tokens_per_unit(), dtype=torch.float32)
        if self.experts is not None:
            full_batch = with_records(full_batch, *self.experts)
        return shares(full_batch.with_column("unit", "weight/tokens", tokens / tokens.sum(), over=None), groups)


def with_records(batch: Batch, layers: int, experts: int, chosen: int) -> Batch:
    """Choices of experts that no router made, for all tokens but some."""
    draw = torch.Generator().manual_seed(1)
    experts_NLK = torch.rand(batch.tokens, layers, experts, generator=draw).argsort(-1)[..., :chosen].to(torch.int16)
    experts_NLK[batch.ids_N % 5 == 0] = UNKNOWN
    return batch.with_column("tok", EXPERTS, experts_NLK, over=None)


def _row(length: int, number: int, loss: Loss) -> Batch:
    data = SequenceData(
        [5 + number + position for position in range(length)],
        {"loss_mask": [position > 0 for position in range(length)]},
    )
    return slim_batch(weigh(columns(pack([UnitData([data])])), loss.reduce()), loss)


CASES = {
    "tokens": Case(loss=ContextLoss()),
    "checkpointing": Case(of_role={"gradient_checkpointing": True}, options={"logits_chunk": 500}),
    "adapters": Case(options={"lora": {"rank": 4}}, loss=SequenceLoss()),
    "one key head": Case("one key head", loss=SequenceLoss()),
    "critic": Case("critic", loss=ValueLoss()),
    "three key heads": Case("three key heads"),
    "window and softcap": Case("window and softcap"),
    "experts": Case("experts", options={"aux_loss_coef": 0.1}),
    "router replay": Case("experts", options={"router_replay": True}, experts=(2, 4, 2)),
    "recomputed adapters": Case(options={"lora": {"rank": 4}}, of_role={"gradient_checkpointing": True}),
    "prefixes computed again": Case(options={"shared_prefixes": False}),
    "short rows": Case(rows=(3, 2, 4)),
    "bf16": Case(of_role={"dtype": "bf16"}),
}
IN_EVERY_RUN = ("tokens", "checkpointing", "one key head", "router replay")
"""The cases of ``make test``; the others are for ``make test-all``."""


def make_models(folder: Path, names: Sequence[str] = tuple(MODELS)) -> None:
    for name in names:
        tiny_model(folder / name, std=0.2, **MODELS[name])


Make = Callable[..., Any]
"""``make(spec, **options)``: a trainer."""


def run_case(name: str, make: Make, model_spec: ModelSpec, folder: Path, parts: int) -> dict[str, Any]:
    """The numbers of a rank whose rows are divided over ``parts`` ranks. Rank 0 writes the gradients of the first step
    to ``FOLDER/parts-PARTS-NAME.safetensors``."""
    case = CASES[name]
    trainer = make(case.spec(model_spec, folder), sequence_parallel=parts, **case.options)
    groups = model_spec.world_size // parts
    gradients, numbers = measured(
        trainer, lambda number: case.micros(number, groups)[model_spec.rank // parts], case.loss
    )
    if model_spec.rank == 0:
        save_file({name: g.contiguous() for name, g in gradients.items()}, folder / f"parts-{parts}-{name}.safetensors")
    return numbers | {"share": trainer.facts().ranks_per_share}


def check_case(
    name: str, make: Make, ranks: Ranks, numbers_of_ranks: Sequence[dict[str, Any]], parts: int, tolerance: float = 1e-5
) -> None:
    """Compare ``numbers_of_ranks``, which :func:`run_case` returned on each of ``ranks``, with ``make``'s trainer on
    one rank, which gets the same micro-batches."""
    case, groups = CASES[name], ranks.ranks // parts
    trainer = make(case.spec(spec(ranks.folder, head=case.head), ranks.folder), **case.options)
    gradients, want = measured(trainer, lambda number: [m for g in case.micros(number, groups) for m in g], case.loss)
    assert apart(ranks.tensors(f"parts-{parts}-{name}"), gradients) < tolerance
    assert {rank.pop("share") for rank in numbers_of_ranks} == {parts}
    check(numbers_of_ranks, want, parts, tolerance)


def measured(
    trainer: Any, micros: Callable[[int], list[Batch]], loss: Loss, steps: int = 2
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(gradients of the first step, numbers of this rank and of all) of a trainer.

    Args:
        micros: the micro-batches of this rank for a step.
    """
    first = trainer.accumulate(micros(0), loss, {}, {})
    gradients = trainer.gradients()
    trainer.zero_grad()
    outputs = [output for output in loss.outputs() if isinstance(output, str)]
    scores = [
        {name: value.tolist() for name, value in outputs_of_micro.items()}
        for outputs_of_micro in trainer.forward(micros(0), outputs)
    ]
    evaluated = trainer.evaluate(micros(0), loss, {}, {})
    results = [trainer.update(micros(number), loss, {}, {})[1] for number in range(steps)]
    numbers = {
        "first": {name: list(value) for name, value in first.items()},
        "evaluated": {name: list(value) for name, value in evaluated.items()},
        "scores": scores,
        "norms": [result.grad_norm for result in results],
    }
    return gradients, numbers


def kept_bytes(trainer: Any, micros: Sequence[Batch], loss: Loss) -> int:
    """Bytes that ``accumulate`` keeps for the backward pass, each storage once, without those of weights (tensors with
    the shape of a weight)."""
    weights = {tuple(sorted(p.shape)) for p in trainer.module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tuple(sorted(tensor.shape)) not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.accumulate(micros, loss, {}, {})
    return sum(storages.values())


def check(
    numbers_of_ranks: Sequence[dict[str, Any]], want: dict[str, Any], ranks: int, tolerance: float = 1e-5
) -> None:
    """Raises AssertionError unless the numbers of all ranks are those of one rank.

    Args:
        numbers_of_ranks: of each rank.
        want: of the trainer on one rank.
        ranks: ranks that divide rows. The losses of their groups add up; each group scores a part of the micro-batches.
    """
    firsts = numbers_of_ranks[::ranks]
    for number, rank in enumerate(numbers_of_ranks):
        assert rank == firsts[number // ranks], "the ranks of a group return the same"
        assert torch.allclose(torch.tensor(rank["norms"]), torch.tensor(want["norms"]), rtol=10 * tolerance)
    for kind in ("first", "evaluated"):
        for name, sums in want[kind].items():
            added = torch.tensor([[r[kind][name] for r in firsts]]).sum(1)
            assert torch.allclose(added, torch.tensor(sums), rtol=10 * tolerance, atol=10 * tolerance), (kind, name)
    if len(firsts) == 1:
        for scores, other in zip(firsts[0]["scores"], want["scores"], strict=True):
            for name, values in other.items():
                assert torch.allclose(
                    torch.tensor(scores[name]), torch.tensor(values), rtol=tolerance, atol=10 * tolerance
                )
