"""The executor and the instance class of an agent file: found, checked, and built with the run file's arguments."""

from __future__ import annotations

import inspect
import logging
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from pydantic import Field, model_validator
from rlhf.errors import PluginInvalid
from rlhf.interfaces import ComponentConfig

_LOG = logging.getLogger(__name__)
_WARNED: set[type[Any]] = set()
"""Classes about which a warning was shown, because a start resolves a file several times."""
INSTANCE_BASE = "AgentInstanceBase"
EXECUTOR_BASE = "AgentExecutorBase"
EXECUTOR = "AgentExecutor"
MULTI_TURN = "MultiTurnAgentExecutor"
OLDER = ("llm_engine", "hf_tokenizer", "result_queue")
"""Parameters of executors of OpenRLHF 0.8, which only its engine can provide."""


class ExecutorConfig(ComponentConfig):
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the executor. OpenRLHF itself builds it without arguments."""

    executor: ClassVar[type[Any] | None] = None

    @model_validator(mode="after")
    def _fits(self) -> ExecutorConfig:
        if self.executor is None and self.arguments:
            raise ValueError("arguments are for an executor, but the file's executor is not used")
        if self.executor is not None:
            signature = inspect.signature(self.executor)
            try:
                signature.bind(**self.arguments)
            except TypeError as cause:
                call = f"{self.executor.__name__}{signature}"
                raise ValueError(f"arguments = {self.arguments}: {call} cannot be called with them: {cause}") from None
        return self

    def built_executor(self) -> Any:
        """A new executor of the file."""
        assert self.executor is not None
        return self.executor(**self.arguments)


C = TypeVar("C", bound=ExecutorConfig)


def config_of(base: type[C], executor: type[Any] | None, module: ModuleType) -> type[C]:
    """The config class for components with this executor; None: the file has no executor."""
    return type(base.__name__, (base,), {"__module__": module.__name__, "__doc__": base.__doc__, "executor": executor})


def executor_of(module: ModuleType, attribute: str | None) -> type[Any]:
    """The file's executor that defines its own ``execute()``. Raises PluginInvalid."""
    chosen = _chosen(module, attribute)
    if chosen is None:
        raise PluginInvalid(f"{module.__file__} defines no {EXECUTOR}; expected a subclass of {EXECUTOR_BASE}")
    _refuse_older(module, chosen)
    if not _executes(chosen):
        raise PluginInvalid(
            f"{module.__file__}: {chosen.__name__} inherits execute(). Use the file as an environment: [env] use = "
            '"file:...", with [rollout] use = "multi_turn".'
        )
    return chosen


def instance_of(module: ModuleType, attribute: str | None) -> tuple[type[Any] | None, type[Any] | None]:
    """The file's instance class and its executor. The class is None if it is known only after the executor has been
    built with arguments. The executor is None if the file has none. Raises PluginInvalid."""
    chosen = _chosen(module, attribute)
    if chosen is None:
        instances = _instances(module, attribute)
        if len(instances) != 1:
            names = ", ".join(c.__name__ for c in instances) or "none"
            raise PluginInvalid(
                f"{module.__file__}: expected one subclass of {INSTANCE_BASE}, or an {EXECUTOR} that names one; got "
                f"{names}. Pick one with file:PATH.py:NAME"
            )
        return checked(instances[0]), None
    _refuse_older(module, chosen)
    if _executes(chosen) or not _derives(chosen, MULTI_TURN):
        raise PluginInvalid(
            f"{module.__file__}: {chosen.__name__} runs episodes by its own execute(). Use the file as a rollout: "
            '[rollout] use = "file:...", without [env].'
        )
    try:
        inspect.signature(chosen).bind()
    except TypeError:
        return None, chosen
    try:
        executor = chosen()
    except Exception as cause:
        raise PluginInvalid(f"{module.__file__}: {chosen.__name__}() raised {type(cause).__name__}: {cause}") from cause
    return checked(executor.agent_instance_cls), chosen


def checked(cls: type[Any]) -> type[Any]:
    """The class itself. Raises PluginInvalid if it is not an instance class."""
    if not inspect.iscoroutinefunction(getattr(cls, "step", None)):
        raise PluginInvalid(f"{cls.__module__}: {cls.__name__}.step must be `async def step(self, states, **kwargs)`")
    if inspect.iscoroutinefunction(cls.__init__) and cls not in _WARNED:
        _WARNED.add(cls)
        _LOG.warning(
            "%s.__init__ is `async def`. It is awaited here. OpenRLHF itself fails on it with TypeError: __init__() "
            "should return None, not 'coroutine'.",
            cls.__name__,
        )
    return cls


async def instantiate(cls: type[Any]) -> Any:
    """A new instance. ``async def __init__`` is awaited."""
    if not inspect.iscoroutinefunction(cls.__init__):
        return cls()
    instance = object.__new__(cls)
    await cls.__init__(instance)
    return instance


def _chosen(module: ModuleType, attribute: str | None) -> type[Any] | None:
    executors = [c for c in _defined_classes(module, attribute) if _derives(c, EXECUTOR_BASE)]
    return next((c for c in executors if c.__name__ == EXECUTOR), executors[0] if executors else None)


def _defined_classes(module: ModuleType, attribute: str | None) -> list[type[Any]]:
    classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    if attribute is not None:
        classes = [v for v in classes if v.__name__ == attribute]
        if not classes:
            raise PluginInvalid(f"{module.__file__} defines no class {attribute!r}")
    return classes


def _instances(module: ModuleType, attribute: str | None) -> list[type[Any]]:
    return [c for c in _defined_classes(module, attribute) if _derives(c, INSTANCE_BASE) and not inspect.isabstract(c)]


def _executes(executor: type[Any]) -> bool:
    """Whether the file defines the executor's ``execute``."""
    owner = next(c for c in executor.__mro__ if "execute" in vars(c))
    return owner.__module__ == executor.__module__


def _refuse_older(module: ModuleType, executor: type[Any]) -> None:
    parameters = inspect.signature(executor).parameters
    if older := [name for name in OLDER if name in parameters]:
        instances = _instances(module, None)
        advice = (
            f'Its {instances[0].__name__} works without the executor: [rollout] use = "multi_turn", [env] use = '
            f'"file:{module.__file__}:{instances[0].__name__}". This omits what execute() of the executor adds.'
            if len(instances) == 1
            else "Write an execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine) that "
            'returns its result, and use the file as a rollout: [rollout] use = "file:...", without [env].'
        )
        raise PluginInvalid(
            f"{module.__file__}: {executor.__name__} takes {', '.join(older)}, the interface of OpenRLHF 0.8. {advice}"
        )


def _derives(cls: type[Any], base: str) -> bool:
    """Compares names, because the base class is OpenRLHF's own if that is installed, and otherwise the shim's."""
    return any(c.__name__ == base for c in cls.__mro__[1:])
