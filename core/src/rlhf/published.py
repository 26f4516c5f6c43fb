"""What a published model says of itself in its ``config.json``. Light: transformers is imported when one is read."""

from __future__ import annotations

from typing import Any

from rlhf.errors import ModelError


def settings_of(model: str, asker: str) -> dict[str, Any]:
    """The ``config.json`` of a folder or a hub name.

    Args:
        asker: who needs it, for messages: ``reward 'model'``.

    Raises ModelError where it cannot be read, or there is none.
    """
    from transformers import PretrainedConfig

    try:
        settings, _ = PretrainedConfig.get_config_dict(model)
    except Exception as cause:  # of many kinds: no such folder or name, no network, no JSON
        raise ModelError(f"{asker}: the config.json of {model!r} cannot be read: {cause}") from cause
    if not settings:
        raise ModelError(f"{asker}: there is no config.json in {model!r}; give a folder or a hub name")
    return dict(settings)
