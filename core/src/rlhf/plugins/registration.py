"""Get the classes of a plugin's module: pluggy calls the hooks, and each class is checked before use.

pluggy alone would ignore a misspelled hook silently, import all plugins at once, and pick one of two plugins with the
same name. Therefore each module has its own manager, unknown hooks are an error, and hooks are called one by one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from types import ModuleType
from typing import Any

from pluggy import PluginManager, PluginValidationError

from rlhf import hookspecs
from rlhf.errors import PluginImportFailed, PluginInvalid, did_you_mean
from rlhf.plugins.abilities import check_abilities
from rlhf.plugins.entry import HOOK_PREFIX, KINDS
from rlhf.plugins.importing import importing
from rlhf.plugins.references import NAME


def first_cause(error: BaseException) -> str:
    """The first exception of the chain, and where it was raised."""
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def import_plugin(module: str, label: str) -> ModuleType:
    """Import a plugin's module. Raises PluginImportFailed with the first cause of any exception."""
    try:
        with importing(label):
            return importlib.import_module(module)
    except PluginImportFailed:
        raise
    except (Exception, SystemExit) as cause:
        raise PluginImportFailed(f"{label} failed to import {module!r}: {first_cause(cause)}") from cause


def registered_classes(module: ModuleType, kind: str, label: str) -> list[type[Any]]:
    """The classes that the module's ``rlhf_register_<kind>`` functions return, checked to be components of that kind.

    Raises PluginInvalid: a hook of unknown name or signature, no hook for this kind, or a hook that raises or does not
    return a list of classes of its kind.
    """
    hook = HOOK_PREFIX + kind
    manager = PluginManager("rlhf")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, name=module.__name__)
        manager.check_pending()
    except PluginValidationError as cause:
        raise PluginInvalid(f"{label}: {_explain(cause, module)}") from cause
    classes: list[type[Any]] = []
    implementations = getattr(manager.hook, hook).get_hookimpls()
    if not implementations:
        raise PluginInvalid(f"{label}: module {module.__name__!r} has no hook {hook!r}. {_forgotten(module, hook)}")
    for implementation in implementations:
        try:
            with importing(label):
                # Hooks import what they offer, so a hook may block or exit like an import.
                offered = implementation.function()
        except PluginImportFailed:
            raise
        except ImportError as cause:
            raise PluginImportFailed(f"{label}: {hook} failed to import: {first_cause(cause)}") from cause
        except (Exception, SystemExit) as cause:
            raise PluginInvalid(f"{label}: {hook} raised {first_cause(cause)}") from cause
        if not isinstance(offered, (list, tuple)):
            raise PluginInvalid(f"{label}: {hook} must return a list of classes, got {offered!r}")
        for cls in offered:
            check_kind_of(kind, cls, label)
        classes.extend(offered)
    return classes


def pick(classes: list[type[Any]], kind: str, name: str, label: str) -> type[Any]:
    """The class with this name. Raises PluginInvalid if no class has it, or more than one."""
    matches = [cls for cls in classes if cls.name == name]
    if len(matches) == 1:
        return check_class(kind, matches[0], label)
    if matches:
        raise PluginInvalid(
            f"{label} registers {len(matches)} classes named {name!r}: {', '.join(map(_path, matches))}"
        )
    offered = ", ".join(f"{cls.__name__} (name = {cls.name!r})" for cls in classes) or "none"
    raise PluginInvalid(
        f"{label} registers no {kind} class with name = {name!r}, the name of its entry point. It registers: {offered}"
    )


def check_class(kind: str, cls: Any, label: str) -> type[Any]:
    """Returns ``cls`` if it is a usable component of that kind. Raises PluginInvalid saying what is missing."""
    check_kind_of(kind, cls, label)
    if not isinstance(cls.name, str) or not NAME.fullmatch(cls.name):
        raise PluginInvalid(
            f"{label}: {_path(cls)} has name = {cls.name!r}; a name is lower case letters, digits and '_', e.g. "
            f"name = {re.sub(r'[^a-z0-9_]+', '_', str(cls.name or cls.__name__).lower())!r}"
        )
    _check_config(kind, cls, label)
    check_abilities(kind, cls, label)
    owners: dict[str, list[str]] = {}
    for name in abstract_methods(cls):
        owners.setdefault(_owner(kind, cls, name), []).append(name)
    if owners:
        missing = "; ".join(f"{', '.join(names)}, which every {owner} must have" for owner, names in owners.items())
        raise PluginInvalid(f"{label}: {_path(cls)} does not define {missing}")
    for name in _never_awaited(kind, cls):
        raise PluginInvalid(f"{label}: {_path(cls)}.{name} is `async def`, but nothing awaits it: write `def {name}`")
    result: type[Any] = cls
    return result


