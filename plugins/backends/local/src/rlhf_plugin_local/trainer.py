"""The trainer ``torch``: one role's model in this process, on the CPU or on one GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from rlhf.errors import CapabilityError, ConfigError, TrainingError
from rlhf.interfaces import ApplyResult, Component, Loss, ModelSpec, Sums, Trainer
from rlhf.ops.batch import Batch
from rlhf.ops.heads import LANGUAGE_MODEL_ONLY, resolve_head
from rlhf.ops.losses import add_sums, evaluate, over_mask
from rlhf.seeds import derive_seed
from rlhf.types import Head
from torch import Tensor

from rlhf_plugin_local import heads as head_ops
from rlhf_plugin_local import state
from rlhf_plugin_local.attention import attend_with, current_route
from rlhf_plugin_local.config import TorchTrainerConfig
from rlhf_plugin_local.ema import Ema
from rlhf_plugin_local.model import eos_token_ids, exporting, load_model, load_tokenizer
from rlhf_plugin_local.optimizer import build_optimizer, clip, optimizer_tensors, restore_optimizer
from rlhf_plugin_local.precision import Precision, choose_device, choose_precision
from rlhf_plugin_local.schedule import Schedule


class TorchTrainer(Trainer):
    """fp32 weights, fused AdamW, padding-free forward and backward; bf16 is autocast on top. Roles that are not trained
    hold weights and nothing else."""

    name = "torch"
    source = "AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101)"
    Config = TorchTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"export:module", "export:tensors", "ema", "bf16", "fp32", "resume:exact"}
    )

    def __init__(self, config: TorchTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        if spec.world_size != 1:
            raise CapabilityError(
                f"trainer 'torch' runs on one rank, role {spec.role.name!r} asks for {spec.world_size}: use a trainer "
                "with the capability 'ranks:many'"
            )
        self.spec = spec
        self.device = choose_device(self.config.device)
        self.precision: Precision = choose_precision(spec.dtype, self.device)
        self.tokenizer = load_tokenizer(spec) if spec.role.trained else None
        self.loaded = load_model(spec, self.device)
        self.module = self.loaded.module
        """The live model, in evaluation mode between calls (``export:module``)."""
        self.eos_token_ids = eos_token_ids(self.module, self.tokenizer)
        self.updates = 0
        """Optimizer steps so far, skipped ones included."""
        self.skipped = 0
        self._micros = 0  # micro-batches since the last step; counters of the dropout seeds
        self._bad_loss = ""
        self._coverage: dict[str, list[str]] | None = None
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.module.named_parameters())
        self.module.requires_grad_(spec.role.trained)
        self.optimizer: torch.optim.Optimizer | None = None
        self.ema: Ema | None = None
        if spec.role.trained:
            self.optimizer = build_optimizer(self.parameters, self.config)
            self.schedule = Schedule(self.config, spec.total_updates)
            if self.config.ema_decay is not None:
                self.ema = Ema(self.parameters, self.config.ema_decay)
            if spec.gradient_checkpointing:
                self._checkpoint_gradients()

    @property
    def views(self) -> tuple[str, ...]:
        return ("live",) if self.ema is None else ("live", "ema")

    @property
    def precision_note(self) -> str:
        """Which arithmetic was chosen and why."""
        return self.precision.note

    def token_budget(self) -> int:
        """bf16 gains by larger matrices; in fp32 they only cost memory (docs/benchmarks.md has the shapes)."""
        return 4096 if self.precision.bf16 else 2048

    @property
    def tokenizer_path(self) -> str:
        return self.spec.path

    # ------------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        resolved = [self._head(o) for o in outputs]
        results = []
        with self._view(view):
            for micro in micros:
                batch = micro.to(self.device)
                values = self._outputs(batch, resolved)
                results.append({h.name: head_ops.scatter(batch, h, values[h.name]).cpu() for h in resolved})
        return results

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        self._require_trained("accumulate")
        over = over_mask(loss)
        resolved = [self._head(o, over) for o in loss.outputs()]
        parts = []
        self.module.train()
        try:
            for micro in micros:
                parts.append(self._backward(micro.to(self.device), loss, resolved, coef, live))
        finally:
            self.module.eval()
        return add_sums(parts)

    def _backward(
        self, batch: Batch, loss: Loss, resolved: Sequence[Head], coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        seed = derive_seed(self.spec.seed, f"dropout/{self.spec.role.name}", self.updates, self._micros)
        self._micros += 1
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            values = self._outputs(batch, resolved)
            total, sums = evaluate(loss, batch, values, coef, live)
            if not math.isfinite(sums["loss"][0]):
                self._bad_loss = self._bad_loss or f"non-finite loss ({sums['loss'][0]}) of {loss.name!r}"
            elif not self._bad_loss and total.requires_grad:
                total.backward()
        return sums

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.bf16):
            hidden_NH = self.loaded.hidden(batch.ids_N, batch.position_N, batch.lens_B.tolist())
            return head_ops.compute(
                hidden_NH,
                batch,
                resolved,
                self.loaded.logits,
                tempered=self.loaded.kind == "lm",
                chunk=max(1, self.config.logits_chunk // self.loaded.head.out_features),
                head_fp32=self.config.head_fp32,
            )

    def _head(self, output: str | Head, over: str | None = None) -> Head:
        head = resolve_head(output, over)
        if isinstance(output, str) and (output in LANGUAGE_MODEL_ONLY) != (self.loaded.kind == "lm"):
            raise TrainingError(
                f"role {self.spec.role.name!r} has a {self.loaded.kind!r} head, which does not give {output!r}"
            )
        return head

    # ---------------------------------------------------------------------------------------- step

    def apply(self) -> ApplyResult:
        optimizer = self._require_trained("apply")
        lr = self.config.lr * self.schedule.factor(self.updates)
        norm = clip(self.parameters, self.config.max_grad_norm)
        skipped = self._bad_loss or ("" if math.isfinite(norm) else f"non-finite gradient (norm {norm})")
        if skipped:
            self.skipped += 1
        else:
            for group in optimizer.param_groups:
                group["lr"] = lr
            self._step(optimizer)
        self.updates += 1
        self.zero_grad()
        return ApplyResult(norm, lr, skipped)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        before = None
        if self._coverage is None:
            without = [n for n, p in self.parameters.items() if p.grad is None or not bool(p.grad.any())]
            before = {n: _fingerprint(p) for n, p in self.parameters.items()}
        optimizer.step()
        if before is not None:
            unchanged = [n for n, p in self.parameters.items() if _fingerprint(p) == before[n]]
            self._coverage = {"without_gradient": without, "unchanged": unchanged}
        if self.ema is not None:
            self.ema.update()

    def zero_grad(self) -> None:
        self._bad_loss, self._micros = "", 0
        for p in self.parameters.values():
            p.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Zeros for parameters that got none."""
        return {
            name: torch.zeros_like(p).cpu() if p.grad is None else p.grad.detach().clone().cpu()
            for name, p in self.parameters.items()
        }

    def coverage(self) -> dict[str, list[str]]:
        """After the first step that was not skipped: parameter names under ``without_gradient`` (none, or all zero) and
        ``unchanged``. Empty before."""
        return {} if self._coverage is None else {k: list(v) for k, v in self._coverage.items()}

    # ------------------------------------------------------------------------------------- weights

    def weights(self, view: str = "live") -> Iterator[tuple[str, Tensor]]:
        """Detached, on the trainer's device, tied weights once (under the embedding's name). They share memory with the
        model: copy what must outlive the next step."""
        with self._view(view):
            for name, tensor in state.named_tensors(self.module).items():
                yield name, tensor.detach()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        state.copy_into(state.named_tensors(self.module), dict(weights), f"what role {self.spec.role.name!r} was sent")

    def export(self, path: Path, view: str = "live") -> None:
        tokenizer = self.tokenizer or load_tokenizer(self.spec)
        with self._view(view), exporting(self.module):
            self.module.save_pretrained(str(path))
        tokenizer.save_pretrained(str(path))
        for file in Path(path).glob("*.safetensors"):
            file.chmod(0o644)  # written through a private temporary file; as readable as its config.json

    # --------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        files: dict[str, Mapping[str, Tensor]] = {"model": state.named_tensors(self.module)}
        if self.optimizer is not None:
            files["optimizer"] = optimizer_tensors(self.optimizer, self.parameters)
        if self.ema is not None:
            files["ema"] = self.ema.tensors
        facts: dict[str, Any] = {
            "role": self.spec.role.name,
            "trained": self.spec.role.trained,
            "updates": self.updates,
            "skipped": self.skipped,
            "precision": self.precision.name,
            "ema": self.ema is not None,
            "coverage": self._coverage,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        state.write(path, files, facts)

    def load(self, path: Path) -> None:
        facts = state.read_facts(path)
        if facts["trained"] != self.spec.role.trained or facts["ema"] != (self.ema is not None):
            raise ConfigError(
                f"the checkpoint {str(path)!r} was saved with trained = {facts['trained']}, ema = {facts['ema']}; this "
                f"run has trained = {self.spec.role.trained}, ema = {self.ema is not None}. Resume with its config."
            )
        where = f"the checkpoint {str(path)!r}"
        state.copy_into(state.named_tensors(self.module), state.read_tensors(path, "model"), where)
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self.parameters, state.read_tensors(path, "optimizer"), where)
        if self.ema is not None:
            state.copy_into(self.ema.tensors, state.read_tensors(path, "ema"), where)
        self.updates, self.skipped, self._coverage = facts["updates"], facts["skipped"], facts["coverage"]
        if self.spec.dtype == "auto" and facts["precision"] != self.precision.name:
            name = facts["precision"]
            self.precision = Precision(name == "bf16", f"{name} on {self.device.type}: as the resumed run had")
        self.zero_grad()

    # ------------------------------------------------------------------------------------ internals

    def _view(self, view: str) -> AbstractContextManager[None]:
        if view == "live":
            return nullcontext()
        if view == "ema" and self.ema is not None:
            return self.ema.worn()
        why = {"ema": "ema_decay is not set", "base": "this trainer has no adapters"}.get(view, "it is not known")
        raise CapabilityError(f"role {self.spec.role.name!r} has no view {view!r}: {why}. Views: live, ema, base.")

    def _require_trained(self, call: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise TrainingError(f"role {self.spec.role.name!r} is not trained: {call}() needs RoleSpec(trained=True)")
        return self.optimizer

    def _checkpoint_gradients(self) -> None:
        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # the second pass runs inside backward(), outside of the context that holds the lengths
            return nullcontext(), attend_with(current_route())

        self.module.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def _fingerprint(p: Tensor) -> int:
    return int(p.detach().view(torch.int32).sum(dtype=torch.int64))
