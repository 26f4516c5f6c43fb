"""Which tables and options a run file to start from has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.interfaces import Algorithm
from rlhf.plugins import Plugins
from rlhf.types import Update
from rlhf_runtime.checks.sections import READ_OF
from rlhf_runtime.config.options import Option, plugin_options, run_file_options, sections
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import MAX_STEPS, Choice

FIRST: Mapping[str, Sequence[str]] = {
    "run": ("output", "steps", "epochs", "seed"),
    "policy": ("model", "dtype", "gradient_checkpointing"),
    "critic": ("model",),
    "reference": ("model",),
    "roles": ("model",),
    "data": ("train", "eval", "batch_size", "prompt", *READ_OF, "template", "max_tokens", "too_long"),
    "sampling": ("samples_per_prompt", "max_new_tokens", "temperature"),
    "stream": ("staleness", "on_failed_sample"),
    "reward": ("use", "weight"),
    "env": ("use", "max_turns"),
    "trainer": ("use", "lr", "schedule", "warmup_ratio", "weight_decay", "max_grad_norm", "lora.rank"),
    "generator": ("use",),
    "launcher": ("use",),
    "placement": ("ranks", "devices", "share"),
    "eval": ("every", "samples", "temperature", "max_rows"),
    "checkpoint": ("every", "keep", "export_every"),
}
"""{section: options that matter first, in this order}. A plugin that has none of them shows its first options."""
MOST = 6
"""Options of such a plugin that are shown, besides those that are given or required."""
FEW = 2
"""Options that are shown of a nested table of such a plugin."""
BY_NAME = ("roles", "placement")
"""Sections whose tables have names."""

Values = dict[str, Any]
"""{dotted path: value} of what the file sets."""


@dataclass(frozen=True)
class OptionTable:
    """One table of the file."""

    heading: str
    path: str
    """Dotted, with the number of the entry in a list: ``reward.0``."""
    options: Sequence[Option]


def tables(run: RunFile, algorithm: Algorithm, values: Values, plugins: Plugins) -> Iterator[OptionTable]:
    """The tables of the file, in the order of the run file's sections.

    Args:
        values: what the file sets; a table that holds one of them is among the tables.
    """
    online = algorithm.data == "prompts"
    roles = [role.name for role in algorithm.needs().roles]
    places = {"run", "algorithm", "policy", "data", "trainer", "eval", "checkpoint", *roles}
    places |= {"sampling", "stream"} if online else set()
    places |= {path.partition(".")[0] for path in values}
    entries: dict[str, list[str]] = {name: [] for name in (*BY_NAME, *LISTS)}
    for path in values:
        if path.partition(".")[0] in entries:
            entries[path.partition(".")[0]].append(path.split(".")[1])
    entries["roles"] += [name for name in roles if name not in RunFile.model_fields]
    if run.launcher.use != RunFile.model_fields["launcher"].default.use:
        entries["placement"] += ["policy", "generator"] if online else ["policy"]
    for section in sections():
        place = section.path
        if place not in entries and place not in places:
            continue
        for entry in dict.fromkeys(entries.get(place, [""])):
            where = f"{place}.{entry}" if entry else place
            options = [*_own(place, where, algorithm), *_of_plugin(run, values, place, where, plugins)]
            options = _shown(place, where, options, values, algorithm)
            options = [replace(o, doc=_installed(plugins, o.kind)) if o.kind else o for o in options]
            yield from _split(section.heading.replace("NAME", entry), where, options, algorithm)


def _own(place: str, where: str, algorithm: Algorithm) -> list[Option]:
    """Options of the run file itself in one table. A list of sources is one option."""
    head = f"{place}.0." if place in LISTS else f"{place}.NAME." if place in BY_NAME else f"{place}."
    options = []
    for option in run_file_options():
        name = option.path.removeprefix(head)
        forms = READ_OF.get(name) if place == "data" else None
        if option.path.startswith(head) and ".0." not in name and (forms is None or algorithm.data in forms):
            options.append(replace(option, path=f"{where}.{name}"))
    if place == "data":
        docs = {section.path: section.doc for section in sections()}
        options += [Option(f"data.{use}", "text", None, False, docs[f"data.{use}"]) for use in ("train", "eval")]
    return options


def _of_plugin(run: RunFile, values: Values, place: str, where: str, plugins: Plugins) -> list[Option]:
    """Options of the plugin that a table selects; none where a placeholder stands for its name."""
    if place in SINGLE:
        choice = getattr(run, place)
    elif place in LISTS and run.reward + run.observer:
        choice = dict(enumerate(getattr(run, place))).get(int(where.rpartition(".")[2]))
    else:
        return []
    use = values.get(f"{where}.use")
    if isinstance(choice, Choice) and place == "rollout" and isinstance(use, str):
        choice = choice.model_copy(update={"use": use})
    return plugin_options(plugins, place, where, choice) if choice is not None else []


def _shown(place: str, where: str, options: Sequence[Option], values: Values, algorithm: Algorithm) -> list[Option]:
    """Options that are set, required or matter first, those that matter first in front."""
    ranks = {f"{where}.{name}": rank for rank, name in enumerate(FIRST.get(place, ("use",)))}
    last = len(ranks)
    if not any(o.path in ranks for o in options if o.plugin):
        slots = algorithm.slots if place == "algorithm" else {}
        ranks |= {f"{where}.{slot}.{name}": last for slot in slots for name in ("use", *slots[slot].defaults)}
        of_plugin = [o.path for o in options if o.plugin and o.type != "table" and o.path not in ranks]
        for table in dict.fromkeys(path.rpartition(".")[0] for path in of_plugin):
            most = MOST if table in (where, *(f"{where}.{slot}" for slot in slots)) else FEW
            ranks |= dict.fromkeys([path for path in of_plugin if path.rpartition(".")[0] == table][:most], last + 1)
    paths = {option.path for option in options}
    deeper = [path for path in values if path.startswith(f"{where}.") and path not in paths]  # within a free table
    matches = [o for o in options if o.path in values or o.path in ranks or (o.required and not o.table)]
    matches += [Option(path, "any value", None, False, "") for path in deeper]
    return sorted(matches, key=lambda option: ranks.get(option.path, last + 1))


def _installed(plugins: Plugins, kind: str) -> str:
    return f"installed: {', '.join(dict.fromkeys(entry.name for entry in plugins.list(kind)))}"


def _split(heading: str, where: str, options: Sequence[Option], algorithm: Algorithm) -> Iterator[OptionTable]:
    """A table for the section itself, and one for each slot of the algorithm, but for losses that train nothing."""
    slots = {f"algorithm.{name}": slot for name, slot in algorithm.slots.items()} if where == "algorithm" else {}
    own = [o for o in options if not o.path.startswith(tuple(f"{path}." for path in slots))]
    yield OptionTable(heading, where, own)
    updates = [u for step in (0, MAX_STEPS - 1) for u in algorithm.updates(step) if isinstance(u, Update)]
    idle = [p for p, s in slots.items() if s.kind == "loss" and p not in {f"algorithm.{u.loss}" for u in updates}]
    for path in slots:
        part = [o for o in options if o.path.startswith(f"{path}.")]
        if part and path not in idle:
            yield OptionTable(f"[{path}]", path, part)
