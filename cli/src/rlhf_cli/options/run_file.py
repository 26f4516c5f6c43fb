"""The text of a first run file."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.interfaces import Algorithm
from rlhf.plugins import Plugins
from rlhf.types import Update
from rlhf_runtime.checks.sections import READ_OF
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.config.flag_values import FlagText, plain
from rlhf_runtime.config.load import placeholder
from rlhf_runtime.config.options import Option, plugin_options, run_file_options, sections
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import GROUP, MAX_STEPS, Choice

from rlhf_cli.main import plugin_names

WIDTH = 120
COLUMN = 36
"""Column at which comments begin."""
SOURCE = "a file, a folder, or a name on the hub"
PLACEHOLDERS = {"model": "a folder, or a name on the hub", "train": SOURCE, "eval": SOURCE}
"""{name of an option: description of the value that replaces its placeholder}. For other options it is their type."""


def run_file(run: RunFile, plugins: Plugins, name: str) -> str:
    """A run file as text. Options that are set or required are values; other important options are comments.

    Args:
        run: the options that are set, including the required options of its algorithm.
        name: name of the file, for the comment at its top.

    Raises ConfigError or PluginError if a plugin is missing or has wrong options.
    """
    algorithm = build_algorithm(plugins, run.algorithm, run.origins)
    values = _values_of_flags(run, algorithm)
    values |= _needed(run, algorithm, values, plugins)
    summary = inspect.cleandoc(type(algorithm).__doc__ or "").split("\n\n")[0]
    lines = [
        *_comment(f"A run of the algorithm {algorithm.name}. {summary}"),
        *_comment(f"`rlhf train {name} --dry-run` checks this file, `rlhf train {name}` starts the run."),
        *_comment('Lines that begin with "#" and a name hold defaults: remove the "#" to set another value.'),
        *_comment("`rlhf explain SECTION` lists all options of a section."),
    ]
    for table in tables(run, algorithm, values, plugins):
        lines += ["", table.heading, *(_line(o, o.path.removeprefix(f"{table.path}."), values) for o in table.options)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- values


def _values_of_flags(run: RunFile, algorithm: Algorithm) -> Values:
    """The values that flags set, by dotted path."""
    values = {path: run.value(path) for path in run.origins.options}
    for slot in algorithm.slots:  # the short form of a part, `loss = "NAME"`
        if (path := f"algorithm.{slot}") in values:
            values[f"{path}.use"] = values.pop(path)
    for use in ("train", "eval"):
        if sources := getattr(run.data, use):
            values = {path: value for path, value in values.items() if not path.startswith(f"data.{use}.")}
            values[f"data.{use}"] = _sources(sources)
    return values


def _needed(run: RunFile, algorithm: Algorithm, values: Values, plugins: Plugins) -> Values:
    """Values that the plugins need and that are not set: sufficient sizes, a rollout with an environment, models."""
    needs, additions = algorithm.needs(), Values()
    online = algorithm.data == "prompts"
    if needs.rows_min > run.data.batch_size:
        additions["data.batch_size"] = needs.rows_min
    if online and needs.group_min > run.sampling.samples_per_prompt:
        additions["sampling.samples_per_prompt"] = max(GROUP, needs.group_min)
    if online and needs.reward and not run.reward and run.env is None:
        additions |= _rewarded(run, values, plugins)
    if run.env is not None and "rollout.use" not in values:
        able = [n for n in plugin_names(plugins, "rollout") if plugins.resolve("rollout", n).cls.needs_env]
        additions |= {"rollout.use": able[0]} if able else {}
    if not run.data.train:
        additions["data.train"] = placeholder(PLACEHOLDERS["train"])
    for role in needs.roles:
        section = role.name if role.name in RunFile.model_fields else f"roles.{role.name}"
        if role.like is None and role.model is None and f"{section}.model" not in values:
            additions[f"{section}.model"] = placeholder(PLACEHOLDERS["model"])
    return additions


def _rewarded(run: RunFile, values: Values, plugins: Plugins) -> Values:
    """The source of the reward: the rollout if it can return one, else a placeholder for a reward that only the user
    knows."""
    rollout = plugins.resolve("rollout", run.rollout.use).cls
    if rollout.gives_rewards or plain(values.get("rollout.returns_reward")) is True:
        return {}
    if "returns_reward" in rollout.Config.model_fields and "rollout.returns_reward" not in values:
        return {"rollout.returns_reward": True}
    return {"reward.0.use": placeholder(f"a reward: {', '.join(plugin_names(plugins, 'reward'))}, file:PATH.py")}


def _sources(sources: Sequence[SourceSection]) -> Any:
    """As short as the run file allows: one path, a list of paths, or a list of tables."""
    entries = [source.model_dump(include=source.model_fields_set) for source in sources]
    if any(set(source) != {"path"} for source in entries):
        return entries
    paths = [source["path"] for source in entries]
    return paths[0] if len(paths) == 1 else paths


# ----------------------------------------------------------------------------------------------- lines


def _line(option: Option, name: str, values: Values) -> str:
    """``name = value # meaning``, commented out if the value is only the default. If there is no default value, the
    type precedes the meaning."""
    gap = placeholder(PLACEHOLDERS.get(option.name, option.type))
    if option.path in values:
        value = values[option.path]
        is_text = option.type == "text" or option.type.startswith('"')
        text = f"{name} = {toml(str(value) if isinstance(value, FlagText) and is_text else plain(value))}"
    elif option.required and not option.table:
        text = f"{name} = {toml(gap)}"
    else:
        unset = option.default in (None, [], {}) or bool(option.plugin and option.table)  # the table is not there
        text = f"#{name} =" if unset else f"#{name} = {toml(option.default)}"
    sentence = re.split(r"(?<=[^.][.]) (?=[A-Z`])", option.doc)[0]
    if text.endswith("="):
        sentence = f"{option.type}; {sentence}"
    text = text.ljust(COLUMN)
    room = WIDTH - len(text) - 4
    if len(sentence) > room:
        sentence = sentence[: max(room - 4, 0)].rpartition(" ")[0] + " ..."
    return f"{text}  # {sentence}" if option.doc else text.rstrip()


def toml(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, Iterable):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")


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
"""{section: its most important options, in order}. For a plugin without any of them, its first options are shown."""
MANY = 6
"""Number of options of such a plugin that are shown, besides options that are set or required."""
FEW = 2
"""Options that are shown of a nested table of such a plugin."""
BY_NAME = ("roles", "placement")
"""Sections whose tables have names."""

Values = dict[str, Any]
"""{dotted path: value} of the options that the file sets."""


@dataclass(frozen=True)
class OptionTable:
    """One table of the file."""

    heading: str
    path: str
    """Dotted path, with the number of the entry in a list: ``reward.0``."""
    options: Sequence[Option]


def tables(run: RunFile, algorithm: Algorithm, values: Values, plugins: Plugins) -> Iterator[OptionTable]:
    """The tables of the file, in the order of the run file's sections.

    Args:
        values: options that the file sets. Every table with one of them is included.
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
            table = f"{place}.{entry}" if entry else place
            options = [*_options_of_run_file(place, table, algorithm), *_of_plugin(run, values, place, table, plugins)]
            options = _select(place, table, options, values, algorithm)
            options = [
                replace(o, doc=f"installed: {', '.join(plugin_names(plugins, o.kind))}") if o.kind else o
                for o in options
            ]
            yield from _split(section.heading.replace("NAME", entry), table, options, algorithm)


