"""``--backend fsdp``."""

from __future__ import annotations

from rlhf.interfaces import Backend


class FsdpBackend(Backend):
    """The trainer `fsdp` with the launcher `ray` and the generator `vllm`, which come from their own distributions."""

    name = "fsdp"
    launcher = "ray"
    trainer = "fsdp"
    generator = "vllm"
