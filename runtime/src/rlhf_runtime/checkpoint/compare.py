"""Checks whether a checkpoint belongs to the run that would continue from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import CheckpointError
from rlhf.plugins.requirements import installed_version
from rlhf.saved import Saved

from rlhf_runtime.checkpoint import json_values

Severity = Literal["refuse", "report", "added", "moved"]

_IGNORED = (
    "run.output", "run.resume", "run.overwrite", "run.name", "run.report", "run.show_samples", "run.stop_after",
    "run.timeline", "run.peak_tflops", "checkpoint.keep", "checkpoint.save_rollouts", "checkpoint.export_every",
)  # fmt: skip
"""Keys that are not compared: a run's location, name, console output and kept files do not change what it computes."""

_REPORTED = (
    # length, intervals and speed: they do not change the steps that are done
    "run.steps", "run.epochs", "run.threads", "run.requires", "checkpoint", "observer", "launcher", "generator",
    "placement", "sync",
    "eval.every", "eval.at_start", "eval.samples", "eval.temperature", "eval.max_new_tokens", "eval.max_rows",
    "eval.pass_threshold", "eval.weights", "eval.metric", "eval.mode", "eval.patience", "data.eval",
    "stream.rollout_deadline", "stream.max_failed", "reward.*.deadline", "reward.*.retries", "env.deadline",
    "reward.*.concurrency", "env.concurrency",
    # splits of the same sums: results are equal up to rounding
    "*.micro_tokens", "roles.*.micro_tokens", "*.gradient_checkpointing", "roles.*.gradient_checkpointing",
)  # fmt: skip
"""Patterns of run-file keys (``*`` = one part) that may change on resume. A change is reported, because the run is then
no longer bit-equal."""

_PLACES = {"*.model": "{0}.model", "roles.*.model": "{1}.model", "data.chat_template": "data.chat_template",
           "data.train.*.path": "data.train.", "data.eval.*.path": "data.eval."}  # fmt: skip
"""{pattern of run-file keys that name a file or folder: its key in the content, or the start of such keys}."""

_ABSENT = "(not set)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the checkpoint and the run."""

    key: str
    checkpoint_value: Any
    run_value: Any
    severity: Severity
    """``refuse``: continuing would mix two runs. ``report``: the run continues, and a message says that it is a
    different run. ``added``: an option at its default that the checkpoint's release did not have; the same run.
    ``moved``: another path of equal content; the same run."""

    @property
    def absent_before(self) -> bool:
        return self.checkpoint_value == _ABSENT

    def __str__(self) -> str:
        return f"{self.option}: was {self.checkpoint_value!r}, now {self.run_value!r}"

    @property
    def option(self) -> str:
        """The key as written in run files and flags: ``trainer.lr`` for ``trainer.options.lr``."""
        return self.key.replace(".options.", ".")


class SavedMeta(Saved):
    """The ``meta`` of a checkpoint, as :func:`describe` makes it."""

    config: dict[str, Any] = {}
    plugins: dict[str, str] = {}
    environment: dict[str, Any] = {}
    content: dict[str, str] = {}


def describe(
    config: Mapping[str, Any],
    plugins: Sequence[Mapping[str, Any]],
    *,
    threads: int | None,
    device: str,
    content: Mapping[str, str] = {},
) -> dict[str, Any]:
    """The ``meta`` of a checkpoint, which identifies the run.

    Args:
        config: the resolved run file, with the plugins' options and defaults.
        plugins: {"kind", "name", "distribution", "version"} of each component in use; for files "sha256".
        threads: torch threads of the process that trains.
        device: ``cpu``, or the accelerator's name.
        content: {key of the config that names a file or folder: hash of its content}.
    """
    return {
        "config": json_values.encode(dict(config), "config"),
        "plugins": {f"{p['kind']}:{p['name']}": _identity(p) for p in plugins},
        "environment": {
            "threads": threads,
            "device": device,
            **{name: installed_version(name) for name in ("torch", "transformers")},
        },
        "content": dict(content),
    }


def compare(meta: Mapping[str, Any], current: Mapping[str, Any], layout: Collection[str] = ()) -> list[Difference]:
    """All differences between a checkpoint's ``meta`` and the run that resumes it, both made by :func:`describe`.

    A changed model, algorithm, reward, data, seed, batch size or staleness is refused, even if a file changed under its
    old path. A model, chat template or data of equal content may have another path. Changed total steps, threads,
    device, versions and schedules are reported. Keys that only one of the two has are refused.
    :mod:`rlhf_runtime.setup.resume` then asks the run's plugins which of these keys are options at their defaults.

    Args:
        layout: patterns of options that are reported, too (:func:`layout_of`).
    """
    reported = (*_REPORTED, *layout)
    old, new = meta.get("content", {}), current.get("content", {})
    differences = _differences(
        meta.get("config", {}),
        current.get("config", {}),
        "",
        lambda key, *_: "moved" if _is_moved(key, old, new) else _severity_of_key(key, reported),
    )
    differences += _differences(meta.get("plugins", {}), current.get("plugins", {}), "plugins.", _severity_of_plugin)
    differences += _differences(
        meta.get("environment", {}), current.get("environment", {}), "environment.", lambda *_: "report"
    )
    return (
        differences
        + [  # if only one of them has a key, the config or the release differs
            Difference(f"content of {key}", old[key][:12], new[key][:12], _severity_of_key(key, reported))
            for key in sorted(old.keys() & new.keys())
            if old[key] != new[key]
        ]
    )


