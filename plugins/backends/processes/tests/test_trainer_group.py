"""The suite `suite_ranks`, with real processes."""

import pytest
from suite_ranks import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.full]
