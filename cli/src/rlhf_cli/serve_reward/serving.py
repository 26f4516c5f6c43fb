"""Loads the rewards, and serves them until a stop is requested: the sockets, and their connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from typing import Any

from aiohttp import web
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checks.run import active_rewards
from rlhf_runtime.config.components import Selections
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.jobs.scoring import place_rewards, start_scorer
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer

from rlhf_cli.serve_reward.access import Access
from rlhf_cli.serve_reward.application import PATH, Answer, Application, Metrics, RequestLimits
from rlhf_cli.serve_reward.sample_groups import Question, SampleGroups, answer_of

_LOG = logging.getLogger(__name__)
END = 5.0
"""Seconds within which the server must close its connections after a failure."""
IDLE = 15.0
"""Seconds within which a connection must send the headers of a request."""
MAX_CONNECTIONS = 1024
"""Largest number of connections, if the limit on open files allows it."""


def serve(
    config: RunFile,
    plugins: Plugins,
    access: Access,
    limits: RequestLimits,
    label: str | None,
    *,
    announce: Callable[[str], None],
    stop: StopRequest | None = None,
) -> None:
    """Serve the rewards of ``config``. Returns after a stop was requested and all current requests have been answered.

    Args:
        label: column of the row that gets a sample's label.
        announce: called with the address when the server is ready.
        stop: None: signals request a stop.

    Raises ConfigError, PluginError, ModelError or RewardError, which say what to change.
    """
    rewards = active_rewards(Selections.of(plugins, config, ("reward",)))
    access.hide()  # after the rewards have read their own variables, which may be the same
    _check(config, rewards)
    plugins_of_run = None
    if config.policy.model is not None or any(reward.instance.reads == "tokens" for reward in rewards):
        plugins_of_run = place_rewards(config, plugins)
    stop = stop or StopRequest("finishing the current requests, then stopping")
    metrics = Metrics()
    application = Application(access, limits, metrics)
    with stop, ExitStack() as closing:
        main = MainThread(stop)
        closing.callback(main.close)
        server = _Server(application, access, limits)
        url = _call(server.start(), main)
        closing.callback(_end, server, main)
        stop.callback = _at_once
        if plugins_of_run is None:
            scorer = Scorer(rewards, seed=config.run.seed)
            closing.callback(scorer.close)
            main.run(scorer.setup())
        else:
            passed = metrics.passes.observe
            scorer = start_scorer(plugins_of_run, main, closing, wait=limits.wait, largest=limits.batch, passed=passed)
        tokenizer = None if plugins_of_run is None else plugins_of_run.tokenizer
        samples = SampleGroups(tokenizer, label, config.data.add_eos, config.data.max_tokens)
        stop.callback = lambda: main.from_main(server.stop.set)
        application.answer = _answer(scorer, samples)
        announce(f"serving {', '.join(reward.name for reward in rewards)} at {url}")
        main.run(server.until_stopped())


def _at_once() -> None:
    """A stop while the models are loaded."""
    raise KeyboardInterrupt


def _answer(scorer: Scorer, samples: SampleGroups) -> Answer:
    names = [reward.name for reward in scorer.rewards]

    async def answer(question: Question) -> dict[str, Any]:
        groups, all_samples = samples.groups(question)
        await asyncio.gather(*(scorer.score(group, trained_on=False) for group in groups))
        return answer_of(all_samples, names)

    return answer


def _check(config: RunFile, rewards: list[ActiveReward]) -> None:
    """Raises ConfigError for options that a server cannot follow, because a request has a prompt and an answer only."""
    if config.env is not None:
        raise ConfigError(
            f"env {config.env.use!r} is set, but a request does not describe an environment. Remove [env]."
        )
    for reward in rewards:
        if reward.credit == "step":
            raise ConfigError(
                f'{reward}: credit = "step", but a response has one number per sample, not one per step. Set '
                f"--reward.{reward.name}.credit outcome, which sums the steps."
            )
        if reward.sources:
            raise ConfigError(
                f"{reward}: sources = {list(reward.sources)}, but a request does not say which source its samples are "
                "from. Remove sources."
            )
        if reward.instance.reads == "tokens" and not reward.instance.roles() and config.policy.model is None:
            raise ConfigError(
                f"{reward} reads tokens, but requests contain text. Set --model PATH (a folder or a hub name); only "
                "its tokenizer is loaded."
            )


def largest_number() -> int:
    """Largest number of concurrent connections. Each is an open file; the remaining files are for the rewards."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, files // 4))


class Connections:
    """Creates the protocol of each new connection. A connection over the limit replaces the connection that has been
    open longest without a current request, so clients without a token cannot lock others out.

    Args:
        server: server of aiohttp's runner.
        answering: the connections with a request in progress.
    """

    def __init__(self, server: web.Server, answering: Collection[Any], limit: int) -> None:
        self._server, self._answering, self._limit = server, answering, limit
        self._open: dict[Connection, None] = {}

    def __call__(self) -> Connection:
        loop = asyncio.get_running_loop()
        return Connection(self, self._server, loop=loop, access_log=None, keepalive_timeout=IDLE)

    def opened(self, connection: Connection) -> None:
        self._open[connection] = None
        if len(self._open) > self._limit:
            idle = next(
                candidate for candidate in self._open if candidate is connection or candidate not in self._answering
            )
            del self._open[idle]
            idle.force_close()

    def lost(self, connection: Connection) -> None:
        self._open.pop(connection, None)


class Connection(web.RequestHandler):
    """One connection."""

    def __init__(self, connections: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.lost(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp would return and log the line that it cannot parse, which may contain the token."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        _LOG.debug("a request from %s is not HTTP: %s", request.remote, type(exc).__name__)
        response = web.json_response({"error": "the request is not valid HTTP"}, status=status)
        response.force_close()
        return response


class _Server:
    """The sockets. Its methods run on the event loop."""

    def __init__(self, application: Application, access: Access, limits: RequestLimits) -> None:
        self.stop = asyncio.Event()
        self._application, self._access = application, access
        # handler_cancellation: the samples of a client that went away no longer count towards the limit.
        self._runner = web.AppRunner(
            application.web, handler_cancellation=True, access_log=None, shutdown_timeout=limits.seconds
        )
        self._listening: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen. Returns the URL of the rewards. Raises ConfigError if the address cannot be used."""
        await self._runner.setup()
        assert self._runner.server is not None
        limit = largest_number()
        connections = Connections(self._runner.server, self._application.answering, limit)
        try:
            loop = asyncio.get_running_loop()
            self._listening = await loop.create_server(
                connections, self._access.host, self._access.port, backlog=min(128, limit)
            )
        except OSError as error:
            await self._runner.cleanup()
            raise self._access.cannot_listen(error) from None
        return self._access.url(self._listening.sockets[0].getsockname()[1]) + PATH

    async def until_stopped(self) -> None:
        """Serve until :attr:`stop` is set. Then accept no more requests, and answer the current ones."""
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
