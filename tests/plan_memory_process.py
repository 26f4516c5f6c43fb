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
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import GenerationRequest, Image, RoleSpec, Sampling

from tests.support.losses import NllLoss

TOKENS, LENGTH = 512, 128
SAMPLES = 64
VOCABULARY = 32_000


def batch(seed: int) -> Batch:
    count = TOKENS // LENGTH
    ids_N = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    mask_N = torch.ones(TOKENS, dtype=torch.bool)
    mask_N[::LENGTH] = False
    lens_B, unit_B = torch.full((count,), LENGTH), torch.arange(count)
    return weigh(Batch(ids_N, lens_B, unit_B, torch.zeros_like(unit_B), {"loss_mask": mask_N}), NllLoss().reduce())


def image_batch(seed: int, path: str) -> Batch:
    """Sequences of :data:`LENGTH` tokens, each with an image of its own."""
    from rlhf.ops.packing import SequenceData, UnitData, pack
    from rlhf_hub.processors import load_processor, open_image
    from rlhf_testing.image_models import drawing

    processor, units = load_processor(path), []
    for number in range(TOKENS // LENGTH):
        file = drawing(256, 256, f"rgb({seed},{number},0)")
        inputs = processor(images=[open_image(file)], text=[processor.image_token], add_special_tokens=False)
        image_ids = [int(i) for i in inputs["input_ids"][0]]
        ids = [*image_ids, *(3 + i % 50 for i in range(LENGTH - len(image_ids)))]
        mask = [n >= len(image_ids) for n in range(LENGTH)]
        units.append(
            UnitData([SequenceData(ids, {"loss_mask": mask}, images=(Image(file, 0, len(image_ids), image_ids[:1]),))])
        )
    return weigh(pack(units), NllLoss().reduce())


def requests() -> list[GenerationRequest]:
    """Eight samples of each prompt; prompt and answer are half of the length each."""
    sampling = Sampling(max_new_tokens=LENGTH // 2, ignore_eos=True)
    return [GenerationRequest(tuple(range(3 + i // 8, 3 + i // 8 + LENGTH // 2)), i, sampling) for i in range(SAMPLES)]


def resident(key: str) -> int:
    """``VmRSS`` or its peak ``VmHWM``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def main(work: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    plugins, ranks, train = Plugins.discover(), work["ranks"], work["what"] != "forward"
    options = dict(work["options"])
    with_images = bool(options.pop("images", ""))
    use = options.pop("use", "deepspeed" if ranks > 1 else "torch")
    if use == "deepspeed":
        import deepspeed  # noqa: F401
    if "lora" in options:
        import peft  # noqa: F401
    trainer = plugins.resolve("trainer", use).cls
    sampler = plugins.resolve("generator", "transformers").cls
    rank_options = {"rank": work["rank"], "world_size": ranks, "rendezvous": f"tcp://127.0.0.1:{work['port']}"}
    role = RoleSpec("policy", "lm", train)
    spec = ModelSpec(
        role, work["path"], "fp32", total_updates=9, images=with_images, **(rank_options if ranks > 1 else {})
    )
    if with_images:  # imports what loading needs
        with torch.device("meta"):
            AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(work["path"]))
        image_batch(0, work["path"])
    gc.collect()
    baseline = resident("VmRSS")
    role_trainer = trainer(trainer.Config(device="cpu", **options), spec)
    numbers = [2 * work["rank"] + number for number in range(2)]
    micros = [image_batch(number, work["path"]) if with_images else batch(number) for number in numbers]
    if train:
        role_trainer.update(micros, NllLoss(), {}, {})  # the first step makes the optimizer's state
    generator = sampler(sampler.Config(), GeneratorSpec(eos_token_ids=(1,), decode=lambda ids: ""))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    if work["what"] == "train":
        role_trainer.update(micros, NllLoss(), {}, {})
    elif work["what"] == "forward":
        role_trainer.forward(micros, ["logprobs"])
    else:
        generator.load(role_trainer, 0)
        list(generator.generate(requests()))
    print(resident("VmHWM") - baseline)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
