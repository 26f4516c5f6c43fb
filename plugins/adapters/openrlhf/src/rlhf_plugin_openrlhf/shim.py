"""The names that reward and agent files import from ``openrlhf``, for machines without it.

They exist only while such a file is imported, so that no other code mistakes them for OpenRLHF. If OpenRLHF is
installed, files import the real package. A file's executor may call the ``execute()`` that it inherits.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType
from typing import Any

from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn

from rlhf_plugin_openrlhf.values import logs, scalar


class AgentInstanceBase(ABC):
    """One episode."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class AgentExecutorBase(ABC):
    """Generates a sample with an engine that takes and returns tokens."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]: ...


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One prompt, one answer, and no reward."""

    def __init__(self, remote_rm_url: Any = None) -> None:
        if remote_rm_url:
            raise ValueError("remote_rm_url: set [[reward]] in the run file instead")

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        tokens = _tokens(hf_tokenizer, prompt)
        output = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs[0]
        observation_tokens = tokens + list(output.token_ids)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": observation_tokens,
            "action_ranges": [(len(tokens), len(observation_tokens))],
            "truncated": output.finish_reason == "length",
            "reward": None,
            "scores": None,
            "extra_logs": {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Episodes of instances. A file that does not define ``execute`` becomes an environment instead."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        from rlhf_plugin_openrlhf.executors import instantiate

        instance = await instantiate(self.agent_instance_cls)
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens, ranges, total, last, done = _tokens(hf_tokenizer, text), [], 0.0, {}, False
        while not done and len(tokens) < max_length:
            sampling_params.max_tokens = max_length - len(tokens)
            output = (await llm_engine.generate(list(tokens), deepcopy(sampling_params))).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            states = {"observation_text": text, "action_text": output.text, "label": label}
            last = await instance.step(states | {"sampling_params": sampling_params})
            total += scalar(last["rewards"], "rewards") or 0.0
            feedback, done = last.get("environment_feedback") or "", bool(last["done"])
            text += output.text + feedback
            tokens += [*output.token_ids, *_tokens(hf_tokenizer, feedback)]
            sampling_params = last.get("sampling_params") or sampling_params
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "truncated": not done,
            "reward": total,
            "scores": last.get("scores", total),
            "extra_logs": logs(last.get("extra_logs"), "extra_logs"),
        }


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"])


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last ``\boxed{...}``; None if the text has no box, or its brace is not closed."""
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
        # import machinery asks modules for names such as __spec__ and expects an AttributeError
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ImportError(
            f"{name}.{attribute} is not provided: openrlhf is not installed, and files get only "
            f"{', '.join(sorted(contents)) or 'its submodules'}. Install openrlhf, or remove that name."
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
