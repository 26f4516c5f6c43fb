"""Load a run file and flags into :class:`~rlhf_runtime.config.runfile.RunFile`, and write it back.

There are two layers: the TOML file, then the flags, in the order given (the last of equal flags wins). All problems of
both are reported at once, including those of plugins' options. A later layer may select another plugin. Options that an
earlier layer set for the replaced plugin are then an error that names both plugins. They are never dropped. The
sections launcher, trainer and generator are an exception, because they determine where a run executes, not what it
computes. The new plugin gets these options, and reads or refuses them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from rlhf.errors import ConfigError, PluginError, PluginInvalid, PluginNotFound, did_you_mean
from rlhf.plugins import Plugins
from rlhf.plugins.entry import distribution_of
from rlhf.secrets import find_secrets
from rlhf_hub.hub import Commits, hub_name, is_cached
from rlhf_hub.published import pinned, require_folder

from rlhf_runtime.config.components import chosen_by, dumped, option_problems
from rlhf_runtime.config.flag_values import PYTHON_BOOLEANS, FlagText, PythonValue, plain, read
from rlhf_runtime.config.overrides import RUNTIME, Override, Overrides
from rlhf_runtime.config.problems import describe, origin, raise_problems, type_and_value
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile, expand, long_form
from rlhf_runtime.config.sections import ROLES, Choice, PlacementSection, SyncSection
from rlhf_runtime.config.suggestions import Chosen, Suggestions

_ROWS_ADVICE = " To pass a file of rows, use --data FILE."
MAX_DEPTH = 100
"""Deepest nesting of tables and lists. No section needs more than a few levels."""


def load(
    path: str | None,
    overrides: Sequence[Override] = (),
    plugins: Plugins | None = None,
    left_out: list[str] | None = None,
    algorithm: str | None = None,
) -> RunFile:
    """The run file with the flags applied to it.

    Args:
        path: a TOML file, or None if flags give all values.
        overrides: (dotted flag without dashes, raw text, None for a flag without a value, or a value given in Python).
            A list section's entries are addressed by index or by name (``reward.0.weight``, ``reward.math.weight``);
            ``reward``, ``observer``, ``data.train`` and ``data.eval`` alone replace the whole list.
        plugins: plugins whose options and names are suggested; default: the installed ones.
        left_out: if a flag replaces a launcher, trainer or generator by a plugin that lacks some of its options, these
            options are left out and added to this list. So are the placement and the transport of weights, if the
            launcher has one process. None: they are refused, unless they are defaults of the replaced plugin, as in the
            file that a run writes.
        algorithm: the algorithm if the file names none, for commands that do not use it.

    Raises ConfigError listing every problem with its path, its origin, the value got and the allowed values.
    """
    text = _read(path) if path is not None else ""
    file_name = Path(path).name if path is not None else "flags"
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits, and thousands of brackets
        flag = "" if file_name.endswith(".toml") else _ROWS_ADVICE
        raise ConfigError(f"{path} is not valid TOML: {error}.{flag}{unquoted(text, str(error))}") from None
    origins = {p: f"{file_name}, line {n}" for p, n in line_numbers(text).items()}
    _check_depth(data)
    plugins = plugins or Plugins.discover()
    data = expand(data)
    overrides = _expand_backend(overrides, data, plugins)
    if algorithm is not None:
        data = {"algorithm": {"use": algorithm}, **data}
    for kind in RUNTIME:
        _leave_out_unread(data, kind, overrides, plugins, left_out)
    if left_out is not None:
        _leave_out_processes(data, overrides, plugins, left_out)
    layers = Overrides(data, origins, lambda key: Suggestions(plugins, _chosen_in(layers.data)).suggest(key, (), True))
    layers.apply(overrides)
    _check_depth(layers.data)
    data, origins = layers.data, layers.origins
    headline = (
        f"{path} is not a valid run file" if path is not None and not overrides else "the configuration is not valid"
    )
    # Messages about other problems contain values, so secrets are reported before them.
    raise_problems("the configuration holds secrets", _secret_problems(data, origins))
    raise_problems("the run file is not filled in", unfilled(data, origins))
    problems = [*layers.problems, *_toml_problems(data, origins)]
    try:
        run = RunFile.model_validate(read(RunFile, long_form(data)))
    except ValidationError as error:
        choices = _chosen_in(data)
        problems += describe(error, RunFile, "", origins, Suggestions(plugins, choices))
        raise_problems(headline, problems + option_problems(plugins, choices, origins))
        raise AssertionError from error
    if problems:
        # Without other problems, the options of plugins are checked when the plugins are selected.
        problems += option_problems(plugins, chosen_by(run), origins)
    raise_problems(headline, problems)
    run.origins.update(origins)
    # The short form `[trainer] lr = 1e-5` has no `use`. It was filled in, not set by the user.
    filled = {f"{key}.use" for key in SINGLE if isinstance(data.get(key), Mapping) and "use" not in data[key]}
    run.origins.options = tuple(path for path in run.origins.options if path not in filled)
    return run


def _chosen_in(data: Mapping[str, Any]) -> Chosen:
    """The plugins that nested tables select; invalid selections are left out."""
    choices = []
    tables = long_form(dict(data))
    for kind in {**SINGLE, **LISTS}:
        default = RunFile.model_fields[kind].default
        entries = tables.get(kind, (default,) if kind in SINGLE else ())
        for n, table in enumerate(entries if kind in LISTS else (tables.get(kind, default),)):
            if isinstance(table, Mapping) and isinstance(table.get("use"), str):
                options = table.get("options", {})  # other values are reported as another problem
                table = Choice(use=str(table["use"]), options=options if isinstance(options, dict) else {})
            if isinstance(table, Choice):
                choices.append((kind, f"{kind}.{n}" if kind in LISTS else kind, table))
    return choices


def unquoted(text: str, error: str) -> str:
    """Advice if the line that ``error`` names contains a word that is not a TOML value; else empty."""
    place = re.search(r"\(at line (\d+), column (\d+)\)", error)
    if place is None or int(place[1]) > len(lines := text.splitlines()):
        return ""
    line, column = lines[int(place[1]) - 1], int(place[2]) - 1
    assignment = re.fullmatch(r"\s*[\w.-]+\s*=\s*([^\s\"'\[{#][^#\"']*?)\s*(#.*)?", line)
    word = assignment[1] if assignment else _word(line, column) if error.startswith("Invalid value") else ""
    if word in PYTHON_BOOLEANS:
        return f" TOML's booleans are written true and false, got {word}."
    if not word or FlagText(word).value != word:  # the word is a valid value, so the error is in the line before
        return ""
    if word in ("None", "null"):
        return f" TOML has no {word}: remove the line."
    return f' Text is quoted: "{word}".'


def _word(line: str, column: int) -> str:
    """The word of a line at this column."""
    return next((m[0] for m in re.finditer(r"[^\s,\[\]{}=#\"']+", line) if m.start() <= column < m.end()), "")


def to_toml(run: RunFile) -> str:
    """The configuration with all defaults, as TOML; :func:`load` reads it back to an equal RunFile.

    Values of None are left out, because TOML cannot express them. Raises ConfigError if the configuration holds a
    secret.
    """
    data = _sections(run)
    raise_problems("the configuration holds secrets", _secret_problems(data, {}))
    return tomli_w.dumps(data)


def line_numbers(text: str) -> dict[str, int]:
    """{dotted path: line from 1} of the tables and keys that start a line in a TOML document."""
    lines: dict[str, int] = {}
    table, counts = "", dict[str, int]()
    quotes = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if quotes:  # inside a multi-line string
            quotes = "" if quotes in stripped else quotes
            continue
        header = re.match(r"(\[\[?)\s*([^\[\]]+?)\s*\]", stripped)
        key = re.match(r"([A-Za-z0-9_.\"' -]+?)\s*=", stripped)
        if header:
            name = _plain_key(header[2])
            if header[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
            # A table below a list of tables belongs to the last entry of that list.
            parents = sorted((c for c in counts if name == c or name.startswith(c + ".")), key=len)
            table = name
            if parents:
                last = parents[-1]
                table = f"{last}.{counts[last]}{name[len(last) :]}"
            lines.setdefault(table, number)
        elif key:
            path = _plain_key(key[1])
            lines.setdefault(f"{table}.{path}" if table else path, number)
            for quote in ('"""', "'''"):
                if stripped.count(quote) == 1:
                    quotes = quote
    return lines


