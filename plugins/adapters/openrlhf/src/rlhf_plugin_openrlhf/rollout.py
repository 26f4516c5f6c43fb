"""An executor with an ``execute()`` of its own as a rollout."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn

from rlhf_plugin_openrlhf.engine import Engine
from rlhf_plugin_openrlhf.executors import ExecutorConfig, config_of
from rlhf_plugin_openrlhf.sampling import to_params
from rlhf_plugin_openrlhf.values import label_of

CLASS_NAME = "OpenRLHFRollout"


class RolloutConfig(ExecutorConfig):
    label: str | None = None
    """Row column given as ``label``. If absent: ``label``, else ``answer``, else an empty text."""


def rollout_class(module: ModuleType, executor: type[Any]) -> type[Rollout]:
    """A Rollout class in the file's module."""
    body = {
        "__module__": module.__name__,
        "__doc__": executor.__doc__ or f"{executor.__name__} of {module.__file__}.",
        "Config": config_of(RolloutConfig, executor, module),
    }
    return type(CLASS_NAME, (_ExecutorRollout,), body)


class _ExecutorRollout(Rollout):
    """Every sample has its own executor."""

    Config = RolloutConfig
    gives_rewards = True

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        prompt = ctx.encode_prompt(row)
        if prompt.images:
            where = f"row {row.index} of {row.source}"
            raise RolloutError(f"{where} has images, which an executor's execute() does not get; use an environment")
        executor, engine = self.config.built_executor(), Engine(ctx)
        arguments = {
            "prompt": ctx.tokenizer.decode(list(prompt.ids), skip_special_tokens=False),
            "label": label_of(row, self.config.label),
            "sampling_params": to_params(ctx.sampling),
            "max_length": ctx.max_tokens,
            "hf_tokenizer": ctx.tokenizer,
            "llm_engine": engine,
        }
        if "images" in inspect.signature(executor.execute).parameters:  # executors of OpenRLHF before 0.10 lack it
            arguments["images"] = None
        return engine.turns(await executor.execute(**arguments))
