"""vLLM reads the folders that trainers export and `rlhf merge` writes, by itself: it computes the trainer's log-probs
from them."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_cli.main import main
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.engine import Engine
from rlhf_plugin_vllm.platforms import current_platform
from rlhf_testing.models import model_path
from transformers import AutoModelForCausalLM

from tests.support.losses import NllLoss

pytestmark = pytest.mark.full

IDS = [20, 21, 22, 7, 55, 3, 90, 14, 14, 60]
DORA = {"rank": 4, "use_rslora": True, "use_dora": True, "modules_to_save": ("lm_head",)}
CASES = {
    "qwen3, tied": ("qwen3", {}, {}),
    "qwen3, tied, adapters": ("qwen3", {}, {"lora": DORA}),
    "llama, untied, adapters": ("llama", {"tied": False}, {"lora": DORA}),
}


def trained(path, options):
    """(trainer, log-probs of :data:`IDS` before and after four steps)."""
    trainer = TorchTrainer(
        TorchTrainer.Config(lr=0.02, device="cpu", **options), ModelSpec(RoleSpec("policy", trained=True), path, "fp32")
    )
    batch = pack([UnitData([SequenceData(IDS, {"loss_mask": [i > 0 for i in range(len(IDS))]})])])
    nll = NllLoss()
    scores = [trainer.forward([batch], ("logprobs",))[0]["logprobs"][1:]]
    for _ in range(4):
        trainer.update([weigh(batch, nll.reduce())], nll, {}, {})
    scores.append(trainer.forward([batch], ("logprobs",))[0]["logprobs"][1:])
    return trainer, *scores


def prompt_logprobs(path, spec, adapter=None):
    """[9] fp32: what vLLM computes for the prompt :data:`IDS` with the weights that it read from ``path``, and with the
    adapter that it reads from the folder ``adapter``."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = Engine(VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=8), spec, current_platform())
    try:
        if adapter is not None:
            engine._adapter = LoRARequest("exported", 7, str(adapter))
        engine.add("one", IDS, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
        while engine.busy:
            for output in engine.step():
                logprobs = output.prompt_logprobs
        return torch.tensor(
            [candidates[token].logprob for candidates, token in zip(logprobs[1:], IDS[1:], strict=True)]
        )
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES)
def test_vllm_computes_the_trainers_logprobs_from_an_export(engines, tmp_path, case):
    architecture, sizes, options = CASES[case]
    trainer, old_logprobs, new_logprobs = trained(str(model_path(architecture, head_dim=32, **sizes)), options)
    trainer.export(tmp_path)
    assert (new_logprobs - old_logprobs).abs().max() > 0.1
    logprobs = prompt_logprobs(tmp_path, engines.spec(tmp_path))
    torch.testing.assert_close(logprobs, new_logprobs, atol=1e-4, rtol=0)  # fp32 sums in another order


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vllm_computes_the_logprobs_of_transformers_from_a_merged_folder(engines, tmp_path, dtype):
    base, folder = model_path("qwen3", head_dim=32), tmp_path / "merged"
    trainer, old_logprobs, new_logprobs = trained(str(base), {"lora": DORA})
    trainer.export(tmp_path / "export")
    assert main(["merge", str(tmp_path / "export" / "adapter"), str(folder), "--dtype", dtype]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    expected = logprobs_TV.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    logprobs = prompt_logprobs(folder, engines.spec(folder))
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert (
        (expected - new_logprobs).abs().max()
        < {"fp32": 1e-4, "bf16": 0.1}[dtype]
        < (old_logprobs - new_logprobs).abs().max()
    )


def test_vllm_reads_an_exported_adapter_beside_its_base(engines, tmp_path):
    base, lora = str(model_path("qwen3", head_dim=32)), {"rank": 4, "use_rslora": True}
    trainer, old_logprobs, new_logprobs = trained(base, {"lora": lora})
    trainer.export(tmp_path)
    spec = engines.spec(base, adapters=TorchTrainer.adapters(trainer.config, trainer.spec))
    assert (new_logprobs - old_logprobs).abs().max() > 0.1
    torch.testing.assert_close(prompt_logprobs(base, spec, tmp_path / "adapter"), new_logprobs, atol=1e-4, rtol=0)