def _options_of_run_file(place: str, table: str, algorithm: Algorithm) -> list[Option]:
    """Options of the run file itself in one table. A list of sources is one option."""
    head = f"{place}.0." if place in LISTS else f"{place}.NAME." if place in BY_NAME else f"{place}."
    options = []
    for option in run_file_options():
        name = option.path.removeprefix(head)
        forms = READ_OF.get(name) if place == "data" else None
        if option.path.startswith(head) and ".0." not in name and (forms is None or algorithm.data in forms):
            options.append(replace(option, path=f"{table}.{name}"))
    if place == "data":
        docs = {section.path: section.doc for section in sections()}
        options += [Option(f"data.{use}", "text", None, False, docs[f"data.{use}"]) for use in ("train", "eval")]
    return options


def _of_plugin(run: RunFile, values: Values, place: str, table: str, plugins: Plugins) -> list[Option]:
    """Options of the plugin that a table selects; none if its name is a placeholder."""
    if place in SINGLE:
        choice = getattr(run, place)
    elif place in LISTS and run.reward + run.observer:
        choice = dict(enumerate(getattr(run, place))).get(int(table.rpartition(".")[2]))
    else:
        return []
    use = values.get(f"{table}.use")
    if isinstance(choice, Choice) and place == "rollout" and isinstance(use, str):
        choice = choice.model_copy(update={"use": use})
    return plugin_options(plugins, place, table, choice) if choice is not None else []


def _select(place: str, root: str, options: Sequence[Option], values: Values, algorithm: Algorithm) -> list[Option]:
    """Options that are set, required or important, with the important ones first."""
    ranks = {f"{root}.{name}": rank for rank, name in enumerate(FIRST.get(place, ("use",)))}
    last = len(ranks)
    if not any(o.path in ranks for o in options if o.plugin):
        slots = algorithm.slots if place == "algorithm" else {}
        ranks |= {f"{root}.{slot}.{name}": last for slot in slots for name in ("use", *slots[slot].defaults)}
        of_plugin = [o.path for o in options if o.plugin and o.type != "table" and o.path not in ranks]
        for table in dict.fromkeys(path.rpartition(".")[0] for path in of_plugin):
            limit = MANY if table in (root, *(f"{root}.{slot}" for slot in slots)) else FEW
            ranks |= dict.fromkeys([path for path in of_plugin if path.rpartition(".")[0] == table][:limit], last + 1)
    paths = {option.path for option in options}
    deeper = [path for path in values if path.startswith(f"{root}.") and path not in paths]  # within a free table
    matches = [o for o in options if o.path in values or o.path in ranks or (o.required and not o.table)]
    matches += [Option(path, "any value", None, False, "") for path in deeper]
    return sorted(matches, key=lambda option: ranks.get(option.path, last + 1))


def _split(heading: str, table: str, options: Sequence[Option], algorithm: Algorithm) -> Iterator[OptionTable]:
    """A table for the section itself, and one for each slot of the algorithm, except losses that train nothing."""
    slots = {f"algorithm.{name}": slot for name, slot in algorithm.slots.items()} if table == "algorithm" else {}
    options_of_table = [o for o in options if not o.path.startswith(tuple(f"{path}." for path in slots))]
    yield OptionTable(heading, table, options_of_table)
    # A loss may train at the start of the run only, or late in the run only.
    updates = [u for step in (0, MAX_STEPS - 1) for u in algorithm.updates(step) if isinstance(u, Update)]
    idle = [p for p, s in slots.items() if s.kind == "loss" and p not in {f"algorithm.{u.loss}" for u in updates}]
    for path in slots:
        part = [o for o in options if o.path.startswith(f"{path}.")]
        if part and path not in idle:
            yield OptionTable(f"[{path}]", path, part)
