"""The suite `suite_links`, on a real Ray."""

from suite_links import *  # noqa: F403
