"""The suite `suite_stalls`, with real processes."""

import pytest
from suite_stalls import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.full]
