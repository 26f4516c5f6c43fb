"""Two processes in one gloo group, which run cases for two ranks once, for all tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for fsdp_cases

from rlhf_testing.rank_processes import Ranks  # noqa: E402
from rlhf_testing.token_parts import IN_EVERY_RUN, make_models  # noqa: E402

QUICK = ("equal", "resume", *(f"parts-2-{name}" for name in IN_EVERY_RUN))
"""Cases that ``make test`` reads: names, or their beginnings."""


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Both ranks of every case, or only of those that ``make test`` reads."""
    full = any(item.get_closest_marker("full") for item in request.session.items if item.path.parent == HERE)
    folder = tmp_path_factory.mktemp("ranks")
    for made in models.iterdir():
        (folder / made.name).symlink_to(made)
    return Ranks(HERE / "fsdp_pair.py", folder, 2, "rlhf_plugin_fsdp.trainer", *(() if full else QUICK))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf_testing.image_models import tiny_image_model
    from rlhf_testing.tiny import tiny_model
    from rlhf_testing.tiny_architectures import tiny_architecture

    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    tiny_model(folder / "lender", std=0.2, seed=7, hidden=48, heads=4)
    tiny_architecture(folder / "recurrent", "qwen3_next")
    make_models(folder)
    tiny_image_model(folder / "images", "qwen3_vl")
    one_rank_checkpoint(folder)
    return folder


def one_rank_checkpoint(folder: Path) -> None:
    """Train two steps on one rank, and save the checkpoints from which the two ranks continue."""
    from fsdp_cases import STORED, trainer
    from rlhf_testing.rank_batches import batch, spec
    from rlhf_testing.suite_losses import TokenLoss

    for name, options in (("from_one", {}), ("from_one_stored", STORED)):
        one = trainer(spec(folder, **options), ema_decay=0.9)
        for number in range(2):
            one.update([batch(number)], TokenLoss(), {}, {})
        one.save(folder / name)
