"""The elements of the parameters that a rank owns in each ZeRO stage, as views of the optimizer's flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_modeling.sharded.partition import Flat, Partition, Piece
from torch import Tensor, nn


class ZeroPartition(Partition):
    """The rank's share of a role's parameters in a ZeRO stage.

    Args:
        optimizer: DeepSpeed's optimizer; in stage 0 torch's. For a role that is not trained, DeepSpeed's gatherer
            (stage 3) or None.
        trained: whether the optimizer updates the parameters.
    """

    def __init__(
        self, stage: int, optimizer: Any, names: Mapping[nn.Parameter, str], rank: int, trained: bool = True
    ) -> None:
        self.stage, self.optimizer, self.trained = stage, optimizer, trained
        self.replicated = stage == 0 or (stage < 3 and not trained)
        if self.replicated:
            make = _whole_parameters
        elif stage == 3:
            make = _partitioned if trained else _frozen
        else:
            make = _flattened
        self.flats: list[Flat] = list(make(optimizer, names, rank))

    def gradients(self, index: int) -> list[Tensor]:
        owner = self.flats[index].owner
        if self.replicated or getattr(self.optimizer, "cpu_offload", False) or _offloads(self.optimizer):
            return [] if owner.grad is None else [owner.grad]
        averages = self.optimizer.averaged_gradients
        return list(averages.get(index) or [])

    def publish(self) -> None:
        if self.replicated:
            return
        if self.stage < 3:
            self.optimizer.update_lp_params()
            return
        for index in range(len(self.flats) if self.trained else 0):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        offload = self.optimizer.parameter_offload if self.trained else self.optimizer
        offload.partition_all_parameters()
        if offload.persistent_parameters:  # parameters that stay whole on every rank
            offload.persistent_parameters[0].all_gather(offload.persistent_parameters)
        for parameter in offload.module.parameters():
            parameter.ds_secondary_tensor = None  # ZeRO++: the node's copy has the old values


def _offloads(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "offload_optimizer", False))


def _whole_parameters(optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> Iterator[Flat]:
    for parameter, name in names.items():
        yield Flat(parameter, [Piece(name, 0, 0, parameter.numel())], [name])


def _flattened(optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> Iterator[Flat]:
    """Stages 1 and 2: each group of parameters is one flat tensor, divided into as many equal parts as ranks."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        pieces = []
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:  # None: this rank's part has no element of it
                start = mapping.lp_fragment_address.start
                address = mapping.hp_fragment_address
                pieces.append(Piece(names[parameter], start, address.start, address.numel))
        yield Flat(flat, pieces, [names[p] for p in group])


def _partitioned(optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> Iterator[Flat]:
    """Stage 3: each parameter is divided into as many equal parts as ranks; the last part is padded."""
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        pieces, offset = [], 0
        for parameter in group:
            width = parameter.partition_numel()
            start = min(rank * width, parameter.ds_numel)
            numel = min(width, parameter.ds_numel - start)
            if numel:
                pieces.append(Piece(names[parameter], start, offset, numel))
            # The padding of the last part is in the flat too.
            offset += width
        yield Flat(flat, pieces, [names[p] for p in group])


def _frozen(optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> Iterator[Flat]:
    """Stage 3 without an optimizer."""
    for parameter, name in names.items():
        divided: Any = parameter
        part = divided.ds_tensor
        start = min(rank * part.numel(), divided.ds_numel)
        numel = min(part.numel(), divided.ds_numel - start)
        yield Flat(part, [Piece(name, start, 0, numel)] if numel else [], [name])
