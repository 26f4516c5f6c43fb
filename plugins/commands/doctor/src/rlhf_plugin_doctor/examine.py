"""All checks in order. Each is a small function of its own in a module beside this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlhf.errors import RlhfError
from rlhf_runtime.config.flag_values import plain
from rlhf_runtime.config.load import load
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import label_of

from rlhf_plugin_doctor import cluster, imports, machine, needs, versions
from rlhf_plugin_doctor.check import Check
from rlhf_plugin_doctor.child import ask

RAY_ADDRESS = "RAY_ADDRESS"
"""The variable from which Ray takes a cluster's address where none is given."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to examine."""

    run_file: str | None = None
    overrides: Sequence[tuple[str, str | None]] = ()
    """Flags laid over it, as for :func:`rlhf_runtime.config.load.load`. A flag of the launcher alone makes no run."""
    start_ray: bool = False
    """Start a Ray on this machine for a moment."""
    timeout: float = 120.0
    """Seconds for one child process."""

    @property
    def is_run(self) -> bool:
        return self.run_file is not None or any(not key.startswith("launcher.") for key, _ in self.overrides)


Step = tuple[str, Callable[[], Check | list[Check]]]


def examine(request: Request, announce: Callable[[str], None] = lambda name: None) -> Iterator[Check]:
    """Every check, as it is done. ``announce`` is told the name of the next one, which may take seconds.

    Nothing that is wrong with what is examined raises; a defect of a check itself is a check that failed.
    """
    for name, step in _installation(request):
        announce(name)
        yield from _done(name, step)
    config: RunFile | None = None
    if request.is_run:
        announce("run file")
        try:
            config = load(request.run_file, request.overrides)
        except RlhfError as error:
            yield Check("run file", "fail", str(error), "correct the run file or the flags").redacted()
    if config is not None:
        yield Check("run file", "ok", f"{request.run_file or 'flags'} can be read")
    for name, step in _run(request, config) if config is not None else ():
        announce(name)
        yield from _done(name, step)
    announce("ray cluster")
    yield from _done("ray cluster", lambda: _cluster(request, config))


def _installation(request: Request) -> list[Step]:
    installed = versions.Installed()
    timeout = request.timeout
    return [
        ("python", lambda: versions.python(installed)),
        ("versions", lambda: versions.versions(installed)),
        ("requirements", lambda: versions.requirements(installed)),
        ("vision packages", lambda: imports.vision(timeout)),
        ("torch", lambda: imports.torch_device(timeout)),
        ("transformers", lambda: imports.transformers(timeout)),
        ("vllm", lambda: imports.vllm(timeout, installed)),
        ("deepspeed", lambda: imports.deepspeed(timeout, installed)),
        ("ray", lambda: imports.ray(timeout, installed, request.start_ray)),
        ("plugins", lambda: imports.plugins(timeout)),
        ("cores", machine.cores),
        ("memory", machine.memory),
        ("shared memory", machine.shared_memory),
        ("open files", machine.file_descriptors),
        ("loopback", machine.loopback),
        ("disk", partial(machine.disk, Path.cwd())),
        ("environment", machine.environment_variables),
    ]


def _run(request: Request, config: RunFile) -> list[Step]:
    found, sizes = needs.models(config)
    return [
        ("run plugins", lambda: run_plugins(request)),
        ("models", lambda: found),
        ("data", lambda: needs.data(config)),
        ("output", lambda: needs.output(config, sizes)),
    ]


def run_plugins(request: Request) -> Check:
    """The plugins that the run selects, with their options."""
    argument = {"path": request.run_file, "overrides": [list(pair) for pair in request.overrides]}
    answer = ask("run_plugins", argument, request.timeout)
    if answer.error:
        return Check("run plugins", "fail", answer.error, "`rlhf train ... --dry-run` shows all of it")
    names = sorted({f"{item['kind']} {item['name']}" for item in answer.value["manifest"]})
    return Check("run plugins", "ok", ", ".join(names))


def _cluster(request: Request, config: RunFile | None) -> Check | list[Check]:
    """The cluster that the launcher would use: at its address, else at the one in RAY_ADDRESS."""
    if config is not None:
        address = plain(config.launcher.options.get("address"))
    else:
        address = dict(request.overrides).get("launcher.address")
    paths = _shared_paths(config) if config is not None else []
    if address:
        return cluster.cluster(str(address), paths, request.timeout)
    if config is not None and label_of(config.launcher.use) != "ray":
        return Check("ray cluster", "skipped", f"the run's launcher is {config.launcher.use!r}")
    if variable := os.environ.get(RAY_ADDRESS):
        found = cluster.cluster(variable, paths, request.timeout)
        return [replace(check, found=check.found.replace(variable, f"${RAY_ADDRESS}")) for check in found]
    return Check("ray cluster", "skipped", "no address given; --launcher.address HOST:PORT asks one")


def _shared_paths(config: RunFile) -> list[str]:
    """What every node reads or writes: local models, and the folder of the run (or what is there of it)."""
    models = [path for path in needs.model_paths(config).values() if needs.is_local(path)]
    paths = [Path(path).expanduser().absolute() for path in models]
    return [str(path) for path in (*paths, needs.existing(Path(config.run.output).expanduser()))]


def _done(name: str, step: Callable[[], Check | list[Check]]) -> Iterator[Check]:
    try:
        found = step()
    except Exception as error:  # the report goes on: the other lines may be what the user needs
        found = Check(name, "fail", f"the check itself failed: {type(error).__name__}: {error}", "please report this")
    for check in found if isinstance(found, list) else [found]:
        yield check.redacted()
