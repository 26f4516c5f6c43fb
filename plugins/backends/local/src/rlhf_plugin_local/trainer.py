"""The trainer ``torch``: one role's model in this process, on the CPU or on one GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import ApplyResult, Component, ModelSpec, RestartsOptimizer, SharesModule
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf.weights.fingerprint import fingerprint
from rlhf_modeling import state
from rlhf_modeling.adapter_files import sent_name, write_adapter
from rlhf_modeling.adapters import base_tensors, is_adapter, merged, merged_name
from rlhf_modeling.checkpoint_tensors import Published
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.ema import Copy
from rlhf_modeling.export_files import head_bias, token_classifier
from rlhf_modeling.masters import Masters
from rlhf_modeling.model import load_model
from rlhf_modeling.optimizer import (
    build_optimizer,
    clip,
    give_back,
    optimizer_tensors,
    restore_optimizer,
    set_rates,
    to_device,
    to_host,
)
from rlhf_modeling.option_checks import LEARNING, check_training
from rlhf_modeling.precision import choose_device
from rlhf_modeling.pretrained import copy_processor, exporting, load_tokenizer, set_exported, set_exported_dtype
from rlhf_modeling.rate_schedule import RateSchedule
from rlhf_modeling.trainer import PackedTrainer
from torch import Tensor


class TorchTrainerConfig(TrainingConfig):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto``: a GPU if there is one."""


