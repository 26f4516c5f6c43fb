"""The suite `suite_engines`, on a real Ray."""

from suite_engines import *  # noqa: F403
