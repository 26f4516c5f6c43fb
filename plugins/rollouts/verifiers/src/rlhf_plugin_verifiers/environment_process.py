"""Loads an environment and plays the requested examples of its dataset concurrently. Run by the environment's Python,
which has verifiers and need not have this package.

Only the standard library may be imported here before the environment is loaded. Requests and answers are JSON lines on
the original standard input and output; prints of the environment go to standard error.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import math
import os
import sys
from typing import Any

FAILED_REWARDS: contextvars.ContextVar[list[str]] = contextvars.ContextVar("FAILED_REWARDS")
"""Reward functions that raised for the current sample. verifiers counts each as 0."""
EMPTY_ANSWER = "EmptyModelResponseError"
RESERVED = ("reward", "metrics", "error", "is_truncated", "stop_condition")
"""Fields of a result. The value of a reward function with such a name would overwrite the field in verifiers."""


class Refused(Exception):
    """The environment, or a sample, cannot be played. The message says why."""


def load(name: str, args: dict[str, Any]) -> Any:
    """The environment. Raises Refused."""
    try:
        import verifiers

        environment = verifiers.load_environment(name, **args)
    except Exception as error:
        cause = error.__cause__
        reason = f"{type(error).__name__}: {error}"
        raise Refused(f"{reason} ({type(cause).__name__}: {cause})" if cause else reason) from error
    if environment.requires_group_rollouts:
        raise Refused("a reward function compares the samples of a group; only those of single samples are supported")
    names = set(environment.rubric._get_reward_func_names())
    if hidden := sorted(names & set(RESERVED)):
        raise Refused(f"a reward function is named {hidden[0]!r}, which hides this field of the result; rename it")
    watch_environment(environment)
    return environment


def watch_environment(environment: Any) -> None:
    """Note the reward functions that raise in :data:`FAILED_REWARDS`."""
    watch(environment.rubric)
    for part in getattr(environment, "envs", ()):
        watch_environment(part)


def watch(rubric: Any) -> None:
    for part in getattr(rubric, "rubrics", ()):
        watch(part)
    rubric.funcs = [_watched(function) for function in rubric.funcs]


def _watched(function: Any) -> Any:
    def note(error: Exception) -> None:
        name = getattr(function, "__name__", repr(function))
        FAILED_REWARDS.get([]).append(f"the reward function {name!r} failed: {type(error).__name__}: {error}")

    async def awaited(value: Any) -> Any:
        try:
            return float(await value)
        except Exception as error:
            note(error)
            raise

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return awaited(value) if inspect.isawaitable(value) else float(value)
        except Exception as error:
            note(error)
            raise

    return call


class Player:
    """Plays examples of an environment."""

    def __init__(self, environment: Any) -> None:
        from openai import AsyncOpenAI

        self._environment = environment
        self._openai = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None)

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reward and metrics of one sample. Raises Refused, or what the environment raises."""
        from verifiers.clients import OpenAIChatCompletionsClient

        example = dict(self.example(request["split"], request["index"], request.get("prompt")))
        client = self._openai.with_options(base_url=request["base_url"], api_key=request["api_key"])
        failed: list[str] = []
        FAILED_REWARDS.set(failed)
        result = await self._environment.run_rollout(example, OpenAIChatCompletionsClient(client), request["model"], {})
        error = result.get("error")
        if error and EMPTY_ANSWER not in error["error_chain_str"]:  # an empty answer is an error of the policy
            raise Refused(f"{error['error_chain_repr']}")
        if result.get("stop_condition") == "timeout_reached":
            raise Refused("its own time limit (timeout_seconds) has passed")
        if failed:
            raise Refused(failed[0])
        if not math.isfinite(result["reward"]):
            raise Refused(f"its reward is {result['reward']}")
        metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items()}
        return {"reward": float(result["reward"]), "metrics": metrics, "truncated": bool(result.get("is_truncated"))}

    def example(self, split: str, index: int, prompt: Any = None) -> dict[str, Any]:
        """Raises Refused: there is no such example, or its prompt differs from the row's."""
        examples = self.examples(split)
        if index >= len(examples):
            raise Refused(f"index is {index}, but the split {split!r} has {len(examples)} examples")
        example: dict[str, Any] = examples[index]
        if prompt and prompt != text_of(example["prompt"]):
            raise Refused(f"example {index} of {split!r} has a different prompt from the row's. Write the rows again")
        return example

    def examples(self, split: str) -> Any:
        """Raises Refused: the environment has no such dataset."""
        environment = self._environment
        if split == "train":
            dataset = environment.build_dataset()
        else:
            dataset = environment.build_eval_dataset()
        if dataset is None:
            raise Refused(f"the environment has no dataset of the split {split!r}")
        return dataset


def text_of(prompt: Any) -> str:
    """The last message of a prompt, as readable text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"] if prompt else ""
    return content if isinstance(content, str) else json.dumps(content)


async def serve(requests: int, tell: Any, environment: Any) -> None:
    """Play the requested examples until the run closes its end."""
    reader = asyncio.StreamReader(limit=2**26)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(requests, "rb"))
    player = Player(environment)
    playing: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> None:
        number = request["number"]
        try:
            tell({"number": number, **await player.play(request)})
        except Exception as error:
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            tell({"number": number, "failed": f"the environment failed: {reason}"})
        except asyncio.CancelledError:
            tell({"number": number, "failed": "cancelled"})
        finally:
            del playing[number]

    while line := await reader.readline():
        request = json.loads(line)
        if not request.get("cancel"):
            playing[request["number"]] = asyncio.create_task(answer(request))
            await asyncio.sleep(0)  # a task that is cancelled before its first step would never answer
        elif request["number"] in playing:
            playing[request["number"]].cancel()
    for task in list(playing.values()):
        task.cancel()
    await asyncio.gather(*playing.values())


def main(settings: dict[str, Any]) -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        line = json.dumps(answer).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]

    try:
        environment = load(settings["id"], settings["args"])
        if rows := settings.get("rows"):
            write_rows(tell, Player(environment), **rows)
            return
    except Refused as refused:
        tell({"loaded": str(refused)})
        return
    tell({"loaded": ""})
    asyncio.run(serve(requests, tell, environment))


def write_rows(tell: Any, player: Player, split: str, first: int, count: int | None) -> None:
    """A row for each of ``count`` examples, or for all."""
    last = len(player.examples(split)) if count is None else first + count
    for index in range(first, last):
        tell({"prompt": text_of(player.example(split, index)["prompt"]), "index": index, "split": split})


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # instead of this file's folder: environments are found where the run was started
    main(json.loads(sys.argv[1]))
