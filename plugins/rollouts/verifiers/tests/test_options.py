"""What is refused before the run. These tests need no verifiers."""

from __future__ import annotations

import sys

import pytest
from rlhf.errors import ConfigError
from rlhf_plugin_verifiers import Verifiers
from rlhf_plugin_verifiers.config import required


def check(**options):
    Verifiers(Verifiers.Config(**{"id": "adding", **options})).check()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"python": "envs/none/bin/python"},
            "none/bin/python' is not a program. Create an environment with `rlhf plugins isolate ver",
        ),
        ({"python": sys.executable}, "does not have the package verifiers. Create an environment with"),
        ({}, "does not have the package verifiers"),
        ({"python": "/bin/true"}, "does not have the package verifiers"),
        ({"python": "/bin/false"}, "is not a Python interpreter that starts"),
        ({"environment": ("UNSET_X",)}, "UNSET_X is not set"),
    ],
)
def test_a_python_without_verifiers_is_refused_with_what_to_do(options, error):
    with pytest.raises(ConfigError, match=error):
        check(**options)


def test_another_version_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.4.0\n")
    python.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"has verifiers 0.4.0, but verifiers<0.4,>=0.3.1 is required. Later versions have"
    ):
        check(python=str(python))
    assert "0.3.1" in required().specifier


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"id": ""}, "at least 1 character"),
        ({"processes": 0}, "greater than 0"),
        ({"args": [1]}, "valid mapping|valid dictionary|should be a"),
    ],
)
def test_options_are_strict(options, error):
    with pytest.raises(ValueError, match=error):
        Verifiers.Config(**{"id": "adding", **options})
