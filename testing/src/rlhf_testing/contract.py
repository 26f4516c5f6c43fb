"""Shared parts of all suites: how a check fails, the grid of configs, and the checks of every component.

A suite is a plain class with ``test_`` methods. pytest collects a subclass whose name starts with ``Test``;
:func:`rlhf_testing.conformance.run` calls the same methods without pytest.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import math
import numbers
import re
import subprocess
import sys
import types
import typing
import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from rlhf.errors import PluginInvalid
from rlhf.interfaces.component import Ability, Component, ComponentConfig
from rlhf.plugins.abilities import check_abilities
from rlhf.secrets import names_secret

from rlhf_testing.fabricate import NoColumn

NAME = re.compile(r"[a-z][a-z0-9_]*")
FRAMEWORKS = ("torch", "transformers", "datasets", "vllm", "deepspeed", "ray")
_MUTABLE = (list, dict, set, bytearray)


class Nonconformance(AssertionError):
    """A plugin breaks the contract of its kind. The message says which rule, the value and what to do."""


def expect(condition: bool, message: str) -> None:
    """Fail the check with ``message`` unless ``condition``."""
    if not condition:
        raise Nonconformance(message)


def missing(part: str) -> unittest.SkipTest:
    """The exception to raise if the author did not supply ``part``: pytest and ``rlhf plugins check`` report a skip."""
    return unittest.SkipTest(f"The check needs input that only you can supply: {part}")


def expect_light_import(label: str, module: str, remedy: str) -> None:
    """Fails if importing ``module``, in a separate process, fails or imports a framework.

    Args:
        label: the component, at the beginning of messages.
        remedy: advice for its author, at the end of messages.
    """
    code = f"import sys, {module}; print(*(m for m in {FRAMEWORKS!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{label} its module cannot be imported: {done.stderr[-500:]}")
    frameworks = done.stdout.split()
    expect(not frameworks, f"{label} importing {module} imports {frameworks}; {remedy}")


@contextlib.contextmanager
def knowing_columns(label: str, give: str) -> Iterator[None]:
    """Turns the error about a column that the made-up rows lack into a failure that says how to add the column.

    Args:
        give: the entry of ``conformance`` that holds columns. NAME stands for the column's name. EACH stands for all
            columns, if the author's row replaces the made-up one.
    """
    try:
        yield
    except NoColumn as error:
        name, present = error.args
        columns = f" (they have {', '.join(present)})" if present else ""
        needed = ", ".join(f"{json.dumps(column)}: ..." for column in [*present, name])
        entry = give.replace("NAME", f"{json.dumps(name)}: ...").replace("EACH", needed)
        raise Nonconformance(
            f"{label} reads the column {name!r}, which the made-up rows of this suite do not have{columns}. Add an "
            f"example of it: conformance = {{{entry}}} in the plugin's class (in a file with a function: next to the "
            "function)"
        ) from error


def changed_fields(config: BaseModel, path: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """(``kl.coef``, its value, its field) for each field of a config that is not at its default, nested fields
    included."""
    for name, info in type(config).model_fields.items():
        value, default = getattr(config, name), info.get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and type(value) is type(default):
            yield from changed_fields(value, f"{path}{name}.")
        elif value != default:
            yield f"{path}{name}", value, info


def not_default(config: BaseModel) -> list[str]:
    """``kl.coef = 0.1`` for each field of a config that is not at its default."""
    return [f"{path} = {value!r}" for path, value, _ in changed_fields(config)]


def set_options(config: BaseModel) -> list[str]:
    """``kl.coef`` for each option of a config that is set to another value than its default, nested options
    included."""
    return [path for path, _, info in changed_fields(config) if not info.is_required()]


class PluginContract:
    """Base of the suites. ``kind`` names both the kind and the attribute that holds the class under test."""

    kind: ClassVar[str] = ""
    registered: bool = True
    """False for a class that no installed distribution offers (a single file, an example)."""

    @property
    def cls(self) -> Any:
        """The class under test."""
        cls = getattr(type(self), self.kind, None)
        expect(isinstance(cls, type), f"{type(self).__name__} must name its class: {self.kind} = YourClass")
        return cls

    def label(self, config: Any = None) -> str:
        """The subject of messages: the class, and the options of the config that are not at their defaults."""
        options = "" if config is None else ", ".join(not_default(config))
        return f"{self.kind} {getattr(self.cls, 'name', '?')!r}{options and f' with {options}'}:"

    # -------------------------------------------------------------------------- checks of every kind

    def test_class(self) -> None:
        """The class is complete, subclasses its kind's interface, and has a name that works on a command line."""
        from rlhf.interfaces import KINDS

        cls, base = self.cls, KINDS[self.kind]
        expect(issubclass(cls, base), f"{cls.__name__} must subclass rlhf.interfaces.{base.__name__}")
        abstract = sorted(n for n in dir(cls) if getattr(getattr(cls, n, None), "__isabstractmethod__", False))
        expect(not abstract, f"{cls.__name__} does not define {abstract}")
        name = cls.name
        expect(bool(NAME.fullmatch(name)), f"{cls.__name__}.name is {name!r}; it must match [a-z][a-z0-9_]*")
        options = hasattr(cls, "Config") and not hasattr(base, "Config")
        expect(not options, f"{cls.__name__} has a Config, but a {self.kind} has no options: remove it")
        try:
            check_abilities(self.kind, cls, self.kind)
        except PluginInvalid as error:
            raise Nonconformance(str(error)) from None
        faces = [
            base,
            *(c for c in cls.__mro__ if issubclass(c, Ability) and not issubclass(c, base) and c is not Ability),
        ]
        for attribute, member in misspelled(cls, *faces):
            raise Nonconformance(
                f"{cls.__name__}.{attribute} is not a member of kind {self.kind}, so it is never called. Did you mean "
                f"{member!r}?"
            )
        for problem in (problem for face in faces for problem in uncallable(cls, face)):
            raise Nonconformance(problem)
        doc = cls.__dict__.get("__doc__")
        expect(bool(doc and doc.strip()), f"{cls.__name__} has no docstring; `rlhf plugins show {name}` prints it")

    def test_entry_point(self) -> None:
        """The name in the distribution's metadata is the class's name, and the hook of its module offers the class."""
        if not self.registered:
            return
        from importlib.metadata import entry_points

        from rlhf.errors import RlhfError
        from rlhf.plugins import Plugins

        cls, package = self.cls, self.cls.__module__.split(".")[0]
        points = [p for p in entry_points(group=f"rlhf.{self.kind}") if p.module.split(".")[0] == package]
        names = sorted(p.name for p in points)
        expect(
            cls.name in names,
            f"{cls.__name__}.name is {cls.name!r}, but package {package!r} offers {names} in the entry-point group "
            f"'rlhf.{self.kind}'. Make them equal, then reinstall the distribution.",
        )
        distribution = next(p.dist.name for p in points if p.name == cls.name and p.dist is not None)
        try:
            Plugins.discover().resolve(self.kind, f"{distribution}/{cls.name}")
        except RlhfError as error:
            raise Nonconformance(f"a run cannot select {self.kind} {cls.name!r}: {error}") from error


