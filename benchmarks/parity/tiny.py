"""The models of the parity runs: weights from Python's own random numbers, so they do not depend on torch's.

python benchmarks/parity/tiny.py FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path

import torch
from cases import alphabet, write
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file, save_file

STD = 0.1


def make(folder: Path) -> None:
    """``FOLDER/lm`` and ``FOLDER/scalar`` (two layers of Qwen3, width 32, fp32, no dropout), and ``models.json``: the
    SHA-256 of each one's weights."""
    write(folder / "models.json", {head: _make(folder / head, head) for head in ("lm", "scalar")})


def _make(path: Path, head: str) -> str:
    tiny_model(path, chars=alphabet(), head=head)  # type: ignore[arg-type]
    file = path / "model.safetensors"
    tensors, digest = load_file(str(file)), hashlib.sha256()
    for name in sorted(tensors):
        shape = tensors[name].shape
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        else:
            draw, bound = random.Random(name), STD * 3**0.5
            values = [round((2 * draw.random() - 1) * bound, 6) for _ in range(shape.numel())]
            tensor = torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)
        digest.update(f"{name} {tuple(shape)} ".encode() + tensor.numpy().tobytes())
        tensors[name] = tensor
    save_file(tensors, str(file), metadata={"format": "pt"})
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()
