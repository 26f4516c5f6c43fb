"""Recognises files written for OpenRLHF, and makes rewards and environments of them."""

from __future__ import annotations

import ast
import inspect
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from rlhf.errors import PluginInvalid
from rlhf.interfaces import Adapter, Component

from rlhf_plugin_openrlhf.env import env_class
from rlhf_plugin_openrlhf.reward import reward_class
from rlhf_plugin_openrlhf.shim import provided

REWARD_FUNCTION = "reward_func"
INSTANCE_BASE = "AgentInstanceBase"
EXECUTOR = "AgentExecutor"
MULTI_TURN = "MultiTurnAgentExecutor"


class OpenRLHF(Adapter):
    """Files for OpenRLHF's ``--reward.remote_url FILE`` (a ``reward_func``) become rewards. Files for its
    ``--train.agent_func_path FILE`` become environments if they have an ``AgentInstance`` and a
    ``MultiTurnAgentExecutor``. The agent files in OpenRLHF's own documents are refused; the README says why."""

    name = "openrlhf"
    source = "OpenRLHF 0.11.0, https://github.com/OpenRLHF/OpenRLHF"

    def recognises(self, kind: str, text: str) -> bool:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return False
        if kind == "reward":
            functions = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            return any(f.name == REWARD_FUNCTION for f in functions)
        if kind == "env":
            bases = [b for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for b in n.bases]
            names = {b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in bases}
            return bool(names & {INSTANCE_BASE, MULTI_TURN, "AgentExecutorBase", "SingleTurnAgentExecutor"})
        return False

    def importing(self) -> AbstractContextManager[None]:
        return provided()

    def adapt(self, kind: str, module: ModuleType, attribute: str | None) -> type[Component]:
        if kind == "reward":
            return reward_class(module, _function(module, attribute or REWARD_FUNCTION))
        return env_class(module, _instance_class(module, attribute))


def _function(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise PluginInvalid(
            f"{module.__file__}: {name!r} is {function!r}; expected a function (queries, prompts, labels)"
        )
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as cause:
        raise PluginInvalid(
            f"{module.__file__}: {name}{inspect.signature(function)} cannot be called as {name}(queries, prompts, "
            f"labels): {cause}"
        ) from None
    return function


def _instance_class(module: ModuleType, attribute: str | None) -> type[Any]:
    """The AgentInstance class that the file's executor uses, or the only one that the file defines."""
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    if attribute is not None:
        own = [v for v in own if v.__name__ == attribute]
        if not own:
            raise PluginInvalid(f"{module.__file__} defines no class {attribute!r}")
    executors = [c for c in own if _derives(c, "AgentExecutorBase")]
    chosen = next((c for c in executors if c.__name__ == EXECUTOR), executors[0] if executors else None)
    if chosen is None:
        instances = [c for c in own if _derives(c, INSTANCE_BASE) and not inspect.isabstract(c)]
        if len(instances) != 1:
            names = ", ".join(c.__name__ for c in instances) or "none"
            raise PluginInvalid(
                f"{module.__file__}: expected one subclass of {INSTANCE_BASE}, or an {EXECUTOR} that names one; got "
                f"{names}. Pick one with file:PATH.py:NAME"
            )
        return _checked(module, instances[0])
    execute = next(c for c in chosen.__mro__ if "execute" in vars(c))
    if execute.__name__ != MULTI_TURN:
        raise PluginInvalid(
            f"{module.__file__}: {chosen.__name__} runs episodes by its own execute(), with OpenRLHF's engine and its "
            f"tokens. Only executors that inherit execute() from {MULTI_TURN} can be adapted. Write a plugin of kind "
            "`rollout` instead (rlhf plugins new NAME --kind rollout), or keep the AgentInstance alone."
        )
    try:
        executor = chosen()
    except Exception as cause:
        raise PluginInvalid(
            f"{module.__file__}: {chosen.__name__}() raised {type(cause).__name__}: {cause}. It is built without "
            "arguments, as OpenRLHF does since 0.9; executors that take an engine or a queue are of an older interface."
        ) from cause
    return _checked(module, executor.agent_instance_cls)


def _checked(module: ModuleType, cls: type[Any]) -> type[Any]:
    if inspect.iscoroutinefunction(cls.__init__):
        raise PluginInvalid(
            f'{module.__file__}: {cls.__name__}.__init__ is `async def`, so building it raises TypeError ("__init__() '
            'should return None"), with OpenRLHF too. Write `def __init__`, and what must be awaited into `reset`.'
        )
    if not inspect.iscoroutinefunction(getattr(cls, "step", None)):
        raise PluginInvalid(f"{module.__file__}: {cls.__name__}.step must be `async def step(self, states, **kwargs)`")
    return cls


def _derives(cls: type[Any], base: str) -> bool:
    """Compares names, because the base class is OpenRLHF's own if that is installed, and otherwise the shim's."""
    return any(c.__name__ == base for c in cls.__mro__[1:])
