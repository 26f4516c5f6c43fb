"""The run that ``stream.replay`` names: whether what it recorded can be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_runtime.config.load import load
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.setup.prepare import Prepared

SECTIONS = (
    *("algorithm", "policy", "reference", "critic", "roles", "data", "sampling", "stream", "rollout", "env", "reward"),
    "curriculum",
)
"""What decides which samples are drawn and what is learnt from them."""


def check_record(prepared: Prepared) -> None:
    """Raises ConfigError where ``stream.replay`` names a folder without a record, a record of another run, or one of
    too few steps."""
    config = prepared.config
    if config.stream.replay is None:
        return
    folder = Path(config.stream.replay)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"stream.replay = {str(folder)!r} is not the folder of a run: it has no config.toml.")
    if folder.resolve() == Path(config.run.output).resolve():
        raise ConfigError(f"stream.replay and run.output are both {folder}. Set --run.output to another folder.")
    before = load(str(folder / "config.toml"))
    if different := [name for name in SECTIONS if _section(before, name) != _section(config, name)]:
        raise ConfigError(
            f"stream.replay = {str(folder)!r} records another run: [{'], ['.join(different)}] differ. Use its own run "
            f"file: rlhf replay {folder}"
        )
    if before.run.seed != config.run.seed:
        raise ConfigError(
            f"stream.replay = {str(folder)!r} was recorded with seed {before.run.seed}, and run.seed = "
            f"{config.run.seed}. Remove it."
        )
    last = min(config.run.stop_after or prepared.total_steps, prepared.total_steps)
    missing = next((step for step in range(1, last + 1) if not RunDirectory.rollouts_of(folder, step).is_file()), None)
    if missing is not None:
        why = "" if before.checkpoint.save_rollouts else " It was run with checkpoint.save_rollouts = false."
        fewer = f" Set --steps {missing - 1} to replay what is there." if missing > 1 else ""
        raise ConfigError(
            f"stream.replay = {str(folder)!r} records no samples of step {missing} of {last}.{why}{fewer}"
        )


def _section(run: RunFile, name: str) -> Any:
    section: Any = run.model_dump(mode="json").get(name)
    return {**section, "replay": None} if name == "stream" else section
