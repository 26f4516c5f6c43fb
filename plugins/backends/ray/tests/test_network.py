"""Ports that are promised to a worker."""

import socket

import pytest
from rlhf_plugin_ray.actor.network import reserve_port


def test_a_held_port_is_free_for_who_names_it_and_for_nobody_else():
    held = reserve_port("127.0.0.1")
    place = held.getsockname()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(place)
    with socket.create_server(place) as server, socket.create_connection(place) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""
    held.close()
    with socket.create_server(place):
        pass
