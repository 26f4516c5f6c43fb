"""Ports and network interfaces of this node. Uses the standard library only."""

from __future__ import annotations

import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux request code: the IPv4 address of an interface."""


def reserve_port(address: str) -> socket.socket:
    """Reserve a TCP port of ``address`` until the returned socket is closed. The system gives the port to no process
    that asks for a free one. A process that names the port can listen on it with SO_REUSEADDR, which servers set."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    reservation = socket.socket(family, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address, ``lo`` for loopback; empty if it cannot be found. Gloo needs
    the name: by default it takes the interface of the host name, which need not be the cluster's."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
