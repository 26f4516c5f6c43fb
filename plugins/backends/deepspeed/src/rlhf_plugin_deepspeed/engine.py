"""A wrapper of DeepSpeed's engine: gradients are sums over ranks, and a step is taken or discarded as a whole.

During accumulation the engine never treats a micro-batch as the last one, because only :meth:`ZeroEngine.reduce` knows
which one is. That call finishes the reduction: stages 0 and 1 do all of it there; stages 2 and 3 reduced in every
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf.errors import TrainingError
from torch import Tensor, nn

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.engine_module import EngineModule, sparing_linear
from rlhf_plugin_deepspeed.process_group import import_deepspeed, quiet, second_copies
from rlhf_plugin_deepspeed.topology import Topology


class ZeroEngine:
    """One model under one engine. ``optimizer`` is None for a role that is not trained (stage 3 only)."""

    def __init__(
        self,
        model: EngineModule,
        optimizer: torch.optim.Optimizer | None,
        config: DeepSpeedTrainerConfig,
        topology: Topology,
        device: torch.device,
        stored: str = "fp32",
    ) -> None:
        """``stored``: ``fp32`` | ``bf16``, the number format of the weights."""
        deepspeed = import_deepspeed(device)
        self.model, self.stage, self.topology = model, config.stage, topology
        self.base_optimizer = optimizer
        self.gathered: Any = deepspeed.zero.GatheredParameters
        self.host_optimizer = config.offload_optimizer != "none"
        self.masters = stored == "bf16"
        """Whether the optimizer updates DeepSpeed's fp32 copies, from which DeepSpeed rounds the weights."""
        elements = sum(_numel(p) for p in model.parameters())
        with quiet(), second_copies(config.hpz_partition_size, config.timeout), topology.used_by_deepspeed():
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                config=engine_config(config, elements, stored),
                mpu=topology.mpu,
                dist_init_required=False,
            )
        self.optimizer: Any = self.engine.optimizer
        if self.stage == 3:
            model.gather_outside()
        if optimizer is not None:
            self._share_weights()
            self.engine.set_gradient_accumulation_boundary(False)
        self._states: Any = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
        self.bucket = config.bucket
        self.reduced = False
        """The gradients of all micro-batches since the last step are summed over ranks."""

    def _share_weights(self) -> None:
        """Make the optimizer update the weights themselves, which are fp32, instead of DeepSpeed's copy."""
        if self.stage == 0 or self.host_optimizer or self.masters:
            return
        optimizer = self.optimizer
        if self.stage == 3:
            pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
        else:
            replica_parts = [parts[self.topology.replica] for parts in optimizer.parallel_partitioned_bit16_groups]
            pairs = zip(optimizer.single_partition_of_fp32_groups, replica_parts, strict=True)
        for stepped, computed in pairs:
            stepped.data = computed.data
        if self.stage < 3:
            optimizer._link_all_hp_params()  # its maps still refer to the copy

    def forward(self, *arguments: Any, bf16: bool) -> dict[str, Tensor]:
        with sparing_linear(bf16 and self.stage == 3):
            values: dict[str, Tensor] = self.engine(*arguments, bf16)
        return values

    def backward(self, total: Tensor, bf16: bool) -> None:
        """Add the gradients of ``total``. DeepSpeed averages over replicas, so ``total`` is multiplied by their
        number."""
        if self.reduced:
            raise TrainingError("gradients were read: apply() or zero_grad() must come before the next accumulate()")
        with sparing_linear(bf16 and self.stage == 3):
            self.engine.backward(total * self.topology.replicas, scale_wrt_gas=False)

    def reduce(self) -> None:
        """Sum the gradients over the replicas, once, after the last micro-batch."""
        if self.reduced:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        with self.topology.used_by_deepspeed():
            if self.stage >= 2:
                self.optimizer.finalize_gradient_accumulation_boundary()
            elif self.stage == 1 or self.topology.replicas > 1:
                for parameter in self._trained():
                    if parameter.grad is None:  # every rank must reduce the same elements
                        parameter.grad = torch.zeros_like(parameter)
                self.engine.allreduce_gradients(self.bucket)
        self.reduced = True

    def step(self) -> None:
        """Step with the reduced gradients, then discard them."""
        with self.topology.used_by_deepspeed():
            self.engine.step()
        self._fresh()

    def discard(self) -> None:
        """Forget the gradients, reduced or not, finite or not."""
        optimizer = self.optimizer
        if self.stage == 0:
            for parameter in self._trained():
                parameter.grad = None
        else:
            optimizer.zero_grad(set_to_none=True)
        if self.stage in (1, 2):
            # DeepSpeed does all of this in its step, which is not taken.
            optimizer._release_preflattened_grad_buffers()
            for index in range(len(optimizer.bit16_groups)):
                optimizer.averaged_gradients[index] = None
                optimizer.all_grad_tensors[index] = None
            optimizer.micro_step_id = -1  # as DeepSpeed's own step leaves it
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
        elif self.stage == 3:
            optimizer.averaged_gradients = {}
            optimizer._offload_boundary_param_ids = set()
        self._fresh()

    def offload(self) -> None:
        """Move tensors that only the step needs to host memory."""
        pin, state = torch.cuda.is_available(), self._states
        if self.stage in (1, 2):
            # With an optimizer in host memory DeepSpeed leaves out its state and the masters, which are there already.
            include = [state.optim_states, state.lp_grads, *([state.hp_params] if self.masters else [])]
            self.engine.offload_states(include=include, pin_memory=pin)
            return
        if self.stage == 3:
            grads = [] if self.host_optimizer else [state.lp_grads]  # gradients are already on the host
            # the engine's own method refuses this if weights are in host memory
            self.optimizer.offload_states(include=[*grads, state.contiguous_grad_buffer], pin_memory=pin)
            self._move_masters(torch.device("cpu"))
        self._move_optimizer(torch.device("cpu"))

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        if self.stage > 0:
            self.engine.reload_states()
        if self.stage in (0, 3) and not self.host_optimizer:
            self._move_optimizer(self.engine.device)
        if self.stage == 3:
            self._move_masters(self.engine.device)

    def _move_masters(self, device: torch.device) -> None:
        """Move the masters. In stage 3 DeepSpeed moves only the masters of its own fused Adam."""
        if self.masters and not self.host_optimizer:
            for flat in self.optimizer.fp32_partitioned_groups_flat:
                flat.data = flat.data.to(device)

    def _move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's state. In stage 3 DeepSpeed moves only the state of its own fused Adam."""
        assert self.base_optimizer is not None
        for state in self.base_optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    def _fresh(self) -> None:
        self.reduced = False
        self.engine.set_gradient_accumulation_boundary(False)
        if self.stage == 3:  # otherwise a parameter without gradient would use its last one
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.host_optimizer:  # for the same reason
            flats = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
            for flat in getattr(self.optimizer, flats):
                flat.grad.zero_()

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def _numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, divided or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def engine_config(config: DeepSpeedTrainerConfig, elements: int, stored: str = "fp32") -> dict[str, Any]:
    """DeepSpeed's config for a model with ``elements`` parameters, which are stored in ``stored``. Gradients of weights
    in bf16 are summed over micro-batches and ranks in fp32."""
    bucket = max(1, min(config.bucket, elements))
    zero: dict[str, Any] = {
        "stage": config.stage,
        "reduce_bucket_size": bucket,
        # DeepSpeed demands a multiple of two.
        "allgather_bucket_size": bucket + bucket % 2,
        "contiguous_gradients": True,
    }
    if config.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": config.keep_whole,
            "stage3_max_live_parameters": config.gathered,
            "stage3_max_reuse_distance": config.gathered,
            "zero_hpz_partition_size": config.hpz_partition_size,
            "memory_efficient_linear": False,  # see sparing_linear
        }
    if config.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": config.offload_optimizer, "pin_memory": torch.cuda.is_available()}
    if config.offload_params != "none":
        zero["offload_param"] = {"device": config.offload_params, "pin_memory": torch.cuda.is_available()}
    bf16: dict[str, Any] = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    return (bf16 if stored == "bf16" else {}) | {
        # DeepSpeed demands a batch size. ZeroEngine itself says where an optimizer batch ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the trainer clips, with the norm that it reports
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
