"""Loads the policy, and serves it until a stop is requested."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from rlhf.errors import ConfigError
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.jobs.training import trained_policy
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.setup.prepare import PlacedPlugins

from rlhf_cli.command_output import note
from rlhf_cli.serve_reward.access import Access
from rlhf_cli.serve_training.application import Served, TrainingApplication
from rlhf_cli.serve_training.losses import BadRequest
from rlhf_cli.serve_training.models import TrainedModels, checkpoint_folder


def serve(
    plugins_of_run: PlacedPlugins,
    access: Access,
    name: str,
    folder: Path,
    *,
    announce: Callable[[str], None],
    stop: StopRequest | None = None,
) -> None:
    """Serve the policy. Returns after a stop was requested and the current computation has ended.

    Args:
        name: name of the base model for clients.
        folder: folder of checkpoints; checkpoints of earlier servers can be loaded.
        announce: called with the address when the server is ready.

    Raises ConfigError if the address cannot be used.
    """
    stop = stop or StopRequest("stopping after the current computation; everything unsaved is lost")
    with stop, trained_policy(plugins_of_run, note=note) as policy:
        models = TrainedModels(policy, name, folder)
        longest = plugins_of_run.config.data.max_tokens
        path = policy.role.spec.path
        tokenizer_id = str(Path(path).absolute()) if Path(path).is_dir() else path
        vocabulary = policy.role.facts.vocabulary
        tokenizer, check = plugins_of_run.tokenizer, plugins_of_run.check_sampling
        served = Served(name, tokenizer_id, tokenizer, vocabulary, longest, policy.adapter_rank, check)
        main = MainThread(stop)
        try:
            main.run(_serve(TrainingApplication(served, access, main, models), access, stop, announce, main))
        finally:
            main.close()


def export(plugins_of_run: PlacedPlugins, name: str, folder: Path, checkpoint: str, target: Path) -> None:
    """Write the model of a checkpoint in ``folder``. Raises ConfigError, before the policy is loaded, if the checkpoint
    does not exist or ``target`` exists."""
    try:
        if not checkpoint_folder(folder, checkpoint).is_dir():
            raise BadRequest(f"there is no checkpoint {checkpoint} in {folder} (--checkpoints)")
        if target.exists():
            raise BadRequest(f"{target} exists. Choose another folder, or delete it")
        with trained_policy(plugins_of_run, note=note) as policy:
            TrainedModels(policy, name, folder).export(checkpoint, target)
    except BadRequest as error:
        raise ConfigError(str(error)) from None


async def _serve(
    application: TrainingApplication,
    access: Access,
    stop: StopRequest,
    announce: Callable[[str], None],
    main: MainThread,
) -> None:
    end = asyncio.Event()
    stop.callback = lambda: main.from_main(end.set)
    runner = web.AppRunner(application.web, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, access.host, access.port)
        try:
            await site.start()
        except OSError as error:
            raise access.cannot_listen(error) from None
        announce(f"training at {access.url(runner.addresses[0][1])} (TINKER_BASE_URL)")
        if not stop.requested:
            await end.wait()
    finally:
        await runner.cleanup()
