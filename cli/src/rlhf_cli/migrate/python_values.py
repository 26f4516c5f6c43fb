"""Values of expressions in a Python script, as far as its text states them. The script is parsed, never executed.

A name has the value of its only assignment, or of the last assignment above its line at the top level. A parameter has
the argument of the only call of its function. ``args.lr`` of ``argparse`` or of a dataclass is the flag of the command,
else the default. Sums, conditions, f-strings, ``int(...)`` and similar expressions are computed from such values.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (int, float, str, bool, abs, min, max, len, list, tuple, dict)
} | {
    "Path": lambda *parts: os.path.join(*map(str, parts)),
    "round": lambda number, *digits: round(number, *(max(count, -300) for count in digits)),
}
MAX_SIZE = 100_000
"""Largest size of a repeated value (characters and items), and largest number of expressions of a script, because a
short text can require more than fits in memory."""
_OF_BF16 = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
"""Functions that return whether bf16 is supported. A run supports it, so they are true."""
_OF_TEXTS = ("lower", "upper", "strip", "rstrip", "split", "rsplit", "replace", "join", "startswith", "endswith")
_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")


class NoValueError(Exception):
    """The text of a script does not state the value of an expression."""


@dataclass
class Fields:
    """Attributes that a name has: flags of ``argparse``, or fields of a class of the script."""

    nodes: dict[str, ast.expr] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Assignment:
    """A value that is assigned to a name, or an item of it. It has no value if the name changes in another way."""

    value: ast.expr | None
    item: int | None
    statement: ast.AST
    line: int


@dataclass
class PythonValues:
    """The values of one script.

    Args:
        settings: values of ``--set``, by name.
        flags: flags of the command, with their texts.
    """

    tree: ast.Module
    settings: Mapping[str, str]
    location: str
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_flags = set[str]()
        self.classes = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        self.calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.functions: dict[ast.AST, ast.FunctionDef] = {}
        for function in (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)):
            self.functions |= dict.fromkeys(ast.walk(function), function)  # an inner function comes later
        self.assignments: dict[tuple[str, ast.FunctionDef | None], list[_Assignment]] = {}
        self.stored_attributes = set[str]()
        self._busy = set[ast.AST]()
        self._expressions = 0
        in_classes = {statement for node in self.classes.values() for statement in node.body}
        for node in ast.walk(self.tree):
            targets = list[ast.expr]()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
                targets = [node.target]
            plain = node.value if isinstance(node, ast.Assign | ast.AnnAssign) and node not in in_classes else None
            for target in targets if node not in in_classes else ():
                items = target.elts if isinstance(target, ast.Tuple) else [target]
                for number, item in enumerate(items):
                    if isinstance(item, ast.Attribute):
                        self.stored_attributes.add(item.attr)
                        continue
                    value = plain if isinstance(item, ast.Name) else None
                    part = _Assignment(value, None if item is target else number, node, target.lineno)
                    for name in (n for n in ast.walk(item) if isinstance(n, ast.Name)):
                        self.assignments.setdefault((name.id, self.functions.get(node)), []).append(part)
        self.imports = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        self.arguments = {name: call for call in self.calls if name_of(call) == "add_argument" for name in _names(call)}

    def literal(self, node: ast.expr, name: str) -> Any:
        """The value of an argument. Raises ConfigError, with the line, if the script does not determine it."""
        if name in self.settings:
            return self.settings[name]
        try:
            value = self.value(node)
        except (NoValueError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
            value = Fields()
        if isinstance(value, Fields):
            raise ConfigError(
                f"{self.location}, line {node.lineno}: {name}={ast.unparse(node)} is not a literal, and code is not "
                f"executed. Give the value: --set {name}=VALUE"
            )
        return value

    def _assignment(self, node: ast.Name) -> _Assignment | None:
        """The assignment that determines a name: the only one of its function, else of the script. Of several
        consecutive assignments, the last one above the name."""
        scope = self.functions.get(node)
        is_reached = (node.id, scope) in self.assignments
        assignments = self.assignments.get((node.id, scope if is_reached else None), [])
        if len(assignments) > 1:
            blocks = [self.tree.body if scope is None else scope.body]
            mains = [part for part in blocks[0] if isinstance(part, ast.If) and "__name__" in ast.unparse(part.test)]
            blocks += [part.body for part in mains]
            in_a_row = all(any(part.statement in block for block in blocks) for part in assignments)
            earlier = [part for part in assignments if part.line < node.lineno]
            assignments = earlier[-1:] if in_a_row and is_reached else []
        value = assignments[0].value if assignments else None
        return None if value is None or node in ast.walk(value) else assignments[0]

    def node(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that a name stands for at its line. Other expressions are returned unchanged."""
        if isinstance(node, ast.Name) and not self._parameter(node):
            assignment = self._assignment(node)
            if assignment and assignment.item is None:
                return assignment.value
        return node

    def value(self, node: ast.expr) -> Any:
        self._expressions += 1
        # A name may be assigned from itself, also over other names.
        if node in self._busy or self._expressions > MAX_SIZE:
            raise NoValueError
        self._busy.add(node)
        try:
            return self._value(node)
        finally:
            self._busy.discard(node)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Set(elts=items):
                return sorted(self.value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                entries = dict[Any, Any]()
                for key, item in zip(keys, values, strict=True):
                    entries |= self.value(item) if key is None else {self.value(key): self.value(item)}
                return entries
            case ast.Name():
                return self._name(node)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.Attribute(value=base, attr=name):
                return self._field(self.value(base), name)
            case ast.Subscript(value=base, slice=index):
                return self.value(base)[self.value(index)]
            case ast.UnaryOp(op=sign, operand=operand):
                value = self.value(operand)
                return not value if isinstance(sign, ast.Not) else -value if isinstance(sign, ast.USub) else value
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                # As floats: a power of integers can need any amount of memory, a power of floats raises OverflowError.
                return float(self.value(left)) ** self.value(right)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
                return _result(sign, self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATIONS:
                return _OPERATIONS[type(sign)](self.value(left), self.value(right))
            case ast.BoolOp(op=sign, values=values):
                for item in values[:-1]:
                    if bool(value := self.value(item)) == isinstance(sign, ast.Or):
                        return value
                return self.value(values[-1])
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self.value(test) else other)
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.Call():
                return self._call(node)
        raise NoValueError

    def _part(self, part: ast.expr) -> str:
        if not isinstance(part, ast.FormattedValue):
            return str(self.value(part))
        if part.format_spec or part.conversion != -1 or isinstance(value := self.value(part.value), Fields):
            raise NoValueError
        return str(value)

    def _name(self, node: ast.Name) -> Any:
        if parameter := self._parameter(node):
            return self._of_parameter(node.id, *parameter)
        assignment = self._assignment(node)
        if assignment and assignment.value is not None:
            value = self.value(assignment.value)
            return value if assignment.item is None else value[assignment.item]
        if node.id in self.classes:
            return self._of_class(self.classes[node.id])
        raise NoValueError

    def _parameter(self, node: ast.Name) -> tuple[ast.FunctionDef, ast.arg] | None:
        function = self.functions.get(node)
        if function is None:
            return None
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return next(((function, argument) for argument in arguments if argument.arg == node.id), None)

    def _of_parameter(self, name: str, function: ast.FunctionDef, argument: ast.arg) -> Any:
        """The argument of the only call of a function; else a default, or the class of the annotation."""
        calls = [call for call in self.calls if isinstance(call.func, ast.Name) and call.func.id == function.name]
        places = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
        if len(calls) == 1 and not any(keyword.arg is None for keyword in calls[0].keywords):
            bindings = dict(zip(places, calls[0].args, strict=False))
            bindings |= {keyword.arg or "": keyword.value for keyword in calls[0].keywords}
            defaults = dict(zip(places[::-1], function.args.defaults[::-1], strict=False))
            if (node := bindings.get(name) or defaults.get(name)) is not None:
                return self.value(node)
        if not calls and isinstance(argument.annotation, ast.Name) and argument.annotation.id in self.classes:
            return self._of_class(self.classes[argument.annotation.id])
        raise NoValueError

    def _field(self, base: Any, name: str) -> Any:
        if not isinstance(base, Fields) or name in self.stored_attributes:
            raise NoValueError
        if name in base.values:
            return base.values[name]
        if name in base.nodes:
            return self.value(base.nodes[name])
        raise NoValueError

    def _call(self, call: ast.Call) -> Any:
        name, base = name_of(call), call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in _OF_BF16:
            return True
        if "parse" in name and "args" in name:
            return self._of_parser(base)
        if ast.unparse(call.func) in ("os.getenv", "os.environ.get", "getenv", "environ.get") and call.args:
            variable = self.value(call.args[0])
            if variable in self.settings:
                return self.settings[variable]
            return self.value(call.args[1] if call.args[1:] else ast.Name("None"))
        if ast.unparse(call.func) == "os.path.join":
            return os.path.join(*(str(self.value(item)) for item in call.args))
        if name in _OF_TEXTS and base is not None and isinstance(text := self.value(base), str):
            arguments = [self.value(item) for item in call.args]
            if name == "replace":
                _require_size(text.count(arguments[0]) * len(arguments[1]))
            if name == "join":
                _require_size(len(text) * len(arguments[0]))
            return getattr(text, name)(*arguments)
        if name == "get" and base is not None and isinstance(entries := self.value(base), dict):
            return entries.get(self.value(call.args[0]), *(self.value(item) for item in call.args[1:]))
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if len(keywords) < len(call.keywords):
            raise NoValueError
        if base is None and name in self.classes:
            fields = self._of_class(self.classes[name])
            fields.nodes |= dict(zip(fields.nodes, call.args, strict=False)) | keywords
            return fields
        if name in ("SimpleNamespace", "Namespace"):
            return Fields(keywords)
        if base is None and name in _FUNCTIONS:
            values = [self.value(item) for item in call.args]
            return _FUNCTIONS[name](*values, **{key: self.value(item) for key, item in keywords.items()})
        functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if base is None and len(functions) == 1:
            returns = [node for node in ast.walk(functions[0]) if isinstance(node, ast.Return) and node.value]
            if len(returns) == 1 and returns[0].value is not None:
                return self.value(returns[0].value)
        raise NoValueError

    def _of_class(self, node: ast.ClassDef) -> Fields:
        """The fields of a class, with their defaults. Flags of the command take precedence."""
        fields = Fields()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != node.name:
                fields.nodes |= self._of_class(self.classes[base.id]).nodes
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            if len(targets) == 1 and isinstance(targets[0], ast.Name):
                value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
                fields.nodes[targets[0].id] = _default(value) if value is not None else ast.Name("")
        for name in fields.nodes.keys() & self.flags.keys():
            self.read_flags.add(name)
            texts = self.flags[name]
            fields.values[name] = _plain(texts[0]) if len(texts) == 1 else [_plain(text) for text in texts] or True
        return fields

    def _of_parser(self, parser: ast.expr | None) -> Any:
        """The result of a parser: the flags of ``argparse``, or a tuple of the fields of dataclasses."""
        constructor = self.node(parser) if parser is not None else None
        if isinstance(constructor, ast.Call) and name_of(constructor) in _PARSERS and constructor.args:
            argument = constructor.args[0]
            classes = argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]
            names = [node.id if isinstance(node, ast.Name) else "" for node in classes]
            return tuple(self._of_class(self.classes[n]) if n in self.classes else Fields() for n in names)
        fields = Fields()
        for name, call in self.arguments.items():
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            action = options.get("action")
            switch = isinstance(action, ast.Constant) and str(action.value).startswith("store_")
            if name in self.flags:
                self.read_flags.add(name)
                fields.values[name] = self._flag(self.flags[name], options, switch)
            elif "default" in options:
                fields.nodes[name] = options["default"]
            elif switch and isinstance(action, ast.Constant):
                fields.values[name] = action.value == "store_false"
            elif not isinstance(required := options.get("required"), ast.Constant) or not required.value:
                fields.values[name] = None
        return fields

    def _flag(self, texts: Sequence[str], options: Mapping[str | None, ast.expr], switch: bool) -> Any:
        if switch:
            return isinstance(action := options["action"], ast.Constant) and action.value != "store_false"
        kind = options.get("type")
        convert = {"int": int, "float": float, "str": str}.get(ast.unparse(kind) if kind else "str", _plain)
        values = [convert(text) for text in texts]
        return values if "nargs" in options or len(values) != 1 else values[0]


