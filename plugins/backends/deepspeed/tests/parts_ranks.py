"""The ranks that divide layers in tests (``tensor_parallel = 2``), and their program: two ranks are one replica of the
model, four are two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.weights.fingerprint import fingerprint
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model
from zero_cases import trainer

from tests.support.rank_batches import batch, shares, spec
from tests.support.rank_case import held
from tests.support.trainer_rank_cases import TrainerRankCases

LORA: dict[str, dict[str, Any]] = {
    "all": {"stage": 2, "lora": {"rank": 2, "alpha": 8}},
    "some": {"stage": 0, "lora": {"rank": 3, "alpha": 8, "targets": ("q_proj", "o_proj", "down_proj")}},
    "unfused": {"stage": 2, "kernels": "none", "lora": {"rank": 2, "alpha": 8}},
}
MUON: dict[str, dict[str, Any]] = {
    "whole": {"stage": 0},
    "lora": {"stage": 2, "lora": {"rank": 2, "alpha": 8}},
}
"""Options of Muon for matrices, and for adapters."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "attention_bias": True, "mlp_bias": True, "tied": False},
    "mistral": {"architecture": "mistral", "sliding_window": 8},
    "gemma2": {"architecture": "gemma2", "sliding_window": 8},
    "gemma3": {"architecture": "gemma3_text", "sliding_window": 8},
}
"""Kinds of layers other than those of Qwen 3."""
REFUSED: dict[str, dict[str, Any]] = {
    "heads": {"heads": 3, "kv_heads": 1, "head_dim": 8},
    "dropout": {"attention_dropout": 0.1},
    "layers": {"architecture": "olmo2"},
}
PARAMETER_VALUES = {"lora": tuple(LORA), "muon": tuple(MUON), "kind": tuple(MODELS)}


class TwoReplicas(TrainerRankCases):
    """The layouts are the stages of ZeRO. A single rank divides nothing, and can continue in stage 3 too."""

    module = "rlhf_plugin_deepspeed.trainer"
    share = 2
    layouts = {stage: {"stage": int(stage)} for stage in ("0", "1", "2", "3")}
    default_layout = "2"
    only = dict.fromkeys(("equal", "resume", "from_one"), ("0", "1", "2")) | {"skip": ("2",)}

    @staticmethod
    def make(of: ModelSpec, **options: Any) -> Any:
        return trainer(of, **({"tensor_parallel": 2} if of.world_size > 1 else {}), **options)

    @classmethod
    def values(cls, parameter: str, case: str) -> Iterable[str]:
        if parameter in PARAMETER_VALUES:
            return PARAMETER_VALUES[parameter]
        choices = {"layout": cls.only.get(case, ()), "variant": tuple(cls.variants)}
        return choices.get(parameter, ())

    @classmethod
    def prepare(cls, folder: Path) -> None:
        super().prepare(folder)
        for name, options in {**MODELS, **REFUSED}.items():
            tiny_model(folder / name, std=0.2, **options)
        policy = trainer(spec(folder), **LORA["all"])
        for number in range(2):
            policy.update([batch(number)], TokenLoss(), {}, {})
        policy.save(folder / "adapters")

    def facts(self, of: Any) -> dict[str, Any]:
        return {
            "share": of.facts().ranks_per_share,
            "shapes": {name: list(p.shape) for name, p in of.parameters.items()},
            "prints": {name: fingerprint(p.detach()) for name, p in of.parameters.items()},
        }

    def case_adapted(self, lora: str) -> Any:
        """Gradients after a first step (before it one factor has none), further steps, the tensors of a rank."""
        policy = self.make(self.here(), ema_decay=0.9, weight_decay=0.1, **LORA[lora])
        first = self.steps(policy, [0])
        self.first_gradients(policy, f"lora-{lora}", self.mine(0), TokenLoss())
        done = first + self.steps(policy, range(1, 4))
        self.keep(f"weights-lora-{lora}", held(policy))
        self.keep(f"average-lora-{lora}", held(policy, "ema"))
        policy.save(self.folder / f"saved-lora-{lora}")
        return {"steps": done, "coverage": policy.coverage(), **self.facts(policy)}

    def case_muon(self, muon: str) -> Any:
        policy = self.make(self.here(), optimizer="muon", weight_decay=0.1, **MUON[muon])
        done = self.steps(policy, range(3))
        self.keep(f"weights-muon-{muon}", held(policy))
        return {"steps": done}


class OneReplica(TwoReplicas):
    """Further cases, for two ranks only."""

    only = TwoReplicas.only | dict.fromkeys(("critic", "frozen", "lent"), ("2",))
    variants = {
        "checkpointing": {"stage": 2, "gradient_checkpointing": True, "logits_chunk": 500},
        "offload": {"stage": 2, "offload_optimizer": "cpu"},
        "bucket": {"stage": 1, "bucket": 1000},
        "clipped": {"stage": 2, "max_grad_norm": 0.1},
        "bf16": {"stage": 2, "dtype": "bf16"},
        "stored": {"stage": 2, "dtype": "bf16", "storage": "bf16"},
    }

    def case_model(self, kind: str) -> Any:
        model = self.make(replace(self.here(), path=str(self.folder / kind)), stage=2)
        self.first_gradients(model, kind, self.mine(0), TokenLoss())
        done = self.steps(model, range(2))
        self.keep(f"weights-{kind}", held(model))
        return {"steps": done}

    def case_adapters(self) -> Any:
        """The weights and the export of a checkpoint that one rank saved."""
        policy = self.make(self.here(), **LORA["all"])
        policy.load(self.folder / "adapters")
        policy.export(self.folder / "export-lora")
        self.keep("base", held(policy, "base"))
        scores = [policy.forward(self.mine(9), ("logprobs",), view)[0]["logprobs"] for view in ("live", "base")]
        self.keep("scores-lora", dict(zip(("live", "base"), scores, strict=True)))
        list(policy.buckets())
        return policy.sent_fingerprints()

    def case_exported(self) -> Any:
        policy = self.make(self.here(), stage=2, ema_decay=0.9)
        policy.export(self.folder / "export")
        list(policy.buckets())
        return policy.sent_fingerprints()

    def case_beside(self) -> Any:
        """Roles with and without divided layers in one process, in both orders."""
        divided, plain = self.make(self.here(), stage=2), trainer(self.here(), stage=2)
        norms = [self.steps(divided, [0])[0][1]]
        norms.append(plain.update(shares(batch(0), self.ranks)[self.rank], TokenLoss(), {}, {})[1].grad_norm)
        return [
            *norms, self.steps(divided, [1])[0][1], self.steps(self.make(self.here(), stage=1), [0])[0][1]
        ]  # fmt: skip

    def case_refused(self) -> Any:
        messages = {}
        for name in REFUSED:
            try:
                self.make(replace(self.here(), path=str(self.folder / name)), stage=2)
            except CapabilityError as error:
                messages[name] = str(error)
        return messages


if __name__ == "__main__":
    OneReplica.main()
