"""The suite `suite_stalls`, on a real Ray."""

from suite_stalls import *  # noqa: F403
