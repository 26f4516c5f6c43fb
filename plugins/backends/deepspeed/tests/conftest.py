"""Two processes in one gloo group, which run the cases for two ranks once, for all tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for zero_cases

from rlhf_testing.rank_processes import Ranks  # noqa: E402
from rlhf_testing.token_parts import make_models  # noqa: E402
from zero_pair_names import ONLY_FULL  # noqa: E402


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    from rlhf_testing.image_models import tiny_image_model
    from rlhf_testing.tiny import tiny_model
    from rlhf_testing.tiny_architectures import tiny_architecture

    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    tiny_model(folder / "lender", std=0.2, seed=7, hidden=48, heads=4)
    make_models(folder)
    tiny_architecture(folder / "recurrent", "qwen3_next")
    tiny_image_model(folder / "images", "qwen3_vl")
    one_rank_checkpoint(folder)
    full = any(item.get_closest_marker("full") for item in request.session.items if item.path.parent == HERE)
    left_out = () if full else [f"-{case}" for case in ONLY_FULL]
    return Ranks(HERE / "zero_pair.py", folder, 2, "rlhf_plugin_deepspeed.trainer", *left_out)


def one_rank_checkpoint(folder: Path) -> None:
    """Train two steps on one rank in stage 2, and save the checkpoint from which the two ranks continue."""
    from rlhf_testing.suite_losses import TokenLoss
    from zero_cases import batch, spec, trainer

    one = trainer(spec(folder), stage=2, ema_decay=0.9)
    for number in range(2):
        one.update([batch(number)], TokenLoss(), {}, {})
    one.save(folder / "from_one")
