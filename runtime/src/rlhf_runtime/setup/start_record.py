"""What a start of a run records of itself: in the run directory, and in every checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rlhf_hub.adapter_folders import adapter_of
from rlhf_hub.published import content_of

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
        content=content(prepared),
    )


def content(prepared: Prepared, before: Mapping[str, str] = {}) -> dict[str, str]:
    """Hashes of what the run reads from local paths and a checkpoint does not hold: the models that roles start as,
    the chat template, the held-out rows. Training rows have theirs in the order of rows.

    Args:
        before: those of the checkpoint to resume from. A model's hash by an earlier release is kept where it is equal.
    """
    folders = {name: Path(spec.path).expanduser() for name, spec in prepared.specs.items()}
    hashes = {folder: content_of(folder) for folder in {*folders.values()} if folder.is_dir()}
    digests = {f"{name}.model": hashes[folder] for name, folder in folders.items() if folder in hashes}
    for name, spec in prepared.specs.items():
        adapter = adapter_of(spec.path)
        if adapter is not None and (base := Path(adapter.base).expanduser()).is_dir():
            digests[f"{name}.base"] = content_of(base)
    for name, folder in folders.items():
        key = f"{name}.model"
        saved = before.get(key)
        if key in digests and saved not in (None, digests[key]) and saved == content_of(folder, whole=True):
            digests[key] = saved
    if prepared.config.data.chat_template is not None:
        template: str = prepared.data.template.tokenizer.chat_template
        digests["data.chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    for source, about in prepared.data.fingerprints()["eval"].items():
        digests[f"data.eval.{source}"] = about["fingerprint"]
    return digests


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
            images=data.has_images,
            content=content(prepared),
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
    measurement = prepared.specs["policy"].on_processor
    measured: dict[str, Any] = {"on_processor": dataclasses.asdict(measurement)} if measurement else {}
    chat = prepared.data.template.chat
    if chat is not None and chat.day is not None:
        measured["template_day"] = chat.day.isoformat()
    return measured | ({"hub": commits} if (commits := prepared.commits.record()) else {})
