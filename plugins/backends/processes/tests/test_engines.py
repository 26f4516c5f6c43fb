"""The suite `suite_engines`, with real processes."""

import pytest
from suite_engines import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.full]
