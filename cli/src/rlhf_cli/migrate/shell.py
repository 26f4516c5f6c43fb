"""Parses the commands of a shell script, or of one line, into words. No shell is started, and no command is executed.

The parser supports quotes, comments, continued lines, assignments of variables and arrays, sums and products of whole
numbers, conditions that compare known words, and here-documents of ``read`` (``read -d '' NAME <<EOF``). A variable
that is set in another way (by a command, by the environment except HOME, by a loop, under an unknown condition) is
unknown. That is an error only if an option needs it (:func:`known_text`).
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf.errors import ConfigError

from rlhf_cli.migrate.shell_branches import UNKNOWN, Branches

COMMAND = f"{UNKNOWN}(command){UNKNOWN}"
"""Stands for the output of a command."""
_ROUND = r"\((?:[^()]|INNER)*\)"
for _ in range(7):  # nested brackets, up to the depth that scripts have
    _ROUND = _ROUND.replace("INNER", r"\((?:[^()]|INNER)*\)")
_COMMAND = rf"\$\[[^\[\]]*\]|\${_ROUND.replace('|INNER', '')}"
_BRACES = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
# Possessive: if the quote is not closed, each $(...) could be read in two ways, which takes exponential time.
_QUOTED = rf'"(?:\\.|{_COMMAND}|{_BRACES}|[^"\\])*+"'
_VARIABLE = rf"{_BRACES}|\$\w+|\$[@*#?$!-]"
_PIECE = re.compile(
    rf"\\(?P<escaped>.)|\$?'(?P<single>[^']*)'|(?P<double>{_QUOTED})|(?P<command>{_COMMAND}|`[^`]*`)"
    rf"|(?P<variable>{_VARIABLE})|(?P<text>[^\s;&|()<>'\"\\`$]+|\$)",
    re.DOTALL,
)
_WORD = re.compile("(?:" + re.sub(r"\?P<[a-z]+>", "?:", _PIECE.pattern) + ")+", re.DOTALL)
_SPACE = re.compile(r"(?:[ \t\r]|\\\r?(?:\n|\Z))+")
_COMMENT = re.compile(r"#[^\n]*")
_HERE_TEXT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"\d*(?:<<<|&>>?|>>|>&|<&|<|>)[ \t]*(?:\d\b)?")
_END = re.compile(r"&&|\|\||;;|[;&|()\n]")
_ARRAY = re.compile(r"(\w+)(\+?)=\(")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARITHMETIC = re.compile(r"\(\(.*?\)\)", re.DOTALL)
_SET_BY = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")
"""A variable that ``((...))`` changes."""
_DECLARE = ("export", "readonly", "local", "declare", "typeset")
_BRACED = re.compile(r"\$\{(\w+)(?:(\[[@*]\])|(:?[-=+])(.*)|:?\?.*)?\}", re.DOTALL)
_SUM = re.compile(r"\$(?:\(\((.*)\)\)|\[(.*)\])", re.DOTALL)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),  # a shell truncates towards 0
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, without its quotes, with its variables replaced."""

    text: str
    line: int


