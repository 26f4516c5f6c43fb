"""The common part of trainers of transformers models: packed forward, outputs of heads, backward per micro-batch.

A subclass holds and steps the optimizer, and reads and writes weights, state and exports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

import torch
from rlhf.errors import CapabilityError, TrainingError
from rlhf.interfaces import (
    LendsHead,
    Loss,
    LowRankAdapters,
    ModelSpec,
    Offloads,
    SendsWeights,
    Sums,
    TakesWeights,
    Trainer,
    TrainerFacts,
)
from rlhf.interfaces.memory import ModelSize, TrainerMemory, TrainerWork
from rlhf.interfaces.model import Flops
from rlhf.ops.batch import Batch
from rlhf.ops.heads import OutputHead
from rlhf.ops.loss_value import add_sums, evaluate, over_mask
from rlhf.seeds import derive_seed
from rlhf.types import ExpertLayers, Head
from torch import Tensor, nn

from rlhf_modeling import heads as head_ops
from rlhf_modeling.adapter_check import separable_adapters
from rlhf_modeling.adapters import train_adapters_only
from rlhf_modeling.arithmetic import arithmetic, default_micro_tokens
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.determinism import determinism, seeded
from rlhf_modeling.embedding_noise import EmbeddingNoise
from rlhf_modeling.experts import ExpertBalance
from rlhf_modeling.export_files import try_export
from rlhf_modeling.flash_attention import check_kernel, why_not
from rlhf_modeling.flops import count_flops
from rlhf_modeling.heads import comparable_head, head_of_role
from rlhf_modeling.host_inputs import HostInputs
from rlhf_modeling.images.architecture import vision_parameters
from rlhf_modeling.kernel_agreement import disagreement
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.memory import trainer_memory
from rlhf_modeling.packed_model import PackedModel, checkpoint_gradients
from rlhf_modeling.precision import Precision, choose_precision, precision_of
from rlhf_modeling.pretrained import eos_token_ids, load_tokenizer, set_padding
from rlhf_modeling.router_replay import Routers
from rlhf_modeling.skeleton import check_files, replayed_layers
from rlhf_modeling.storage import whole_storage
from rlhf_modeling.weight_views import WeightViews


class PackedTrainer(WeightViews, SendsWeights, TakesWeights, Offloads, LendsHead, Trainer):
    """Padding-free forward and backward of one role's model; bf16 arithmetic is autocast on top of the weights."""

    Config = TrainingConfig
    capabilities: ClassVar[frozenset[str]] = frozenset()
    layout: ClassVar[frozenset[str]] = frozenset(
        {"logits_chunk", "shared_prefixes", "deterministic", "offload_activations"}
    )
    config: TrainingConfig

    @classmethod
    def precision_on_processor(cls) -> Precision:
        return choose_precision("auto", torch.device("cpu"))

    @classmethod
    def check_files(cls, spec: ModelSpec) -> None:
        check_files(spec)

    @classmethod
    def experts(cls, config: TrainingConfig, spec: ModelSpec) -> ExpertLayers | None:
        return replayed_layers(config, spec)

    @classmethod
    def memory(
        cls, config: TrainingConfig, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str
    ) -> TrainerMemory:
        storage = whole_storage(config, device, size, spec.storage)
        return trainer_memory(storage, arithmetic(config, spec, size, work, device), config, spec, size, work)

    @classmethod
    def adapters(cls, config: TrainingConfig, spec: ModelSpec) -> LowRankAdapters | None:
        return separable_adapters(config.lora, spec) if spec.role.trained and config.lora is not None else None

    def prepare(self, model: LoadedModel, spec: ModelSpec, device: torch.device) -> None:
        """Use a loaded model. A subclass calls this method once in its constructor, before it creates an optimizer."""
        self.spec, self.device, self.loaded_model = spec, device, model
        model.device = device
        self.precision: Precision = precision_of(spec, device)
        check_kernel(self.config.attention, device, self.precision.bf16)
        self.choose_kernel()
        self.tokenizer = load_tokenizer(spec) if spec.role.trained else None
        self.module = model.module
        """The live model, in evaluation mode between calls."""
        self.packed: nn.Module = PackedModel(model, self.config)
        """Computes a micro-batch: ``packed(batch, outputs)``."""
        self.eos_token_ids = eos_token_ids(self.module, self.tokenizer)
        if self.tokenizer is not None and model.kind != "lm":
            set_padding(self.module, self.tokenizer, self.eos_token_ids)
        self._notes = try_export(spec, self.module, self.tokenizer) if self.tokenizer is not None else ()
        default = type(self.config).model_fields["lr"].default
        if spec.role.trained and self.config.lora is not None and self.config.lr == default:
            self._notes += (
                f"{spec.role.name}: trainer.lr is {default:g}, the default, at which adapters learn very slowly. "
                "Usual rates are 1e-5 to 2e-4.",
            )
        self.borrowed: dict[str, OutputHead] = {}
        """{lending role: output head}."""
        self._active_view = ExitStack()
        self.updates = 0
        """Optimizer steps so far, including skipped ones and scheduled ones that were not taken."""
        self.skipped = 0
        self._micros = 0  # micro-batches since the last step; part of the dropout seeds
        self._bad_loss = ""
        self._coverage: dict[str, list[str]] | None = None
        self.parameters: dict[str, nn.Parameter] = choose_parameters(model, spec, self.config)
        """{name: trained parameter}; of a frozen role, all parameters."""
        offloads = spec.role.trained and self.config.offload_activations
        self.host_inputs = HostInputs(device) if offloads else None
        if spec.role.trained and spec.gradient_checkpointing:
            checkpoint_gradients(self.module, self.host_inputs)
        coef = self.config.aux_loss_coef if spec.role.trained else 0.0
        self.balance = ExpertBalance(self.module, coef) if coef else None
        layers = replayed_layers(self.config, spec)
        model.routers = None if layers is None else Routers(self.module, layers)
        alpha = self.config.neftune_alpha if spec.role.trained else None
        self.noise = None if alpha is None else EmbeddingNoise(model, alpha)

    def choose_kernel(self) -> None:
        """Choose the attention kernel, after the model was probed. Raises CapabilityError if an option names a kernel
        but this model is not packed, or if ``flash`` and ``sdpa`` give different results on this device."""
        model, kernel, name = self.loaded_model, self.config.attention, type(self.loaded_model.module).__name__
        if kernel != "auto" and model.layout == "alone":
            raise CapabilityError(
                f"trainer.attention = {kernel!r} chooses a kernel for packed attention, but {name} is computed without "
                "packed attention. Remove the option."
            )
        model.attention = kernel
        dtype = torch.bfloat16 if self.precision.bf16 else torch.float32
        if kernel == "sdpa" or why_not(self.device, dtype) or not (problem := disagreement(model.layers, self.device)):
            return
        if kernel == "flash":
            raise CapabilityError(f"trainer.attention = 'flash': for layers of {name} {problem}. Remove the option.")
        model.attention = "sdpa"
        model.notes += (f"{self.spec.role.name}: attention of {name} is 'sdpa', because with 'flash' {problem}.",)

    def facts(self) -> TrainerFacts:
        return TrainerFacts(
            eos_token_ids=self.eos_token_ids,
            vocabulary=self.loaded_model.vocabulary,
            device=str(self.device),
            dtype=self.precision.name,
            precision=self.precision.note,
            views=self.views,
            shares_prefixes=bool(getattr(self.packed, "shares_prefixes", False)),
            token_budget=default_micro_tokens(self.spec, self.precision.bf16, self.device.type),
            wants_token_share=self.balance is not None,
            device_name=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "",
            flops=self._flops(),
            notes=self.loaded_model.notes + self._notes,
            trained_parameters=sum(map(self.elements, self.parameters)) if self.spec.role.trained else 0,
            random_head=self.loaded_model.fresh_head,
            experts=self.loaded_model.routers.layers if self.loaded_model.routers is not None else None,
        )

    def elements(self, name: str) -> int:
        """Number of elements of a parameter, on all ranks."""
        return self.parameters[name].numel()

    def _flops(self) -> Flops | None:
        """The FLOPs of a trained role, on the rank whose facts are read."""
        if not self.spec.role.trained or self.spec.rank != 0:
            return None
        return count_flops(self.spec, self.loaded_model.head.out_features, self.config.lora is not None)

    # ------------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        resolved = [self._head(o) for o in outputs]
        results = []
        with (
            # The current view is swapped in already. A second swap would bring the live weights back.
            self._view("live" if view == self.current_view else view),
            determinism(self.config.deterministic),
            self._casts(len(micros), backward=False),
        ):
            for micro in self._with_pixels(micros):
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
        self._set_training(True)
        try:
            with determinism(self.config.deterministic), self._casts(len(micros), backward=True):
                for number, micro in enumerate(self._with_pixels(micros)):
                    last = number == len(micros) - 1
                    parts.append(self._micro(micro.to(self.device), loss, resolved, coef, live, last))
        finally:
            self._set_training(False)
        return add_sums(parts)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        self._require_trained("evaluate")
        over = over_mask(loss)
        resolved = [self._head(o, over) for o in loss.outputs()]
        parts = []
        with self._casts(len(micros), backward=False):
            for micro in self._with_pixels(micros):
                batch = micro.to(self.device)
                watched = self.balance.watched() if self.balance is not None else nullcontext()
                with determinism(self.config.deterministic), watched:
                    values = self._outputs(batch, resolved)
                parts.append(evaluate(loss, batch, values, coef, live)[1])
                if self.balance is not None:
                    parts[-1]["aux_loss"] = (float(self.balance.loss(batch, self.loaded_model.part)), 0.0)
        return add_sums(parts)

    def skip_updates(self, count: int) -> None:
        self._require_trained("skip_updates")
        self.updates += count

    def _micro(
        self,
        batch: Batch,
        loss: Loss,
        resolved: Sequence[Head],
        coef: Mapping[str, float],
        live: Mapping[str, str],
        last: bool,
    ) -> Sums:
        number = self._micros * self.spec.world_size + self.spec.rank  # over all ranks: no two drop the same
        seed = derive_seed(self.spec.seed, f"dropout/{self.spec.role.name}", self.updates, number)
        self._micros += 1
        with seeded(seed, self.device):
            with ExitStack() as around:
                if self.balance is not None:
                    around.enter_context(self.balance.watched())
                if self.noise is not None:
                    around.enter_context(self.noise.added())
                values = self._outputs(batch, resolved)
            total, sums = evaluate(loss, batch, values, coef, live)
            if self.balance is not None:
                aux = self.balance.loss(batch, self.loaded_model.part)
                total, sums["aux_loss"] = total + self.balance.coef * aux, (float(aux.detach()), 0.0)
            if not math.isfinite(sums["loss"][0]):
                self._bad_loss = self._bad_loss or f"non-finite loss ({sums['loss'][0]}) of {loss.name!r}"
            self._backward(total, last)
        return sums

    def _with_pixels(self, micros: Sequence[Batch]) -> Iterator[Batch]:
        """``micros``. While one micro-batch is computed, a thread computes the pixels of the next one's images. The
        caller requests the next one after computing."""
        for number, micro in enumerate(micros):
            if self.loaded_model.images is not None:
                for upcoming in micros[number : number + 2]:
                    self.loaded_model.images.pixels.start(image for images in upcoming.images_B for image in images)
            yield micro
            if self.progress is not None:
                self.progress(number + 1, len(micros))

    def _backward(self, total: Tensor, last: bool) -> None:
        """Add the gradients of ``total``. ``last``: this is the last micro-batch before the step."""
        if not self._bad_loss and total.requires_grad:
            total.backward()

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.bf16):
            return self.packed(batch, resolved)

    def _casts(self, micros: int, backward: bool) -> AbstractContextManager[Any]:
        """Context in which ``micros`` micro-batches may share autocast's bf16 copies of weights. With a ``backward``
        pass the weights get gradients."""
        return nullcontext()

    def _set_training(self, training: bool) -> None:
        """Replaces ``module.train(training)``, which sets the mode of each module through ``__setattr__``. That takes
        as long as a tenth of a small model's forward pass."""
        parts = list(self.module.modules())
        if any(type(part).train is not nn.Module.train for part in parts):
            self.module.train(training)
            return
        for part in parts:
            part.__dict__["training"] = training

    def _head(self, output: str | Head, over: str | None = None) -> Head:
        return head_of_role(output, over, self.spec.role.name, self.loaded_model.kind, self.borrowed)

    # ----------------------------------------------------------------------------------------- lending

    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        with self._view(view):
            head = self.loaded_model.output_head
        yield head

    def borrow_head(self, role: str, head: OutputHead) -> None:
        """The head is in bf16 if this role's logits are. Raises ModelError if either head has no row for some token
        (:func:`rlhf_modeling.heads.comparable_head`)."""
        tokens = len(self.tokenizer or load_tokenizer(self.spec))
        comparable = comparable_head(head, role, self.loaded_model.head.out_features, self.spec, tokens)
        bf16 = self.precision.bf16 and not self.config.head_fp32
        self.borrowed[role] = comparable.to(self.device, torch.bfloat16 if bf16 else torch.float32)

    # --------------------------------------------------------------------------------------- state

    def saved_facts(self) -> dict[str, Any]:
        """Fields of a checkpoint's ``trainer.json``, beside those of a subclass."""
        return {
            "role": self.spec.role.name,
            "updates": self.updates,
            "skipped": self.skipped,
            "precision": self.precision.name,
            "coverage": self._coverage,
            "lora": self.config.lora.model_dump(mode="json") if self.has_adapters and self.config.lora else None,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def restore_facts(self, facts: Mapping[str, Any]) -> None:
        """Take the counters and, with ``dtype = "auto"``, the precision of a checkpoint."""
        self.updates, self.skipped, self._coverage = facts["updates"], facts["skipped"], facts["coverage"]
        name = facts["precision"]
        if self.spec.dtype == "auto" and name != self.precision.name:
            self.precision = Precision(name == "bf16", f"{name} on {self.device.type}: as in the resumed run")

    # ------------------------------------------------------------------------------------- coverage

    def coverage(self) -> dict[str, list[str]]:
        return {} if self._coverage is None else {k: list(v) for k, v in self._coverage.items()}

    @property
    def _without_coverage(self) -> bool:
        """Whether the next step is examined. This is the case for the first step, and for all steps until a parameter
        gets a gradient."""
        return self._coverage is None or len(self._coverage["without_gradient"]) == len(self.parameters)

    def _require_trained(self, call: str) -> None:
        if not self.spec.role.trained:
            raise TrainingError(f"role {self.spec.role.name!r} is not trained: {call}() needs RoleSpec(trained=True)")


def choose_parameters(model: LoadedModel, spec: ModelSpec, config: TrainingConfig) -> dict[str, nn.Parameter]:
    """Set ``requires_grad`` of every parameter. Returns {name: trained parameter}; of a frozen role, all parameters."""
    module, trained = model.module, spec.role.trained
    module.requires_grad_(trained)
    if trained and config.lora is not None:
        own_head = model.head if model.kind != "lm" else None
        train_adapters_only(module, own_head, config.lora.modules_to_save)
    if trained and config.freeze_vision:
        for name in vision_parameters(module):
            module.get_parameter(name).requires_grad_(False)
    return {name: p for name, p in module.named_parameters() if p.requires_grad or not trained}
