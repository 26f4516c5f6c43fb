"""Liger's kernels in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1 python liger_cases.py FOLDER``.

Prints {case: differences between trainers with and without these kernels, or messages} as JSON. It is a process of its
own, because Triton reads the variable when its kernels are defined.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import GeneratorSpec, Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling import liger
from rlhf_modeling.attention import packed, use_packed_attention
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.tiny import tiny_model
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

sys.path.append(str(Path(__file__).resolve().parents[4]))  # the root's tests are not on a script's path
from tests.interpreted import complete_the_interpreter
from tests.support.losses import SquaresLoss

FOLDER = Path(sys.argv[1])
SMALL: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 24, "std": 0.3}


def trainer(name: str, head: str = "lm", checkpointing: bool = False, **options: Any) -> TorchTrainer:
    spec = ModelSpec(RoleSpec("policy", head, True), str(FOLDER / name), "fp32", checkpointing)
    return TorchTrainer(TorchTrainer.Config(lr=1e-2, device="cpu", **options), spec)


def batch_for(loss: Loss, lens: Sequence[int] = (6, 4)) -> Batch:
    units = [UnitData([SequenceData(list(range(3, 3 + n)), {"loss_mask": [i >= 2 for i in range(n)]})]) for n in lens]
    return weigh(pack(units), loss.reduce())


def bound(module: PreTrainedModel) -> int:
    return sum("forward" in vars(m) for m in module.modules())


def compare(name: str, head: str = "lm", steps: int = 1, **options: Any) -> dict[str, float]:
    """Compare log-probs (or values) and gradients after ``steps - 1`` steps."""
    output = "logprobs" if head == "lm" else "values"
    loss = SquaresLoss(output)
    batch, results = batch_for(loss), []
    for chosen in ("liger", "none"):
        instance = trainer(name, head, kernels=chosen, **options)
        for _ in range(steps - 1):
            instance.update([batch], loss, {}, {})
        [values] = instance.forward([batch], [output])
        instance.accumulate([batch], loss, {}, {})
        results.append((values[output], instance.gradients(), bound(instance.module)))
    (a, ga, with_liger), (b, gb, plain_bound) = results
    return {**differences(a, b, ga, gb), "bound": with_liger, "not bound": plain_bound}


def differences(a: Tensor, b: Tensor, ga: dict[str, Tensor], gb: dict[str, Tensor]) -> dict[str, float]:
    """``values``: the largest difference. ``gradients``: the largest difference of a parameter divided by its norm."""
    assert ga.keys() == gb.keys()
    worst = max(float((ga[n] - gb[n]).norm() / gb[n].norm()) for n in gb)
    return {"values": float((a - b).abs().max().detach()), "gradients": worst}


def qwen2() -> dict[str, float]:
    """A model without a trainer: the character tokenizer of the tests does not load for this architecture."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=20, num_hidden_layers=1, initializer_range=0.3, **sizes)).eval()
    use_packed_attention(model)
    results = []
    for bind in (False, True):
        if bind:
            liger.use_liger(model)
        with packed([4, 2]):
            out = model(input_ids=torch.arange(6)[None] + 3, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]))
        gradients = torch.autograd.grad(out.logits.square().sum(), list(model.parameters()))
        results.append((out.logits, dict(zip([n for n, _ in model.named_parameters()], gradients, strict=True))))
    (b, gb), (a, ga) = results
    gb = {n: g for n, g in gb.items() if "k_proj.bias" not in n}  # its gradient is zero up to rounding
    return {**differences(a, b, {n: ga[n] for n in gb}, gb), "bound": bound(model)}


def sampled() -> float:
    """The largest difference between log-probs of samples, of rows that are at other positions, and those of a trainer
    without these kernels."""
    sampler = trainer("qwen3", kernels="liger")
    generator = TransformersGenerator(None, GeneratorSpec(tuple(sampler.eos_token_ids), sampler.tokenizer.decode))
    generator.load(sampler, 0)
    prompts = [tuple(range(3, 3 + n)) for n in (2, 5, 3)]
    turns = dict(generator.generate([GenerationRequest(ids, n, Sampling(6)) for n, ids in enumerate(prompts)]))
    units, logprobs = [], []
    for n, ids in enumerate(prompts):
        mask = [False] * len(ids) + [True] * len(turns[n].ids)
        units.append(UnitData([SequenceData([*ids, *turns[n].ids], {"loss_mask": mask})]))
        logprobs += [*[0.0] * len(ids), *turns[n].logprobs]
    batch = pack(units)
    [values] = trainer("qwen3", kernels="none").forward([batch], ["logprobs"])
    return float((values["logprobs"] - torch.tensor(logprobs))[batch.tok["loss_mask"]].abs().max())


def refused() -> dict[str, str]:
    def message(name: str) -> str:
        try:
            trainer(name, kernels="liger")
        except CapabilityError as error:
            return str(error)
        return ""

    messages = {"olmo2": message("olmo2"), "gelu": message("gelu")}
    norm, liger._norm = liger._norm, lambda module, kind: lambda hidden_states: hidden_states
    messages["differs"] = message("qwen3")
    liger._norm = norm
    return messages


def main() -> None:
    complete_the_interpreter()
    originals = {name: value for name, value in vars(modeling_qwen3).items() if callable(value)}
    forwards = {name: value.forward for name, value in originals.items() if hasattr(value, "forward")}
    for name in ("qwen3", "llama", "mistral", "gemma2", "gemma3_text"):
        tiny_model(FOLDER / name, architecture=name, layers=1, **SMALL)
    tiny_model(FOLDER / "critic", layers=1, head="scalar", tied=False, **SMALL)
    tiny_model(FOLDER / "olmo2", architecture="olmo2")
    tiny_model(FOLDER / "gelu", hidden_act="gelu")
    results: dict[str, Any] = {name: compare(name) for name in ("qwen3", "llama", "mistral", "gemma2", "gemma3_text")}
    results["qwen2"] = qwen2()
    results["critic"] = compare("critic", "scalar")
    results["adapters"] = compare("qwen3", steps=2, checkpointing=True, lora={"rank": 2})
    results["sampled"] = sampled()
    results["refused"] = refused()
    results["others"] = all(getattr(modeling_qwen3, name) is value for name, value in originals.items()) and all(
        getattr(modeling_qwen3, name).forward is value for name, value in forwards.items()
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
