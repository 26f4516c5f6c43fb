"""The tool of `tool.toml`."""

from typing import Literal


def calculate(a: int, operation: Literal["add", "subtract", "multiply"], b: int) -> int:
    """Calculate with two numbers.

    Args:
        a: the first number
        operation: what to do
        b: the second number
    """
    return a + b if operation == "add" else a - b if operation == "subtract" else a * b