def _never_awaited(kind: str, cls: type[Any]) -> list[str]:
    """Methods that are ``async def`` although the kind's interface has them as plain ``def`` only. A call of one would
    do nothing."""
    from rlhf.interfaces import interface

    names = []
    for name, declared in inspect.getmembers_static(interface(kind), inspect.isfunction):
        result = str(declared.__annotations__.get("return"))
        method = inspect.getattr_static(cls, name)
        if not inspect.iscoroutinefunction(declared) and "Awaitable" not in result and _is_async(method):
            names.append(name)
    return names


def _is_async(method: object) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _check_config(kind: str, cls: type[Any], label: str) -> None:
    """Raises PluginInvalid if ``Config`` has the wrong base class, or if the kind has no options."""
    from rlhf.interfaces import interface

    if not hasattr(interface(kind), "Config"):
        if hasattr(cls, "Config"):
            raise PluginInvalid(f"{label}: {_path(cls)} has a Config, but a {kind} has no options. Remove the Config")
        return
    from rlhf.interfaces import ComponentConfig

    config = cls.Config
    if not isinstance(config, type) or not issubclass(config, ComponentConfig):
        raise PluginInvalid(
            f"{label}: {_path(cls)}.Config must be a subclass of rlhf.interfaces.ComponentConfig, got {config!r}"
        )


def check_kind_of(kind: str, cls: Any, label: str) -> None:
    """Raises PluginInvalid unless ``cls`` is a class of this kind's interface."""
    from rlhf.interfaces import interface

    base = interface(kind)
    expected = f"a subclass of rlhf.interfaces.{base.__name__}"
    if not isinstance(cls, type):
        instance = " (an instance: return the class itself)" if kind_of(type(cls)) else ""
        raise PluginInvalid(f"{label}: expected {expected}, got {cls!r}{instance}")
    if not issubclass(cls, base):
        other = kind_of(cls)
        description = f"is of kind {other}" if other else f"derives from {', '.join(b.__name__ for b in cls.__bases__)}"
        raise PluginInvalid(f"{label}: {_path(cls)} {description}; kind {kind} needs {expected}")


def kind_of(cls: type[Any]) -> str:
    """The kind whose interface a class derives from, or an empty string."""
    from rlhf.interfaces import KINDS as INTERFACES

    return next((kind for kind, base in INTERFACES.items() if issubclass(cls, base)), "")


def abstract_methods(cls: type[Any]) -> list[str]:
    """Abstract methods that a class does not define. (``Component`` is not an ``ABC``, so Python does not check it.)"""
    return sorted(n for n in dir(cls) if getattr(getattr(cls, n, None), "__isabstractmethod__", False))


def _owner(kind: str, cls: type[Any], method: str) -> str:
    """The ability that a method belongs to, or the kind."""
    from rlhf.interfaces import Ability, interface

    base = next(base for base in reversed(cls.__mro__) if method in vars(base))
    return base.__name__ if issubclass(base, Ability) and not issubclass(base, interface(kind)) else kind


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _explain(cause: PluginValidationError, module: ModuleType) -> str:
    """pluggy's message; for an unknown hook, a message with the most similar hook."""
    hooks = [HOOK_PREFIX + kind for kind in KINDS]
    for name in vars(module):
        if hasattr(vars(module)[name], "rlhf_impl") and name not in hooks:
            return f"there is no hook {name!r}.{did_you_mean(name, hooks)} Hooks are {', '.join(hooks)}."
    return " ".join(str(cause).split())


def _forgotten(module: ModuleType, hook: str) -> str:
    if hasattr(module, hook):
        return (
            "The function exists but is not marked as a hook: write '@hookimpl' (from rlhf import hookimpl) above it."
        )
    return f"Define it there: @hookimpl def {hook}(): return [YourClass]"
