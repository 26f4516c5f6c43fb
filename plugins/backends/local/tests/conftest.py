"""Tiny models, batches and losses of the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rlhf.interfaces import GeneratorSpec, Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.losses import NllLoss, SquaresLoss

sys.path.insert(0, str(Path(__file__).parent))  # for sampling_cases


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def nll() -> NllLoss:
    return NllLoss()


@pytest.fixture
def squares() -> SquaresLoss:
    return SquaresLoss()


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    def make(lens: Sequence[int], seed: int = 0, loss: Loss | None = None, **columns: Sequence[float]) -> Batch:
        g = torch.Generator().manual_seed(seed)
        units = [
            UnitData(
                [
                    SequenceData(
                        torch.randint(3, 90, (n,), generator=g).tolist(), {"loss_mask": [i >= 2 for i in range(n)]}
                    )
                ]
            )
            for n in lens
        ]
        batch = pack(units)
        for name, values in columns.items():
            batch = batch.with_column("tok", name, torch.tensor(values))
        return batch if loss is None else weigh(batch, loss.reduce())

    return make


@pytest.fixture
def make_trainer(model_path: Path) -> Callable[..., TorchTrainer]:
    def make(path: Path | str = model_path, head: str = "lm", trained: bool = True, dtype: str = "fp32", **options):
        fields = ("gradient_checkpointing", "total_updates", "seed", "storage")
        spec = {k: options.pop(k) for k in fields if k in options}
        config = TorchTrainerConfig(**{"lr": 1e-3, "device": "cpu", **options})
        return TorchTrainer(config, ModelSpec(RoleSpec("policy", head, trained), str(path), dtype, **spec))

    return make


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForCausalLM.from_pretrained(path).train()


@pytest.fixture(scope="module")
def decode(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture
def build(model, decode):
    def make(**options):
        generator = TransformersGenerator(TransformersGenerator.Config(**options), GeneratorSpec((1,), decode))
        generator.load(model, 3)
        return generator

    return make
