"""All checks in order: first the doctor's own checks, which are functions in the other files, then checks of
plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlhf.errors import PluginError, RlhfError
from rlhf.interfaces import Examination, Finding
from rlhf.plugins import Entry, Plugins
from rlhf.secrets import find_secrets
from rlhf_hub.published import looks_local
from rlhf_runtime.config.flag_values import plain
from rlhf_runtime.config.load import load
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import label_of

from rlhf_cli.doctor import imports, machine, needs, probes, versions
from rlhf_cli.doctor.child import ask


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of one examination."""

    run_file: str | None = None
    overrides: Sequence[tuple[str, str | None]] = ()
    """Flags that override the run file, as for :func:`rlhf_runtime.config.load.load`. Flags of the launcher alone do
    not define a run."""
    start: bool = False
    """Whether checks may start and stop services."""
    timeout: float = 120.0
    """Seconds for one child process."""

    @property
    def is_run(self) -> bool:
        return self.run_file is not None or any(not key.startswith("launcher.") for key, _ in self.overrides)


Step = tuple[str, Callable[[], Finding | Iterable[Finding]]]


def examine(request: Request, announce: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """Yield every finding as soon as it is known.

    Args:
        announce: called with the name of the next check, which may take seconds.

    Problems of the installation or the run raise nothing. A check that raises is a failed finding.
    """
    for name, step in _installation(request):
        announce(name)
        yield from _findings_of(name, step)
    config: RunFile | None = None
    if request.is_run:
        announce("run file")
        try:
            config = load(request.run_file, request.overrides)
        except RlhfError as error:
            yield redacted(Finding("run file", "fail", str(error), "correct the run file or the flags"))
    if config is not None:
        yield Finding("run file", "ok", f"{request.run_file or 'flags'} can be read")
    for name, step in _run(request, config) if config is not None else ():
        announce(name)
        yield from _findings_of(name, step)
    examination = _examination(request, config)
    plugins = Plugins.discover()
    for entry in plugins.list("check"):
        announce(entry.name)
        step = partial(_plugin_findings, plugins, entry, examination)
        yield from _findings_of(entry.name, step, f"report this to the authors of {entry.owner}")


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
    # Read here, because the check of the output needs the sizes too.
    findings, sizes = needs.models(config)
    return [
        ("run plugins", lambda: run_plugins(request)),
        ("models", lambda: findings),
        ("data", lambda: needs.data(config)),
        ("output", lambda: needs.output(config, sizes)),
    ]


def run_plugins(request: Request) -> Finding:
    """The plugins that the run selects, with their options."""
    argument = {"path": request.run_file, "overrides": [list(pair) for pair in request.overrides]}
    answer = ask(probes.run_plugins, argument, request.timeout)
    if answer.error:
        return Finding("run plugins", "fail", answer.error, "`rlhf train ... --dry-run` shows the whole error")
    return Finding("run plugins", "ok", ", ".join(answer.value))


def _plugin_findings(plugins: Plugins, entry: Entry, examination: Examination) -> Iterable[Finding]:
    """The findings of a plugin's check."""
    try:
        check = plugins.resolve("check", f"{entry.distribution}/{entry.name}").cls()
    except PluginError as error:
        fix = f"repair or uninstall {entry.distribution}; the other checks are not affected"
        return [Finding(entry.name, "fail", str(error), fix)]
    findings = list(check.examine(examination))
    if wrong := [finding for finding in findings if not isinstance(finding, Finding)]:
        raise TypeError(f"examine() of {entry} gives {wrong[0]!r}; expected rlhf.interfaces.Finding")
    return findings


def _examination(request: Request, config: RunFile | None) -> Examination:
    """The argument of a plugin's check. Flags of the launcher apply also without a run file."""
    if config is not None:
        options = {name: plain(value) for name, value in config.launcher.options.items()}
    else:
        flags = [(key, value) for key, value in request.overrides if key.startswith("launcher.")]
        options = {key.removeprefix("launcher."): value for key, value in flags}

    return Examination(
        ask=partial(ask, timeout=request.timeout),
        timeout=request.timeout,
        start=request.start,
        launcher=None if config is None else label_of(config.launcher.use),
        launcher_options=options,
        shared_paths=() if config is None else tuple(_shared_paths(config)),
    )


def _shared_paths(config: RunFile) -> list[str]:
    """Paths that every machine reads or writes: local models, and the run's folder or its nearest existing parent."""
    models = [path for path in needs.model_paths(config).values() if looks_local(path)]
    paths = [Path(path).expanduser().absolute() for path in models]
    return [str(path) for path in (*paths, needs.existing(Path(config.run.output).expanduser()))]


def _findings_of(
    name: str, step: Callable[[], Finding | Iterable[Finding]], remedy: str = "please report this"
) -> Iterator[Finding]:
    try:
        result = step()
    except Exception as error:  # the other checks continue: the user may need their results
        result = Finding(name, "fail", f"the check itself failed: {type(error).__name__}: {error}", remedy)
    for finding in [result] if isinstance(result, Finding) else result:
        yield redacted(finding)


def redacted(finding: Finding, environment: Mapping[str, str] | None = None) -> Finding:
    """The finding with the values of secret environment variables replaced by ``$NAME``. An error message may quote
    them.

    Args:
        environment: the variables; None: those of this process.
    """
    text, remedy = finding.text, finding.remedy
    for name, value in _secrets(os.environ if environment is None else environment).items():
        text, remedy = text.replace(value, f"${name}"), remedy.replace(value, f"${name}")
    return replace(finding, text=text, remedy=remedy)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Secret values, longest first, so that a value that contains another one is replaced completely."""
    names = {path for path in find_secrets(dict(environment)) if len(environment.get(path, "")) >= 4}
    return {name: environment[name] for name in sorted(names, key=lambda n: -len(environment[n]))}
