"""The trainer ``deepspeed``: one role's model over the ranks of a process group, by ZeRO stages 0 to 3."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from rlhf.errors import CapabilityError, TrainingError
from rlhf.interfaces import ApplyResult, Component, Loss, ModelSpec, Sums
from rlhf.interfaces.memory import Sharding
from rlhf.modeling.adapters import without_adapters
from rlhf.modeling.model import check_head, load_model, load_tokenizer
from rlhf.modeling.optimizer import give_back
from rlhf.modeling.precision import choose_device
from rlhf.modeling.schedule import Schedule
from rlhf.modeling.trainer import PackedTrainer
from rlhf.ops.batch import Batch
from rlhf.ops.heads import OutputHead
from rlhf.ops.losses import add_sums, evaluate, over_mask
from rlhf.types import Head
from torch import Tensor

from rlhf_plugin_deepspeed import checkpoint, export, memory
from rlhf_plugin_deepspeed.average import Average
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.coverage import Coverage
from rlhf_plugin_deepspeed.engine import Zero
from rlhf_plugin_deepspeed.group import barrier, collective, first_text, import_deepspeed, join, reduce_to_first, total
from rlhf_plugin_deepspeed.loading import load_divided
from rlhf_plugin_deepspeed.model import ShardedModel
from rlhf_plugin_deepspeed.muon import OrthogonalAdamW
from rlhf_plugin_deepspeed.optimizer import build_optimizer
from rlhf_plugin_deepspeed.shards import Shards, scale
from rlhf_plugin_deepspeed.tensors import Tensors


class DeepSpeedTrainer(PackedTrainer):
    """fp32 weights under ZeRO 0-3, AdamW; bf16 is autocast on top, as with the trainer ``torch``, whose numbers it
    gives on any number of ranks. Roles that are not trained hold weights and nothing else, in stage 3 a part each."""

    name = "deepspeed"
    source = "ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054)"
    Config = DeepSpeedTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"ranks:many", "export:tensors", "lend:head", "ema", "bf16", "fp32", "resume:exact"}
    )
    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    )
    config: DeepSpeedTrainerConfig

    @classmethod
    def sharding(cls, config: DeepSpeedTrainerConfig | None, spec: ModelSpec, device: str) -> Sharding:
        return memory.sharding(config or cls.Config(), spec, device)

    def __init__(self, config: DeepSpeedTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        trained, divided = spec.role.trained, self.config.stage == 3
        device = choose_device(self.config.device)
        self._possible(spec)
        deepspeed = import_deepspeed(device)
        join(spec, device, self.config.timeout)
        if divided:
            loaded = load_divided(spec, device, self.config, deepspeed)
        else:
            loaded = load_model(spec, device, self.config.lora if trained else None)
        self.prepare(loaded, spec, device)
        self.tensors = Tensors(self.module)
        self.packed = ShardedModel(loaded, self.config)
        self.base: torch.optim.Optimizer | None = None
        self.zero: Zero | None = None
        self.average: Average | None = None
        self._values: dict[str, Tensor] = {}  # outputs of the micro-batch at work
        with self._guard("__init__"):
            if trained:
                self.schedule = Schedule(self.config, spec.total_updates)
                outside = {id(p) for m in (self.module.get_input_embeddings(), loaded.head) for p in m.parameters()}
                self.base = build_optimizer(self.parameters, self.tensors.shapes, outside, self.config)
            if trained or divided:
                self.zero = Zero(self.packed, self.base, self.config, spec.world_size, device)
            if divided and loaded.kind == "lm":
                check_head(loaded, spec)
            names = {p: name for name, p in self.parameters.items()}
            self.shards = Shards(self.config.stage, self.zero and self.zero.optimizer, names, spec.rank, trained)
        if isinstance(self.base, OrthogonalAdamW):
            self.base.bind(self.shards, self.tensors.shapes)
        if trained and self.config.ema_decay is not None:
            self.average = Average(self.shards, self.config.ema_decay)

    def _possible(self, spec: ModelSpec) -> None:
        """Raise CapabilityError for options that this role, or this number of ranks, cannot have."""
        config, role = self.config, spec.role
        if spec.world_size % config.hpz_partition_size:
            raise CapabilityError(
                f"hpz_partition_size = {config.hpz_partition_size} does not divide the {spec.world_size} ranks of role "
                f"{role.name!r}: use a divisor, at best the ranks of one node, or 1 for no second copy"
            )

    @property
    def views(self) -> tuple[str, ...]:
        return ("live", *(("ema",) if self.average is not None else ()), *(("base",) if self.has_adapters else ()))

    def _guard(self, call: str) -> AbstractContextManager[None]:
        return collective(self.spec, call, self.config.timeout)

    # ------------------------------------------------------------------------------------- forward

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        with self._guard("forward"):
            return super().forward(micros, outputs, view)

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        with self._guard("accumulate"):
            return super().accumulate(micros, loss, coef, live)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        self._require_trained("evaluate")
        over = over_mask(loss)
        resolved = [self._head(o, over) for o in loss.outputs()]
        with self._guard("evaluate"):
            batches = [micro.to(self.device) for micro in micros]
            return add_sums([evaluate(loss, b, self._outputs(b, resolved), coef, live)[1] for b in batches])

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        bf16 = self.precision.bf16
        if self.zero is None:
            return self.packed(batch, resolved, bf16)
        self._values = self.zero.forward(batch, resolved, bf16=bf16)
        return self._values

    def _backward(self, total: Tensor, last: bool) -> None:
        """Every rank goes through every backward, also one whose loss is not finite: with a loss of zero then."""
        assert self.zero is not None
        if self._bad_loss or not total.requires_grad:
            total = torch.stack([(v * 0.0).sum() for v in self._values.values()]).sum()
        self.zero.backward(total, self.precision.bf16)
        self._values = {}

    # ---------------------------------------------------------------------------------------- step

    def apply(self) -> ApplyResult:
        self._require_trained("apply")
        factor = self.schedule.factor(self.updates)
        norm, skipped = 0.0, ""
        if self._micros:
            with self._guard("apply"):
                norm, skipped = self._step(factor)
        self.updates += 1
        self.skipped += bool(skipped)
        self._bad_loss, self._micros = "", 0
        return ApplyResult(norm, self.config.lr * factor, skipped)

    def _step(self, factor: float) -> tuple[float, str]:
        assert self.zero is not None
        assert self.base is not None
        norm, skipped = self._finish_gradients()
        if skipped:
            self.zero.discard()
            return norm, skipped
        seen = Coverage(self.shards, list(self.parameters), self.device) if self._coverage is None else None
        for group in self.base.param_groups:
            group["lr"] = group.get("peak", self.config.lr) * factor
        self.zero.step()
        if seen is not None:
            self._coverage = seen.after()
        if self.average is not None:
            self.average.update()
        return norm, ""

    def _finish_gradients(self) -> tuple[float, str]:
        """Reduce and clip; (the global norm before, why the step must not be taken), the same on every rank."""
        assert self.zero is not None
        self.zero.reduce()
        parts = [g for i in range(len(self.shards.flats)) for g in self.shards.gradients(i)]
        local = float(torch.nn.utils.get_total_norm(parts)) if parts else 0.0
        facts = torch.tensor([local * local, float(bool(self._bad_loss))], dtype=torch.float64, device=self.device)
        squares, bad = total(facts).tolist()
        norm = math.sqrt(squares / self.spec.world_size if self.shards.replicated else squares)
        if bad:
            return norm, first_text(self._bad_loss)
        if not math.isfinite(norm):
            return norm, f"non-finite gradient (norm {norm})"
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            scale(parts, self.config.max_grad_norm / (norm + 1e-6))
        return norm, ""

    def zero_grad(self) -> None:
        self._bad_loss, self._micros = "", 0
        if self.zero is not None and self.spec.role.trained:
            self.zero.discard()

    def gradients(self) -> dict[str, Tensor]:
        """Sums over ranks, whole on rank 0, one parameter at a time; zeros for parameters that got none."""
        shapes = {name: self.tensors.shapes[name] for name in self.parameters}
        found = {}
        with self._guard("gradients"):
            if self.zero is not None and self._micros:
                self.zero.reduce()
            own = {p.name: (p, g) for i in range(len(self.shards.flats)) for p, g in self.shards.piece_gradients(i)}
            for name, shape in shapes.items():
                whole = torch.zeros(shape.numel(), device=self.device)
                if name in own and not (self.shards.replicated and self.spec.rank):
                    piece, gradient = own[name]
                    whole[piece.start : piece.start + piece.numel] = gradient
                reduce_to_first(whole)
                if self.spec.rank == 0:
                    found[name] = whole.view(shape).cpu()
        return found

    # ------------------------------------------------------------------------------------- weights

    def weights(self, view: str = "live") -> Iterator[tuple[str, Tensor]]:
        """On rank 0, or where :attr:`everywhere` on all, detached, on the trainer's device, tied weights once (under
        the embedding's name), adapters merged; other ranks take part and yield nothing. In stages 0 to 2 they share
        memory with the model: copy what must outlive the next step."""
        gather = self.zero.gathered if self.zero is not None and self.config.stage == 3 else None
        with self._guard("weights"), self._view(view):
            first = self.spec.rank == 0 or self.everywhere
            yield from self.tensors.stream(gather, first, self.config.bucket, view != "base")

    def lend_head(self) -> Iterator[OutputHead]:
        """In stages 0 to 2 it shares memory with the model, in stage 3 it is a copy, gathered whole."""
        head = None
        with self._guard("lend_head"), self._head_gathered():
            if self.spec.rank == 0:
                head = self.loaded.output_head
                if self.config.stage == 3:
                    bias_V = None if head.bias_V is None else head.bias_V.clone()
                    head = OutputHead(head.weight_VH.clone(), bias_V, head.softcap)
        if head is not None:
            yield head

    def _head_gathered(self) -> AbstractContextManager[Any]:
        if self.zero is None or self.config.stage < 3:
            return nullcontext()
        return self.zero.gathered(list(self.loaded.head.parameters()))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every rank is given whole tensors and keeps its part."""
        if self.has_adapters:
            raise TrainingError(f"role {self.spec.role.name!r} trains adapters; its weights cannot be replaced")
        where = f"what role {self.spec.role.name!r} was sent"
        with self._guard("load_weights"):
            self.tensors.overwrite(dict(weights), self.shards, where)
            self.shards.publish()

    def export(self, path: Path, view: str = "live") -> None:
        path = Path(path)
        if self.spec.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            export.write_configs(path, self.module, self.tokenizer or load_tokenizer(self.spec))
            limit = self.config.export_shard_bytes
            export.write_weights(path, self.weights(view), self.tensors.published(), limit)
        else:
            for _ in self.weights(view):
                pass
        with self._guard("export"):
            barrier()

    def offload(self) -> None:
        """Optimizer state, its copy of the weights, the average and gradient buffers move to host memory. On a CPU they
        are there already."""
        if self.zero is not None and self.spec.role.trained:
            self.zero.offload()
        if self.average is not None:
            self.average.move("cpu")
        give_back(self.device)

    def reload(self) -> None:
        if self.zero is not None and self.spec.role.trained:
            self.zero.reload()
        if self.average is not None and self.config.offload_optimizer == "none":
            self.average.move(self.device)

    # --------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        with self._guard("save"):
            checkpoint.save(self, Path(path))

    def load(self, path: Path) -> None:
        with self._guard("load"):
            checkpoint.load(self, Path(path))

    # ------------------------------------------------------------------------------------ internals

    def _view(self, view: str) -> AbstractContextManager[None]:
        if view == "live":
            return nullcontext()
        if view == "ema" and self.average is not None:
            return self.average.worn()
        if view == "base" and self.has_adapters:
            return without_adapters(self.module)
        raise self._no_view(view, {"ema": "ema_decay is not set", "base": "lora is not set, so it has no adapters"})
