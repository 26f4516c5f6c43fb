"""Whether a run can write where it is told to, and go on from what is there: asked before anything is started."""

from __future__ import annotations

from pathlib import Path

from rlhf.saved import validated

from rlhf_runtime.checkpoint import CheckpointStore, compare, describe, require_same_run
from rlhf_runtime.checkpoint.compare import SavedMeta
from rlhf_runtime.checkpoint.manifest import MANIFEST
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.setup.added_options import allow_defaults
from rlhf_runtime.setup.prepare import Prepared


def check_output(prepared: Prepared) -> None:
    """Refuse what ``build.build`` would refuse about ``run.output`` and what writes there, in
    its words; nothing is changed there. Raises ConfigError or CheckpointError."""
    run = prepared.config.run
    RunDirectory.check(run.output, run.resume, run.overwrite)
    check_resume(prepared)
    check_observers(prepared)


def check_observers(prepared: Prepared) -> None:
    """Raises ConfigError where an observer could not begin (:meth:`Observer.check`)."""
    for observer in prepared.observers.values():
        observer.check(Path(prepared.config.run.output))


def check_resume(prepared: Prepared) -> None:
    """Raises CheckpointError where the run resumes and its newest checkpoint is of another run. Where it was trained,
    in threads and device, is only reported, and known when the models are loaded."""
    run = prepared.config.run
    newest = CheckpointStore(run.output).newest() if run.resume else None
    if newest is None:
        return
    before = validated(SavedMeta, newest.meta, f"{newest.path / MANIFEST}, meta").environment
    now = describe(
        prepared.config.model_dump(mode="json"),
        [plugin.manifest() for plugin in prepared.plugins],
        threads=before.get("threads"),
        device=before.get("device", ""),
    )
    found = compare(newest.meta, now, prepared.parts["trainer"].resolved.cls.layout)
    require_same_run(allow_defaults(found, prepared.config, prepared.resolve), newest.path)
