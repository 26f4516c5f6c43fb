"""One phase of one role in a process of its own: prints the peak of its memory above the process after import.

python plan_memory_process.py '{"what": "train", "path": ..., "rank": 0, "ranks": 1, "port": 0, "options": {}}'
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import GeneratorSpec, Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import GenerationRequest, LossOutput, Reduce, RoleSpec, Sampling

TOKENS, LENGTH = 512, 128
SAMPLES = 64
VOCABULARY = 32_000


class Mean(Loss):
    """The mean of the log-probs."""

    name = "mean"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        return ()

    def reduce(self) -> dict[str, Reduce]:
        return {"mean": Reduce("token_mean")}

    def __call__(self, x: Any) -> LossOutput:
        return LossOutput(terms={"mean": -x["logprobs"]})


def batch(seed: int) -> Batch:
    count = TOKENS // LENGTH
    ids_N = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    mask_N = torch.ones(TOKENS, dtype=torch.bool)
    mask_N[::LENGTH] = False
    lens_B, unit_B = torch.full((count,), LENGTH), torch.arange(count)
    return weigh(Batch(ids_N, lens_B, unit_B, torch.zeros_like(unit_B), {"loss_mask": mask_N}), Mean(None).reduce())


def requests() -> list[GenerationRequest]:
    """Eight samples of each prompt; prompt and answer are half of the length each."""
    sampling = Sampling(max_new_tokens=LENGTH // 2, ignore_eos=True)
    return [GenerationRequest(tuple(range(3 + i // 8, 3 + i // 8 + LENGTH // 2)), i, sampling) for i in range(SAMPLES)]


def resident(key: str) -> int:
    """``VmRSS`` or its peak ``VmHWM``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def main(work: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    plugins, ranks, train = Plugins.discover(), work["ranks"], work["what"] != "forward"
    options = dict(work["options"])
    use = options.pop("use", "deepspeed" if ranks > 1 else "torch")
    if use == "deepspeed":
        import deepspeed  # noqa: F401
    if "lora" in options:
        import peft  # noqa: F401
    trainer = plugins.resolve("trainer", use).cls
    sampler = plugins.resolve("generator", "transformers").cls
    where = {"rank": work["rank"], "world_size": ranks, "rendezvous": f"tcp://127.0.0.1:{work['port']}"}
    role = RoleSpec("policy", "lm", train)
    spec = ModelSpec(role, work["path"], "fp32", total_updates=9, **(where if ranks > 1 else {}))
    gc.collect()
    before = resident("VmRSS")
    made = trainer(trainer.Config(device="cpu", **options), spec)
    micros = [batch(2 * work["rank"] + number) for number in range(2)]
    if train:
        made.update(micros, Mean(None), {}, {})  # the first step makes the optimizer's state
    generator = sampler(sampler.Config(), GeneratorSpec(eos_token_ids=(1,), decode=lambda ids: ""))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    if work["what"] == "train":
        made.update(micros, Mean(None), {}, {})
    elif work["what"] == "forward":
        made.forward(micros, ["logprobs"])
    else:
        generator.load(made, 0)
        list(generator.generate(requests()))
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
