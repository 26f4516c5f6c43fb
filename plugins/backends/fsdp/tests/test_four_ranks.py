"""Rows that are divided over two of four ranks, and over all four, give the numbers of one rank."""

from __future__ import annotations

import pytest
from fsdp_cases import one_rank
from fsdp_ranks import FsdpRanks

from tests.support.trainer_ranks import FourRanksContract

pytestmark = [pytest.mark.slow, pytest.mark.full]


class TestFourRanks(FourRanksContract):
    cases = FsdpRanks
    one_rank = staticmethod(one_rank)