class Contract(PluginContract):
    """Base of the suites of a run's parts, which have a config and state for the checkpoint."""

    configs: Sequence[ComponentConfig] = ()
    """Configs to check, each by itself; empty: only the default config."""
    without_effect: Mapping[str, str] = {}
    """{``option`` or ``option = value``: why it has no effect that the suite can measure}, for the check ``options`` of
    algorithms, advantages and losses: ``{"entropy_coef = 0.0": "reports only"}``."""

    def grid(self) -> list[Any]:
        """The configs to check; the default config if the author set none."""
        if self.configs:
            return list(self.configs)
        try:
            return [self.cls.Config()]
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'the defaults'}: {first['msg']}"
            raise missing(f"configs = [{self.cls.__name__}.Config(...)], as Config() is not valid ({reason})") from None

    def build(self, config: Any) -> Any:
        """An instance, built as the runtime builds it."""
        return self.cls(config)

    def test_config(self) -> None:
        """The config is strict, frozen, documented, and equal after a round trip through JSON."""
        cls = self.cls.Config
        expect(issubclass(cls, ComponentConfig), f"{cls.__qualname__} must subclass rlhf.interfaces.ComponentConfig")
        check_fields(cls)
        for name, taker in taken_fields(self.cls, self.kind).items():
            raise Nonconformance(f"{cls.__qualname__}.{name} cannot be set: {taker} uses the name. Choose another")
        unknown = sorted(name for name in self.cls.layout if name.partition(".")[0] not in cls.model_fields)
        expect(not unknown, f"{self.cls.__name__}.layout names {unknown}; {cls.__qualname__} has {[*cls.model_fields]}")
        for config in self.grid():
            check_config(config)

    def test_state_is_json(self) -> None:
        """``state_dict`` holds JSON values and loads into a fresh instance."""
        for config in self.grid():
            check_state(self.build(config), self.build(config), self.label(config))


def misspelled(cls: type[Any], *faces: type[Any]) -> list[tuple[str, str]]:
    """[(public name that ``cls`` defines, similar name in its interfaces ``faces`` that ``cls`` does not override)].
    Example: ``step_finish``, although the runtime calls ``step_finished``."""
    optional = [
        n
        for face in faces
        for n in dir(face)
        if not n.startswith("_") and inspect.getattr_static(cls, n) is inspect.getattr_static(face, n)
    ]
    names = [n for n in vars(cls) if not n.startswith("_") and not any(hasattr(face, n) for face in faces)]
    pairs = [(n, difflib.get_close_matches(n, optional, n=1, cutoff=0.8)) for n in names]
    return [(n, match[0]) for n, match in pairs if match]