def _result(sign: ast.operator, left: Any, right: Any) -> Any:
    """The value of an operation, if its size is within :data:`MAX_SIZE`."""
    if isinstance(sign, ast.Mult):
        for text, times in ((left, right), (right, left)):
            _require_size(_size(text) * times if isinstance(times, int) else 0)
    if isinstance(sign, ast.Mod) and isinstance(left, str) and re.search(r"%[^%a-zA-Z]*[\d*]", left):
        raise NoValueError  # a width
    return _OPERATIONS[type(sign)](left, right)


def _size(value: Any) -> int:
    """Number of characters and items of a text or list, including nested ones. Above :data:`MAX_SIZE` the count may
    stop."""
    size = len(value) if isinstance(value, str | list | tuple) else 0
    for item in value if isinstance(value, list | tuple) else ():
        size += _size(item) if size <= MAX_SIZE else 0
    return size


def _require_size(size: int) -> None:
    if size > MAX_SIZE:
        raise NoValueError


def name_of(call: ast.Call) -> str:
    """``GRPOConfig`` of ``trl.GRPOConfig(...)``."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def source_of(path: str) -> str:
    """The Python code of a script, or of the cells of a notebook without the notebook's own commands."""
    text = Path(path).read_text(encoding="utf-8")
    if not path.endswith(".ipynb"):
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if not cell.startswith("%%")]
    return re.sub(r"^([ \t]*)[!%](?:[^\n]*\\\n)*[^\n]*", r"\1pass", "\n".join(cells), flags=re.MULTILINE)


def _names(call: ast.Call) -> list[str]:
    """The names of ``add_argument("--lr", ...)`` in the parser's result."""
    for keyword in call.keywords:
        if keyword.arg == "dest" and isinstance(keyword.value, ast.Constant):
            return [str(keyword.value.value)]
    texts = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [text for text in texts if text.startswith("--")] or texts
    return [names[0].lstrip("-").replace("-", "_")] if names else []


def _default(node: ast.expr) -> ast.expr:
    """The default of ``field(default=...)`` and ``field(default_factory=lambda: ...)``. Other expressions are returned
    unchanged."""
    if isinstance(node, ast.Call) and name_of(node) in ("field", "Field"):
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = options.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return factory.body
        if factory is not None:
            return ast.Call(factory, [], [])
        return options.get("default") or (node.args[0] if node.args else ast.Name(""))
    return node


def _plain(text: str) -> Any:
    """A text of a command as a number or a switch, if it is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
