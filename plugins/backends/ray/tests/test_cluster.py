"""Messages when Ray itself does not start."""

from __future__ import annotations

import pytest
import ray
from rlhf.errors import ConfigError, WorkerError
from rlhf_plugin_ray.cluster.connection import Cluster
from rlhf_plugin_ray.config import RayConfig


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            Exception("The current node timed out during startup."),
            WorkerError,
            "Ray could not be started here: The current node timed out .* attempt may succeed. .*session_latest/logs",
        ),
        (RuntimeError("Version mismatch"), ConfigError, "Ray at 'local' cannot be used: Version mismatch"),
        (KeyError("unexpected"), KeyError, "unexpected"),
    ],
)
def test_errors_of_ray_at_its_start(monkeypatch, raised, error, message):
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(error, match=message):
        Cluster(RayConfig())


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("ray://head:10001", {}, r"RAY_ADDRESS = 'ray://head:10001' in the environment: .*Ray client"),
        ("http://head:8265", {}, "'http://head:8265' is not a cluster: set 'auto' or HOST:PORT"),
        (
            "head:6379",
            {"cpus": 4},
            "cpus can be set only for a Ray that the run starts; address = 'head:6379'",
        ),
    ],
)
def test_ray_address_is_checked_like_the_option(monkeypatch, address, options, message):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        Cluster(RayConfig(**options))