def commands(text: str, script: str, settings: Mapping[str, str]) -> Iterator[list[Word]]:
    """The simple commands of a script.

    Args:
        script: name of the script, for messages.
        settings: values of variables, which override those of the script.

    Raises ConfigError, with the line, for an unclosed quote or bracket.
    """
    return _Script(text, script, settings).commands()


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command with the texts of its value."""

    name: str
    """Name without dashes."""
    texts: Sequence[str]
    text: str
    """The flag as it was written."""
    location: str
    """``run.sh, line 3``."""


def flags(words: Sequence[Word], script: str, problems: list[str]) -> Iterator[Flag]:
    """The flags of a command. Words that cannot be read are added to ``problems``: words with an unknown variable, and
    words that belong to no flag."""
    rest = list(words)
    while rest:
        word, values = rest.pop(0), list[Word]()
        while rest and not rest[0].text.startswith("--") and "=" not in word.text:
            values.append(rest.pop(0))
        location = f"{script}, line {word.line}"
        try:
            flag, equals, text = known_text(word, script).partition("=")
            texts = [text] if equals else [known_text(value, script) for value in values]
        except ConfigError as error:
            problems.append(str(error))
            continue
        if flag.startswith("--"):
            form = word.text if equals else " ".join([flag, *texts])
            yield Flag(flag.removeprefix("--"), texts, form, location)
        else:
            problems.append(f"{location}: {flag!r} is not an option, and does not belong to one")


def known_text(word: Word, script: str) -> str:
    """The text of a word. Raises ConfigError, with the line, if it holds an unknown variable."""
    if UNKNOWN not in word.text:
        return word.text
    if COMMAND in word.text:
        plain = word.text.replace(COMMAND, "$(...)")
        raise ConfigError(
            f"{script}, line {word.line}: {plain!r} needs a command, but commands are not executed. Write its value"
        )
    name = word.text.split(UNKNOWN)[1]
    plain = word.text.replace(UNKNOWN + name + UNKNOWN, f"${name}")
    raise ConfigError(
        f"{script}, line {word.line}: {plain!r} needs ${name}, which is not assigned a plain value: commands are not "
        f"executed, and the environment is not read. Give it: --set {name}=VALUE"
    )


@dataclass(frozen=True)
class Start:
    """The command that starts a training."""

    entry: str
    word: str
    """The word with the entry point: a module, a script or a name."""
    launcher_words: Sequence[Word]
    """The words of the launcher, before the entry point."""
    options: Sequence[Word]
    script: str
    """Location of the command, for messages."""
    line: int

    @property
    def location(self) -> str:
        return f"{self.script}, line {self.line}"


@dataclass
class _Script:
    text: str
    location: str
    settings: Mapping[str, str]
    variables: dict[str, list[str]] = field(default_factory=dict)
    """A plain variable is a list of one text."""
    branches: Branches = field(default_factory=Branches)

    def commands(self) -> Iterator[list[Word]]:
        words: list[Word] = []
        here_texts: list[tuple[str, str]] = []  # (variable, mark) of texts that begin at the next line
        position = 0
        while position < len(self.text):
            if match := _SPACE.match(self.text, position) or _COMMENT.match(self.text, position):
                position = match.end()
            # Before redirections, whose pattern matches its first character.
            elif match := _HERE_TEXT.match(self.text, position):
                reads = bool(words) and words[0].text == "read"
                here_texts.append((words[-1].text if reads else "", match[2]))
                position = match.end()
            elif match := _REDIRECTION.match(self.text, position):
                position = match.end()
                target = _WORD.match(self.text, position)
                position = target.end() if target and not match[0].strip()[-1].isdigit() else position
            elif match := _ARRAY.match(self.text, position):
                words = self._without_control(words)
                position = self._array(match)
            elif (match := _ARITHMETIC.match(self.text, position)) and not (words := self._without_control(words)):
                words, position = [Word(match[0], self._line(position))], match.end()
            elif match := _END.match(self.text, position):
                if self._runs(words, match[0]):
                    yield words
                words, position = [], match.end()
                if match[0] == "\n" and here_texts:
                    for name, mark in here_texts:
                        position = self._here_text(name, mark, position)
                    here_texts = []
            elif match := _WORD.match(self.text, position):
                is_value = _ASSIGNMENT.fullmatch(match[0]) is not None
                words = self._without_control(words) if is_value else words
                is_value &= all(w.text in _DECLARE or w.text[:1] == "-" or _ASSIGNMENT.fullmatch(w.text) for w in words)
                words += [Word(text, self._line(position)) for text in self._expanded(match[0], is_value)]
                position = match.end()
            else:
                raise ConfigError(f"{self.location}, line {self._line(position)}: a quote or a bracket is not closed")
        if self._runs(words, "\n"):
            yield words

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _without_control(self, words: list[Word]) -> list[Word]:
        return words[self.branches.control([word.text for word in words]) :]

    def _runs(self, words: list[Word], end: str) -> bool:
        """Store the variables that a command sets. Returns whether it does more than that and is not in a skipped
        branch."""
        words = self._without_control(words)
        runs = self.branches.is_executed([word.text for word in words], end)
        if self.branches.test or (words and words[-1].text == "]]"):
            return False
        words = words[1:] if words and words[0].text == "do" else words
        for name in _names_set_by([word.text for word in words]):
            self._set(name, [f"{UNKNOWN}{name}{UNKNOWN}"], runs)
        if words and words[0].text in _DECLARE:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        for word in words if runs is not False else ():
            assignment = _ASSIGNMENT.fullmatch(word.text)
            if assignment is None:
                return True
            name, appends, value = assignment.groups()
            unknown = f"{UNKNOWN}{name}{UNKNOWN}"
            values = self.variables.get(name, [unknown]) if appends else []
            self._set(name, [unknown if COMMAND in value else "".join([*values[:1], value]), *values[1:]], runs)
        return False

    def _set(self, name: str, values: list[str], runs: bool | None) -> None:
        """Store a variable. It is unknown if it is set under an unknown condition."""
        if runs or (runs is None and self.variables.get(name) == values):
            self.variables[name] = values
        elif runs is None:
            self.variables[name] = [f"{UNKNOWN}{name}{UNKNOWN}"]

    def _array(self, begin: re.Match[str]) -> int:
        """Store the words in the brackets. Returns the position after them."""
        values, position = list(self.variables.get(begin[1], []) if begin[2] else []), begin.end()
        while not self.text.startswith(")", position):
            if match := _SPACE.match(self.text, position) or _COMMENT.match(self.text, position):
                position = match.end()
            elif self.text.startswith("\n", position):
                position += 1
            elif match := _WORD.match(self.text, position):
                values += self._expanded(match[0])
                position = match.end()
            else:
                raise ConfigError(f"{self.location}, line {self._line(begin.start())}: the array {begin[1]} has no end")
        self._set(begin[1], values, self.branches.runs())
        return position + 1

    def _here_text(self, name: str, mark: str, position: int) -> int:
        """Store the lines up to the mark. Returns the position after it."""
        end = re.compile(rf"^[ \t]*{mark}[ \t]*$", re.MULTILINE).search(self.text, position)
        if end is None:
            raise ConfigError(
                f"{self.location}, line {self._line(position)}: the text that should end at {mark} has no end"
            )
        if name:
            self.variables[name] = [self._in_quotes(self.text[position : end.start()])]
        return end.end()

    # ------------------------------------------------------------------------------------- variables

    def _expanded(self, raw: str, is_value: bool = False) -> list[str]:
        """The words that a written word expands to. An unquoted variable with spaces becomes several words, except in
        an assignment."""
        words = [""]
        quoted = False
        for piece in _PIECE.finditer(raw):
            values = [piece[0]]
            if piece["escaped"] is not None:
                values = ["" if piece["escaped"] == "\n" else piece["escaped"]]
            elif piece["single"] is not None:
                text = piece["single"]
                values = [text.encode().decode("unicode_escape") if piece[0].startswith("$") else text]
            elif piece["double"] is not None:
                inner = piece["double"][1:-1]
                braces = _BRACED.fullmatch(inner)
                values = self._values(inner) if braces and braces[2] == "[@]" else [self._in_quotes(inner)]
            elif piece["command"] is not None:
                values = [self._output(piece[0])]
            elif piece["variable"] is not None:
                values = self._values(piece[0], quoted=False)
                values = [part for value in values for part in value.split()] if not is_value else [" ".join(values)]
            quoted |= (piece["single"] is not None or piece["double"] is not None) and bool(values)
            if values:
                words[-1] += values[0]
                words += values[1:]
        return words if words != [""] or quoted else []

    def _in_quotes(self, text: str) -> str:
        """Expand text between double quotes."""

        def replaced(match: re.Match[str]) -> str:
            if match[0].startswith("\\"):
                return "" if match[0][1] == "\n" else match[0][1]
            if match[0].startswith(("$(", "$[", "`")):
                return self._output(match[0])
            return " ".join(self._values(match[0]))

        return re.sub(rf"\\[\"\\$`\n]|{_COMMAND}|`[^`]*`|{_VARIABLE}", replaced, text)

    def _output(self, text: str) -> str:
        """The expansion of ``$(...)``: the value of a sum of whole numbers; unknown for other commands."""
        if not (inner := _SUM.fullmatch(text)):
            return COMMAND
        terms = self._in_quotes(inner[1] or inner[2])
        if UNKNOWN not in terms:
            terms = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._values(f"${{{name[0]}}}")), terms)
        if UNKNOWN in terms:
            return UNKNOWN + terms.split(UNKNOWN)[1] + UNKNOWN
        try:
            return str(_number(ast.parse(terms.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return COMMAND

    def _values(self, text: str, quoted: bool = True) -> list[str]:
        """The expansion of ``$NAME``, ``${NAME}``, ``${NAME[@]}``, ``${NAME:?TEXT}`` or ``${NAME:-TEXT}``.

        Args:
            quoted: whether it is between double quotes, where single quotes belong to TEXT.
        """
        braced = _BRACED.fullmatch(text)
        name = braced[1] if braced else text.strip("${}")
        if name in self.settings:
            return [self.settings[name]]
        if (array := re.fullmatch(r"\$\{#(\w+)\[[@*]\]\}", text)) and array[1] in self.variables:
            values = self.variables[array[1]]
            return next(([value] for value in values if UNKNOWN in value), [str(len(values))])
        if text.startswith(("${@", "${*")):
            name = "@"
        default = braced[3] if braced else None
        # Its value; but TEXT for ${X+TEXT}, for ${X:+TEXT} if it is not empty, and for ${X:-TEXT} and ${X:=TEXT}
        # (below) if it is.
        if name in self.variables and (braced or not text.startswith("${")):
            values = self.variables[name]
            if not (default and (default.endswith("+") or (default[0] == ":" and values[:1] in ([], [""])))):
                return values if braced and braced[2] else values[:1]
            if default == "+" or (default.endswith("+") and values[:1] not in ([], [""])):
                if values and UNKNOWN in values[0]:  # it may be empty, or not set
                    return values[:1]
                return [self._default(braced[4], quoted)] if braced else []
        # ${X:+TEXT} of an empty variable, and ${X+TEXT} of one that the script does not set.
        if default and default.endswith("+"):
            return [""]
        if braced and default:
            text = self._default(braced[4], quoted)
            if default.endswith("="):
                self._set(name, [text], self.branches.runs())
            return [text]
        return [os.path.expanduser("~") if name == "HOME" else f"{UNKNOWN}{name}{UNKNOWN}"]

    def _default(self, text: str, quoted: bool) -> str:
        """The expansion of TEXT in ``${NAME:-TEXT}``."""
        if quoted:
            return self._in_quotes(re.sub(r'(?<!\\)"', "", text))

        def expanded(part: re.Match[str]) -> str:
            return part[1] if part[1] is not None else self._in_quotes(part[0] if part[2] is None else part[2])

        return re.sub(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|[^'\"]+", expanded, text)


def _names_set_by(words: Sequence[str]) -> list[str]:
    """The variables that a command sets to unknown values."""
    match words:
        case [text, *_] if text.startswith("(("):
            return _SET_BY.findall(text)
        case ["for", name, *_]:
            return [name]
        case ["read" | "let" | "unset", *texts]:
            return [match[0] for text in texts if (match := re.match(r"[A-Za-z_]\w*", text))]
    return []


def _number(node: ast.expr) -> int:
    """The value of a sum. Raises ValueError for other expressions."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return int(_OPERATIONS[type(operation)](_number(left), _number(right)))
    raise ValueError(ast.unparse(node))
