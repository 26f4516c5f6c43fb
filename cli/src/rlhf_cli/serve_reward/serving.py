"""Loads the rewards, and serves them until the process is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from aiohttp import web
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.jobs.scoring import place_rewards, start_scorer
from rlhf_runtime.observe import StopRequest
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer
from rlhf_runtime.setup.plugins import active_reward
from rlhf_runtime.workers.main_thread import MainThread

from rlhf_cli.serve_reward.access import Access
from rlhf_cli.serve_reward.application import PATH, Answer, Application, Limits
from rlhf_cli.serve_reward.connections import Connections, largest_number
from rlhf_cli.serve_reward.metrics import Metrics
from rlhf_cli.serve_reward.questions import Question
from rlhf_cli.serve_reward.samples import Samples, answer_of

END = 5.0
"""Seconds that the server has to close its connections after a failure."""


def serve(
    config: RunFile,
    plugins: Plugins,
    access: Access,
    limits: Limits,
    label: str | None,
    *,
    announce: Callable[[str], None],
    stop: StopRequest | None = None,
) -> None:
    """Serve the rewards of ``config``. Returns after a stop was asked for and the requests under way are answered.

    Args:
        label: column of the row that gets a sample's label.
        announce: told where the server listens, when it is ready.
        stop: None: signals ask for a stop.

    Raises ConfigError, PluginError, ModelError or RewardError saying what to change.
    """
    rewards = [active_reward(plugins, config, number) for number in range(len(config.reward))]
    access.hide()  # after the rewards have read their own variables, which may be the same
    _check(config, rewards)
    placed = None
    if config.policy.model is not None or any(reward.instance.reads == "tokens" for reward in rewards):
        placed = place_rewards(config, plugins)
    stop = stop or StopRequest("answering the requests under way, then ending")
    metrics = Metrics()
    application = Application(access, limits, metrics)
    with stop, ExitStack() as closing:
        main = MainThread(stop)
        closing.callback(main.close)
        server = _Server(application, access, limits)
        url = _call(server.start(), main)
        closing.callback(_end, server, main)
        stop.then = _at_once
        if placed is None:
            scorer = Scorer(rewards, seed=config.run.seed)
            closing.callback(scorer.close)
            main.run(scorer.setup())
        else:
            passed = metrics.passes.observe
            scorer = start_scorer(placed, main, closing, wait=limits.wait, largest=limits.batch, passed=passed)
        tokenizer = None if placed is None else placed.tokenizer
        samples = Samples(tokenizer, label, config.data.add_eos, config.data.max_tokens)
        stop.then = lambda: main.from_main(server.stop.set)
        application.answer = _answer(scorer, samples)
        announce(f"serving {', '.join(reward.name for reward in rewards)} at {url}")
        main.run(server.until_stopped())


def _at_once() -> None:
    """A stop while the models are loaded."""
    raise KeyboardInterrupt


def _answer(scorer: Scorer, samples: Samples) -> Answer:
    names = [reward.name for reward in scorer.rewards]

    async def answer(question: Question) -> dict[str, Any]:
        groups, all_samples = samples.groups(question)
        await asyncio.gather(*(scorer.score(group, trained_on=False) for group in groups))
        return answer_of(all_samples, names)

    return answer


def _check(config: RunFile, rewards: list[ActiveReward]) -> None:
    """Raises ConfigError for options that a server cannot follow, because a request has a prompt and an answer only."""
    if config.env is not None:
        raise ConfigError(f"env {config.env.use!r} is set, but a request says nothing of an environment. Remove [env].")
    for reward in rewards:
        if reward.credit == "step":
            raise ConfigError(
                f'{reward}: credit = "step", but an answer has one number per sample, without places. Set '
                f"--reward.{reward.name}.credit outcome, which adds the steps up."
            )
        if reward.sources:
            raise ConfigError(
                f"{reward}: sources = {list(reward.sources)}, but a request does not say which source its samples are "
                "from. Remove sources."
            )
        if reward.instance.reads == "tokens" and not reward.instance.roles() and config.policy.model is None:
            raise ConfigError(
                f"{reward} reads tokens, and requests hold texts. Set --model PATH (a folder or a hub name); of it "
                "only the tokenizer is loaded."
            )


class _Server:
    """The sockets. Its methods run on the event loop."""

    def __init__(self, application: Application, access: Access, limits: Limits) -> None:
        self.stop = asyncio.Event()
        self._application, self._access = application, access
        self._runner = web.AppRunner(
            application.web, handler_cancellation=True, access_log=None, shutdown_timeout=limits.seconds
        )
        self._listening: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen. Returns the URL of the rewards. Raises ConfigError where the address cannot be used."""
        host, port = self._access.host, self._access.port
        await self._runner.setup()
        assert self._runner.server is not None
        limit = largest_number()
        connections = Connections(self._runner.server, self._application.answering, limit)
        try:
            loop = asyncio.get_running_loop()
            self._listening = await loop.create_server(connections, host, port, backlog=min(128, limit))
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self._listening.sockets[0].getsockname()[1]}{PATH}"

    async def until_stopped(self) -> None:
        """Serve until :attr:`stop` is set. Then take no more requests, and answer those under way."""
        await self.stop.wait()
        self._application.stopping = True
        await self.close()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


def _end(server: _Server, main: MainThread) -> None:
    with contextlib.suppress(TimeoutError):  # requests that wait for the models end with the process
        _call(server.close(), main, END)


def _call(coroutine: Coroutine[Any, Any, Any], main: MainThread, seconds: float | None = None) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, main.loop).result(seconds)
