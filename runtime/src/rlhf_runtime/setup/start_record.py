"""What a start of a run records of itself: in the run directory, and in every checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rlhf_runtime.checkpoint import describe
from rlhf_runtime.config.load import to_toml
from rlhf_runtime.loop.run import Run
from rlhf_runtime.models.roles import Role
from rlhf_runtime.setup.prepare import Prepared


def checkpoint_metadata(prepared: Prepared, policy: Role) -> dict[str, Any]:
    """The metadata of every checkpoint. A resume compares it, to make sure that it continues the same run."""
    return describe(
        prepared.config.model_dump(mode="json"),
        [plugin.manifest() for plugin in prepared.plugins],
        threads=torch.get_num_threads(),
        device=policy.facts.device,
    )


def record_start(run: Run, prepared: Prepared) -> None:
    """Write the resolved run file and the manifest, and show the start-up warnings."""
    config, data = run.config, run.data
    with run.store.writing(run.directory.path):
        asked_once = config.run.model_copy(update={"overwrite": False})
        # First, because a folder is recognised by it. A run that is killed before the next line can start again.
        run.directory.write_manifest(
            config.run.seed,
            [plugin.manifest() for plugin in prepared.plugins],
            run.first_step,
            total_steps=run.total_steps,
            options=list(config.origins.options),
            data=data.fingerprints(),
            **_measured(prepared),
        )
        run.directory.write_config(to_toml(config.model_copy(update={"run": asked_once})))
    for count, why in ((data.eval_dropped, "over the limits"), (data.eval_bad_rows, "bad")):
        if count:
            run.progress.note(f"{count} evaluation rows are {why} and left out")
    if precision := run.roles["policy"].facts.precision:
        run.progress.note(f"precision: {precision}")
    for note in dict.fromkeys(note for role in run.roles.values() for note in role.facts.notes):
        run.progress.note(note)


def _measured(prepared: Prepared) -> dict[str, Any]:
    """Measured and looked-up values that a resume reads instead of determining them again."""
    found = prepared.specs["policy"].on_processor
    measured = {"on_processor": dataclasses.asdict(found)} if found is not None else {}
    return measured | ({"hub": commits} if (commits := prepared.commits.record()) else {})
