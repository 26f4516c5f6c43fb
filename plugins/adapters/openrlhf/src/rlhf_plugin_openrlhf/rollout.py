"""An executor that defines its own ``execute()``, as a rollout."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from rlhf.errors import RolloutError, brief
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn

from rlhf_plugin_openrlhf.executors import ExecutorConfig, config_of
from rlhf_plugin_openrlhf.sampling import from_params, to_params
from rlhf_plugin_openrlhf.values import label_of, logs, scalar

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
            location = f"row {row.index} of {row.source}"
            raise RolloutError(f"{location} has images, which an executor's execute() does not get; use an environment")
        executor, engine = self.config.built_executor(), ExecutorEngine(ctx)
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


class ExecutorEngine:
    """The engine that an executor's ``execute()`` gets. Its requests and outputs are token ids, as in vLLM. It samples
    the turns of one sample, and builds the trajectory from them."""

    def __init__(self, ctx: RolloutContext) -> None:
        self._ctx = ctx
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._sampled: list[tuple[list[int], Turn]] = []
        """(tokens before, turn), in order."""

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """May be called from the event loop of another thread, such as that of a server that the executor starts."""
        if multi_modal_data:
            raise RolloutError("the executor generates with multi_modal_data; images are not supported")
        sampling = self._sample(list(prompt_token_ids), sampling_params)
        if asyncio.get_running_loop() is self._loop:
            return await sampling
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampling, self._loop))

    async def _sample(self, ids: list[int], params: Any) -> Any:
        async with self._lock:
            sampling = from_params(params, self._ctx.sampling)
            turn = await self._ctx.generate([Turn(ids, sampled=False)], sampling, len(self._sampled))
            self._sampled.append((ids, turn))
        tokens = list(turn.ids)
        logprobs = [{i: SimpleNamespace(logprob=p)} for i, p in zip(tokens, turn.logprobs or (), strict=True)]
        output = SimpleNamespace(token_ids=tokens, text=turn.text, finish_reason=turn.finish, logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=ids, outputs=[output])

    def turns(self, result: Any) -> list[Turn]:
        """The trajectory for the result of ``execute()``. Log-probs are those of the sampling. Tokens after the last
        action are left out, because no answer follows them.

        Raises RolloutError: tokens in ``action_ranges`` were not sampled in this context.
        """
        if not isinstance(result, dict) or not {"observation_tokens", "action_ranges"} <= result.keys():
            raise RolloutError(
                f"execute() returned {brief(result)}; expected a dict with observation_tokens, action_ranges and reward"
            )
        tokens, turns, position = [int(token) for token in result["observation_tokens"]], [], 0
        for start, end in result["action_ranges"]:
            turn = self._find(tokens, start, end)
            if start > position:
                context = tokens[position:start]
                turns.append(Turn(context, sampled=False, text=self._text(context)))
            turns.append(turn)
            position = end
        if not turns:
            raise RolloutError("execute() returned no action_ranges; there is nothing to learn from")
        turns[-1].reward = scalar(result.get("reward"), "reward")
        turns[-1].score = scalar(result.get("scores"), "scores")
        for name, value in logs(result.get("extra_logs"), "extra_logs").items():
            if value is not None:
                self._ctx.report(name, value)
        if result.get("truncated"):
            turns[-1].finish = "length"
        return turns

    def _text(self, ids: list[int]) -> str:
        """The text that rewards read."""
        text: str = self._ctx.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _cut(self, turn: Turn, count: int) -> Turn:
        """The first ``count`` tokens of a turn."""
        assert turn.logprobs is not None
        ids, logprobs, experts = turn.ids[:count], turn.logprobs[:count], turn.experts
        versions = tuple(version for version in turn.versions if version[0] < count)
        if experts is not None:  # it ends before the last token of the turn
            left = max(0, experts.tokens - (len(turn.ids) - count))
            experts = replace(experts, choices=experts.choices[: left * experts.token_bytes])
        text = self._text(list(ids))
        return replace(turn, ids=ids, logprobs=logprobs, versions=versions, experts=experts, finish="length", text=text)

    def _find(self, tokens: list[int], start: int, end: int) -> Turn:
        """A copy of the turn whose tokens are at ``start:end``. The last turn may be cut at the end of the tokens."""
        for prompt, turn in self._sampled:
            ids, cut = list(turn.ids[: end - start]), end == len(tokens)
            if prompt == tokens[:start] and ids == tokens[start:end] and ids and (cut or len(ids) == len(turn.ids)):
                if len(ids) == len(turn.ids):
                    return replace(turn)
                return self._cut(turn, len(ids))
        raise RolloutError(
            f"execute() returned the action range ({start}, {end}), but llm_engine.generate() did not sample these "
            "tokens after the preceding tokens. Put the sampled tokens into observation_tokens as they are, without "
            "decoding and encoding them again."
        )
