"""``--backend ray``."""

from __future__ import annotations

from rlhf.interfaces import Backend


class RayBackend(Backend):
    """A Ray cluster with the trainer `deepspeed` and the generator `vllm`, which come from their own distributions."""

    name = "ray"
    launcher = "ray"
    trainer = "deepspeed"
    generator = "vllm"
