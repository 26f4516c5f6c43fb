"""The forms of tool calls in published chat templates. docs/how-to/tools.md names the models of each form.

A form is used only if the chat template contains its mark. Text that does not match the form is not a call, and stays
in the content of the answer.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from rlhf_runtime.data.strict_json import STRICT, decoded


class AnswerCall(NamedTuple):
    name: str
    arguments: str
    """JSON text."""
    id: str = ""
    """The id that the policy wrote. Empty if the form has none."""


Types = Mapping[tuple[str, str], frozenset[str]]
"""{(function, argument): the JSON types that its schema allows; empty if the schema does not say}. A value inside an
argument has a path, such as ``places.*.city`` for a list of objects."""


@dataclass(frozen=True, slots=True)
class CallForm:
    mark: str
    """A text that is in each chat template with this form."""
    opening: str
    """Pattern of the text before one or several calls. It may have the groups ``name`` and ``id``."""
    closing: str
    """Pattern of the text after the calls."""
    read: Callable[[str, Types], list[AnswerCall]] | None = None
    """Reads the text between opening and closing. Returns no calls if it does not match this form. None for JSON, which
    is read up to its end, so its strings may contain tags. The JSON is the arguments if the opening has the name.
    Otherwise :attr:`convert` reads it."""
    convert: Callable[[list[Any]], list[AnswerCall]] = lambda values: calls_in_objects(values)
    """The calls in the JSON values that follow an opening."""
    tags: str = ""
    """Tags within a call."""
    trace: str = ""
    """Pattern of text that, like the mark, shows that a call was attempted. If it is empty, the tags of the opening are
    used."""
    separator: str = ""
    """Pattern of the text between several JSON calls after one opening."""

    def visible(self, token: str) -> bool:
        """Whether a token is a tag of this form. Some tokenizers have such tags among their special tokens."""
        return token in re.sub(r"\\(.)", r"\1", f"{self.opening} {self.closing} {self.tags}")

    def is_tried(self, text: str, has_calls: bool) -> bool:
        """Whether a text, from which the parsed calls were removed, shows that another call was attempted.

        Args:
            has_calls: whether calls were parsed. If so, a closing tag may be left over from them.
        """
        source = "" if self.trace else self.opening
        source = re.sub(
            r"\\(.)", r"\1", re.sub(r"\?P<\w+>|\?<[=!]", "", source if has_calls else source + self.closing)
        )
        tags = re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", source)
        is_traced = bool(self.trace) and re.search(self.trace, text) is not None
        return is_traced or any(tag in text for tag in (self.mark, *tags))


def argument_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """The types of all arguments, for forms that write values as text."""
    types = dict[tuple[str, str], frozenset[str]]()
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        _add_types(types, function.get("name", ""), "", schema, schema.get("$defs") or {})
    return types


def _add_types(
    types: dict[tuple[str, str], frozenset[str]],
    function: str,
    prefix: str,
    schema: Any,
    definitions: Mapping[str, Any],
    depth: int = 4,
) -> None:
    """Add the types of the values of an object or of the items of a list, recursively."""
    if not isinstance(schema, Mapping) or not depth:
        return
    if isinstance(reference := schema.get("$ref"), str):
        schema = definitions.get(reference.rpartition("/")[2]) or {}
    items = {"*": schema["items"]} if "items" in schema else {}
    for key, its_schema in {**(schema.get("properties") or {}), **items}.items():
        types[function, prefix + key] = _types(its_schema, definitions)
        _add_types(types, function, f"{prefix}{key}.", its_schema, definitions, depth - 1)


def _types(schema: Any, definitions: Mapping[str, Any], depth: int = 4) -> frozenset[str]:
    """
    Args:
        definitions: {name: schema} for references.
        depth: remaining depth of references and alternatives, which may be circular.
    """
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(definitions.get(reference.rpartition("/")[2]), definitions, depth - 1)
    if types := schema.get("type"):
        return frozenset([types] if isinstance(types, str) else types)
    alternatives = [_types(s, definitions, depth - 1) for s in schema.get("anyOf") or schema.get("oneOf") or ()]
    alternatives += [frozenset([type_of(value)]) for value in schema.get("enum") or ()]
    return frozenset().union(*alternatives) if all(alternatives) else frozenset()


def type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def value_of(text: str, types: frozenset[str]) -> Any:
    """A value that is written as text. It is parsed as JSON, unless the schema allows a string and not the type of the
    parsed value. Several templates write other values than strings in Python syntax (``True``, ``None``)."""
    if types == {"string"}:
        return text
    try:
        value = STRICT.decode(text.strip())
    except (ValueError, RecursionError):  # the policy may nest lists deeper than Python reads
        # Text that is not JSON is the string itself, if the argument may be one. The template may still have written
        # these three words for a value of another type.
        if "string" in types and text.strip() not in ("True", "False", "None"):
            return text
        try:
            (node,) = _expressions(text)
            value = _literal(node)
        except (ValueError, RecursionError):
            return text
    kinds = {type_of(value), "number"} if type_of(value) == "integer" else {type_of(value)}
    return text if isinstance(value, str) or ("string" in types and not kinds & types) else value


def _expressions(source: str) -> list[ast.expr]:
    """Raises ValueError if a text is not Python, or has statements."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about strings with a backslash
            body = ast.parse(source.strip()).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not Python") from error
    return [node.value if isinstance(node, ast.Expr) else _no_call() for node in body]


