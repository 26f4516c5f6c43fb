"""What is said where Ray itself does not come up."""

from __future__ import annotations

import pytest
import ray
from rlhf.errors import ConfigError, WorkerError
from rlhf_plugin_ray.cluster import Cluster
from rlhf_plugin_ray.config import RayConfig


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            Exception("The current node timed out during startup."),
            WorkerError,
            "Ray could not be started here: The current node timed out .* at the next attempt; .*session_latest/logs",
        ),
        (RuntimeError("Version mismatch"), ConfigError, "Ray at 'local' cannot be used: Version mismatch"),
        (KeyError("unexpected"), KeyError, "unexpected"),
    ],
)
def test_a_ray_that_does_not_start(monkeypatch, raised, error, message):
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(error, match=message):
        Cluster(RayConfig())
