"""The conformance suite of rollouts, with the real package."""

import pytest
from rlhf_plugin_verifiers import Verifiers
from rlhf_testing.rollout import RolloutContract

from plugins.rollouts.verifiers.tests.conftest import ENVIRONMENTS


@pytest.mark.full
class TestVerifiers(RolloutContract):
    rollout = Verifiers
    columns = {"prompt": "", "index": 1}
    limit = 120.0  # it starts a Python that imports verifiers

    @pytest.fixture(autouse=True)
    def given(self, python, monkeypatch):
        monkeypatch.chdir(ENVIRONMENTS)
        self.configs = (Verifiers.Config(id="adding", python=python),)
