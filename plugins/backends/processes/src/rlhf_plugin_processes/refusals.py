"""What is refused before a process starts: a system without the needed calls, and a run under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rlhf.errors import ConfigError


def refuse_other_systems(launcher: str) -> None:
    """Raises ConfigError where processes cannot be supervised and memory cannot be shared as ``launcher`` does it."""
    if sys.platform != "linux":
        raise ConfigError(
            f"launcher {launcher!r} needs Linux, this is {sys.platform}. Use --launcher.use ray, or local."
        )


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Raises ConfigError in a process that torchrun started. A run has one driver, which places roles and engines and
    starts their processes. Under torchrun every process would be a driver."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    ranks = environment.get("WORLD_SIZE", "several")
    raise ConfigError(
        f"this process is rank {environment.get('RANK', '?')} of {ranks} that torchrun started, and launcher "
        "'processes' starts ranks and engines itself: every process of torchrun would start a whole run. Use "
        "--launcher.use torchrun; or start `rlhf train` once, without torchrun."
    )
