"""An error of the generator ends the run, with any policy for failed samples."""

from __future__ import annotations

import pytest
from rlhf.errors import SyncError, WorkerError
from rlhf_plugin_local.generator import TransformersGenerator


@pytest.mark.parametrize("policy", ["abort", "drop_sample", "drop_group"])
@pytest.mark.parametrize("error", [WorkerError, SyncError])
def test_an_error_of_a_generator_is_not_a_failed_sample(shop, monkeypatch, policy, error):
    def generate(self, requests):
        raise error("engine 0 is gone")

    monkeypatch.setattr(TransformersGenerator, "generate", generate)
    finished = shop.run("grpo", "broken", stream={"on_failed_sample": policy})
    assert finished.code == 1
    assert "engine 0 is gone" in finished.said
    assert "sample" not in finished.said
