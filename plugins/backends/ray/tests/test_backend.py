"""The suite of backends, for RayBackend."""

from rlhf_plugin_ray import RayBackend
from rlhf_testing.backend import BackendContract


class TestRayBackend(BackendContract):
    backend = RayBackend
