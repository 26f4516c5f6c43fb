"""``--backend simulated``."""

from __future__ import annotations

from rlhf.interfaces import Backend


class SimulatedBackend(Backend):
    """A runtime without models: components take the time they are told and compute nothing."""

    name = "simulated"
    launcher = "simulated"
    trainer = "simulated"
    generator = "simulated"
