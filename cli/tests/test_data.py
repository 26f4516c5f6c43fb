"""The command `rlhf data`: its actions, and what `rlhf data preview` shows."""

from __future__ import annotations

import pytest
from rlhf_cli.data import ACTIONS
from rlhf_cli.main import main


def test_actions_are_named_and_known(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["data", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ACTIONS)
    assert main(["data", "previw"]) == 2
    assert "no action 'previw'; actions are preview" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["data"])


def test_the_help_of_an_action(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["data", "preview", "--help"])
    out = capsys.readouterr().out
    assert "usage: rlhf data preview" in out
    assert "--rows" in out
