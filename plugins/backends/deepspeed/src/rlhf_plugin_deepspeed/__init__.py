"""Trainer over several ranks: DeepSpeed ZeRO stages 0 to 3.

Importing this package imports neither torch nor deepspeed; the hook imports the classes that it returns.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Check, Trainer


@hookimpl
def rlhf_register_trainer() -> list[type[Trainer]]:
    import torch

    if not torch.cuda.is_available():  # transformers imports deepspeed, which warns where it has to guess
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer

    return [DeepSpeedTrainer]


@hookimpl
def rlhf_register_check() -> list[type[Check]]:
    from rlhf_plugin_deepspeed.checks import DeepSpeedCheck

    return [DeepSpeedCheck]
