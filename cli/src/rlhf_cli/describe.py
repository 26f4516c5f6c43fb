"""What ``rlhf plugins show`` says of a plugin: read off its class, and off an instance with its defaults."""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined
from rlhf.errors import RlhfError
from rlhf.interfaces import ComponentConfig
from rlhf.plugins import Plugins, Resolved

DECLARATIONS: dict[str, tuple[str, ...]] = {
    "algorithm": ("data", "slots", "needs"),
    "advantage": ("group_min", "needs_values", "normalise"),
    "loss": ("outputs", "columns", "reduce", "prepass"),
    "rollout": ("needs_env",),
    "reward": ("roles",),
    "trainer": ("capabilities",),
    "generator": ("capabilities",),
    "launcher": ("capabilities",),
}
"""What a kind declares about itself: class attributes, properties, and methods without arguments."""


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
        "options": options(cls.Config),
        "declares": declarations(resolved, plugins),
    }


def options(config: type[Any], prefix: str = "") -> list[dict[str, Any]]:
    """One object per config field: name, type, default (as TOML would have it, null where required), doc."""
    found: list[dict[str, Any]] = []
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ComponentConfig):
            found += options(field.annotation, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        required = default is PydanticUndefined
        found.append(
            {
                "name": prefix + name,
                "type": _type(field.annotation),
                "required": required,
                "default": None if required else plain(default),
                "doc": " ".join((field.description or "").split()),
            }
        )
    return found


def declarations(resolved: Resolved, plugins: Plugins) -> dict[str, Any]:
    """Needs or capabilities, with the default options; ``"depends on its options"`` where those are required."""
    cls = resolved.cls
    if resolved.kind == "env":
        return {"calls": _calls(cls.step)}
    found: dict[str, Any] = {"calls": _calls(cls.score)} if resolved.kind == "reward" else {}
    subject: Any = cls
    if resolved.kind in ("algorithm", "advantage", "loss", "reward", "rollout"):
        try:
            subject = _instance(resolved, plugins)
        except (ValidationError, RlhfError, TypeError, ValueError) as error:
            problem = f"depends on its options ({str(error).splitlines()[0]})"
            return found | dict.fromkeys(DECLARATIONS[resolved.kind], problem)
    for name in DECLARATIONS.get(resolved.kind, ()):
        value = getattr(subject, name)
        found[name] = plain(value() if inspect.ismethod(value) else value)
    return found


def _instance(resolved: Resolved, plugins: Plugins) -> Any:
    """One with default options; an algorithm's parts are those of its slots."""
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


def _type(annotation: Any) -> str:
    """``'k1' | 'k2' | None``, ``tuple[float, float]``, ``int``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is not None:
        return f"{_type(origin)}[{', '.join('...' if a is Ellipsis else _type(a) for a in arguments)}]"
    if annotation is type(None):
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")


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


def as_text(shown: dict[str, Any]) -> str:
    """For people."""
    owner = f"{shown['distribution']} {shown['version']}".strip()
    lines = [f"{shown['kind']} {shown['name']}  ({owner})", "", shown["summary"] or "(no docstring)", ""]
    lines += [f"source  {shown['source']}"] if shown["source"] else []
    lines += [f"class   {shown['class']}", f"file    {shown['file']}", ""]
    lines.append("options" if shown["options"] else "options: none")
    for option in shown["options"]:
        default = "required" if option["required"] else f"= {option['default']!r}"
        lines.append(f"  {option['name']}: {option['type']}  {default}")
        lines += [f"      {option['doc']}"] if option["doc"] else []
    if shown["declares"]:
        lines += ["", "declares", *(f"  {name}: {_one_line(value)}" for name, value in shown["declares"].items())]
    return "\n".join(lines)


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={_one_line(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        inner = ["(" + _one_line(v) + ")" if isinstance(v, dict) else _one_line(v) for v in value]
        return ", ".join(inner) or "none"
    return str(value)