def _literal(node: ast.expr) -> Any:
    """A JSON value. Raises ValueError for any other value."""
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return json.loads(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -_literal(number)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [k.value if isinstance(k, ast.Constant) and isinstance(k.value, str) else _no_call() for k in keys]
            return arguments_of([(name, _literal(value)) for name, value in zip(names, values, strict=True)])
    return _no_call()


def _no_call() -> NoReturn:
    raise ValueError("not a call, or not a value of JSON")


def call_of(name: Any, arguments: Any, its_id: str | None = None) -> list[AnswerCall]:
    """One call; empty if the arguments are not an object, or contain what JSON text cannot: a lone surrogate, NaN."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return []
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()
    except (ValueError, RecursionError):
        return []
    return [AnswerCall(name, text, its_id or "")]


# ---------------------------------------------------------------------------------------- calls as JSON


def calls_in_objects(values: list[Any]) -> list[AnswerCall]:
    """``{"name": ..., "arguments": {...}}`` or lists of such objects. Some templates write ``parameters`` or
    ``tool_name``."""
    calls = []
    for value in values:
        if isinstance(value, dict):
            value = {**value, **value["function"]} if isinstance(value.get("function"), dict) else value
            name, its_id = value.get("name", value.get("tool_name")), value.get("id")
            arguments = value.get("arguments", value.get("parameters", {}))
            if isinstance(arguments, str):  # as Granite 4 writes some
                arguments = decoded(arguments.strip())
            new = call_of(name, arguments, its_id if re.fullmatch("[A-Za-z0-9]{9}", str(its_id)) else "")
        else:
            new = calls_in_objects(value) if isinstance(value, list) else []
        if not new:
            return []
        calls += new
    return calls


def _bare(values: list[Any]) -> list[AnswerCall]:
    """An answer that consists only of calls as JSON objects (Llama 3). Any other object is an answer in JSON."""
    are_calls = all(isinstance(value, dict) and {"parameters", "arguments"} & value.keys() for value in values)
    return calls_in_objects(values) if are_calls else []


def _keys(values: list[Any]) -> list[AnswerCall]:
    """``[{name: arguments}, ...]`` (Apertus)."""
    calls = values[0] if len(values) == 1 and isinstance(values[0], list) else []
    results = [call_of(*next(iter(c.items()))) if isinstance(c, dict) and len(c) == 1 else [] for c in calls]
    return [call for result in results for call in result] if all(results) else []


# ---------------------------------------------------------------------------------------- calls in other notations

_FENCE = re.compile(r"\s*```(?:python)?\n(.*?)\n?```\s*", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def matches_of(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """All matches in the text. Raises ValueError if there is text other than white space between them."""
    matches: list[re.Match[str]] = []
    position = 0
    while match := pattern.match(text, position):
        matches.append(match)
        position = match.end()
    return _no_call() if text[position:].strip() else matches


def arguments_of(values: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """{name: value}. Raises ValueError if a name occurs twice."""
    return _no_call() if len({key for key, _ in values}) < len(values) else dict(values)


def _python(text: str, types: Types) -> list[AnswerCall]:
    """``[add(a=1), add(a=2)]``, or one call on each line, with or without a code fence. Strings may have line
    breaks."""
    fence = _FENCE.fullmatch(text)
    source = _STRING.sub(lambda string: string[0].replace("\n", "\\n"), fence[1] if fence else text)
    calls = []
    for node in _expressions(source):
        for call in node.elts if isinstance(node, ast.List) else [node]:
            if not isinstance(call, ast.Call) or call.args:
                return []
            values = [(keyword.arg or _no_call(), _literal(keyword.value)) for keyword in call.keywords]
            calls += call_of(ast.unparse(call.func), arguments_of(values))
    return calls


def _quoted(text: str, types: Types, quote: str) -> list[AnswerCall]:
    """``call:NAME{key:value}``, with strings between quotes that are tokens (Gemma)."""
    match = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", text, re.DOTALL)
    if not match:
        return []
    pieces = match[2].split(quote)
    # Pieces at even positions are outside of strings.
    pieces[::2] = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+):", r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[::2] = [re.sub(r"\bNone\b", "null", piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return call_of(match[1], decoded("".join(pieces)))


# ---------------------------------------------------------------------------------------- the forms

FORMS: Sequence[CallForm] = (
    # Hermes, Qwen 2.5, Qwen3, SmolLM3, Granite 4, Falcon 3
    CallForm("<tool_call>", r"<tool_call>", r"\s*(?:</tool_call>|\Z)"),
    # Mistral
    CallForm("[TOOL_CALLS]", r"\[TOOL_CALLS\]", r"\s*(?=\[TOOL_CALLS\]|\Z)"),
    # later Mistral models, which write the name before the arguments
    CallForm(
        "[TOOL_CALLS]",
        r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?:(?P<id>[A-Za-z0-9]{9})(?=\[)|[^\[]*))?\[ARGS\]",
        r"\s*(?=\[TOOL_CALLS\]|\Z)",
    ),
    # Granite 3, Phi-4-mini
    CallForm("<|tool_call|>", r"<\|tool_call\|>", r"\s*(?:<\|/tool_call\|>|\Z)"),
    # DeepSeek V3, with the arguments in a code fence, and V3.1
    CallForm(
        "<｜tool▁call▁begin｜>",
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:\w*<｜tool▁sep｜>(?!\s*\{))?"
        r"(?P<name>[^\n{<]+?)(?:\n```json\n|<｜tool▁sep｜>)",
        r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>|\Z)(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    # Kimi K2, which writes the name as part of the id
    CallForm(
        "<|tool_call_argument_begin|>",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<>]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        r"\s*(?:<\|tool_call_end\|>|\Z)?(?:\s*<\|tool_calls_section_end\|>|(?<=<\|tool_call_end\|>)|\Z)",
    ),
    # Gemma 4 and FunctionGemma
    CallForm("<|tool_call>", r"<\|tool_call>", r"<tool_call\|>", partial(_quoted, quote='<|"|>'), tags='<|"|>'),
    CallForm(
        "<start_function_call>",
        r"<start_function_call>",
        r"<end_function_call>",
        partial(_quoted, quote="<escape>"),
        tags="<escape>",
    ),
    # LFM2.5, MiniCPM3
    CallForm("<|tool_call_start|>", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _python),
    # Olmo 3
    CallForm("<function_calls>", r"<function_calls>", r"</function_calls>", _python),
    # Command R7B, Command A
    CallForm("<|START_ACTION|>", r"<\|START_ACTION\|>", r"\s*(?:<\|END_ACTION\|>|\Z)"),
    # Hunyuan A13B, Jamba, Apriel, MiniMax M1
    CallForm("<tool_calls>", r"<tool_calls>", r"\s*(?:</tool_calls>|\Z)"),
    # GigaChat 3.1
    CallForm("<|function_call|>", r"<\|function_call\|>", r"\s*\Z"),
    # Functionary 3.1
    CallForm("<|eom_id|>", r"<function=(?P<name>[^<>\s]+)>", r"\s*</function>", trace="<function="),
    # Nemotron Nano 2
    CallForm("<TOOLCALL>", r"<TOOLCALL>", r"\s*(?:</TOOLCALL>|\Z)"),
    # InternLM 2
    CallForm("<|plugin|>", r"<\|action_start\|>\s*<\|plugin\|>", r"\s*(?:<\|action_end\|>|\Z)"),
    # Apertus
    CallForm("<|tools_prefix|>", r"<\|tools_prefix\|>", r"\s*(?:<\|tools_suffix\|>|\Z)", convert=_keys),
    # Llama 4
    CallForm("<|python_end|>", r"<\|python_end\|>", r"\s*\Z"),
    # xLAM 2. The whole answer is a list of calls.
    CallForm('[{"name": "tool_call_name"', r"\A", r"\s*\Z", trace=r'"arguments"\s*:'),
    # Llama 3.1 to 3.3. The whole answer is a call, or several calls with `;` between them.
    CallForm(
        '"parameters": ',
        r"\A\s*(?:<\|python_tag\|>)?",
        r"\s*\Z",
        convert=_bare,
        trace=r'"(?:parameters|arguments)"\s*:',
        separator=";",
    ),
)


def read_calls(text: str, forms: Sequence[CallForm], types: Types) -> tuple[str, list[AnswerCall]]:
    """The text without its calls, and the calls. The first form that reads a call is used."""
    for form in forms:
        calls: list[AnswerCall] = []
        rest, position, boundary = [], 0, 0
        for opening in re.finditer(form.opening, text, re.DOTALL):
            if opening.start() < boundary:  # a tag in the text that was read
                continue
            new, boundary = _read_json(form, opening) if form.read is None else _read_text(form, opening, types)
            if new:
                calls += new
                rest.append(text[position : opening.start()])
                position = boundary
        if calls:
            return "".join([*rest, text[position:]]).strip(), calls
    return text, []


def _read_json(form: CallForm, opening: re.Match[str]) -> tuple[list[AnswerCall], int]:
    """The calls after an opening, and the end of the text that was read."""
    text, position, groups = opening.string, _after_space(opening.string, opening.end()), opening.groupdict()
    values: list[Any] = []
    # json.JSONDecodeError counts the lines before the error: quadratic time for an answer with many openings.
    if not _JSON.match(text, position):
        return [], opening.end()
    try:
        while not values or "name" not in groups:
            value, position = STRICT.raw_decode(text, position)
            values.append(value)
            position = _after_space(text, position)
            if separator := re.compile(rf"{form.separator}\s*(?=\{{)").match(text, position):
                position = separator.end()
            else:
                break
    except (ValueError, RecursionError):  # the policy may nest lists deeper than Python reads
        return [], opening.end()
    end = re.compile(form.closing).match(text, position) or re.compile(form.opening).match(text, position)
    if end is None:
        return [], opening.end()
    boundary = position if end.re.pattern == form.opening else end.end()
    return call_of(groups["name"], values[0], groups.get("id")) if "name" in groups else form.convert(values), boundary


def _read_text(form: CallForm, opening: re.Match[str], types: Types) -> tuple[list[AnswerCall], int]:
    """The calls after an opening, and the position up to which the text was read: its end if no closing tag follows. A
    value may contain closing tags, so later closing tags are tried too."""
    text, boundary = opening.string, len(opening.string)
    # Each attempt reads the text from the opening on, so their number is limited. Without a limit, an answer that
    # repeats a closing tag would take quadratic time.
    for end in islice(re.compile(form.closing).finditer(text, opening.end()), 8):
        boundary = min(boundary, end.end())
        with suppress(ValueError, RecursionError):
            if form.read is not None and (calls := form.read(text[opening.end() : end.start()], types)):
                return calls, end.end()
    return [], boundary


_JSON = re.compile(r'\{\s*["}]|\[\s*\{')
"""The first characters of an object, or of a list of objects."""


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


# ---------------------------------------------------------------------------------------- channels of gpt-oss

CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""The tags of answers in several parts (harmony)."""
_PART = re.compile(
    r"(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|channel\|>(?P<channel>\w*)[^<]*)?(?:<\|constrain\|>[^<]*)?)"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)\s*",
    re.DOTALL,
)


def read_channels(text: str) -> tuple[str, str, list[AnswerCall]]:
    """Content, reasoning and calls of an answer in parts. A part for a function is a call; the other parts of the
    channel ``analysis`` are reasoning, and the rest is content."""
    content, reasoning, calls, position = list[str](), list[str](), list[AnswerCall](), 0
    while part := _PART.match(text, position):
        position = part.end()
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", part["header"])
        if recipient and (call := call_of(recipient[1], decoded(part["body"].strip()))):
            calls += call
        elif recipient:
            content.append(part[0])
        else:
            (reasoning if part["channel"] == "analysis" else content).append(part["body"])
    content.append(text[position:])
    return "\n".join(filter(None, content)), "\n".join(filter(None, reasoning)), calls
