"""Rows that are divided over two of four ranks, and over all four, give the numbers of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf.interfaces import ModelSpec
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.rank_processes import Ranks
from rlhf_testing.tiny import tiny_model
from rlhf_testing.token_parts import check_case

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("four")
    tiny_model(folder / "model", std=0.2)
    return Ranks(Path(__file__).parent / "four_ranks.py", folder, 4, "rlhf_plugin_deepspeed.trainer")


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", ["tokens", "short rows"])
def test_rows_that_ranks_divide_give_the_numbers_of_one(four, name, parts):
    check_case(name, one_rank, four, parts)


def one_rank(of: ModelSpec, **options: Any) -> TorchTrainer:
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), of)
