"""``file:`` references: a component from a Python file, without packaging.

The text is read once and recorded by its SHA-256. It is imported as a module in ``sys.modules`` under a name that is
derived from its path and content. So its classes pickle, and another process that imports the same text gets the same
names. The file cannot import modules beside it, because only the file itself is sent to other processes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import ConfigError, PluginImportFailed, PluginInvalid, did_you_mean
from rlhf.paths import check_path
from rlhf.plugins.functions import FORMS, SAMPLE_PARAMETERS, form_of_function
from rlhf.plugins.importing import importing
from rlhf.plugins.registration import abstract_methods, check_class, first_cause, kind_of


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file's text as read, and its identity."""

    path: str
    text: str
    sha256: str

    @classmethod
    def read(cls, path: str) -> SourceFile:
        try:
            file = Path(check_path(path)).expanduser()
        except ValueError as cause:
            raise ConfigError(f"'file:' reference: {cause}") from None
        try:
            return cls.of(str(file.resolve()), file.read_text(encoding="utf-8"))
        except OSError as cause:
            suggestion = did_you_mean(file.name, [p.name for p in file.absolute().parent.glob("*.py")])
            raise ConfigError(
                f"'file:{path}' cannot be read: {cause.strerror or cause} ({file.absolute()}).{suggestion}"
            ) from cause
        except UnicodeDecodeError as cause:
            raise ConfigError(f"'file:{path}' is not UTF-8 text: {cause}") from cause

    @classmethod
    def of(cls, path: str, text: str) -> SourceFile:
        return cls(path, text, hashlib.sha256(text.encode()).hexdigest())

    @property
    def name(self) -> str:
        """Name of a component whose class sets no name: the file's stem, with '_' for characters that are not
        allowed."""
        return re.sub(r"[^a-z0-9_]+", "_", Path(self.path).stem.lower())

    @property
    def module_name(self) -> str:
        path_hash = hashlib.sha256(self.path.encode()).hexdigest()[:6]
        return f"rlhf_file_{self.name}_{path_hash}_{self.sha256[:12]}"

    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, self.path)
        except SyntaxError as cause:
            raise PluginImportFailed(
                f"'file:{self.path}' failed to import: line {cause.lineno}: {cause.msg}"
            ) from cause

    def load(self) -> ModuleType:
        """The module. The first call in this process executes it."""
        name = self.module_name
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = self.path
        module.__spec__ = ModuleSpec(name, None, origin=self.path)
        sys.modules[name] = module  # before execution: dataclasses look themselves up there
        try:
            with importing(f"'file:{self.path}'"):
                exec(compile(self.tree(), self.path, "exec"), module.__dict__)
        except BaseException as cause:  # after Ctrl-C too: the next call must not return half of a module
            del sys.modules[name]
            if isinstance(cause, PluginImportFailed | KeyboardInterrupt):
                raise
            raise PluginImportFailed(f"'file:{self.path}' failed to import: {first_cause(cause)}") from cause
        return module


@lru_cache(maxsize=16)
def looks_native(source: SourceFile, kind: str) -> bool:
    """Whether the file defines a component, decided without executing it: it imports from ``rlhf``, or it has a reward
    function. Other files are passed to the installed adapters first. A file with hundreds of functions is parsed once,
    not for each reference to one of them."""
    tree = source.tree()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.split(".")[0] == "rlhf" for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "rlhf":
            return True
    functions = (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return kind == "reward" and any(tuple(a.arg for a in f.args.args) == SAMPLE_PARAMETERS for f in functions)


def pick_component(source: SourceFile, kind: str, attribute: str | None, module: ModuleType) -> type[Any] | None:
    """The component that the module offers for ``kind``, checked; None if it has no usable one.

    Raises PluginInvalid: several candidates, no such attribute, or a candidate that breaks its kind's rules.
    """
    label = f"{kind} 'file:{source.path}{':' + attribute if attribute else ''}'"
    if attribute is not None:
        if not hasattr(module, attribute):
            raise PluginInvalid(f"{label}: the file defines no {attribute!r}. It defines: {_defined(module)}")
        return component_of(getattr(module, attribute), kind, attribute, source.name, module, label)
    from rlhf.interfaces import interface

    members = [v for v in vars(module).values() if getattr(v, "__module__", None) == module.__name__]
    candidates: list[Any] = [c for c in members if isinstance(c, type) and issubclass(c, interface(kind))]
    # If all are abstract, check_class() refuses one with a message that says what is missing.
    concrete = [c for c in candidates if not abstract_methods(c)] or candidates
    if kind == "reward" and not concrete:
        concrete = [f for f in members if _is_function(f) and form_of_function(f)]
    if len(concrete) > 1:
        choices = ", ".join(f"file:{source.path}:{c.__name__}" for c in concrete)
        raise PluginInvalid(f"{label}: the file defines {len(concrete)} plugins of this kind; pick one: {choices}")
    return component_of(concrete[0], kind, concrete[0].__name__, source.name, module, label) if concrete else None


def component_of(member: Any, kind: str, attribute: str, name: str, module: ModuleType, label: str) -> type[Any] | None:
    """An attribute of a module as a component: a class, or for rewards a function. None if it is neither.

    Args:
        name: name of the component, if its class has none.

    Raises PluginInvalid for a class that breaks its kind's rules.
    """
    if isinstance(member, type):
        if not kind_of(member):
            return None
        component: type[Any] = member
        if component.name == "":
            component.name = name
        return check_class(kind, component, label)
    form = form_of_function(member) if callable(member) else None
    if kind != "reward" or form is None:
        return None
    from rlhf.plugins.reward_functions import reward_of_function  # listing plugins starts without it

    class_name = f"Reward_{attribute}"
    if (cls := vars(module).get(class_name)) is None:
        label = f"reward function {attribute!r} of {module.__file__}"
        cls = reward_of_function(member, form, name=name, class_name=class_name, module=module.__name__, label=label)
        if hasattr(module, "conformance"):  # settings for the conformance suite, written beside the function
            cls.conformance = module.conformance
        setattr(module, class_name, cls)  # so that it pickles
    result: type[Any] = cls
    return result


def nothing_usable(label: str, kind: str, module: ModuleType, adapters: list[str], broken: list[str]) -> str:
    """The message for a file without a usable component: what was expected and what the file defines. ``broken``:
    adapters that failed, and why."""
    adapter_note = f" No installed adapter ({', '.join(adapters)}) recognises it." if adapters else ""
    failed = f" Adapters that could not be used: {'; '.join(broken)}." if broken else ""
    return f"{label}: expected {expected(kind)}. The file defines: {_defined(module)}.{adapter_note}{failed}"


def _defined(module: ModuleType) -> str:
    """The classes and functions that a file itself defines, with their kind if they have one."""
    parts = []
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            parts.append(f"class {name}" + (f" ({kind_of(value)})" if kind_of(value) else ""))
        elif inspect.isfunction(value):
            parts.append(f"def {name}{inspect.signature(value)}")
    return ", ".join(parts) or "nothing"


def expected(kind: str) -> str:
    """What a file must define to offer this kind."""
    from rlhf.interfaces import interface

    text = f"one subclass of rlhf.interfaces.{interface(kind).__name__}"
    return f"{text}, or one function {FORMS}" if kind == "reward" else text


def _is_function(value: object) -> bool:
    return inspect.isfunction(value) and not value.__name__.startswith("_")
