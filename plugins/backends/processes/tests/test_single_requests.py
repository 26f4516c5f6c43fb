"""The suite `suite_single_requests`, with real processes."""

import pytest
from suite_single_requests import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.full]
