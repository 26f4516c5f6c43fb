"""The check ``ray``: the installation, a start of it, and the cluster that a run would use."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlhf.errors import short_list
from rlhf.interfaces import Check, Examination, Finding, ProbeAnswer

from rlhf_plugin_ray.checks import probes
from rlhf_plugin_ray.checks.node_facts import collect_facts
from rlhf_plugin_ray.config import TOKEN

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of the cluster that Ray uses if no address is given."""
GIB = 2**30
SHM_MINIMUM = 2 * GIB
"""Minimum bytes of /dev/shm. Ray stores its objects there, including weights in transit to the engines."""
CONNECT = 3.0
"""Timeout for one connection, in seconds."""
_START = "start it with `ray start --head` on one node and `ray start --address ADDRESS` on the others"


class RayCheck(Check):
    """Ray: it can be imported, it can start, and the nodes of a cluster have the same versions as this machine."""

    name = "ray"

    def examine(self, examination: Examination) -> Iterator[Finding]:
        yield from installation(examination)
        yield from cluster(examination)


def installation(examination: Examination) -> Iterator[Finding]:
    """Ray's installation. With ``--start`` also whether a separate Ray starts and runs a task."""
    if importlib.util.find_spec("ray") is None:
        yield Finding("ray", "skipped", "not installed; needed by the launcher `ray` only")
        return
    answer = examination.ask(probes.ray_version)
    if answer.error:
        yield Finding("ray", "fail", answer.error, "python -c 'import ray' shows the whole error; reinstall ray")
        return
    yield Finding("ray", "ok", f"{answer.value}, imported in {answer.seconds:.1f} s")
    if not examination.start:
        yield Finding("ray start", "skipped", "not tested; --start tests it")
        return
    answer = examination.ask(probes.start)
    if answer.error:
        yield Finding("ray start", "fail", f"{answer.error}\n{_last_lines(answer)}", "the lines above say why")
        return
    yield Finding("ray start", "ok", f"started, ran a task and stopped in {answer.seconds:.1f} s")


def cluster(examination: Examination) -> Iterator[Finding]:
    """The cluster that the launcher would use: the one at its address, or the one in RAY_ADDRESS."""
    if address := examination.launcher_options.get("address"):
        yield from check_nodes(examination, str(address))
    elif examination.launcher not in (None, "ray"):
        yield Finding("ray cluster", "skipped", f"the run's launcher is {examination.launcher!r}")
    elif variable := os.environ.get(RAY_ADDRESS):
        for finding in check_nodes(examination, variable):
            yield replace(finding, text=finding.text.replace(variable, f"${RAY_ADDRESS}"))
    else:
        yield Finding("ray cluster", "skipped", "no address given; --launcher.address HOST:PORT checks a cluster")


def _last_lines(answer: ProbeAnswer, count: int = 5) -> str:
    return "\n".join(answer.log.strip().splitlines()[-count:])


def check_nodes(examination: Examination, address: str) -> list[Finding]:
    """Whether a cluster answers at ``address``, and how its nodes differ from this machine."""
    problem = closed(address, CONNECT)
    if problem:
        return [Finding("ray cluster", "fail", problem, _START), Finding("ray nodes", "skipped", "no cluster")]
    paths = list(examination.shared_paths)
    answer = examination.ask(probes.nodes, {"address": address, "timeout": examination.timeout / 2, "paths": paths})
    if not answer.values:
        reason = f"{address}: {answer.error}"
        remedy = f"{_START}; or {TOKEN}"
        return [Finding("ray cluster", "fail", reason, remedy), Finding("ray nodes", "skipped", "no cluster")]
    nodes = {node["id"]: node for node in answer.values[0]["nodes"]}
    total: dict[str, float] = {}
    for node in nodes.values():
        for name in ("CPU", "GPU"):
            total[name] = total.get(name, 0) + node["resources"].get(name, 0)
    text = f"{address}: {_plural(len(nodes))}, CPU {total['CPU']:g}, GPU {total['GPU']:g}"
    reached = Finding("ray cluster", "ok", f"{text}, reached in {answer.seconds:.1f} s")
    answers = {value["id"]: value for value in answer.values[1:]}
    if answer.error:
        for missing in nodes.keys() - answers.keys():
            answers[missing] = {"error": answer.error}
    local_facts = collect_facts(paths)
    return [reached, *_compare(nodes, answers, local_facts)]


def closed(address: str, timeout: float) -> str:
    """Why nothing answers at ``host:port`` (also after ``ray://``). Empty if the port accepts connections, and for
    ``auto``."""
    place = address.rpartition("://")[2]
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except (OSError, OverflowError) as error:
        return f"{address}: {getattr(error, 'strerror', None) or error}"
    return ""


def _compare(nodes: dict[str, Any], answers: dict[str, Any], local_facts: dict[str, Any]) -> list[Finding]:
    different, missing, small = [], [], []
    for number, (key, node) in enumerate(sorted(nodes.items(), key=lambda item: item[1]["address"])):
        name, answer = f"node {number} ({node['address']}, {key[:8]})", answers[key]
        if "error" in answer:
            different.append(f"{name}: {answer['error']}")
            continue
        lines = [
            f"{package} {answer['versions'].get(package, 'not installed')} there, {version} here"
            for package, version in sorted(local_facts["versions"].items())
            if answer["versions"].get(package) != version
        ]
        different += [f"{name}: {short_list(lines)}"] if lines else []
        missing += [f"{name}: {short_list(answer['missing'])}"] if answer["missing"] else []
        small += [f"{name}: {answer['shm'] / GIB:.1f} GiB"] if answer["shm"] < SHM_MINIMUM else []
    checks = []
    if different:
        fix = "install the same versions on every node: the same image, or pip install -c constraints.txt"
        checks.append(Finding("ray nodes", "fail", "\n".join(different), fix))
    else:
        checks.append(
            Finding("ray nodes", "ok", f"{_plural(len(nodes))}: plugins and frameworks have the same versions as here")
        )
    if missing:
        fix = "use a folder that every node sees (a shared file system), or copy it to the same place on each"
        checks.append(Finding("ray files", "fail", "\n".join(missing), fix))
    if small:
        fix = (
            f"Ray's object store and the weight sync need {SHM_MINIMUM / GIB:g} GiB: start the nodes with a larger one"
        )
        checks.append(Finding("ray shared memory", "warn", "\n".join(small), fix))
    return checks


def _plural(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
