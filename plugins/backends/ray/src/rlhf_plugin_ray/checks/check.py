"""The check ``ray``: the installation, a start of it, and the cluster that a run would use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace

from rlhf.interfaces import Check, Examination, Finding, ProbeAnswer

from rlhf_plugin_ray.checks import probes
from rlhf_plugin_ray.checks.nodes import check_nodes

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of the cluster that Ray uses if no address is given."""


class RayCheck(Check):
    """Ray: it can be imported, it can start, and the nodes of a cluster have the same versions as this machine."""

    name = "ray"

    def look(self, examination: Examination) -> Iterator[Finding]:
        yield from installation(examination)
        yield from cluster(examination)


def installation(examination: Examination) -> Iterator[Finding]:
    """Ray's installation. With ``--start`` also whether a Ray of its own starts and runs a task."""
    if importlib.util.find_spec("ray") is None:
        yield Finding("ray", "skipped", "not installed; needed by the launcher `ray` only")
        return
    answer = examination.ask(probes.ray_version)
    if answer.error:
        yield Finding("ray", "fail", answer.error, "python -c 'import ray' shows all of it; pip install ray again")
        return
    yield Finding("ray", "ok", f"{answer.value}, imported in {answer.seconds:.1f} s")
    if not examination.start:
        yield Finding("ray start", "skipped", "not tried; --start tries it")
        return
    answer = examination.ask(probes.start)
    if answer.error:
        fix = "the lines above say why; logs are in /tmp/ray/session_latest/logs"
        yield Finding("ray start", "fail", f"{answer.error}\n{_last_lines(answer)}", fix)
        return
    yield Finding("ray start", "ok", f"started, ran a task and stopped in {answer.seconds:.1f} s")


def cluster(examination: Examination) -> Iterator[Finding]:
    """The cluster that the launcher would use: the one at its address, or the one that RAY_ADDRESS names."""
    if address := examination.launcher_options.get("address"):
        yield from check_nodes(examination, str(address))
    elif examination.launcher not in (None, "ray"):
        yield Finding("ray cluster", "skipped", f"the run's launcher is {examination.launcher!r}")
    elif variable := os.environ.get(RAY_ADDRESS):
        for finding in check_nodes(examination, variable):
            yield replace(finding, found=finding.found.replace(variable, f"${RAY_ADDRESS}"))
    else:
        yield Finding("ray cluster", "skipped", "no address given; --launcher.address HOST:PORT asks one")


def _last_lines(answer: ProbeAnswer, count: int = 5) -> str:
    return "\n".join(answer.log.strip().splitlines()[-count:])
