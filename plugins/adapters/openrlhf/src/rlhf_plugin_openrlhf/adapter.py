"""Recognises files written for OpenRLHF, and converts them to rewards, environments and rollouts."""

from __future__ import annotations

import ast
import inspect
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from rlhf.errors import PluginInvalid
from rlhf.interfaces import Adapter, Component
from rlhf.plugins.functions import form_of

from rlhf_plugin_openrlhf.env import env_class
from rlhf_plugin_openrlhf.executors import executor_of, instance_of
from rlhf_plugin_openrlhf.reward import reward_class
from rlhf_plugin_openrlhf.rollout import rollout_class
from rlhf_plugin_openrlhf.shim import provided

REWARD_FUNCTION = "reward_func"
BASES = {"AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"}


class OpenRLHF(Adapter):
    """Files for OpenRLHF's ``--reward.remote_url FILE`` (a ``reward_func``) become rewards. Files for its
    ``--train.agent_func_path FILE`` become environments if they have an ``AgentInstance`` and a
    ``MultiTurnAgentExecutor``, and rollouts if their executor defines its own ``execute()``."""

    name = "openrlhf"
    source = "OpenRLHF 0.11.0, https://github.com/OpenRLHF/OpenRLHF"

    _runs_nemo_gym = False

    def recognises(self, kind: str, text: str) -> bool:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return False
        # importing() follows for the same file, and refuses such a file before its imports fail
        self._runs_nemo_gym = "nemo_gym" in _packages(tree)
        if kind == "reward":
            functions = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            # functions of this name with another framework's parameters need no adapter
            reward_functions = (f for f in functions if f.name == REWARD_FUNCTION)
            return any(form_of([a.arg for a in (*f.args.args, *f.args.kwonlyargs)]) is None for f in reward_functions)
        if kind in ("env", "rollout"):
            bases = [b for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for b in n.bases]
            names = {b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in bases}
            return bool(names & BASES)
        return False

    def importing(self) -> AbstractContextManager[None]:
        """Raises PluginInvalid for an executor of NeMo Gym, before the import of a missing package can fail."""
        if self._runs_nemo_gym:
            raise PluginInvalid(
                "the file starts NeMo Gym's services and a server of the policy in the training process, which is not "
                'supported. Start a resources server, and use it in place of the file: [env] use = "nemo_gym", url = '
                '"http://...", with [rollout] use = "multi_turn" (README of rlhf-plugin-nemo-gym)'
            )
        return provided()

    def adapt(self, kind: str, module: ModuleType, attribute: str | None) -> type[Component]:
        if kind == "reward":
            return reward_class(module, _function(module, attribute or REWARD_FUNCTION))
        if kind == "rollout":
            return rollout_class(module, executor_of(module, attribute))
        return env_class(module, *instance_of(module, attribute))


def _packages(tree: ast.Module) -> set[str]:
    """The packages that a file imports."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names}


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
