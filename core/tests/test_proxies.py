import urllib.request

import pytest
from rlhf.proxies import exempt_loopback

ALL = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("environment", "exempt"),
    [
        ({}, None),
        ({"NO_PROXY": "x.org"}, "x.org"),
        ({"http_proxy": ""}, None),
        ({"HTTPS_PROXY": "http://proxy:1"}, ALL),
        ({"all_proxy": "http://proxy:1", "NO_PROXY": "x.org, localhost"}, "x.org,localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://proxy:1", "no_proxy": "x.org", "NO_PROXY": "y.org"}, f"x.org,{ALL}"),
        ({"HTTP_PROXY": "http://proxy:1", "NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_has_the_loopback_where_there_is_a_proxy(environment, exempt, monkeypatch):
    monkeypatch.setattr("os.environ", dict(environment))
    exempt_loopback()
    assert urllib.request.getproxies_environment().get("no") == exempt
