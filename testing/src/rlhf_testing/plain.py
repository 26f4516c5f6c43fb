"""A trainer that is as simple as possible: the reference for the tests of real trainers.

It computes one sequence at a time, without packing, chunks and ranks: each log-prob comes from a forward pass over
exactly the tokens before it. It is slow on purpose. :class:`PlainTrainer` holds a transformers model,
:class:`EmbeddingTrainer` a few hundred parameters in pure torch, for suites that need gradients through *some* causal
model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.model import ADAPTER_PREFIX, PARTS, LowRankAdapters, ModelSpec
from rlhf.interfaces.trainer import (
    ApplyResult,
    HasViews,
    LendsHead,
    SendsWeights,
    SharesModule,
    Sums,
    TakesWeights,
    Trainer,
)
from rlhf.ops.batch import Batch
from rlhf.ops.heads import OutputHead, resolve_head
from rlhf.ops.loss_value import add_sums, evaluate, over_mask
from rlhf.seeds import derive_seed
from rlhf.types import Head
from rlhf_modeling.pretrained import exporting
from torch import Tensor, nn

from rlhf_testing import fabricate


class PlainTrainer(SharesModule, SendsWeights, TakesWeights, LendsHead, Trainer):
    """One process, fp32, AdamW without a schedule."""

    name = "plain"

    class Config(ComponentConfig):
        lr: float = 1e-3
        """Learning rate."""

    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None:
        self.config = self.Config() if config is None else config
        self.spec = spec
        self.language_model = spec.role.head == "lm"
        self.module: Any = self.load_module().float()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=self.config.lr)
        self.borrowed: dict[str, OutputHead] = {}

    # ---------------------------------------------------------------------------------- the model

    @classmethod
    def check_files(cls, spec: ModelSpec) -> None:
        """Raises ModelError if a frozen role's model was saved without the role's head."""
        from transformers import AutoConfig

        if spec.role.trained or spec.role.head == "lm":
            return
        if not any("Classification" in name for name in AutoConfig.from_pretrained(spec.path).architectures or ()):
            raise ModelError(f"{spec.path!r} has no {spec.role.head!r} head, and {spec.role.name!r} is not trained")

    def load_module(self) -> nn.Module:
        """The transformers model of the role."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        self.check_files(self.spec)
        if self.language_model:
            return AutoModelForCausalLM.from_pretrained(self.spec.path, dtype=torch.float32).eval()
        labels = 1 if self.spec.role.head == "scalar" else int(self.spec.role.head.split(":")[1])
        auto = AutoModelForSequenceClassification
        with torch.random.fork_rng(devices=[]):  # a head that the files lack depends on the seed only
            torch.default_generator.manual_seed(derive_seed(self.spec.seed, "head/" + self.spec.role.name))
            return auto.from_pretrained(self.spec.path, dtype=torch.float32, num_labels=labels).eval()

    def logits(self, ids_T: Tensor) -> Tensor:
        """[T] -> fp32 [T, V]: the logits after each token (or [T, labels] of a classification head)."""
        if self.language_model:
            return self.module(ids_T[None], use_cache=False).logits[0].float()
        return self.module.score(self.hidden(ids_T)).float()

    def hidden(self, ids_T: Tensor) -> Tensor:
        """[T] -> fp32 [T, H]: the hidden states that the output head reads."""
        base: Any = getattr(self.module, self.module.base_model_prefix)
        return base(ids_T[None], use_cache=False).last_hidden_state[0].float()

    def output_head(self) -> OutputHead:
        """The output head of a language model."""
        head: Any = self.module.get_output_embeddings()
        softcap = getattr(self.module.config, "final_logit_softcapping", None)
        return OutputHead(head.weight.detach(), None if head.bias is None else head.bias.detach(), softcap)

    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        yield self.output_head()

    def borrow_head(self, role: str, head: OutputHead) -> None:
        self.borrowed[role] = head

    def outputs(self, micro: Batch, heads: Sequence[Head]) -> dict[str, Tensor]:
        """{head: [tokens under its mask, ...]}, ``scores`` [B], with gradient."""
        parts: dict[str, list[Tensor]] = {h.name: [] for h in heads}
        for b in range(micro.sequences):
            index = torch.arange(int(micro.starts_B[b]), int(micro.starts_B[b] + micro.lens_B[b]))
            ids_T = micro.ids_N[index]
            inputs = {"logits": self.logits(ids_T)}
            if any(head.reads == "hidden" for head in heads):
                inputs["hidden"] = self.hidden(ids_T)
            for head in heads:
                if head.over == "last_token":
                    positions = torch.tensor([len(index) - 1])
                else:
                    positions = micro.tok[head.over][index].nonzero()[:, 0]
                source = inputs[head.reads][positions - 1 if head.position == "before" else positions]
                tempered = self.language_model and head.reads == "logits" and head.position == "before"
                if tempered and "temperature" in micro.tok:
                    source = source / micro.tok["temperature"][index][positions][:, None]
                columns = {c: micro.tok[c][index][positions] for c in head.columns}
                constants = {**head.constants, **{role: self.borrowed[role] for role in head.lenders}}
                parts[head.name].append(head.fn(source, ids_T[positions], columns, constants))
        return {name: torch.cat(values) for name, values in parts.items()}

    # ------------------------------------------------------------------------- the interface

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        """See :meth:`rlhf.interfaces.Trainer.forward`; only the live view exists."""
        if view != "live":
            raise ValueError(f"the plain trainer has no view {view!r}, only 'live'")
        heads, results = [resolve_head(o) for o in outputs], []
        for micro in micros:
            with torch.no_grad():
                values_of_heads = self.outputs(micro, heads)
            for head in heads:
                if head.over != "last_token":
                    values = values_of_heads[head.name]
                    full = values.new_zeros((micro.tokens, *values.shape[1:]))
                    full[micro.tok[head.over]] = values
                    values_of_heads[head.name] = full
            results.append(values_of_heads)
        return results

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        """See :meth:`rlhf.interfaces.Trainer.accumulate`."""
        outputs = [*loss.outputs(), *live.values()]
        heads = {h.name: h for h in (resolve_head(o, over_mask(loss)) for o in outputs)}
        sums = []
        for micro in micros:
            total, part = evaluate(loss, micro, self.outputs(micro, list(heads.values())), coef, live)
            total.backward()
            sums.append(part)
        return add_sums(sums)

    def apply(self) -> ApplyResult:
        """A step of AdamW, skipped if the gradient is not finite."""
        squares = [p.grad.double().square().sum() for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
        skipped = "" if norm < float("inf") else f"gradient norm is {norm}"
        if not skipped:
            self.optimizer.step()
        self.zero_grad()
        return ApplyResult(norm, self.config.lr, skipped)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        return {k: p.grad for k, p in self.module.named_parameters() if p.grad is not None}

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach().clone()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            parameters = dict(self.module.named_parameters())
            for name, values in weights:
                parameters[name].copy_(values)

    def export(self, path: Path, view: str = "live") -> None:
        from transformers import AutoTokenizer

        with exporting(self.module):
            self.module.save_pretrained(str(path))
        AutoTokenizer.from_pretrained(self.spec.path).save_pretrained(str(path))

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.weights()), str(path / "weights.safetensors"))
        state = self.optimizer.state_dict()
        tensors = {f"{i}/{k}": v for i, values in state["state"].items() for k, v in values.items()}
        save_file(tensors, str(path / "optimizer.safetensors"))
        (path / "groups.json").write_text(json.dumps(state["param_groups"]))

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.load_weights(iter(load_file(str(path / "weights.safetensors")).items()))
        state: dict[int, dict[str, Tensor]] = {}
        for name, values in load_file(str(path / "optimizer.safetensors")).items():
            index, key = name.split("/")
            state.setdefault(int(index), {})[key] = values
        groups = json.loads((path / "groups.json").read_text())
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


