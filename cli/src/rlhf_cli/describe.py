"""The content of ``rlhf plugins show``, from a plugin's class and from an instance with default options."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import ValidationError
from rlhf.errors import RlhfError
from rlhf.interfaces import abilities
from rlhf.plugins import Plugins, Resolved
from rlhf_runtime.config.options import options_of

DECLARATIONS: dict[str, tuple[str, ...]] = {
    "algorithm": ("data", "slots", "needs"),
    "advantage": ("group_min", "needs_values", "normalise"),
    "loss": ("data", "outputs", "columns", "reduce", "prepass"),
    "curriculum": ("min_scores", "reads_probabilities"),
    "rollout": ("needs_env",),
    "reward": ("roles", "columns"),
    "trainer": ("abilities", "capabilities"),
    "generator": ("abilities", "capabilities"),
    "launcher": ("capabilities",),
}
"""Declarations of each kind that are shown: class attributes, properties, and methods without arguments."""


def describe(resolved: Resolved, plugins: Plugins) -> dict[str, Any]:
    """A JSON object: kind, name, distribution, version, summary, source, file, options, declares."""
    cls = resolved.cls
    return {
        "kind": resolved.kind,
        "name": resolved.name,
        "distribution": resolved.distribution,
        "version": resolved.version,
        "summary": inspect.cleandoc(cls.__doc__ or ""),
        "source": cls.source,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "file": resolved.path or inspect.getsourcefile(cls) or "",
        "options": options(cls.Config) if hasattr(cls, "Config") else [],
        "declares": declarations(resolved, plugins),
    }


def options(config: type[Any]) -> list[dict[str, Any]]:
    """One object per option: name, type, default (in TOML's form; null if required), doc."""
    return [
        {"name": o.path, "type": o.type, "required": o.required, "default": o.default, "doc": o.doc}
        for o in options_of(config)
    ]


def declarations(resolved: Resolved, plugins: Plugins) -> dict[str, Any]:
    """Needs or capabilities with the default options. If there are no default options, the values say on which options
    they depend."""
    cls = resolved.cls
    if resolved.kind == "env":
        return {"calls": _calls(cls.step)}
    values: dict[str, Any] = {"calls": _calls(cls.score)} if resolved.kind == "reward" else {}
    subject: Any = cls
    if resolved.kind in ("algorithm", "advantage", "loss", "reward", "rollout"):
        try:
            subject = _instance(resolved, plugins)
        except (ValidationError, RlhfError, TypeError, ValueError) as error:
            problem = f"depends on {_why_not_built(error)}"
            return values | dict.fromkeys(DECLARATIONS[resolved.kind], problem)
    for name in DECLARATIONS.get(resolved.kind, ()):
        value = abilities(cls) if name == "abilities" else getattr(subject, name)
        values[name] = plain(value() if inspect.ismethod(value) else value)
    return values


def _why_not_built(error: Exception) -> str:
    """The names of the required options. If no option is required by itself: why the default options are refused."""
    if not isinstance(error, ValidationError):
        return f"its options ({str(error).splitlines()[0]})"
    errors = error.errors(include_url=False)
    missing = [".".join(map(str, entry["loc"])) for entry in errors if entry["type"] == "missing"]
    reason = ": ".join([*map(str, errors[0]["loc"]), errors[0]["msg"].removeprefix("Value error, ")])
    return f"options that must be set: {', '.join(missing) or reason}"


def _instance(resolved: Resolved, plugins: Plugins) -> Any:
    """An instance with default options; an algorithm gets the default parts of its slots."""
    cls = resolved.cls
    if resolved.kind != "algorithm":
        return cls(cls.Config(**resolved.options))
    parts = {}
    for slot_name, slot in cls.slots.items():
        part = plugins.resolve(slot.kind, slot.use).cls
        parts[slot_name] = part(part.Config(**slot.defaults))
    return cls(cls.Config(), parts)


def _calls(method: Any) -> str:
    return "async def: on the event loop" if inspect.iscoroutinefunction(method) else "def: in a worker process"


def plain(value: Any) -> Any:
    """JSON values: dataclasses and configs become objects, sets sorted lists, functions their names."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {k: plain(v) for k, v in asdict(value).items() if v not in (None, (), {}, "")}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return getattr(value, "__name__", str(value))


def as_text(facts: dict[str, Any]) -> str:
    """The description of :func:`describe` as lines of text."""
    owner = f"{facts['distribution']} {facts['version']}".strip()
    lines = [f"{facts['kind']} {facts['name']}  ({owner})", "", facts["summary"] or "(no docstring)", ""]
    lines += [f"source  {facts['source']}"] if facts["source"] else []
    lines += [f"class   {facts['class']}", f"file    {facts['file']}", ""]
    lines.append("options" if facts["options"] else "options: none")
    for option in facts["options"]:
        default_text = (
            "not set" if option["default"] is None else f"= {json.dumps(option['default'], ensure_ascii=False)}"
        )
        default = "required" if option["required"] else default_text
        lines.append(f"  {option['name']}: {option['type']}  {default}")
        lines += [f"      {option['doc']}"] if option["doc"] else []
    if facts["declares"]:
        lines += ["", "declares", *(f"  {name}: {_one_line(value)}" for name, value in facts["declares"].items())]
    return "\n".join(lines)


def _one_line(value: Any, nested: bool = False) -> str:
    """Tables inside of a value are in parentheses, lists in brackets."""
    if isinstance(value, dict):
        text = ", ".join(f"{k}={_one_line(v, nested=True)}" for k, v in value.items())
        return f"({text})" if nested else text or "none"
    if isinstance(value, list):
        text = ", ".join(_one_line(v, nested=True) for v in value)
        return f"[{text}]" if nested else text or "none"
    return str(value)
