"""A run can be resumed after an upgrade that added options, if these have their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf_runtime.checkpoint import store
from rlhf_runtime.checkpoint.json_values import read_json, write_json

from tests.runs import assert_same_run

ADDED = ("algorithm.options.mask_truncated", "algorithm.options.loss.clip_low", "data.shuffle", "reward.0.weight")


def forget(checkpoint: Path, *keys: str) -> None:
    """Change the checkpoint to one of a release without these options."""
    manifest = read_json(checkpoint / store.MANIFEST)
    del manifest["sha256"]
    for key in keys:
        *parents, last = key.split(".")
        place = manifest["meta"]["config"]
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        del place[last]
    write_json(checkpoint / store.MANIFEST, {**manifest, "sha256": store._digest(manifest)})


def test_a_run_whose_checkpoint_lacks_new_options_is_resumed(shop):
    def train(output, steps, *flags, **changes):
        run = {"steps": steps, "resume": bool(flags)}
        return shop.train("rloo", output, *flags, run=run, checkpoint={"every": 2}, **changes)

    baseline = train("whole", 4)
    first = train("upgraded", 2)
    forget(first.last_checkpoint, *ADDED)
    resumed = train("upgraded", 4, "--resume")
    assert "were added after the checkpoint was saved, at their defaults: " in resumed.said
    for key in ADDED:
        assert f"{key.replace('.options', '')} = " in resumed.said
    assert_same_run(baseline, resumed)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("data.shuffle", {"data": {"shuffle": False}}),
        ("algorithm.options.mask_truncated", {"algorithm": {"mask_truncated": True}}),
        ("algorithm.options.loss.clip_low", {"algorithm": {"loss": {"clip_low": 0.1}}}),
    ],
)
def test_another_value_of_a_new_option_is_another_run(shop, key, changes):
    first = shop.train("rloo", "other", run={"steps": 1}, checkpoint={"every": 1})
    forget(first.last_checkpoint, key)
    refused = shop.run("rloo", "other", "--resume", run={"steps": 2}, checkpoint={"every": 1}, **changes)
    assert refused.code != 0
    assert f"{key.replace('.options', '')}: was '(not set)', now " in refused.said
