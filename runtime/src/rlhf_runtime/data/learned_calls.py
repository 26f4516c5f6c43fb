"""The form in which a chat template writes tool calls, learned from its output for calls of known functions.

The output is cut at the known names, keys and values, and the pieces are compared. The text before each of two calls is
the opening, the text before only the first call is outer, and so on. An example (MiniMax M2)::

    <minimax:tool_call>                        outer
    <invoke name="NAME">                       opening: <invoke name="         head: ">
    <parameter name="KEY">VALUE</parameter>    key opening: <parameter name="  middle: ">  value end: </parameter>
    </invoke>                                  closing
    </minimax:tool_call>                       outer end

The patterns that read an answer are made from these pieces::

    (?:<minimax:tool_call>\\s*)?<invoke\\s*name="    before a call
    NAME">                                           at its start
    <parameter\\s*name="KEY">VALUE</parameter>       each argument
    </invoke>(?:\\s*</minimax:tool_call>)?           after the call

Models sometimes omit the optional pieces. If the opening has several tags (Qwen3-Coder: ``<tool_call>`` and
``<function=``), only the last one is required. Of the closing, only the first tag is required. Arguments in JSON (Solar
Open) have no key opening, middle and value end. The middle may depend on the type of the value (DeepSeek V3.2).

Answers are arbitrary text. So no pattern that is searched for begins with white space, which would take quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf.errors import DataError

from rlhf_runtime.data.call_forms import (
    AnswerCall,
    CallForm,
    Types,
    arguments_of,
    call_of,
    matches_of,
    read_calls,
    type_of,
    value_of,
)
from rlhf_runtime.data.strict_json import STRICT, decoded
from rlhf_runtime.data.text_tokens import Span

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
Writer = Callable[[str, Sequence[Call]], str]
"""The text that the template writes for an answer with this content and these calls, up to the end token. Raises
DataError."""

CALL_IDS = ("zqcallida", "zqcallidb")
"""Ids of the first two calls, which :data:`Writer` gives them. They have the only form that every template accepts."""
_NAMES, _KEYS, _TEXTS = ("zqnamea", "zqnameb"), ("zqkeya", "zqkeyb"), ("zqtexta", "zqtextb")
_CONTENT = "zqcontent"
_FIRST: Call = (_NAMES[0], dict(zip(_KEYS, _TEXTS, strict=True)))
_SECOND: Call = (_NAMES[1], {_KEYS[1]: _TEXTS[1]})
_VALUES: Sequence[Any] = (
    70,
    7.5,
    True,
    {"zqx": "zqy", "zqz": 7},
    ["zqy", {"zqx": 7}],
    'a "b"\n<c> \\d & {"x": [1]}',
    "",
)
"""Values of further arguments. Each must be read back unchanged or not at all."""
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {"type": "object", "properties": {key: {"description": "An argument."} for key in _KEYS}},
        },
    }
    for name in _NAMES
]

_ID, _KEY = "\ue000", "\ue001"
"""Placeholders in a text of the template: for the id of a call, and for the key of the argument before it."""
_OF_PLACES = {_ID: r"[^\s<>]*?", _KEY: "(?P=key)"}
_CDATA = ("<![CDATA[", "]]>")
"""MiniCPM5 writes these around strings that contain tags or line breaks. In other templates they are part of the
string."""
_NAME = r"(?P<name>[^\s<>{}\[\]\"]+)"
_PIECE = re.compile(r"<[^<>\s]*>|\s+|\w+|.")


class _Place(NamedTuple):
    """The position of a call in a render."""

    name: Span
    arguments: Sequence[Span]
    """The arguments as one JSON object; or each key and each value in turn."""

    @property
    def is_json(self) -> bool:
        return len(self.arguments) == 1


@dataclass(frozen=True, slots=True)
class _Elements:
    """How the template writes the arguments of a call."""

    head: re.Pattern[str]
    """The name and the text after it."""
    argument: re.Pattern[str]
    opening: re.Pattern[str]
    """The text before a key."""
    kinds: Sequence[frozenset[str]]
    """The types of values for each variant of the text between key and value; one item if there is only one variant."""
    item: str
    """The key of the items of a list, if objects and lists are written like arguments. Empty if they are JSON."""
    value_end: str
    """The text after a value."""
    texts: str
    """All texts of the template between name and closing."""

    def read(self, text: str, types: Types) -> list[AnswerCall]:
        head = self.head.match(text)
        if head is None:
            return []
        return call_of(head["name"], arguments_of(self._pairs(text[head.end() :], types, head["name"], "")))

    def _pairs(self, text: str, types: Types, name: str, prefix: str) -> list[tuple[str, Any]]:
        pairs = []
        for match in matches_of(self.argument, text):
            key, value = match["key"].strip(), match["value"] or match.groupdict().get("data") or ""
            path = prefix + ("*" if key == self.item and (name, prefix + "*") in types else key)
            kinds = types.get((name, path), frozenset())
            if len(self.kinds) > 1:
                kinds = next(k for n, k in enumerate(self.kinds) if match[f"kind{n}"] is not None)
            pairs.append((key, self._value(value, types, name, path, kinds)))
        return pairs

    def _value(self, text: str, types: Types, name: str, path: str, kinds: frozenset[str]) -> Any:
        if self.item and not text:  # the template writes nothing for an empty list, object or string
            possible = kinds & {"array", "object", "string"}
            return [] if possible == {"array"} else {} if possible == {"object"} else ""
        if not self.opening.search(text):
            value = value_of(text, kinds)
            if len(self.kinds) > 1 and type_of(value) not in {*kinds, "null"} and "number" not in kinds:
                raise ValueError("a value of another type than is written beside it")
            return value
        if not self.item or kinds == {"string"}:
            raise ValueError("a value that holds what stands before a key")
        pairs = self._pairs(text, types, name, path + ".")
        is_list = {key for key, _ in pairs} == {self.item} and (len(pairs) > 1 or "object" not in kinds)
        return [value for _, value in pairs] if is_list else arguments_of(pairs)


def learned_form(write: Writer) -> CallForm | None:
    """The form of calls. None if the template writes no calls, if its form cannot be learned, or if an answer without a
    call may have the same form."""
    with suppress(DataError, re.error):  # no pattern can name the key outside of its argument
        form = _form(write)
        return form if form is not None and _reads(write, form) else None
    return None


def _form(write: Writer) -> CallForm | None:
    text, plain = _text(write, "", [_FIRST]), _text(write, _CONTENT, [])
    place = _place_of(text, _FIRST)
    if place is None:
        return None
    elements = None if place.is_json else _elements(write, text, place)
    before_content, _, after_content = plain.partition(_CONTENT)
    front, tail = text[: place.name[0]].removeprefix(before_content), text[place.arguments[-1][1] :]
    tail = tail.removesuffix(after_content) if after_content.strip() else tail
    value_end = "" if elements is None else elements.value_end
    outer, opening, closing, outer_end = _around(front, tail.replace(_KEYS[1], _KEY), _between(write), value_end)

    # The mark must not occur in ordinary text, because it shows that a call was attempted.
    tags = [piece for piece in _PIECE.findall(outer + opening) if _is_tag(piece) and piece not in plain]
    mark = (tags or [opening])[0]
    if len(mark) < 4 or not re.search(r"[<>|\[\]]", mark) or not (closing or place.is_json):
        return None
    # From here on the patterns are made, as in the example at the top of this file.
    inner_text = text[place.name[1] : place.arguments[0][0]] if elements is None else elements.texts
    front, tag = _before_tag(opening, plain)
    end, rest = _after_tag(closing, opening + inner_text)
    starts = _optional(outer, end=r"\s*") + _optional(front, end=r"\s*") + _pattern(tag)
    ends = _pattern(end) + _optional(rest, start=r"\s*")
    # The JSON after the opening is the arguments alone, so the opening contains the name.
    if elements is None:  # a call as JSON may lack its closing
        starts += _NAME + _pattern(inner_text)
        ends = rf"(?:{ends}|\Z)" if closing else r"\Z"
    return CallForm(
        mark,
        starts,
        ends + _optional(outer_end, start=r"\s*"),
        None if elements is None else elements.read,
        tags=f"{outer} {opening} {inner_text} {closing} {outer_end}",
        trace="|".join([*map(re.escape, tags), _pattern(tag)]),
    )


def _around(front: str, tail: str, between: str | None, value_end: str) -> tuple[str, str, str, str]:
    """Outer, opening, closing and outer end.

    Args:
        front: the text before a call.
        tail: the text after its last value.
        between: the text between the last value of a call and another call; None if there is no other.
    """
    tail = tail.removeprefix(value_end)
    opening, closing = front, tail.rstrip()
    if between is not None:
        opening = _common(front, between, end=True)
        rest = between.removesuffix(opening).removeprefix(value_end).rstrip()
        closing = _common(rest, tail)
    outer, outer_end = front.removesuffix(opening), tail.removeprefix(closing)
    return outer.strip(), opening.strip(), closing.strip(), outer_end.strip()


def _text(write: Writer, content: str, calls: Sequence[Call]) -> str:
    text = write(content, calls)
    for call_id in CALL_IDS:
        text = text.replace(call_id, _ID)
    return text


def _place_of(text: str, call: Call, start: int = 0) -> _Place | None:
    """The position of the first such call after ``start``."""
    name, arguments = call
    for match in re.compile(r"\{").finditer(text, start):
        with suppress(ValueError):
            value, end = STRICT.raw_decode(text, match.start())
            if value == arguments and (index := text.rfind(name, start, match.start())) >= 0:
                return _Place((index, index + len(name)), [(match.start(), end)])
    spans, position = list[Span](), start
    for word in (word for pair in arguments.items() for word in pair):
        index = text.find(word, position)
        if index < 0:
            return None
        position = index + len(word)
        spans.append((index, position))
    index = text.rfind(name, start, spans[0][0])
    return _Place((index, index + len(name)), spans) if index >= 0 else None


def _between(write: Writer) -> str | None:
    """The text that the template writes between two calls; None if it does not write two calls."""
    first: Call = (_NAMES[0], {_KEYS[0]: _TEXTS[0]})
    with suppress(DataError):
        two = _text(write, "", [first, _SECOND])
        if (place := _place_of(two, first)) and (other := _place_of(two, _SECOND, place.arguments[-1][1])):
            return two[place.arguments[-1][1] : other.name[0]].replace(_KEYS[0], _KEY)
    return None


def _elements(write: Writer, text: str, place: _Place) -> _Elements:
    """How arguments are written."""
    (key, key_end), (first, first_end), (other, _), _ = place.arguments
    head, middle = text[place.name[1] : key], text[key_end:first]
    between = text[first_end:other].replace(_KEYS[0], _KEY)
    opening = _common(head, between, end=True)
    head, end, opening = head.removesuffix(opening), between.removesuffix(opening), opening.strip()
    value_end = end
    has_cdata = _CDATA[0] in write("", [(_NAMES[0], {_KEYS[0]: "<&\n"})])
    if middle.endswith(_CDATA[0]) and end.startswith(_CDATA[1]):
        middle, end = middle.removesuffix(_CDATA[0]), end.removeprefix(_CDATA[1])
    middles = _middles(write, opening, middle, end)
    kinds = "|".join(f"(?P<kind{n}>{_value_edge(text)})" for n, text in enumerate(middles))
    key_pattern = rf"\s*{_pattern(opening)}(?P<key>[^<>\"\n]+?)(?:{kinds})"
    closing = _value_edge(end)
    item = _item(write, key_pattern + _TEXTS[0] + closing)
    # A value ends before the next argument, so a missing closing tag does not join two of them. Only if objects and
    # lists are written like arguments may a value contain the text before a key.
    value = "(?P<value>.*?)" if item else f"(?P<value>(?:(?!{_pattern(opening)}).)*?)"
    if has_cdata:
        value = rf"(?:\s*<!\[CDATA\[(?P<data>.*?)\]\]>\s*|{value})"
    return _Elements(
        re.compile(r"\s*" + _NAME + _pattern(head.rstrip())),
        re.compile(key_pattern + value + closing, re.DOTALL),
        re.compile(_pattern(opening)),
        tuple(middles.values()),
        item,
        value_end,
        " ".join([head, opening, *middles, value_end]),
    )


def _middles(write: Writer, opening: str, middle: str, end: str) -> dict[str, frozenset[str]]:
    """{text between key and value: the types of values for which the template writes it}."""
    kinds = {middle: {"string"}}
    for value, forms in ((70, ("70",)), (7.5, ("7.5",)), (True, ("true", "True")), (None, ("null", "None")),
                         ([71], ("[71]",)), ({"zqx": 72}, ('{"zqx": 72}', '{"zqx":72}'))):  # fmt: skip
        with suppress(DataError):
            rest = write("", [(_NAMES[0], {_KEYS[0]: value})]).rpartition(opening + _KEYS[0])[2]
            rest = rest.replace(_KEYS[0], _KEY)
            places = [i for form in forms if (i := rest.find(form + end)) >= 0]
            if not rest.startswith(middle) and places:
                kinds.setdefault(rest[: min(places)], set()).add(type_of(value))
            else:
                kinds[middle].add(type_of(value))
    return {text: frozenset(types) for text, types in kinds.items()}


def _item(write: Writer, argument: str) -> str:
    """The key of the items of a list; empty if lists are not written like arguments (MiniMax M3).

    Args:
        argument: pattern of a key with the first text as its value.
    """
    with suppress(DataError):
        text = write("", [(_NAMES[0], {_KEYS[0]: [_TEXTS[0]]})])
        for match in re.finditer(f"(?={argument})", text):
            if match["key"] != _KEYS[0]:
                return match["key"]
    return ""


def _reads(write: Writer, form: CallForm) -> bool:
    """Whether calls are read back, and never with another value."""
    for value in (_TEXTS[0], *_VALUES):
        # The second argument shows whether the first value is read up to its end and not further.
        call: Call = (_NAMES[0], {_KEYS[0]: value, _KEYS[1]: _TEXTS[1]})
        types = {(_NAMES[0], _KEYS[0]): frozenset([type_of(value)]), (_NAMES[0], _KEYS[1]): frozenset(["string"])}
        try:
            _, calls = read_calls(write(_CONTENT, [call]), [form], types)
        except DataError:
            continue
        # A call with this value may stay unread, unless it is plain text. It must not be read with another value.
        if (calls or value == _TEXTS[0]) and [(c.name, decoded(c.arguments)) for c in calls] != [call]:
            return False
    with suppress(DataError):
        empty = read_calls(write("", [(_NAMES[0], {})]), [form], {})[1]
        return [(c.name, c.arguments) for c in empty] == [(_NAMES[0], "{}")]
    return True


# ---------------------------------------------------------------------------------------- texts of the template


def _pattern(text: str) -> str:
    """Matches a text of the template, with any white space or none."""
    parts = re.split(rf"(\s+|\d+|[{_ID}{_KEY}])", text)
    return "".join(
        _OF_PLACES.get(p) or (r"\s*" if p.isspace() else r"\d+" if p.isdigit() else re.escape(p)) for p in parts if p
    )


def _value_edge(text: str) -> str:
    """Matches a text of the template beside a value, with or without a line break at its edge. Other white space
    belongs to the value."""
    pattern = _pattern(text.removeprefix("\n").removesuffix("\n"))
    if text.startswith("\n"):
        pattern = r"\n?" + pattern
    return pattern + r"\n?" if text.endswith("\n") else pattern


def _optional(text: str, start: str = "", end: str = "") -> str:
    """Matches a text of the template with the patterns around it, or nothing."""
    return f"(?:{start}{_pattern(text)}{end})?" if text else ""


def _before_tag(opening: str, plain: str) -> tuple[str, str]:
    """The part that models sometimes omit, and the last tag. The last tag alone opens a call if answers without calls
    do not contain it.

    Args:
        plain: an answer without a call.
    """
    index = opening.rfind("<")
    front, tag = opening[:index].strip(), opening[index:]
    is_enough = re.match(r"<[^\s<>]*[A-Za-z]{3}", tag) and tag not in plain
    return (front, tag) if index > 0 and is_enough else ("", opening)


def _after_tag(closing: str, other_texts: str) -> tuple[str, str]:
    """The first tag, and the part that models sometimes omit. The first tag alone closes a call if no other text in the
    call has this tag.

    Args:
        other_texts: the other texts of the template within a call.
    """
    tag = next(iter(_PIECE.findall(closing)), "")
    return (tag, closing.removeprefix(tag).strip()) if _is_tag(tag) and tag not in other_texts else (closing, "")


def _is_tag(piece: str) -> bool:
    return piece.startswith("<") and piece.endswith(">")


def _common(first: str, second: str, end: bool = False) -> str:
    """The pieces with which both texts begin, or end, as written in the first text. Numbers may differ."""
    step = -1 if end else 1
    pieces = list[str]()
    for piece, other in zip(_PIECE.findall(first)[::step], _PIECE.findall(second)[::step], strict=False):
        if re.sub(r"\d+", "0", piece) != re.sub(r"\d+", "0", other):
            break
        pieces.append(piece)
    return "".join(pieces[::step])