class TorchTrainer(SharesModule, RestartsOptimizer, PackedTrainer):
    """Fused AdamW or Muon, padding-free forward and backward; bf16 is autocast on top. Weights in bf16 have fp32
    masters, which the optimizer updates. Frozen roles hold only weights."""

    name = "torch"
    source = "AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101)"
    Config = TorchTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "ema",
            "bf16",
            "fp32",
            "storage:bf16",
            "resume:exact",
            "images",
        }
    )
    training_options: ClassVar[frozenset[str]] = LEARNING
    changeable: ClassVar[frozenset[str]] = frozenset({"lr"})
    per_step: ClassVar[frozenset[str]] = frozenset({"betas", "eps", "weight_decay", "max_grad_norm"})
    config: TorchTrainerConfig

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        if spec.world_size != 1:
            raise CapabilityError(
                f"trainer 'torch' runs on one rank, but role {spec.role.name!r} asks for {spec.world_size}. Use "
                "--trainer.use fsdp or deepspeed, or another trainer for several ranks ('ranks:many')."
            )
        check_training(config, spec, config.device, device)

    def __init__(self, config: TorchTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        device = choose_device(self.config.device)
        self.check(self.config, spec, device.type)
        config = self.config
        lora = config.lora if spec.role.trained else None
        model = load_model(
            spec, device, lora, config.quantization, kernels=config.kernels, deterministic=config.deterministic
        )
        self.prepare(model, spec, device)
        self.optimizer: torch.optim.Optimizer | None = None
        self.average: Copy | None = None
        self.masters = Masters(self.parameters) if spec.role.trained and spec.storage == "bf16" else None
        self.stepped = self.parameters if self.masters is None else self.masters.stepped
        """{name: tensor that the optimizer updates}: the trained parameters, or their fp32 masters."""
        self.first: Copy | None = Copy(self.parameters) if self.keeps_first_weights else None
        if spec.role.trained:
            # The optimizer gets masters instead of weights that are stored in bf16.
            outer_ids = {id(self.stepped[name]) for name, p in self.parameters.items() if id(p) in model.outer_ids}
            shapes = {name: p.shape for name, p in self.stepped.items()}
            self.optimizer = build_optimizer(self.stepped, shapes, outer_ids, self.config)
            self.schedule = RateSchedule(self.config, spec.total_updates)
            if self.config.ema_decay is not None:
                self.average = Copy(self.stepped, self.masters.rounded if self.masters else None)

    def _casts(self, micros: int, backward: bool) -> AbstractContextManager[Any]:
        """Micro-batches share the copies, except if checkpointing frees the copies before the backward pass."""
        if micros < 2 or not self.precision.bf16 or (backward and self.spec.gradient_checkpointing):
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)  # copies live until the outermost context ends

    # ---------------------------------------------------------------------------------------- step

    def change(self, config: Any) -> None:
        super().change(config)
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["weight_decay"] = config.weight_decay if group["params"][0].ndim >= 2 else 0.0  # as they were built
            if not group.get("muon"):
                group |= {"betas": config.betas, "eps": config.eps}

    def restart_optimizer(self) -> None:
        self._require_trained("restart_optimizer")
        assert self.optimizer is not None
        self.optimizer.state.clear()
        self.updates, self.skipped, self._coverage = 0, 0, None
        self.zero_grad()

    def apply(self) -> ApplyResult:
        self._require_trained("apply")
        assert self.optimizer is not None
        factor = self.schedule.factor(self.updates)
        norm = clip(self.stepped, self.config.max_grad_norm)
        skipped = self._bad_loss or ("" if math.isfinite(norm) else f"non-finite gradient (norm {norm})")
        if skipped:
            self.skipped += 1
        else:
            set_rates(self.optimizer, self.config, factor)
            self._step(self.optimizer)
        self.updates += 1
        self.zero_grad()
        return ApplyResult(norm, self.config.lr * factor, skipped)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        old_fingerprints = None
        if self._without_coverage:
            zero_gradient_names = [n for n, p in self.stepped.items() if p.grad is None or not bool(p.grad.any())]
            old_fingerprints = {n: fingerprint(p.detach()) for n, p in self.stepped.items()}
        if self._micros and self.spec.images:  # a step without images: as with other trainers, the tower's are zero
            for p in self.stepped.values():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        optimizer.step()
        self._publish()
        if old_fingerprints is not None:
            unchanged = [n for n, p in self.stepped.items() if fingerprint(p.detach()) == old_fingerprints[n]]
            self._coverage = {"without_gradient": zero_gradient_names, "unchanged": unchanged}
        if self.average is not None and self.config.ema_decay is not None:
            self.average.update(self.config.ema_decay)

    def zero_grad(self) -> None:
        self._bad_loss, self._micros = "", 0
        for p in self.stepped.values():
            p.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Zeros for parameters without a gradient."""
        return {
            name: torch.zeros_like(p).cpu() if p.grad is None else p.grad.detach().clone().cpu()
            for name, p in self.stepped.items()
        }

    # ------------------------------------------------------------------------------------- weights

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names of the architecture's checkpoints, detached, on the trainer's device, tied
        weights once (with the embedding's name), adapters merged. They share memory with the model, except those that
        checkpoints store in another layout. Copy them if they must outlive the next step."""
        with self._view(view):
            tensors = state.named_tensors(self.module)
            add = merged if self.merges(view) else base_tensors
            if view != ADAPTERS:
                yield from self._published.stream(add(self.module, tensors))
            for name in self.parameters if view in (ADAPTERS, PARTS) else ():
                yield sent_name(self._published, name), tensors[name].detach()

    @cached_property
    def _published(self) -> Published:
        tensors = state.named_tensors(self.module)
        return Published(self.module, {merged_name(n): t.shape for n, t in tensors.items() if not is_adapter(n)})

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.require_replaceable()
        source = f"the weight stream for role {self.spec.role.name!r}"
        state.copy_into(self._exact_tensors(), self._published.restore(dict(weights), source), source)
        self._publish()

    def export(self, path: Path, view: str = "live") -> None:
        tokenizer = self.tokenizer or load_tokenizer(self.spec)
        with self._view(view), exporting(self.module):
            module_tensors, add = self.module.state_dict(), merged if self.merges(view) else base_tensors
            state_dict = dict(add(self.module, module_tensors)) if self.has_adapters else None
            if masters := self.config.export_masters and self.masters:
                state_dict = masters.substitute(self.module.state_dict())
            if classifier := token_classifier(self.loaded_model):
                state_dict = dict(state_dict or module_tensors)
                state_dict |= head_bias(self.loaded_model, next(iter(state_dict.values())).dtype)
            self.module.save_pretrained(str(path), state_dict=state_dict)
            if classifier:
                set_exported(Path(path), architectures=[classifier])
            if masters:
                set_exported_dtype(Path(path), torch.float32)
            if (lora := self.exported_adapters(view)) is not None:
                write_adapter(Path(path), self.spec, self.loaded_model, lora, self.parameters, classifier)
        tokenizer.save_pretrained(str(path))
        copy_processor(self.spec, Path(path))
        for file in Path(path).glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes it private, but config.json is readable

    # -------------------------------------------------------------------------------------- memory

    def offload(self) -> None:
        """Move optimizer state and average from a GPU to host memory. Between two steps there are no gradients."""
        for tensors in self._aside():
            to_host(tensors)
        if self.masters is not None:
            self.masters.offload()
        give_back(self.device)

    def reload(self) -> None:
        for tensors in self._aside():
            to_device(tensors, self.device)
        if self.masters is not None:
            self.masters.reload(self.device)

    def _aside(self) -> list[MutableMapping[str, Tensor]]:
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return states + ([self.average.tensors] if self.average is not None else [])

    # --------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        files: dict[str, Mapping[str, Tensor]] = {"model": self._own_tensors()}
        if self.optimizer is not None:
            files["optimizer"] = optimizer_tensors(self.optimizer, self.stepped)
        if self.average is not None:
            files["ema"] = self.average.tensors
        state.write(path, files, self.saved_facts() | self._fixed_facts())

    def load(self, path: Path) -> None:
        facts = {"storage": "fp32", **state.read_facts(path)}  # older checkpoints have no storage field
        run_facts = self._fixed_facts()
        if saved := {key: facts.get(key) for key in run_facts if facts.get(key) != run_facts[key]}:
            raise ConfigError(
                f"the checkpoint {str(path)!r} was saved with {_words(saved)}; this run has "
                f"{_words({key: run_facts[key] for key in saved})}. Resume with its config."
            )
        self._load_tensors(self._own_tensors(), path, "model")
        self._publish()
        if self.optimizer is not None:
            coverage = facts["coverage"]
            stepped = set() if coverage is None else set(self.parameters) - set(coverage["without_gradient"])
            tensors = state.read_tensors(path, "optimizer")
            file = path / "optimizer.safetensors"
            restore_optimizer(self.optimizer, self.stepped, tensors, file, stepped)
        if self.average is not None:
            self._load_tensors(self.average.tensors, path, "ema")
        self.restore_facts(facts)
        self.zero_grad()

    def _fixed_facts(self) -> dict[str, Any]:
        """Facts that must be the same in the checkpoint and in the run that resumes from it."""
        trained = self.spec.role.trained
        return {
            "trained": trained,
            "storage": self.spec.storage,
            "ema": self.average is not None,
            "optimizer": self.config.optimizer if trained else None,
        }

    def _load_tensors(self, target: Mapping[str, Tensor], path: Path, name: str) -> None:
        tensors = state.read_tensors(path, name)
        state.check_values(target, tensors, path / f"{name}.safetensors")
        state.copy_into(target, tensors, f"the checkpoint {str(path)!r}")

    def _own_tensors(self) -> dict[str, Tensor]:
        """The model's tensors in a checkpoint: all of them, or only the trained ones if the base is frozen. A frozen
        base is read again from its model."""
        if self.has_adapters:
            return {name: p.data for name, p in self.stepped.items()}
        return self._exact_tensors()

    def _exact_tensors(self) -> dict[str, Tensor]:
        """The model's tensors, with rounded weights replaced by their masters."""
        tensors = state.named_tensors(self.module)
        return tensors if self.masters is None else self.masters.substitute(tensors)

    def _publish(self) -> None:
        if self.masters is not None:
            self.masters.publish()


def _words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in facts.items())
