"""An environment of verifiers, as its users write them. ``kind`` chooses what happens."""

import asyncio
import json
import os
import time

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def right(completion, answer):
    return float(answer in text(completion))


def length(completion):
    return len(completion)


def text(completion):
    return " ".join(str(message.get("content") or "") for message in completion)


def breaks(completion):
    raise ConnectionError("the judge is gone")


async def breaks_later(completion):
    await asyncio.sleep(0)
    raise ConnectionError("the judge is gone later")


def compares(completions):
    return [0.0] * len(completions)


def reward(completion):
    return 1.0


def exits(completion):
    print("leaving", flush=True)
    os._exit(3)


def hangs(completion):
    time.sleep(600)


async def waits(completion):
    await asyncio.sleep(600)


FUNCTIONS = (breaks, breaks_later, compares, reward, exits, hangs, waits)


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on."}]


class Broken(Talk):
    async def env_response(self, messages, state, **kwargs):
        raise vf.SandboxError("no sandbox")


def rows(first, last):
    return Dataset.from_list([{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(first, last)])


def load_environment(kind: str = "turns", fails: str = "", where: str = "", **options):
    if kind == "missing key":
        raise KeyError("JUDGE_KEY")
    if where:
        with open(where, "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "key": os.environ.get("JUDGE_KEY")}) + "\n")
    functions = [right, length, *(f for f in FUNCTIONS if f.__name__ == fails)]
    rubric = vf.Rubric(funcs=functions, weights=[1.0, 0.25, *[0.0] * (len(functions) - 2)])
    data = {"dataset": rows(0, 4), "eval_dataset": rows(4, 6), "system_prompt": "Add.", "rubric": rubric, **options}
    environment_class = {
        "single": vf.SingleTurnEnv,
        "turns": Talk,
        "broken": Broken,
        "tools": vf.ToolEnv,
    }[kind]
    if kind == "turns" or kind == "broken":
        data = {"max_turns": 3, **data}
    if kind == "tools":
        data |= {"tools": [add], "max_turns": 4}
    return environment_class(**data)
