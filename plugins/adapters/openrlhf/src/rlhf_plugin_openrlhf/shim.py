"""The names that reward and agent files import from ``openrlhf``, for machines without it.

They exist only while such a file is imported, so that no other code takes them for OpenRLHF. If OpenRLHF is installed,
files import the real one.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn

from rlhf_plugin_openrlhf.execution import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last ``\boxed{...}``; None if there is none, or its brace is not closed."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[i], 0)
        if depth == 0:
            return solution[start + len("\\boxed{") : i].strip()
    return None


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether the two answers are equal. Raises PluginNotFound if the reward ``math`` is not installed."""
    if given_answer is None:
        return False
    row = Row({"answer": str(ground_truth)}, "openrlhf", 0)
    answer = Turn([], sampled=True, text="#### " + " ".join(str(given_answer).split()))
    (result,) = _math().score(Group(row, 0, [Trajectory(row, [answer], (0, 0))]))
    return result.value == 1.0


@functools.cache
def _math() -> Any:
    cls = Plugins.discover().resolve("reward", "math").cls
    return cls(cls.Config(extract=("hash",)))


AGENT = {c.__name__: c for c in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor)}
MATH = {f.__name__: f for f in (extract_boxed_answer, grade_answer)}
NAMES: dict[str, dict[str, Any]] = {
    "openrlhf": {},
    "openrlhf.utils": MATH,
    "openrlhf.utils.agent": AGENT,
    "openrlhf.utils.math_utils": MATH,
    "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
}
"""{module: {name: object}}."""


@contextmanager
def provided() -> Iterator[None]:
    """A context in which ``import openrlhf...`` works for :data:`NAMES` without OpenRLHF."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        yield
        return
    modules = {name: _module(name, contents) for name, contents in NAMES.items()}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "Stands for OpenRLHF's module of this name while a file is imported.")
    module.__path__ = []  # submodules that are not provided: "No module named 'openrlhf.x'"
    vars(module).update(contents)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ImportError(
            f"{name}.{attribute} is not provided: openrlhf is not installed, and files are given only "
            f"{', '.join(sorted(contents)) or 'its submodules'}. Install openrlhf, or do without that name."
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
