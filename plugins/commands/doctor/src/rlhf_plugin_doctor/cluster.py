"""Checks of a Ray cluster at an address: reachable, and every node like this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from rlhf_plugin_doctor.check import Check, counted, gib, listed
from rlhf_plugin_doctor.child import ask
from rlhf_plugin_doctor.machine import SHM_MINIMUM
from rlhf_plugin_doctor.node import look_around

_START = "start it with `ray start --head` on one node and `ray start --address ADDRESS` on the others"


def cluster(address: str, paths: Sequence[str], timeout: float, connect: float = 3.0) -> list[Check]:
    """``paths``: files and folders that every node must be able to read. ``connect``: seconds for one connection."""
    problem = closed(address, connect)
    if problem:
        return [Check("ray cluster", "fail", problem, _START), Check("ray nodes", "skipped", "no cluster")]
    argument = {"address": address, "timeout": timeout / 2, "paths": list(paths)}
    answer = ask("cluster", argument, timeout)
    if not answer.values:
        found = f"{address}: {answer.error}"
        return [Check("ray cluster", "fail", found, _START), Check("ray nodes", "skipped", "no cluster")]
    nodes = {node["id"]: node for node in answer.values[0]["nodes"]}
    total: dict[str, float] = {}
    for node in nodes.values():
        for name in ("CPU", "GPU"):
            total[name] = total.get(name, 0) + node["resources"].get(name, 0)
    text = f"{address}: {counted(len(nodes), 'node')}, CPU {total['CPU']:g}, GPU {total['GPU']:g}"
    reached = Check("ray cluster", "ok", f"{text}, reached in {answer.seconds:.1f} s")
    answers = {value["id"]: value for value in answer.values[1:]}
    if answer.error:
        for missing in nodes.keys() - answers.keys():
            answers[missing] = {"error": answer.error}
    here = look_around(list(paths))
    return [reached, *_compare(nodes, answers, here)]


def closed(address: str, timeout: float) -> str:
    """Why nothing answers at ``host:port`` (also after ``ray://``); empty for a port that accepts, and for ``auto``."""
    place = address.rpartition("://")[2]
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except (OSError, OverflowError) as error:
        return f"{address}: {getattr(error, 'strerror', None) or error}"
    return ""


def _compare(nodes: dict[str, Any], answers: dict[str, Any], here: dict[str, Any]) -> list[Check]:
    different, missing, small = [], [], []
    for number, (key, node) in enumerate(sorted(nodes.items(), key=lambda item: item[1]["address"])):
        name, answer = f"node {number} ({node['address']}, {key[:8]})", answers[key]
        if "error" in answer:
            different.append(f"{name}: {answer['error']}")
            continue
        lines = [
            f"{package} {answer['versions'].get(package, 'not installed')} there, {version} here"
            for package, version in sorted(here["versions"].items())
            if answer["versions"].get(package) != version
        ]
        different += [f"{name}: {listed(lines)}"] if lines else []
        missing += [f"{name}: {listed(answer['missing'])}"] if answer["missing"] else []
        small += [f"{name}: {gib(answer['shm'])}"] if answer["shm"] < SHM_MINIMUM else []
    checks = []
    if different:
        fix = "install the same versions on every node: the same image, or pip install -c constraints.txt"
        checks.append(Check("ray nodes", "fail", "\n".join(different), fix))
    else:
        checks.append(
            Check("ray nodes", "ok", f"{counted(len(nodes), 'node')}: plugins and frameworks are of the versions here")
        )
    if missing:
        fix = "use a folder that every node sees (a shared file system), or copy it to the same place on each"
        checks.append(Check("ray files", "fail", "\n".join(missing), fix))
    if small:
        fix = f"Ray's object store and the weight sync need {gib(SHM_MINIMUM)}: start the nodes with a larger one"
        checks.append(Check("ray shared memory", "warn", "\n".join(small), fix))
    return checks
