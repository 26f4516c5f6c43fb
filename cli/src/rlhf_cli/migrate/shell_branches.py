"""Determines which commands of a shell script are executed, as far as its words allow: ``if``, ``case``, ``&&`` and
``||``.

A condition is True, False or None (unknown). The commands of loops and functions are read like other commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne

UNKNOWN = "\0"
"""Stands on both sides of the name of an unknown variable in a word."""
_TESTS = ("[", "[[", "test", "true", "false", "!")
_NUMBERS = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}


@dataclass
class _Branch:
    """An ``if``, a ``case`` or a group in braces whose end is not read yet."""

    runs: bool | None
    """Whether the current commands are executed, as far as this branch determines it."""
    kind: str
    earlier: bool | None = False
    """Whether an earlier branch was taken."""
    tests: list[tuple[list[str], str]] | None = None
    """The commands between ``if`` and ``then``, each with its terminator; None outside."""
    text: str = ""
    """The text that ``case`` compares."""
    patterns: list[str] | None = None
    """The patterns of the next branch of ``case``; None in a branch."""


@dataclass
class Branches:
    """The state of the conditions at a position of a script."""

    branches: list[_Branch] = field(default_factory=list)
    and_runs: bool | None = True
    """Whether a command after ``&&`` is executed."""
    or_runs: bool | None = None
    end: str = ""
    """The terminator of the previous command."""
    test: list[tuple[list[str], str]] = field(default_factory=list)
    """The parts of ``[[ A && B ]]`` so far, each with its terminator."""

    def control(self, words: Sequence[str]) -> int:
        """Process ``if``, ``then`` and similar words at the beginning of a command. Returns the number of these
        words."""
        count = 0
        while words[count:]:
            word, top = words[count], self.branches[-1] if self.branches else None
            if word in ("if", "elif"):
                if word == "if" or top is None:
                    top = _Branch(False, "if", _opposite(self._list_runs()))
                    self.branches.append(top)
                else:
                    top.earlier = _either(top.earlier, top.runs)
                top.tests = []
            elif word == "then" and top and top.tests is not None:
                top.runs, top.tests = _and(_opposite(top.earlier), _value(top.tests)), None
            elif word == "else" and top and top.kind == "if":
                top.earlier = _either(top.earlier, top.runs)
                top.runs = _opposite(top.earlier)
            elif word == "case" and words[count + 2 : count + 3] == ["in"]:
                earlier = _opposite(self._list_runs())
                self.branches.append(_Branch(False, "case", earlier, text=words[count + 1], patterns=[]))
                count += 2
            elif word == "{" and (top is None or top.tests is None):
                self.branches.append(_Branch(self._list_runs(), "{"))
            elif top and (word, top.kind) in (("fi", "if"), ("esac", "case"), ("}", "{")):
                self.branches.pop()
            else:
                break
            self.and_runs, self.or_runs, self.end = True, None, ""
            count += 1
        return count

    def runs(self) -> bool | None:
        """Whether the next command is executed."""
        runs = self._list_runs()
        for branch in self.branches:
            runs = _and(runs, branch.runs)
        return runs

    def is_executed(self, words: list[str], end: str) -> bool | None:
        """Whether a command, without its control words, is executed.

        Args:
            end: the terminator of the command.
        """
        top = self.branches[-1] if self.branches else None
        if top and top.tests is not None:
            top.tests.append((words, end))
            return False
        if top and top.patterns is not None:
            top.patterns += words
            if end == ")":
                match = None if UNKNOWN in top.text else any(fnmatchcase(top.text, p) for p in top.patterns)
                top.runs, top.patterns = _and(_opposite(top.earlier), match), None
                top.earlier = _either(top.earlier, match)
            return False
        runs = self.runs()
        # The parser ends a command at && also inside [[ ]], so the parts of a test are collected up to ]].
        if self.test or "[[" in words:
            self.test.append((words, end))
            if words[-1:] != ["]]"] and end in ("&&", "||", "(", ")", "\n"):
                return runs
        parts, self.test = [*self.test[:-1], (words, "")], []
        if words and self._list_runs() is not False:
            is_test = len(parts) > 1 or words[0] in _TESTS or words[0].startswith("((")
            value = _value(parts) if is_test else True
            join = {"&&": _and, "||": _either}.get(self.end)
            value = join(self.and_runs, value) if join else value
            self.and_runs, self.or_runs = value, _opposite(value) if is_test else None
        if end == ")":  # of a group or a sum, whose result is not known
            self.and_runs, self.or_runs = None, None
        if words or end != "\n":
            self.end = end
        if end == ";;" and top and top.kind == "case":
            top.runs, top.patterns = False, []
        return runs

    def _list_runs(self) -> bool | None:
        return {"&&": self.and_runs, "||": self.or_runs}.get(self.end, True)


def _and(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def _either(left: bool | None, right: bool | None) -> bool | None:
    return _opposite(_and(_opposite(left), _opposite(right)))


def _value(tests: Sequence[tuple[list[str], str]]) -> bool | None:
    """The value of tests that are joined by ``&&`` and ``||``, perhaps in braces."""
    tokens: list[str | list[str]] = []
    for test, end in tests:
        words = list(test)
        while words and words[0] in ("{", "!") and len(words) > 1:
            tokens.append(words.pop(0))
        if words and words[0] == "[[" and words[-1] != "]]":
            tokens.append("{")
        tokens += ["}"] if words == ["}"] else [words] if words else []
        if words and words[-1] == "]]" and words[0] != "[[":
            tokens.append("}")
        if end in ("|", "&", "(", ")"):
            return None
        tokens += [end] if end in ("&&", "||") else []
    return _list(tokens)


def _list(tokens: list[str | list[str]]) -> bool | None:
    value = _term(tokens)
    while tokens and tokens[0] in ("&&", "||"):
        join = _and if tokens.pop(0) == "&&" else _either
        value = join(value, _term(tokens))
    return value


def _term(tokens: list[str | list[str]]) -> bool | None:
    token = tokens.pop(0) if tokens else []
    if token == "!":
        return _opposite(_term(tokens))
    if token == "{":
        value = _list(tokens)
        if tokens and tokens[0] == "}":
            tokens.pop(0)
        return value
    return _test(token) if isinstance(token, list) else None


def _test(words: Sequence[str]) -> bool | None:
    """The value of ``[ A = B ]`` and similar tests; None if a word is unknown, and for tests of files and commands."""
    opened, closed = words[:1] in (["["], ["[["], ["test"]), words[-1:] in (["]"], ["]]"])
    if words in (["true"], ["false"]):
        return words == ["true"]
    if not (opened or closed):
        return None
    compare = fnmatchcase if "[[" in words[:1] or "]]" in words[-1:] else eq
    match words[opened : len(words) - closed]:
        case operands if any(UNKNOWN in word for word in operands):
            return None
        case ["!", *rest]:
            return _opposite(_test(["[", *rest]))
        case ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return compare(left, right)
        case [left, "!=", right]:
            return not compare(left, right)
        case [left, sign, right] if sign in _NUMBERS and re.fullmatch(r"-?\d+ -?\d+", f"{left} {right}"):
            return bool(_NUMBERS[sign](int(left), int(right)))
    return None
