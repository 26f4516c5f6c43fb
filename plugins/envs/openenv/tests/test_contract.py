"""The conformance suite of environments, against a server on this machine."""

import pytest
from openenv_server import OpenEnvServer
from rlhf_plugin_openenv import OpenEnv
from rlhf_testing.env import EnvContract


class TestOpenEnv(EnvContract):
    env = OpenEnv
    rows = ({"prompt": "Guess.", "seed": 7}, {"prompt": "Guess."})
    actions = ("1", "2", "3", "4", "5", "6")

    @pytest.fixture(autouse=True)
    def server(self):
        with OpenEnvServer() as server:
            self.configs = (OpenEnv.Config(url=server.url, action_field="guess", observation_field="text"),)
            yield
