"""The form in which a chat template writes tool calls, learned from what it writes for calls of known functions.

A call has an opening, a name, the arguments as JSON or each between texts of the template, and a closing. What two
calls have in common is the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlhf.errors import DataError

from rlhf_runtime.data.call_forms import (
    AnswerCall,
    CallForm,
    Types,
    arguments_of,
    call_of,
    calls_in_objects,
    matches_of,
    read_calls,
    type_of,
    value_of,
)
from rlhf_runtime.data.strict_json import STRICT, decoded

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
Writer = Callable[[str, Sequence[Call]], str]
"""What the template writes as an answer with this content and these calls, up to the end token. Raises DataError."""

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
"""Further arguments, which are read back as they are or not at all."""
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

_ID, _NUMBER, _KEY = "\ue000", "\ue001", "\ue002"
"""In a text of the template: the id of a call, a number such as its index, and the key of the argument before it."""
_OF_PLACES = {_ID: r"[^\s<>]*?", _NUMBER: r"\d+", _KEY: "(?P=key)"}
_NAME = r"(?P<name>[^\s<>{}\[\]\"]+)"
_CDATA = ("<![CDATA[", "]]>")
_PIECE = re.compile(r"<[^<>\s]*>|\s+|\w+|.")


class _Place(NamedTuple):
    """Where a call stands in a render."""

    start: int
    """Of its name, or of the JSON that holds the name."""
    name_end: int
    arguments: int
    """Start of the arguments as JSON, or of the first key. Equal to ``start`` if the name is in the JSON."""
    end: int
    """Of the JSON, or of the last value."""
    is_json: bool


@dataclass(frozen=True, slots=True)
class _Elements:
    """How the arguments of a call are written, each between texts of the template."""

    head: re.Pattern[str]
    """The name and what follows it."""
    argument: re.Pattern[str]
    opening: re.Pattern[str]
    """What stands before a key."""
    kinds: Sequence[frozenset[str]]
    """The types of values for each way to write what stands between key and value; one if there is one way."""
    item: str = ""
    """The key of the items of a list, if objects and lists are written as the arguments are; else they are JSON."""

    def read(self, text: str, types: Types) -> list[AnswerCall]:
        head = self.head.match(text)
        if head is None:
            return []
        return call_of(head["name"], arguments_of(self._pairs(text[head.end() :], types, head["name"], "")))

    def _pairs(self, text: str, types: Types, name: str, prefix: str) -> list[tuple[str, Any]]:
        pairs = []
        for match in matches_of(self.argument, text):
            key, value = match["key"].strip(), match["value"] if match["data"] is None else match["data"]
            path = prefix + ("*" if key == self.item and (name, prefix + "*") in types else key)
            kinds = types.get((name, path), frozenset())
            if len(self.kinds) > 1:
                kinds = next(k for n, k in enumerate(self.kinds) if match[f"kind{n}"] is not None)
            pairs.append((key, self._value(value, types, name, path, kinds)))
        return pairs

    def _value(self, text: str, types: Types, name: str, path: str, kinds: frozenset[str]) -> Any:
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
    """None if the template writes no calls, or in no such form, or in one that an answer without a call may have."""
    with suppress(DataError):
        text = _text(write, "", [_FIRST])
        place = _found(text, 0, _FIRST)
        form = None if place is None else _form(write, text, place)
        return form if form is not None and _reads(write, form) else None
    return None


def _form(write: Writer, text: str, place: _Place) -> CallForm | None:
    """
    Args:
        text: an answer with the first call.
    """
    plain, talk = _text(write, _CONTENT, []), _text(write, _CONTENT, [_FIRST])
    before_content, _, after_content = plain.partition(_CONTENT)
    fronts = [text[: place.start].removeprefix(before_content)]
    if _CONTENT in talk and (other := _found(talk, 0, _FIRST)):
        fronts.append(talk[: other.start].rpartition(_CONTENT)[2])
    between, tail = _between(write), text[place.end :]
    tail = tail.removesuffix(after_content) if after_content.strip() else tail
    wrapping = _common_end(fronts)
    opening = wrapping if between is None else _common_end([*fronts, between])
    rest = None if between is None else between.removesuffix(opening)
    middle, elements = text[place.name_end : place.arguments], None
    if not place.is_json:
        parts = _elements(write, text, place)
        if parts is None:
            return None
        elements, value_end, middle = parts
        tail = _with_key(tail, _KEYS[1]).removeprefix(value_end)
        rest = None if rest is None else _with_key(rest, _KEYS[0]).removeprefix(value_end)
    closing = _closing(rest, tail)
    outer, outer_end = wrapping.removesuffix(opening), tail.removeprefix(closing).strip()
    tags = [piece for piece in _PIECE.findall(outer + opening) if _is_tag(piece) and piece not in plain]
    mark, end = (tags or [opening.strip()])[0], _required(closing.strip(), opening + middle)
    if len(mark) < 4 or not re.search(r"[<>|\[\]]", mark) or not (end or place.is_json):
        return None
    begin = _loose(opening, plain)
    name_pattern = _NAME + _pattern(middle) if place.is_json and middle else ""
    return CallForm(
        mark,
        (rf"(?:{_pattern(outer)}\s*)?" if outer.strip() else "") + begin + name_pattern,
        rf"\s*{end if elements else f'(?:{end}|' + chr(92) + 'Z)' if end else chr(92) + 'Z'}"
        + (rf"(?:\s*{_pattern(outer_end)})?" if outer_end else ""),
        None if elements is None else elements.read,
        tags=f"{outer} {opening} {middle} {closing} {outer_end}",
        trace="|".join([*map(re.escape, tags), begin]),
    )


def _text(write: Writer, content: str, calls: Sequence[Call]) -> str:
    text = write(content, calls)
    for call_id in CALL_IDS:
        text = text.replace(call_id, _ID)
    return text


def _found(text: str, start: int, call: Call) -> _Place | None:
    """The place of a call from ``start`` on."""
    name, arguments = call
    for match in re.compile(r"[{\[]").finditer(text, start):
        with suppress(ValueError):
            value, end = STRICT.raw_decode(text, match.start())
            if value == arguments and (index := text.rfind(name, start, match.start())) >= 0:
                return _Place(index, index + len(name), match.start(), end, True)
            if [(c.name, decoded(c.arguments)) for c in calls_in_objects([value])] == [call]:
                return _Place(match.start(), match.start(), match.start(), end, True)
    first, last = next(iter(arguments)), next(reversed(arguments.values()))
    key = text.find(first, start)
    index, value_at = text.rfind(name, start, max(key, start)), text.find(last, key)
    is_placed = index >= 0 and key >= 0 and value_at >= 0
    return _Place(index, index + len(name), key, value_at + len(last), False) if is_placed else None


def _between(write: Writer) -> str | None:
    """What the template writes between two calls; None if it does not write two."""
    first: Call = (_NAMES[0], {_KEYS[0]: _TEXTS[0]})
    with suppress(DataError):
        two = _text(write, "", [first, _SECOND])
        if (place := _found(two, 0, first)) and (other := _found(two, place.end, _SECOND)):
            return two[place.end : other.start]
    return None


def _elements(write: Writer, text: str, place: _Place) -> tuple[_Elements, str, str] | None:
    """How arguments are written, what follows a value, and all texts of the template between name and closing."""
    bounds, position = list[tuple[int, int]](), place.arguments
    for part in (_KEYS[0], _TEXTS[0], _KEYS[1], _TEXTS[1]):
        position = text.find(part, position)
        if position < 0:
            return None
        bounds.append((position, position + len(part)))
        position += len(part)
    (key, key_end), (value, after_value), (other, other_end), (last, last_end) = bounds
    head, middle = text[place.name_end : key], text[key_end:value]
    between, tail = _with_key(text[after_value:other], _KEYS[0]), _with_key(text[last_end:], _KEYS[1])
    opening = _common_end([head, between])
    if middle != text[other_end:last] or not opening.strip():
        return None
    end = between.removesuffix(opening)
    end = end if tail.startswith(end) else _common_start([end, tail])
    value_end = end
    if middle.endswith(_CDATA[0]) and end.startswith(_CDATA[1]):  # a value may stand without them
        middle, end = middle.removesuffix(_CDATA[0]), end.removeprefix(_CDATA[1])
    middles = _middles(write, opening, middle, end)
    lines = [r"\n?" if t.endswith("\n") else "" for t in middles]
    ways = "|".join(
        f"(?P<kind{n}>{_pattern(t.rstrip() if t.endswith(chr(10)) else t)}){line}"
        for n, (t, line) in enumerate(zip(middles, lines, strict=True))
    )
    closing = r"\n?" + _pattern(end[1:]) if end.startswith("\n") else _pattern(end)
    if not end.strip() or not middle.strip():
        return None
    elements = _Elements(
        re.compile(r"\s*" + _NAME + _pattern(head.removesuffix(opening))),
        re.compile(
            rf"\s*{_pattern(opening.strip())}(?P<key>[^<>\"\n]+?)(?:{ways})"
            rf"(?:\s*<!\[CDATA\[(?P<data>.*?)\]\]>\s*|(?P<value>VALUE)){closing}".replace(
                "VALUE", f"(?:(?!{_pattern(opening.strip())}).)*?"
            ),
            re.DOTALL,
        ),
        re.compile(_pattern(opening.strip())),
        tuple(middles.values()),
    )
    item = _item(write, elements, closing)
    if item:
        nested = elements.argument.pattern.replace(f"(?:(?!{_pattern(opening.strip())}).)*?", ".*?")
        elements = replace(elements, argument=re.compile(nested, re.DOTALL), item=item)
    return elements, value_end, " ".join([head, *middles, value_end])


def _middles(write: Writer, opening: str, middle: str, end: str) -> dict[str, frozenset[str]]:
    """{text between key and value: the types of values for which the template writes it}."""
    kinds = {middle: {"string"}}
    for value, forms in ((70, ("70",)), (7.5, ("7.5",)), (True, ("true", "True")), (None, ("null", "None")),
                         ([71], ("[71]",)), ({"zqx": 72}, ('{"zqx": 72}', '{"zqx":72}'))):  # fmt: skip
        with suppress(DataError):
            rest = write("", [(_NAMES[0], {_KEYS[0]: value})]).rpartition(opening.strip() + _KEYS[0])[2]
            rest = _with_key(rest, _KEYS[0])
            places = [i for form in forms if (i := rest.find(form + end)) >= 0]
            if not rest.startswith(middle) and places:
                kinds.setdefault(rest[: min(places)], set()).add(type_of(value))
            else:
                kinds[middle].add(type_of(value))
    return {text: frozenset(types) for text, types in kinds.items()}


def _item(write: Writer, elements: _Elements, closing: str) -> str:
    """The key of the items of a list; empty if lists are not written as the arguments are."""
    with suppress(DataError):
        text = write("", [(_NAMES[0], {_KEYS[0]: [_TEXTS[0]]})])
        ways = elements.argument.pattern.partition(r"(?:\s*<!\[CDATA")[0]
        for match in re.finditer(f"(?={ways}{_TEXTS[0]}{closing})", text):
            if match["key"] != _KEYS[0]:
                return match["key"]
    return ""


def _closing(rest: str | None, tail: str) -> str:
    """What follows each call, also the last one.

    Args:
        rest: the text between two calls, without what opens the second.
    """
    if rest is None:
        return tail.rstrip()
    return rest.rstrip() if tail.startswith(rest.rstrip()) else _common_start([rest, tail])


def _reads(write: Writer, form: CallForm) -> bool:
    """Whether calls are read back, and no call with another value."""
    for value in (_TEXTS[0], *_VALUES):
        call: Call = (_NAMES[0], {_KEYS[0]: value, _KEYS[1]: _TEXTS[1]})
        types = {(_NAMES[0], _KEYS[0]): frozenset([type_of(value)]), (_NAMES[0], _KEYS[1]): frozenset(["string"])}
        try:
            _, calls = read_calls(write(_CONTENT, [call]), [form], types)
        except DataError:
            continue
        if (calls or value == _TEXTS[0]) and [(c.name, decoded(c.arguments)) for c in calls] != [call]:
            return False
    with suppress(DataError):
        empty = read_calls(write("", [(_NAMES[0], {})]), [form], {})[1]
        return [(c.name, c.arguments) for c in empty] == [(_NAMES[0], "{}")]
    return True


# ---------------------------------------------------------------------------------------- texts of the template


def _pattern(text: str) -> str:
    """Matches a text of the template, with other white space or without."""
    parts = re.split(rf"(\s+|\d+|[{_ID}{_KEY}])", text)
    return "".join(
        _OF_PLACES.get(p) or (r"\s*" if p.isspace() else r"\d+" if p.isdigit() else re.escape(p)) for p in parts if p
    )


def _loose(opening: str, plain: str) -> str:
    """Matches what opens a call, also without what stands before its last tag: models leave that out at times.

    Args:
        plain: an answer without a call.
    """
    front, tag = opening[: opening.rfind("<")].strip(), opening[opening.rfind("<") :]
    is_known = re.match(r"<[^\s<>]*[A-Za-z]{3}", tag) and tag.strip() not in plain
    return f"(?:{_pattern(front)}\\s*)?{_pattern(tag)}" if front and is_known else _pattern(opening.strip())


def _required(closing: str, other_texts: str) -> str:
    """Matches what closes a call, also without what follows its first tag.

    Args:
        other_texts: the other texts of the template within a call.
    """
    pieces = _PIECE.findall(closing)
    if len(pieces) > 1 and _is_tag(pieces[0]) and pieces[0] not in other_texts:
        return rf"{_pattern(pieces[0])}(?:\s*{_pattern(''.join(pieces[1:]).strip())})?"
    return _pattern(closing)


def _is_tag(piece: str) -> bool:
    return piece.startswith("<") and piece.endswith(">")


def _with_key(text: str, key: str) -> str:
    return text.replace(key, _KEY)


def _common_start(texts: Sequence[str]) -> str:
    return "".join(_equal([_PIECE.findall(text) for text in texts]))


def _common_end(texts: Sequence[str]) -> str:
    return "".join(reversed(_equal([_PIECE.findall(text)[::-1] for text in texts])))


def _equal(pieces_of_texts: Sequence[Sequence[str]]) -> list[str]:
    """The first pieces, as far as they are equal in all texts. Numbers may differ."""
    pieces = list[str]()
    for column in zip(*pieces_of_texts, strict=False):
        if len({re.sub(r"\d+", "0", piece) for piece in column}) > 1:
            break
        pieces.append(column[0])
    return pieces