class PlainAdapterTrainer(HasViews, PlainTrainer):
    """Gives a generator adapters of two layers of each block. The module has the sums. Nothing is trained."""

    name = "plain_adapters"
    low_rank = LowRankAdapters(4, 0.5, ("q_proj", "v_proj"))

    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None:
        super().__init__(config, spec)
        self.base = dict(super().weights())
        self.draw(0)

    def draw(self, seed: int) -> None:
        """Replace the adapters by random ones."""
        random, rank = torch.Generator().manual_seed(seed), self.low_rank.rank
        self.factors = {
            name: (
                torch.randn(rank, weight.shape[1], generator=random),
                torch.randn(weight.shape[0], rank, generator=random),
            )
            for name, weight in self.base.items()
            if name.split(".")[-2] in self.low_rank.layers
        }
        self.use_view("live")

    def use_view(self, view: str) -> None:
        weights = dict(self.base)
        for name, (a_RI, b_OR) in self.factors.items() if view == "live" else ():
            weights[name] = weights[name] + self.low_rank.scaling * b_OR @ a_RI
        self.load_weights(iter(weights.items()))
        self.current_view = view

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        if view != PARTS:
            yield from super().weights()
            return
        yield from self.base.items()
        for name, factors in self.factors.items():
            for letter, factor in zip("AB", factors, strict=True):
                yield f"{ADAPTER_PREFIX}{name.removesuffix('weight')}lora_{letter}.weight", factor


class _Embedding(nn.Module):
    """A minimal causal model: each position reads its own token and the mean of the tokens before it."""

    def __init__(self, vocabulary: int, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, outputs)

    def hidden(self, ids_T: Tensor) -> Tensor:
        own_TH = self.embedding(ids_T)
        mean_TH = own_TH.cumsum(0) / torch.arange(1, len(ids_T) + 1)[:, None]
        return torch.tanh(self.mix(torch.cat([own_TH, mean_TH], 1)))

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.head(self.hidden(ids_T))


class EmbeddingTrainer(PlainTrainer):
    """The plain trainer over a tiny model of fabricated tokens; equal seeds give equal weights."""

    name = "embedding"

    def load_module(self) -> nn.Module:
        outputs = {"lm": fabricate.VOCABULARY, "scalar": 1}.get(self.spec.role.head)
        if outputs is None:
            outputs = int(self.spec.role.head.split(":")[1])
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed formats the call stack for each kind of device
            torch.default_generator.manual_seed(self.spec.seed)
            return _Embedding(fabricate.VOCABULARY, outputs)

    def logits(self, ids_T: Tensor) -> Tensor:
        return self.module(ids_T)

    def hidden(self, ids_T: Tensor) -> Tensor:
        return self.module.hidden(ids_T)

    def output_head(self) -> OutputHead:
        return OutputHead(self.module.head.weight.detach(), self.module.head.bias.detach())

    def export(self, path: Path, view: str = "live") -> None:
        raise NotImplementedError("the embedding model has no Hugging Face format")