def at_resume(key: str, layout: Collection[str] = ()) -> Literal["ignore", "report", "moved", "refuse"]:
    """What a resume does if the value of an option differs from the checkpoint.

    Args:
        key: dotted name in the resolved run file; options of a plugin are under ``options``.
        layout: as for :func:`compare`.
    """
    if key in _IGNORED:
        return "ignore"
    severity = _severity_of_key(key, (*_REPORTED, *layout))
    if severity == "report":
        return "report"
    return "moved" if _place(key) else "refuse"


def require_same_run(differences: Sequence[Difference], path: Path | str) -> list[str]:
    """Raise CheckpointError if continuing from ``path`` would mix two runs. Returns lines of text for the user."""
    refused = [str(d) for d in differences if d.severity == "refuse"]
    if refused:
        listing = "\n  ".join(refused)
        raise CheckpointError(
            f"checkpoint {path} was saved with a different config:\n  {listing}\nRestore these values to continue that "
            "run, or choose another run.output to start a new one."
        )
    lines = []
    if reported := [str(d) for d in differences if d.severity == "report"]:
        lines += ["continues as a different run, no longer bit-equal to the one that was saved:", *reported]
    if added := [f"{d.option} = {d.run_value!r}" for d in differences if d.severity == "added"]:
        lines.append(f"options that were added after the checkpoint was saved, at their defaults: {', '.join(added)}")
    if moved := [str(d) for d in differences if d.severity == "moved"]:
        lines.append(f"read from another place, with the same content: {'; '.join(moved)}")
    return lines


def layout_of(section: str, options: Collection[str]) -> list[str]:
    """Patterns of the options in ``Component.layout`` of a section's plugin."""
    places = ("trainer.options", "*.trainer", "roles.*.trainer") if section == "trainer" else (f"{section}.options",)
    return [f"{place}.{name}" for place in places for name in options]


def _is_moved(key: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether ``key`` names a file or folder whose content is equal. ``old``, ``new``: {key: hash of its content}."""
    if not (place := _place(key)):
        return False
    hashes = [{name: h for name, h in side.items() if name.startswith(place)} for side in (old, new)]
    return bool(hashes[0]) and hashes[0] == hashes[1]


def _place(key: str) -> str:
    """The start of the keys in the content for a key of :data:`_PLACES`; empty for another key."""
    for pattern, start in _PLACES.items():
        if _matches(key, pattern) and key.count(".") == pattern.count("."):
            return start.format(*key.split("."))
    return ""


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str, severity: Any) -> list[Difference]:
    old, new = _flatten(old), _flatten(new)
    differences = []
    for key in sorted({*old, *new}):
        a, b = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if (_meant(key, a) != _meant(key, b) or type(a) is not type(b)) and key not in _IGNORED:
            differences.append(Difference(prefix + key, a, b, severity(key, a, b)))
    return differences


def _meant(key: str, value: Any) -> Any:
    """The value as it is compared: ``use = "plugin:math"`` and ``use = "math"`` name the same plugin."""
    return value.removeprefix("plugin:") if key.endswith(".use") and isinstance(value, str) else value


def _severity_of_key(key: str, reported: Sequence[str]) -> Severity:
    return "report" if any(_matches(key, pattern) for pattern in reported) else "refuse"


def _matches(key: str, pattern: str) -> bool:
    """Whether ``key`` is, or is below, a key of this pattern (``*`` = one part)."""
    parts, names = key.split("."), pattern.split(".")
    return len(parts) >= len(names) and all(n in ("*", p) for n, p in zip(names, parts, strict=False))


def _severity_of_plugin(key: str, old: Any, new: Any) -> Severity:
    """A changed version, or changed content of a file, is reported. Another distribution under the same name is another
    plugin. A plugin that only one of the two has also differs in the config, and is compared there."""
    if _ABSENT in (old, new):
        return "report"
    return "report" if old.split(" ")[0] == new.split(" ")[0] else "refuse"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b.0": leaf}; a part with a dot in it is quoted, as in TOML."""
    if isinstance(value, Mapping):
        items = [(str(k) if re.fullmatch(r"[\w:@/-]+", str(k)) else repr(str(k)), v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(n), v) for n, v in enumerate(value)]
    else:
        return {prefix: value}
    if not items:
        return {prefix: value if isinstance(value, Mapping) else list(value)} if prefix else {}
    return {k: v for name, item in items for k, v in _flatten(item, f"{prefix}.{name}" if prefix else name).items()}


def _identity(plugin: Mapping[str, Any]) -> str:
    return f"{plugin['distribution']} {plugin['version'] or plugin.get('sha256', '')[:12]}".strip()
