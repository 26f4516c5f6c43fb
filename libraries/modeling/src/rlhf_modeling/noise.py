"""Noise that a model's config adds in training: dropout, router jitter."""

from __future__ import annotations

from torch import nn

MARKS = ("drop", "jitter", "noise")
"""Parts of the names of noise settings in configs of transformers."""


def noise_settings(module: nn.Module) -> dict[str, float]:
    """{name in the config: value} of the settings that are not zero."""
    config = getattr(module, "config", None)
    fields = config.get_text_config().to_dict() if config is not None else {}
    return {
        name: float(value)
        for name, value in fields.items()
        if any(mark in name for mark in MARKS) and isinstance(value, int | float) and float(value)
    }


def has_noise(module: nn.Module) -> bool:
    """Whether the config or a dropout layer declares noise. A model may draw noise that neither of them declares."""
    return bool(noise_settings(module)) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())
