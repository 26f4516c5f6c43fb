"""Addresses of servers that cannot work."""

from __future__ import annotations

import pytest
from rlhf_engines.server_config import EngineServersConfig


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"urls": ("127.0.0.1:8000",)}, "is not the address of a server"),
        ({"urls": ("http://127.0.0.1:80a",)}, "'http://127.0.0.1:80a' is not the address of a server"),
        ({"urls": ("http://[::1",)}, "is not the address of a server"),
        ({"urls": ("http://127.0.0.1:8000/v1",)}, "has a path: give the address without /v1"),
        ({"urls": ("http://a:1", "http://a:1/"), "folder": "/tmp"}, "the same address is given twice"),
        ({"urls": ("http://node7:8000",)}, "is on another machine: set `folder`"),
        ({"urls": ("http://node7:8000",), "folder": "weights"}, "must be an absolute path"),
        ({"urls": ()}, "at least 1 item"),
    ],
)
def test_addresses_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        EngineServersConfig(**options)
