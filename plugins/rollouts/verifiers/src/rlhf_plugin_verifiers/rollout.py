"""The rollout: a verifiers environment plays the row's example and calls the policy itself."""

from __future__ import annotations

from typing import Any

from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn
from rlhf_endpoint.endpoint import Endpoint
from rlhf_endpoint.session import Session

from rlhf_plugin_verifiers.config import VerifiersConfig, check_python
from rlhf_plugin_verifiers.process import EnvironmentProcess


class Verifiers(Rollout):
    """Plays examples of an environment's dataset. The environment runs in processes of its own Python and calls the
    policy through an OpenAI-compatible endpoint on this machine. Its rubric returns the reward.

    A row names its example with the columns ``index`` and ``split`` (``train``, the default, or ``eval``).

    Sampled tokens are never tokenised again. A request that continues a known conversation adds tokens to its sequence;
    any other begins another sequence of the same trajectory.

    Raises RolloutError (a failed sample): the environment cannot be loaded, has no such example, its process ends, or
    its rollout or one of its reward functions fails.
    """

    name = "verifiers"
    source = "https://github.com/PrimeIntellect-ai/verifiers"
    needs_messages = True
    gives_rewards = True
    Config = VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        self.concurrency = config.concurrency
        self._endpoint = Endpoint(config)
        self._processes = [EnvironmentProcess(config) for _ in range(config.processes)]

    def check(self) -> None:
        check_python(self.config)

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        example = _example(row)
        session = Session(ctx)
        async with self._endpoint.serve(session) as (base_url, key):
            request = {**example, "base_url": base_url, "api_key": key, "model": self.config.models[0]}
            process = min(self._processes, key=lambda p: p.samples)
            process.samples += 1
            try:
                played = await session.during(process.play(request))
                turns = await session.close()
            except BaseException:
                await session.cancel()
                raise
            finally:
                process.samples -= 1
            if session.broken.done():
                session.broken.result()
        last = next((turn for turn in reversed(turns) if turn.sampled), None)
        if last is None:
            cause = "its prompt has data.max_tokens tokens or more" if session.out_of_tokens else "it ended without one"
            raise RolloutError(f"the environment received no answer from the policy: {cause}")
        if session.out_of_tokens and played["truncated"]:
            last.finish = "length"
        last.reward = played["reward"]
        for name, value in played["metrics"].items():
            ctx.report(f"env/{name}", value)
        return turns


def _example(row: Row) -> dict[str, Any]:
    index, split = row.columns.get("index"), row.columns.get("split", "train")
    if type(index) is not int or index < 0:
        raise RolloutError(
            f"the row's column index is {index!r:.60}; it must be the number of an example of the environment's "
            "dataset, from 0. `python -m rlhf_plugin_verifiers` writes such rows"
        )
    if split not in ("train", "eval"):
        raise RolloutError(f"the row's column split is {split!r:.60}; allowed: 'train', 'eval'")
    return {"index": index, "split": split, "prompt": row.columns.get("prompt")}
