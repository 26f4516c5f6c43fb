"""The models that a run file names: looked for before anything heavy is imported."""

from __future__ import annotations

from rlhf_hub.hub import Commits, hub_name, known
from rlhf_hub.published import pinned, require_folder

from rlhf_runtime.config.runfile import RunFile


def look_for_models(config: RunFile) -> None:
    """Whether the models that a run file names are here, or known to the hub: asked before torch is imported, which
    takes seconds, so that a mistyped name takes none. What a hub's client downloaded before is taken to be there still,
    and a resume goes on with the commits that it recorded.

    Raises ModelError.
    """
    sections = [config.policy, config.critic, config.reference, *config.roles.values()]
    for model in dict.fromkeys(section.model for section in sections if section.model is not None):
        asked = hub_name(model)
        if asked is None:
            require_folder(model)
        elif not config.run.resume and not known("model", asked):
            pinned(model, Commits())
