"""Requests to this machine, if the environment names a proxy."""

from __future__ import annotations

import os

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def exempt_loopback() -> None:
    """If a variable names a proxy (``HTTP_PROXY``), add the loopback addresses to ``no_proxy`` and ``NO_PROXY``.

    Otherwise HTTP clients send requests for servers on this machine (rewards, judges, environments, a policy's
    endpoint) to the proxy, which cannot reach them. Child processes inherit the variables.
    """
    proxies = {name.lower() for name, value in os.environ.items() if value and name.lower().endswith("_proxy")}
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")  # clients read the first before the second
    hosts = [host.strip() for host in exempt.split(",") if host.strip()]
    if proxies - {"no_proxy"} and "*" not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys((*hosts, *LOOPBACK)))
