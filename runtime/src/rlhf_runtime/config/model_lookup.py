"""Look up the models that a run file names before anything heavy is imported."""

from __future__ import annotations

from rlhf_hub.hub import Commits, hub_name, known
from rlhf_hub.published import pinned, require_folder

from rlhf_runtime.config.runfile import RunFile


def look_for_models(config: RunFile) -> None:
    """Check that the models that a run file names exist as folders or on the hub. This runs before torch is imported,
    which takes seconds, so that a mistyped name fails at once. A model that the hub's client downloaded before is
    assumed to exist still, and a resume uses the commits that it recorded.

    Raises ModelError.
    """
    sections = [config.policy, config.critic, config.reference, *config.roles.values()]
    for model in dict.fromkeys(section.model for section in sections if section.model is not None):
        name = hub_name(model)
        if name is None:
            require_folder(model)
        elif not config.run.resume and not known("model", name):
            pinned(model, Commits())
