"""A Python function as a tool: its JSON schema, from its signature and docstring, and the check of its arguments."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Required

import docstring_parser
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import GenerateJsonSchema
from rlhf.errors import ConfigError
from rlhf.plugins.files import SourceFile
from typing_extensions import TypedDict  # pydantic refuses the one of Python 3.11

from rlhf_plugin_tools.tool import invalid_arguments, schema_of

REFERENCE = re.compile(r"file:(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The file that defines a function, as read, and the function's name."""

    file: SourceFile
    name: str

    @classmethod
    def of(cls, reference: str) -> FunctionSource:
        """Read ``file:PATH:NAME``. Raises ConfigError."""
        return cls.of_all([reference])[0]

    @classmethod
    def of_all(cls, references: Sequence[str]) -> list[FunctionSource]:
        """Read each ``file:PATH:NAME``, and each file once. Raises ConfigError."""
        files: dict[str, SourceFile] = {}
        sources = []
        for reference in references:
            match = REFERENCE.fullmatch(reference)
            if match is None:
                raise ConfigError(f"rollout.functions: {reference!r} is not a function; write 'file:PATH.py:NAME'")
            path = match["path"]
            if path not in files:
                files[path] = SourceFile.read(path)
            sources.append(cls(files[path], match["name"]))
        return sources


class PythonFunction:
    """The function of a :class:`FunctionSource`. Its file is executed.

    Raises PluginImportFailed: the file. Raises ConfigError: the function cannot be a tool.
    """

    def __init__(self, source: FunctionSource) -> None:
        label = self.label = f"file:{source.file.path}:{source.name}"
        module = source.file.load()
        function = getattr(module, source.name, None)
        if not inspect.isfunction(function):
            names = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
            raise ConfigError(f"{label}: the file has no function of this name. It has: {', '.join(names) or 'none'}")
        self.name = source.name
        self.function: Callable[..., Any] = function
        self.is_async = inspect.iscoroutinefunction(function)
        doc = docstring_parser.parse(function.__doc__ or "")
        description = "\n\n".join(filter(None, (doc.short_description, doc.long_description)))
        if not description:
            raise ConfigError(
                f"{label} has no docstring. The policy sees the docstring as the description of the tool: write one"
            )
        self._arguments = _arguments(function, {p.arg_name: p.description or "" for p in doc.params}, label)
        try:
            parameters = self._arguments.json_schema(schema_generator=_WithoutTitles)
        except PydanticUserError as error:
            raise ConfigError(f"{label}: a parameter has a type without a JSON schema: {error.message}") from None
        parameters.pop("title", None)
        self.schema = schema_of(self.name, description, parameters)

    def validated(self, arguments: str) -> dict[str, Any]:
        """Keyword arguments from a JSON object. Nothing is converted: ``"3"`` is not an integer.

        Raises ToolError, which names every invalid argument.
        """
        try:
            keywords: dict[str, Any] = self._arguments.validate_json(arguments, strict=True)  # also inside of models
        except ValidationError as error:
            problems = ((e["loc"], e["msg"]) for e in error.errors(include_url=False, include_context=False))
            raise invalid_arguments(self.name, problems) from None
        return keywords


def _arguments(function: Callable[..., Any], descriptions: dict[str, str], label: str) -> TypeAdapter[Any]:
    """The arguments as a type of dicts. Raises ConfigError."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name that is not defined, or anything else that an annotation raises
        raise ConfigError(f"{label}: its type hints cannot be read: {type(error).__name__}: {error}") from None
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{label}: parameter {name!r} cannot be passed by name, but a policy passes every argument by name"
            )
        if name not in hints:
            raise ConfigError(
                f"{label}: parameter {name!r} has no type hint; the policy sees the types of all arguments"
            )
        optional = parameter.default is not parameter.empty
        # fields of a TypedDict have no defaults, so the schema would not name them
        extra = {"default": parameter.default} if optional and _plain(parameter.default) else None
        field = Field(description=descriptions.get(name) or None, json_schema_extra=extra)
        presence: Any = NotRequired if optional else Required
        described: Any = Annotated
        fields[name] = presence[described[hints[name], field]]
    try:
        return TypeAdapter(with_config(_CONFIG)(TypedDict(function.__name__, fields)))  # type: ignore[operator]
    except PydanticUserError as error:
        raise ConfigError(f"{label}: a parameter has a type that JSON cannot hold: {error.message}") from None


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)
