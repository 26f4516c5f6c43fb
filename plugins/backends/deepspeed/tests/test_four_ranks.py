"""Rows that are divided over two of four ranks, and over all four, give the numbers of one rank."""

from __future__ import annotations

import pytest
from zero_cases import one_rank
from zero_ranks import ZeroRanks

from tests.support.trainer_ranks import FourRanksContract

pytestmark = [pytest.mark.slow, pytest.mark.full]


class TestFourRanks(FourRanksContract):
    cases = ZeroRanks
    one_rank = staticmethod(one_rank)
