"""A small parser that converts LaTeX and plain formulas to SymPy.

SymPy's own parsers execute Python and evaluate every expression, which is not safe for a policy's text. This parser
raises :class:`FormulaError` for syntax outside its grammar, and :class:`NoValue` for powers above a size limit, before
they are computed.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

TOKEN = re.compile(r"\s*(?:(\d+\.\d+|\.\d+|\d+)|([A-Za-z]+)|(.))", re.ASCII | re.DOTALL)
FUNCTIONS = {
    "sqrt": sympy.sqrt, "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "exp": sympy.exp, "ln": sympy.log,
    "log": lambda x: sympy.log(x, 10), "abs": sympy.Abs,
}  # fmt: skip
CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo, "oo": sympy.oo}
MAX_DEPTH = 30
MAX_CHOSEN = 100
"""Largest lower number of a binomial."""


class FormulaError(Exception):
    """Not a formula of this grammar."""


class NoValue(Exception):
    """A formula that is not computed: too large, nested too deeply, or a division by zero."""


def parse(text: str, max_bits: int) -> Any:
    """A SymPy expression; raises :class:`FormulaError` and :class:`NoValue`."""
    parser = _ExpressionParser(_plain(text), max_bits)
    expression = parser.sum()
    if parser.peek() is not None:
        raise FormulaError(f"{parser.peek()!r} is left over")
    return expression


def _plain(text: str) -> str:
    """LaTeX commands as plain operators and functions."""
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"((\1)/(\2))", text)
    text = re.sub(r"\\[dt]binom(?![a-zA-Z])", r"\\binom", text)
    text = re.sub(r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))", r"sqrt(\1)", text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])|×|·", "*", text)
    text = re.sub(r"\\div(?![a-zA-Z])|÷", "/", text)
    text = text.replace("**", "^").replace("π", "pi").replace("√", "sqrt")
    text = re.sub(r"\\(pi|sin|cos|tan|exp|ln|log|infty)(?![a-zA-Z])", r" \1 ", text)
    text = re.sub(r"\|([^|]*)\|", r"abs(\1)", text)
    text = text.replace("\\binom", " binom ")
    return text.replace("\\frac", " frac ").replace("\\sqrt", " sqrt ").replace("{", "(").replace("}", ")")


class _ExpressionParser:
    """Recursive descent: sum, product (also implicit products such as ``2x``), power, atom."""

    def __init__(self, text: str, max_bits: int) -> None:
        self.tokens = [next(g for g in m.groups() if g is not None) for m in TOKEN.finditer(text) if m[0].strip()]
        self.position, self.depth, self.max_bits = 0, 0, max_bits

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise FormulaError(f"expected {expected or 'more'}, got {token!r}")
        self.position += 1
        return token

    def sum(self) -> Any:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Any:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value = sign * self.power()
        while (token := self.peek()) is not None and token not in ("+", "-", ")", "]", ","):
            if token in ("*", "/"):
                self.take()
                right = self._signed_power()
                if token == "/" and right == 0:
                    raise NoValue("division by zero")
                value = value * right if token == "*" else value / right
            else:
                value = value * self.power()
        return value

    def power(self) -> Any:
        base = self.atom()
        if self.peek() == "!":
            self.take()
            base = self._factorial(base)
        if self.peek() != "^":
            return base
        self.take()
        return self._raise(base, self._signed_power())

    def atom(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoValue("nested too deeply")
        try:
            return self._atom()
        finally:
            self.depth -= 1

    def _atom(self) -> Any:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return sympy.Rational(token)
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token in ("frac", "binom"):
            self.take("(")
            top = self.sum()
            self.take(")")
            self.take("(")
            bottom = self.sum()
            self.take(")")
            if token == "binom":
                return self._binomial(top, bottom)
            if bottom == 0:
                raise NoValue("division by zero")
            return top / bottom
        if token in FUNCTIONS:
            return self._function(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if len(token) == 1 and token.isalpha():
            return sympy.Symbol(token)
        raise FormulaError(f"{token!r} is not known")

    def _factorial(self, base: Any) -> Any:
        if self.peek() == "!":
            raise NoValue("two factorials: of a factorial, or a double factorial")
        # n! is below n^n, and so has at most n times the bits of n
        if not (base.is_Integer and base >= 0) or base * int(base).bit_length() > self.max_bits:
            raise NoValue("a factorial of something else than a number, or too large to work out")
        return sympy.factorial(base)

    def _binomial(self, top: Any, bottom: Any) -> Any:
        """top (top - 1) ... (top - bottom + 1) / bottom!, also for an expression at the top."""
        if not (bottom.is_Integer and 0 <= bottom <= MAX_CHOSEN):
            raise NoValue(f"a binomial with {bottom} below")
        bits = sum(max(abs(n.p).bit_length(), n.q.bit_length()) for n in top.atoms(sympy.Rational))
        if bits * bottom > self.max_bits:
            raise NoValue("a binomial too large to work out")
        value = sympy.Integer(1)
        for number in range(int(bottom)):
            value = value * (top - number) / (number + 1)
        return value

    def _function(self, name: str) -> Any:
        root = 2
        if name == "sqrt" and self.peek() == "[":
            self.take()
            digits = self.take()
            self.take("]")
            if not digits.isdigit() or not 0 < int(digits) <= 100:
                raise NoValue(f"a root of order {digits!r}")
            root = int(digits)
        argument = self.atom() if self.peek() == "(" else self.power()
        return sympy.root(argument, root) if name == "sqrt" else FUNCTIONS[name](argument)

    def _signed_power(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoValue("nested too deeply")
        try:
            if self.peek() in ("+", "-"):
                return -self._signed_power() if self.take() == "-" else self._signed_power()
            return self.power()
        finally:
            self.depth -= 1

    def _raise(self, base: Any, exponent: Any) -> Any:
        if base.is_Rational and exponent.is_Rational:
            bits = max(abs(base.p).bit_length(), base.q.bit_length())
            if bits * abs(exponent) > self.max_bits:
                raise NoValue("a power too large to work out")
        elif exponent.is_Rational:  # SymPy computes powers of its numbers: 2^(5 * 10^8) for sqrt(2)^(10^9)
            bits = sum(max(abs(n.p).bit_length(), n.q.bit_length()) for n in base.atoms(sympy.Rational))
            if bits * abs(exponent) > self.max_bits:
                raise NoValue("a power too large to work out")
        if base == 0 and exponent.is_negative:
            raise NoValue("division by zero")
        return base**exponent
