"""``AgentInstance`` as an environment: one instance per episode."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from rlhf.errors import EnvError
from rlhf.interfaces import Env
from rlhf.types import EnvStep, Row

from rlhf_plugin_openrlhf.executors import ExecutorConfig, checked, config_of, instantiate
from rlhf_plugin_openrlhf.sampling import from_params, to_params
from rlhf_plugin_openrlhf.values import image_bytes, label_of, logs, scalar

CLASS_NAME = "OpenRLHFEnv"


class EnvConfig(ExecutorConfig):
    prompt: str = "prompt"
    """Row column with the prompt that ``reset`` gets as ``observation``: text, or messages, which are joined."""
    label: str | None = None
    """Row column that ``label`` holds. If absent: ``label``, else ``answer``, else an empty text."""


def env_class(module: ModuleType, instance_class: type[Any] | None, executor: type[Any] | None) -> type[Env]:
    """An Env class in the file's module.

    Args:
        instance_class: None: the class is known only after an executor has been built with arguments.
    """
    source_class = instance_class or executor
    assert source_class is not None
    body = {
        "__module__": module.__name__,
        "__doc__": source_class.__doc__ or f"{source_class.__name__} of {module.__file__}.",
        "Config": config_of(EnvConfig, executor, module),
        "instance_class": instance_class,
    }
    return type(CLASS_NAME, (_AgentEnv,), body)


class _AgentEnv(Env):
    Config = EnvConfig
    instance_class: type[Any] | None

    def __init__(self, config: EnvConfig | None = None) -> None:
        super().__init__(config)
        self._class = self.instance_class or checked(self.config.built_executor().agent_instance_cls)

    async def reset(self, row: Row, seed: int) -> str:
        prompt = _text(row, self.config.prompt)
        self._label = label_of(row, self.config.label)
        self._instance = await instantiate(self._class)
        accepts = inspect.signature(self._instance.reset).parameters
        # OpenRLHF passes no seed, so most files do not take one
        takes_seed = "seed" in accepts or any(p.kind is p.VAR_KEYWORD for p in accepts.values())
        states = {"observation": prompt, "prompt": prompt, "label": self._label}
        result = await self._instance.reset(states, **({"seed": seed} if takes_seed else {}))
        observation = result.get("observation") if isinstance(result, dict) else None
        if not isinstance(observation, str) or not observation.startswith(prompt):
            raise EnvError(
                f"reset() must return {{'observation': text}} where the text begins with the prompt {prompt[:60]!r} it "
                f"was given, got {result!r}. The prompt is tokenised once, from the row; an environment adds to it."
            )
        self._observation = observation
        return observation[len(prompt) :]

    async def step(self, action: str) -> EnvStep:
        params = None if self.sampling is None else to_params(self.sampling)
        states = {
            "observation_text": self._observation,
            "action_text": action,
            "label": self._label,
            "sampling_params": params,
        }
        result = await self._instance.step(states)
        if not isinstance(result, dict) or "rewards" not in result or "done" not in result:
            raise EnvError(f"step() must return a dict with at least 'rewards' and 'done', got {result!r}")
        images = tuple(image_bytes(image) for image in result.get("environment_images") or ())
        feedback = result.get("environment_feedback") or ""
        self._observation += action + feedback
        reward = scalar(result["rewards"], "rewards")
        if reward is None:
            raise EnvError("step() returned rewards = None; return 0.0 if a step has no reward")
        info = logs(result.get("extra_logs"), "extra_logs")
        score = scalar(result.get("scores"), "scores")
        if score is not None:
            info["scores"] = score
        new_params = result.get("sampling_params")
        sampling = None if new_params is None or self.sampling is None else from_params(new_params, self.sampling)
        new_sampling = sampling if sampling != self.sampling else None
        return EnvStep(feedback, reward, bool(result["done"]), new_sampling, info, images, score)

    async def close(self) -> None:
        """Calls ``close`` if the instance has it; OpenRLHF's interface has no such method."""
        close = getattr(getattr(self, "_instance", None), "close", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await closing


def _text(row: Row, column: str) -> str:
    if column not in row.columns:
        raise EnvError(f"the row has no column {column!r}; it has {sorted(row.columns)}. Set `prompt` in [env].")
    value = row[column]
    if isinstance(value, str):
        return value
    return "\n".join(_content(m["content"]) for m in value)


def _content(content: Any) -> str:
    """The text of a message, without its images."""
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in content if "text" in part)
    return str(content)
