"""Ports that are reserved for a worker."""

import socket

import pytest
from rlhf_workers.process.worker import reserve_port


def test_a_reserved_port_is_given_only_to_processes_that_name_it():
    reservation = reserve_port("127.0.0.1")
    place = reservation.getsockname()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(place)
    with socket.create_server(place) as server, socket.create_connection(place) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""
    reservation.close()
    with socket.create_server(place):
        pass
