"""The suite `suite_single_requests`, on a real Ray."""

from suite_single_requests import *  # noqa: F403
