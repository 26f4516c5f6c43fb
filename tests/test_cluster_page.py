"""The placements in `docs/how-to/cluster.md` are valid and fit on the stated number of devices."""

from __future__ import annotations

import tomllib

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.config.components import select
from rlhf_runtime.config.placement import placement
from rlhf_runtime.config.runfile import RunFile
from rlhf_workers.placement import ClusterNode, check_fits

from tests.pages import DOCS, blocks

EXAMPLES = [b for b in blocks(DOCS / "how-to/cluster.md", "toml") if "[placement" in b.text]
ROLES = ["policy", "critic", "reference", "reward_model"]


@pytest.mark.parametrize("example", EXAMPLES, ids=["apart", "together", "reward model", "divided rows"])
def test_the_placements_shown_fit_on_eight_gpus_and_no_fewer_and_their_options_are_allowed(example):
    config = RunFile.model_validate({"algorithm": "x", **tomllib.loads(example.text)})
    places = placement(config.placement, [r for r in ROLES if r in config.placement], True)

    def cluster(gpus: int) -> list[ClusterNode]:
        return [ClusterNode("a", "10.0.0.1", {"GPU": gpus, "CPU": 64.0})]

    check_fits(places, cluster(8), "PACK")
    with pytest.raises(ConfigError, match="the placement does not fit"):
        check_fits(places, cluster(7), "PACK")
    for kind in ("trainer", "generator"):
        select(Plugins.discover(), kind, getattr(config, kind))
