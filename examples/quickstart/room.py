"""Is there room for the quick start: disk and memory? `make quickstart` asks before it installs or downloads anything.

Standard library only, because nothing is installed yet: the file of the core that it runs needs no more either.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

CONTROL_GROUPS = Path(__file__).resolve().parents[2] / "core" / "src" / "rlhf" / "control_groups.py"
machine_memory = runpy.run_path(str(CONTROL_GROUPS))["machine_memory"]

MODEL_BYTES = 800_000_000
"""The download, and the model's folder in the cache."""
RUN_BYTES = 3_000_000_000
"""Checkpoint and trained model in `runs/quickstart`."""
MEMORY_BYTES = 4_000_000_000
"""What the training needs at its peak."""
ALTERNATIVE = "or train a tiny model, which needs little disk and memory: make quickstart-tiny"


def model_folder() -> Path:
    """Where the model is kept: in the user's cache, so that the next run finds it."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rlhf" / "models" / "SmolLM2-135M-Instruct"


def is_made(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def problems(run: Path, run_bytes: int = RUN_BYTES, memory_bytes: int = MEMORY_BYTES) -> list[str]:
    """What is too small, each with what to do; `run`: the folder that the run will write."""
    texts = []
    needs = {run: run_bytes, model_folder(): 0 if is_made(model_folder()) else MODEL_BYTES}
    disks: dict[int, list[Path]] = {}
    for folder in needs:
        disks.setdefault(os.stat(existing(folder)).st_dev, []).append(folder)
    for folders in disks.values():
        need, free = sum(needs[folder] for folder in folders), shutil.disk_usage(existing(folders[0])).free
        if free < need:
            texts.append(
                f"The disk of {' and '.join(map(str, folders))} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} GB are "
                f"needed. Free some space, name a cache on another disk (XDG_CACHE_HOME), {ALTERNATIVE}"
            )
    memory = available_memory()
    if memory is not None and memory < memory_bytes:
        texts.append(
            f"{memory / 1e9:.1f} GB of memory are available; the training needs {memory_bytes / 1e9:.1f} GB. Close "
            f"other programs, {ALTERNATIVE}"
        )
    return texts


def existing(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def available_memory() -> int | None:
    """Bytes that programs can still get, a container's limit included; None where the system does not say."""
    memory = machine_memory()
    return None if memory is None else min(memory.available, memory.limit or memory.total)


def main() -> None:
    texts = problems(Path("runs/quickstart"))
    if texts:
        sys.exit("\n".join(texts))


if __name__ == "__main__":
    main()
