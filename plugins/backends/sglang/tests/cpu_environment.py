"""Makes a Python with SGLang 0.5.23 for a machine without a GPU, beside this repository's own environment:

    .venv/bin/python plugins/backends/sglang/tests/cpu_environment.py FOLDER
    RLHF_SGLANG=FOLDER/bin/python .venv/bin/python -m pytest plugins/backends/sglang

SGLang has no wheel for CPUs: its kernels are built from source, and pip would take torch's build for CUDA. So it is
installed without what it requires, into a virtual environment that sees the packages of this one (vLLM brought most of
what it imports), with the stubs of ``cpu_stubs``. They are for text models in fp32.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

SGLANG = ["sglang==0.5.23", "torchvision==0.28.0", "soundfile"]
STUBS = Path(__file__).parent / "cpu_stubs"
IMPORTS = "sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    host_packages = sysconfig.get_path("purelib")
    (packages / "repository.pth").write_text(f"import site; site.addsitedir({host_packages!r})\n")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *SGLANG], check=True)
    shutil.copytree(STUBS, packages, dirs_exist_ok=True)
    metadata = packages / "rlhf_cpu_stubs-0.1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-cpu-stubs\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nrlhf_cpu_stubs = rlhf_cpu_stubs:register\n")
    subprocess.run([python, "-c", f"import {IMPORTS}"], check=True)
    print(f"export RLHF_SGLANG={python}")


if __name__ == "__main__":
    main()
