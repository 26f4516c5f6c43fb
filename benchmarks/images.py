"""Time of a training step on rows of text: an image-text model against a language model that equals its text part.

    python benchmarks/images.py [--family qwen3_vl] [--steps 12]

Both models have the same text layers, and take turns on the same batches in this process. The vision tower is trained
too, but rows of text give it no gradient. Prints the median seconds of each, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.tiny import tiny_model
from transformers import AutoConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support
from tests.support.losses import NllLoss

TEXT_PARTS = {"qwen3_vl": "qwen3", "idefics3": "llama", "llava": "llama"}
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.02,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "mrope_interleaved": True}


def batch(vocabulary: int, units: int, tokens: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(30, vocabulary, (units, tokens), generator=generator).tolist()
    taught = [n > 0 for n in range(tokens)]
    return weigh(pack([UnitData([SequenceData(ids, {"loss_mask": taught})]) for ids in rows]), NllLoss().reduce())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(TEXT_PARTS), default="qwen3_vl")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sections = {"rope_parameters": ROPE} if options.family == "qwen3_vl" else {}
        whole = tiny_image_model(Path(folder) / "whole", options.family, **SIZES, **sections)
        text = AutoConfig.from_pretrained(whole).get_text_config()
        alone = tiny_model(
            Path(folder) / "alone", architecture=TEXT_PARTS[options.family], tied=text.tie_word_embeddings,
            hidden=512, layers=6, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab_size=text.vocab_size,
        )  # fmt: skip
        trainers = {}
        for name, path in (("image-text model", whole), ("text part alone", alone)):
            spec = ModelSpec(RoleSpec("policy", trained=True), str(path), dtype="fp32", total_updates=99)
            trainers[name] = TorchTrainer(TorchTrainer.Config(device="cpu"), spec)
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        micros = [batch(text.vocab_size, 8, 256, seed) for seed in range(2)]
        for step in range(options.steps + 2):
            for name in sorted(trainers, reverse=bool(step % 2)):
                start = time.process_time()
                trainers[name].update(micros, NllLoss(), {}, {})
                if step > 1:
                    seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:18} {value:.3f} s of processor per step of {sum(m.tokens for m in micros)} tokens")
    print(f"ratio {medians['image-text model'] / medians['text part alone']:.3f}")


if __name__ == "__main__":
    main()
