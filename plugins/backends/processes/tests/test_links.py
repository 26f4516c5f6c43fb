"""The suite `suite_links`, with real processes."""

import pytest
from suite_links import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.full]