def _plain_key(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _read(path: str) -> str:
    file = Path(path)
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = sorted(p.name for p in file.parent.glob("*.toml")) if file.parent.is_dir() else []
        hint = f" TOML files in {file.parent}: {', '.join(names)}.{did_you_mean(file.name, names)}" if names else ""
        raise ConfigError(f"the run file {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        config = file / "config.toml"
        hint = _ROWS_ADVICE if isinstance(error, UnicodeDecodeError) else ""
        if config.exists():
            hint = f" The run file of this run is {config}; its model is --model {file / 'model'}."
        raise ConfigError(f"cannot read the run file {path}: {error}.{hint}") from None


def _expand_backend(overrides: Sequence[Override], data: Mapping[str, Any], plugins: Plugins) -> list[Override]:
    """Replace ``--backend NAME`` by the three flags of its launcher, trainer and generator. A generator that is not
    installed is left out if the run samples nothing."""
    expanded: list[Override] = []
    for key, raw in overrides:
        value = raw.value if isinstance(raw, PythonValue) else raw
        if key != "backend" or value is None:
            expanded.append((key, raw))
            continue
        references = _backend(str(value), plugins)
        if not _installed("generator", references["generator"], plugins) and not _samples(overrides, data, plugins):
            del references["generator"]
        expanded += [(f"{kind}.use", reference) for kind, reference in references.items()]
    return expanded


def _samples(overrides: Sequence[Override], data: Mapping[str, Any], plugins: Plugins) -> bool:
    """Whether the run may need a generator: for its algorithm, or for rewards and environments of an evaluation."""
    if any(data.get(kind) or any(key.split(".")[0] == kind for key, _ in overrides) for kind in ("reward", "env")):
        return True
    table = data.get("algorithm")
    name = table.get("use") if isinstance(table, Mapping) else table
    for key, raw in overrides:
        if key in ("algorithm", "algorithm.use"):
            name = raw.value if isinstance(raw, PythonValue) else raw
    try:
        return bool(plugins.resolve("algorithm", str(name)).cls.data == "prompts")
    except PluginError:  # reported when the algorithm is selected
        return True


def _installed(kind: str, name: str, plugins: Plugins) -> bool:
    try:
        plugins.resolve(kind, name)
    except PluginNotFound:
        return False
    return True


def _backend(name: str, plugins: Plugins) -> dict[str, str]:
    """{kind: reference} of the launcher, the trainer and the generator of a backend."""
    try:
        backend = plugins.resolve("backend", name)
    except PluginNotFound:
        names = sorted({entry.name for entry in plugins.list("backend")})
        install = plugins.how_to_install(distribution_of(name))
        raise ConfigError(
            f"--backend {name}: unknown backend; available: "
            f"{', '.join(names) or 'none'}.{did_you_mean(name, names)}{install} Or choose --launcher.use, "
            "--trainer.use and --generator.use individually."
        ) from None
    references = {kind: getattr(backend.cls, kind) for kind in ("launcher", "trainer", "generator")}
    if absent := [kind for kind, reference in references.items() if not reference]:
        raise PluginInvalid(
            f"{backend}: {backend.cls.__name__} names no {' and no '.join(absent)}; all three are needed"
        )
    return references


def _leave_out_unread(
    data: Mapping[str, Any], kind: str, overrides: Sequence[Override], plugins: Plugins, left_out: list[str] | None
) -> None:
    """Remove the options of ``[kind]`` that the plugin selected by a flag does not have (see :func:`load`). For
    ``trainer`` these include the options of single roles."""
    table = data.get(kind)
    names = [value for key, value in overrides if key in (kind, f"{kind}.use") and isinstance(value, str)]
    if not names or not isinstance(table, dict) or "use" not in table:
        return
    try:
        fields = plugins.resolve(kind, names[-1]).cls.Config.model_fields
    except PluginError:  # reported when the plugin is selected
        return
    try:
        defaults = dumped(plugins.resolve(kind, str(table["use"])).cls.Config())
    except (PluginError, ValidationError):  # not installed here, or it has options without a default
        defaults = {}
    for path, options in {kind: table, **(_trainers_of_roles(data) if kind == "trainer" else {})}.items():
        for name in [name for name in options if name != "use" and name not in fields]:
            if name in defaults and options[name] == _sections(defaults[name]):
                del options[name]
            elif left_out is not None:
                left_out.append(f"{path}.{name} = {type_and_value(options.pop(name))}")


def _trainers_of_roles(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{path: options} of ``[ROLE.trainer]``."""
    tables = {name: data.get(name) for name in ROLES}
    if isinstance(roles := data.get("roles"), Mapping):
        tables |= {f"roles.{name}": table for name, table in roles.items()}
    trainers = {f"{name}.trainer": t.get("trainer") for name, t in tables.items() if isinstance(t, Mapping)}
    return {path: options for path, options in trainers.items() if isinstance(options, dict)}


def _leave_out_processes(
    data: dict[str, Any], overrides: Sequence[Override], plugins: Plugins, left_out: list[str]
) -> None:
    """Remove what assigns devices to several processes, if a flag selects a launcher with one process."""
    names = [value for key, value in overrides if key in ("launcher", "launcher.use") and isinstance(value, str)]
    try:
        if not names or "in_process" not in plugins.resolve("launcher", names[-1]).cls.capabilities:
            return
    except PluginError:  # reported when the plugin is selected
        return
    sections: list[tuple[str, Any, Any]] = [("sync", data.get("sync"), {"transport": SyncSection().transport})]
    if isinstance(places := data.get("placement"), dict):
        sections += [(f"placement.{role}", table, PlacementSection().model_dump()) for role, table in places.items()]
    for section, table, defaults in sections:
        for name, default in defaults.items() if isinstance(table, dict) else ():
            if (value := table.pop(name, default)) != default:
                left_out.append(f"{section}.{name} = {type_and_value(value)}")


def _secret_problems(data: Any, origins: Mapping[str, str]) -> list[str]:
    return [
        f"{path}{origin(path, origins)}: looks like a secret. The configuration is copied into the run directory and "
        "to loggers; remove it and set an environment variable instead (HF_TOKEN, WANDB_API_KEY, or the one that the "
        "plugin's page names)."
        for path in find_secrets(plain(data))
    ]


def _check_depth(data: Any) -> None:
    """Raises ConfigError if tables and lists are nested too deeply for the recursive functions below."""
    level = [data]
    for _ in range(MAX_DEPTH):
        children = [v for node in level for v in (node.values() if isinstance(node, Mapping) else node)]
        level = [
            v
            for v in (v.value if isinstance(v, FlagText) else v for v in children)
            if isinstance(v, Mapping | list | tuple)
        ]
        if not level:
            return
    raise ConfigError(
        f"the configuration nests tables and lists more than {MAX_DEPTH} levels deep. Reduce the nesting."
    )


def _toml_problems(value: Any, origins: Mapping[str, str], path: str = "") -> list[str]:
    """Problems of values that a run file cannot hold: integers with more than 64 bits, which tensors and counters do
    not support either, and None in a list that was given in Python."""
    if isinstance(value, FlagText):
        value = value.value
    if isinstance(value, list | tuple) and any(item is None for item in value):
        return [f"{path}{origin(path, origins)}: TOML has no null, got {type_and_value(value)}. Remove None from it."]
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [p for k, v in items for p in _toml_problems(v, origins, f"{path}.{k}" if path else str(k))]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return [f"{path}{origin(path, origins)}: integers are from -2^63 to 2^63 - 1, got {type_and_value(value)}."]
    return []


def _sections(value: Any) -> Any:
    if isinstance(value, Choice):
        fields = {name: getattr(value, name) for name in type(value).model_fields if name != "options"}
        clash = fields.keys() & value.options.keys()
        return _sections({**fields, "options": value.options} if clash else {**fields, **value.options})
    if hasattr(type(value), "model_fields"):
        return _sections({name: getattr(value, name) for name in type(value).model_fields})
    if isinstance(value, Mapping):
        return {k: _sections(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_sections(v) for v in value]
    return plain(value)


_BEGIN, _END = "<fill in: ", ">"


def placeholder(description: str) -> str:
    """Text that :func:`unfilled` finds.

    Args:
        description: the value that belongs there, in a few words.
    """
    return f"{_BEGIN}{description}{_END}"


def unfilled(data: Any, origins: Mapping[str, str]) -> list[str]:
    """One line for every placeholder that is left in nested tables and lists.

    Args:
        origins: {dotted path: file and line}.
    """
    return [
        f"{path}{origin(path, origins)}: still holds the placeholder {text!r}. Write a value in its place, or give "
        f"--{path} VALUE."
        for path, text in _left(data, "")
    ]


def _left(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _left(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _left(item, f"{path}.{number}")
    elif isinstance(value, str) and value.startswith(_BEGIN) and value.endswith(_END):
        yield path, str(value)


def look_for_models(config: RunFile) -> None:
    """Check that the models that a run file names exist as folders or on the hub. This runs before torch is imported,
    which takes seconds, so that a mistyped name fails at once. A model that the hub's client downloaded before is
    assumed to exist, and a resume uses the recorded commits.

    Raises ModelError.
    """
    for model in dict.fromkeys(section.model for section in config.models.values() if section.model is not None):
        name = hub_name(model)
        if name is None:
            require_folder(model)
        elif not config.run.resume and not is_cached("model", name):
            pinned(model, Commits())
