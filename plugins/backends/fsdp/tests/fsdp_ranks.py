"""The ranks of the trainer ``fsdp`` in tests, and their program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsdp_cases import trainer
from rlhf_testing.suite_losses import TokenLoss
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.rank_batches import batch, spec
from tests.support.rank_case import held, same
from tests.support.token_parts import kept_bytes
from tests.support.trainer_rank_cases import DORA, TrainerRankCases

STORED: dict[str, Any] = {"dtype": "bf16", "storage": "bf16"}


class GatheredBytes(TorchDispatchMode):
    """Bytes of the buffers into which this rank gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        if "_allgather_base_" in name:  # of FSDP
            self.bytes += args[0].nbytes
        elif "all_gather_into_tensor" in name:  # of DTensor.full_tensor
            self.bytes += result.nbytes
        return result


class FsdpRanks(TrainerRankCases):
    module = "rlhf_plugin_fsdp.trainer"
    make = staticmethod(trainer)
    variants = {
        "whole": {"reshard_after_forward": False},
        "checkpointing": {"gradient_checkpointing": True, "offload_activations": True, "logits_chunk": 500},
        "muon": {"optimizer": "muon", "weight_decay": 0.1},
        "lora": {"lora": {"rank": 4}, "ema_decay": 0.9},
        "lora-checkpointing": {"lora": {"rank": 4}, "gradient_checkpointing": True},
        "dora": {"lora": DORA, "gradient_checkpointing": True},
        "bf16": {"dtype": "bf16"},
        "bf16-checkpointing": {"dtype": "bf16", "gradient_checkpointing": True, "head_fp32": False},
        "stored": STORED,
        "stored-checkpointing": {**STORED, "gradient_checkpointing": True},
        "stored-lora": {**STORED, "lora": {"rank": 4}},
        "stored-muon": {**STORED, "optimizer": "muon"},
    }
    images = {
        "whole": {},
        "frozen": {"freeze_vision": True, "ema_decay": 0.9},
        "lora": {"lora": {"rank": 4}},
        "lora-vision": {"lora": {"rank": 4, "vision": True}, "gradient_checkpointing": True},
    }
    rows_on_four = ("tokens", "adapters", "short rows")

    @classmethod
    def prepare(cls, folder: Path) -> None:
        super().prepare(folder)
        policy = trainer(spec(folder, **STORED), ema_decay=0.9)
        for number in range(2):
            policy.update([batch(number)], TokenLoss(), {}, {})
        policy.save(folder / "from_one_stored")

    def facts(self, of: Any) -> dict[str, Any]:
        return {"elements": sum(p.to_local().numel() for p in of.parameters.values())}

    @contextmanager
    def gathering(self, of: Any) -> Iterator[list[int]]:
        gathered, counts = type(of.tensors).full_tensor, []

        def count(tensors: Any, name: str) -> Any:
            tensor = gathered(tensors, name)
            counts.append(tensor.numel())
            return tensor

        with patch.object(type(of.tensors), "full_tensor", count):
            yield counts

    def case_kept(self) -> Any:
        """Bytes that are kept for the backward pass of a row that each rank computes whole, and of its half."""
        row = batch(0, units=40)
        return [kept_bytes(trainer(self.here(), sequence_parallel=parts), [row], TokenLoss()) for parts in (1, 2)]

    def case_masters(self) -> Any:
        """With weights that are stored in bf16: the masters are saved, and loaded from one rank's files."""
        policy, other = (trainer(self.here(**STORED), ema_decay=0.9) for _ in range(2))
        self.steps(policy, range(2))
        policy.save(self.folder / "saved-stored")
        save_file(own_masters(policy), self.folder / f"masters-{self.rank}.safetensors")
        other.load(self.folder / "saved-stored")
        numbers = self.steps(policy, range(2, 5)), self.steps(other, range(2, 5))
        pairs = [(own_masters(policy), own_masters(other)), *((held(policy, v), held(other, v)) for v in policy.views)]
        other.load(self.folder / "from_one_stored")
        save_file(own_masters(other), self.folder / f"masters-from-one-{self.rank}.safetensors")
        return {"steps": numbers, "bits": all(same(a, b) for a, b in pairs)}

    def case_bytes(self) -> Any:
        """{number format: [bytes that an update's passes gather, bytes that a sync gathers, bytes that it sends]}."""
        sizes = {}
        for stored in ("fp32", "bf16"):
            policy = trainer(self.here(dtype="bf16", storage=stored))
            with GatheredBytes() as passes:
                policy.accumulate(self.mine(0), TokenLoss(), {}, {})
            with GatheredBytes() as sync:
                sync_bytes = sum(t.nbytes for _, t in policy.weights(every_rank=True))
            sizes[stored] = [passes.bytes, sync.bytes, sync_bytes]
        return sizes


def own_masters(instance: Any) -> dict[str, Tensor]:
    return {f"{p.name}:{p.start}": flat.data.clone() for flat in instance.partition.flats for p in flat.pieces}


if __name__ == "__main__":
    FsdpRanks.main()
