"""A trainer and a generator, named by ``file:`` in run files, that kill their process if a flag file exists."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rlhf.interfaces import Generator, GeneratorSpec, ModelSpec, TakesTensors
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import Proof
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import GenerationRequest, RoleSpec, Turn
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig


def die_once(flag: str) -> None:
    """Remove the file ``flag`` and kill this process, if the file exists."""
    if flag and os.path.exists(flag):
        os.unlink(flag)
        os.kill(os.getpid(), signal.SIGKILL)


class MortalConfig(TorchTrainerConfig):
    flag: str = ""
    """The process kills itself if this file exists."""
    at_update: int = 0
    """The optimizer step in which the process kills itself."""


class Mortal(TorchTrainer):
    """The torch trainer, except that it kills its process in one update."""

    name = "mortal"
    Config = MortalConfig

    def update(self, *arguments: Any) -> Any:
        if self.updates == self.config.at_update:
            die_once(self.config.flag)
        return super().update(*arguments)


class OwnCopyConfig(ComponentConfig):
    flag: str = ""
    """The process kills itself if this file exists."""
    after: int = 3
    """Number of samples of a call before the process kills itself."""


class OwnCopy(TakesTensors, Generator):
    """The transformers generator with a copy of the policy in its own process, in place of a vLLM engine."""

    name = "own_copy"
    capabilities = frozenset({"logprobs", "seeds"})
    Config = OwnCopyConfig

    def __init__(self, config: OwnCopyConfig, spec: GeneratorSpec) -> None:
        self.config = config
        model = ModelSpec(RoleSpec("policy"), spec.path, "fp32")
        self.copy = TorchTrainer(TorchTrainerConfig(device="cpu"), model)
        self.inner = TransformersGenerator(None, spec)
        self.inner.load(self.copy, 0)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        for n, answer in enumerate(self.inner.generate(requests)):
            if n == self.config.after and self.version:
                die_once(self.config.flag)
            yield answer

    def begin_load(self, version: int) -> None:
        self.coming, self.tensors, self.received = version, [], {}

    def take(self, bucket: Any) -> None:
        self.received |= bucket.received()
        self.tensors += [(name, tensor.clone()) for name, tensor in bucket.tensors]

    def end_load(self) -> list[Proof]:
        self.copy.load_weights(iter(self.tensors))
        self.inner.load(self.copy, self.coming)
        self.version = self.coming
        return [Proof(self.version, nbytes=sum(t.nbytes for _, t in self.tensors), received=self.received)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        units = [UnitData([SequenceData(list(s), {"loss_mask": [n > 0 for n in range(len(s))]})]) for s in sequences]
        [outputs] = self.copy.forward([pack(units)], [resolve_head("logprobs", None)])
        rows = torch.split(outputs["logprobs"], [len(s) for s in sequences])
        return [[row[1:].tolist() for row in rows]]
