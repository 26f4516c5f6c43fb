"""``--backend local``."""

from __future__ import annotations

from rlhf.interfaces import Backend


class LocalBackend(Backend):
    """Everything in one process: the trainer `torch` and the generator `transformers`."""

    name = "local"
    launcher = "local"
    trainer = "torch"
    generator = "transformers"
