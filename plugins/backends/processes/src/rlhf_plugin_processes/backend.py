"""``--backend processes``."""

from __future__ import annotations

from rlhf.interfaces import Backend


class ProcessesBackend(Backend):
    """Processes on this machine with the trainer `deepspeed` and the generator `vllm`, which come from their own
    distributions."""

    name = "processes"
    launcher = "processes"
    trainer = "deepspeed"
    generator = "vllm"