def uncallable(cls: type[Any], base: type[Any]) -> Iterator[str]:
    """Problems with methods of ``cls`` that the interface ``base`` declares differently: other arguments, plain instead
    of ``async``, or a method instead of a property."""
    for name in dir(base):
        inherited, defined = inspect.getattr_static(base, name), inspect.getattr_static(cls, name)
        if inherited is defined or (name.startswith("_") and name != "__call__"):
            continue
        if isinstance(inherited, property) and inspect.isfunction(defined):
            yield f"{cls.__name__}.{name} is read as an attribute: put @property above it"
        if not (inspect.isfunction(inherited) and inspect.isfunction(defined)):
            continue
        signature = inspect.signature(inherited)
        parameters = [
            p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        try:
            inspect.signature(defined).bind(*parameters)
        except TypeError as error:
            yield (
                f"{cls.__name__}.{name}{_parameters(inspect.signature(defined))} is called as "
                f"{name}{_parameters(signature)}: {error}"
            )
        if inspect.iscoroutinefunction(inherited) and not inspect.iscoroutinefunction(defined):
            yield f"{cls.__name__}.{name} is awaited: write `async def {name}`"


def taken_fields(cls: type[Any], kind: str) -> dict[str, str]:
    """{field of ``cls.Config``: who reads it} for names that the run file's section or an algorithm's slot already
    uses."""
    from rlhf_runtime.config.runfile import LISTS, SINGLE

    section = {**SINGLE, **LISTS}.get(kind)
    fields = set(section.model_fields) if section is not None else {"use"}
    readers = dict.fromkeys(fields, f"the section of the {kind} itself")
    readers |= {name: f"the slot {name!r}" for name in getattr(cls, "slots", {})}
    return {name: readers[name] for name in cls.Config.model_fields if name in readers}


def _parameters(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def no_number(value: Any) -> str:
    """Empty for a finite number, else a message with the value, what is allowed and what to write."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return ""
    hint = " Write float(...)." if isinstance(value, bool | str) else ""
    hint = " Write .item()." if hasattr(value, "item") else hint
    return f"{value!r} ({type(value).__name__}); allowed is a finite number.{hint}"


def check_state(component: Component, fresh: Component, label: str) -> None:
    """The state of ``component`` survives JSON and restores ``fresh``."""
    state = component.state_dict()
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Nonconformance(f"{label} state_dict() must hold JSON values only: {error}; got {state!r}") from error
    fresh.load_state_dict(json.loads(text))
    second = json.dumps(fresh.state_dict(), allow_nan=False)
    expect(second == text, f"{label} state_dict() is {text}, but {second} after load_state_dict() into a new instance")


def check_config(config: Any) -> None:
    """One config: round trip, frozen, unknown keys refused."""
    cls, text = type(config), repr(config)
    loaded_config = cls.model_validate_json(config.model_dump_json())
    expect(loaded_config == config, f"{text} becomes {loaded_config!r} after a dump and a load")
    for name in cls.model_fields:
        try:
            setattr(config, name, getattr(config, name))
        except (ValidationError, TypeError, AttributeError):
            continue
        raise Nonconformance(f"{cls.__qualname__}.{name} can be set: the config must stay frozen (model_config)")
    wrong = {**config.model_dump(), "no_such_option": 1}
    try:
        cls.model_validate(wrong)
    except ValidationError as error:
        refused = any(e["loc"] == ("no_such_option",) and e["type"] == "extra_forbidden" for e in error.errors())
    else:
        refused = False
    expect(refused, f"{cls.__qualname__} accepts the unknown key 'no_such_option': keep extra='forbid'")


def check_fields(cls: type[BaseModel], path: str = "") -> None:
    """Every field documented and of an immutable type, nested configs included."""
    for name, info in cls.model_fields.items():
        field = f"{path or cls.__qualname__}.{name}"
        expect(
            bool((info.description or "").strip()),
            f"{field} is not documented: put a string literal below the field; "
            "the tables and `plugins show` are made from these texts",
        )
        expect(
            not names_secret(name),
            f"{field} has the name of a secret, but run files are copied and logged, so they must hold none: read an "
            "environment variable, whose name may be an option (api_key_env)",
        )
        for part in _parts(info.annotation):
            if isinstance(part, type) and issubclass(part, _MUTABLE):
                raise Nonconformance(
                    f"{field} is a {part.__name__}, which can change although the config is frozen; "
                    "use tuple or frozenset, or Mapping for a table"
                )
            if isinstance(part, type) and issubclass(part, BaseModel):
                expect(issubclass(part, ComponentConfig), f"{field}: {part.__name__} must subclass ComponentConfig")
                check_fields(part, field)


def _parts(annotation: Any) -> Iterable[Any]:
    """The annotation and everything inside it: ``tuple[list[int], ...]`` gives tuple, list and int."""
    origin = typing.get_origin(annotation)
    if origin is None:
        yield annotation
        return
    if origin is not typing.Literal:
        if origin not in (typing.Union, types.UnionType, typing.Annotated):
            yield origin
        for part in typing.get_args(annotation):
            yield from _parts(part)
