"""The suite of backends, for LocalBackend."""

from rlhf_plugin_local import LocalBackend
from rlhf_testing.backend import BackendContract


class TestLocalBackend(BackendContract):
    backend = LocalBackend
