"""Addresses of this node. Standard library only."""

from __future__ import annotations

import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def free_port(address: str) -> int:
    """A TCP port of ``address`` that nobody listens at just now."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address, ``lo`` for loopback; empty where it cannot be told. Gloo needs
    it, since it would take the interface that the host's name resolves to, which need not be the cluster's."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
