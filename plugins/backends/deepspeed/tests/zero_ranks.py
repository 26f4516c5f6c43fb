"""The ranks of the trainer ``deepspeed`` in tests, and their program."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from rlhf.errors import RlhfError
from rlhf_testing.suite_losses import ValueLoss
from zero_cases import trainer

from tests.support.rank_batches import spec
from tests.support.rank_case import farthest, held, same
from tests.support.trainer_rank_cases import DORA, TrainerRankCases

STAGES = ("0", "1", "2", "3")


class ZeroRanks(TrainerRankCases):
    """The layouts are the stages of ZeRO."""

    module = "rlhf_plugin_deepspeed.trainer"
    make = staticmethod(trainer)
    layouts = {stage: {"stage": int(stage)} for stage in STAGES}
    default_layout = "2"
    only = {
        "base": ("2",), "dropout": ("2",), "timeout": ("2",), "frozen": ("2", "3"), "rows_resume": ("1",),
        **dict.fromkeys(("alone", "critic", "critic_state", "experts", "export", "lora"), ("3",)),
    }  # fmt: skip
    variants = {
        "checkpointing-3": {"stage": 3, "gradient_checkpointing": True, "logits_chunk": 500},
        "whole-3": {"stage": 3, "keep_whole": 100, "gathered": 2**27},
        "bucket-2": {"stage": 2, "bucket": 1000},
        "bucket-3": {"stage": 3, "bucket": 1000},
        "hpz-3": {"stage": 3, "hpz_partition_size": 2},
        "host-2": {"stage": 2, "offload_optimizer": "cpu"},
        "host-3": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        "muon-2": {"stage": 2, "optimizer": "muon", "weight_decay": 0.1},
        "muon-3": {"stage": 3, "optimizer": "muon", "weight_decay": 0.1},
        "lora-2": {"stage": 2, "lora": {"rank": 4}, "ema_decay": 0.9},
        "lora-3": {"stage": 3, "lora": {"rank": 4}, "gradient_checkpointing": True},
        "dora-3": {"stage": 3, "lora": DORA, "gradient_checkpointing": True, "offload_activations": True},
        "bf16-2": {"stage": 2, "dtype": "bf16"},
        "bf16-3": {"stage": 3, "dtype": "bf16", "gradient_checkpointing": True},
        "stored-2": {"stage": 2, "dtype": "bf16", "storage": "bf16"},
        "stored-3": {"stage": 3, "dtype": "bf16", "storage": "bf16"},
        "stored-hpz-3": {"stage": 3, "dtype": "bf16", "storage": "bf16", "hpz_partition_size": 2},
        "stored-lora-3": {"stage": 3, "dtype": "bf16", "storage": "bf16", "lora": {"rank": 4}},
    }
    images = {
        "2": {"stage": 2},
        "3": {"stage": 3},
        "frozen-3": {"stage": 3, "freeze_vision": True, "ema_decay": 0.9},
        "lora-3": {"stage": 3, "lora": {"rank": 4}, "ema_decay": 0.9},
        "lora-vision-3": {"stage": 3, "lora": {"rank": 4, "vision": True}, "gradient_checkpointing": True},
    }
    rows = {"adapters": "2", "one key head": "2", "recomputed adapters": "1", "critic": "0", "experts": "2"}
    export_options = {"bucket": 2000}

    def facts(self, of: Any) -> dict[str, Any]:
        return {"largest": max(p.numel() for p in of.parameters.values())}

    @contextmanager
    def gathering(self, of: Any) -> Iterator[list[int]]:
        gathered, counts = of.zero.gathered, []

        def count(parameters: Any) -> Any:
            counts.append(sum(p.ds_numel for p in parameters))
            return gathered(parameters)

        with patch.object(of.zero, "gathered", count):
            yield counts

    def case_nobody(self) -> Any:
        """Each rank waits for the other at a different address. This case is the first, because it needs no group."""
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            port = str(place.getsockname()[1])
        return error_of(lambda: trainer(spec(self.folder, self.rank, 2, port), stage=2, timeout=2.0))

    def case_hpz(self) -> Any:
        """In one process: policy, critic and reference with second copies of their weights, and a policy without. This
        case is the first with a group, because the first model of a process may have second copies."""
        options = {"stage": 3, "hpz_partition_size": 2}
        policy, plain, critic = (
            trainer(self.here(), **options),
            trainer(self.here(), stage=3),
            trainer(self.here(head="scalar"), **options),
        )
        reference = trainer(self.here(trained=False), **options)
        old_outputs = reference.forward(self.mine(9), ("logprobs",))
        done = (
            [self.steps(instance, range(2)) for instance in (plain, policy)],
            self.steps(critic, range(2), ValueLoss()),
        )
        self.keep("weights-hpz-critic", held(critic))
        unmoved = reference.forward(self.mine(9), ("logprobs",))
        reference.load_weights(policy.weights(every_rank=True))
        new_outputs, want = (instance.forward(self.mine(9), ("logprobs",)) for instance in (reference, policy))
        everyone = (plain, policy, critic, reference)
        return {
            "steps": done,
            "same": same(held(plain), held(policy)),
            "unmoved": farthest(old_outputs, unmoved),
            "left": farthest(new_outputs, want),
            "copies": [
                sum(p.ds_secondary_tensor is not None for p in instance.parameters.values()) for instance in everyone
            ],
            "parameters": [len(instance.parameters) for instance in everyone],
        }

    def case_refused(self) -> Any:
        """Another group than the one that was joined, and roles that differ between the ranks."""
        trainer(self.here(), stage=0)
        wrong = (spec(self.folder), *(spec(self.folder, self.rank, *group) for group in ((2, "1"), (3, self.port))))
        messages = [error_of(lambda wrong_spec=wrong_spec: trainer(wrong_spec, stage=0)) for wrong_spec in wrong]
        return [*messages, error_of(lambda: trainer(self.here(head="scalar" if self.rank else "lm"), stage=0))]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RlhfError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


if __name__ == "__main__":
    ZeroRanks.main()
