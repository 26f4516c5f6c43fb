"""Whole commands of the documentation, those that need no run file, select and configure a run that can start."""

from __future__ import annotations

import argparse

import pytest
from rlhf.config import load
from rlhf.controller.parts import run_parts
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli import plan, train
from rlhf_cli.flags import overrides
from rlhf_cli.main import split_dotted

from tests.pages import commands, name_of, pages

WHOLE = {"--algo", "--model", "--data"}
"""A command that names all of these says what the run is; others are shown to be completed."""


def whole(words: list[str]) -> bool:
    command, *rest = words
    return command in ("train", "plan") and set(rest) >= WHOLE and not any(word.endswith(".toml") for word in rest)


def configure(words: list[str]) -> None:
    """As the command does before it reads data or a model. Raises ConfigError."""
    command, *rest = words
    parser = argparse.ArgumentParser()
    {"train": train, "plan": plan}[command].add_arguments(parser)
    others, dotted = split_dotted(rest)
    args = parser.parse_args(others)
    args.overrides = dotted
    run_parts(load(None, overrides(args)), Plugins.discover())


SHOWN = [
    pytest.param(words, id=f"{name_of(page)}: {' '.join(words)}")
    for page in pages()
    for words in commands(page)
    if whole(words)
]


def test_there_are_such_commands():
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", SHOWN)
def test_the_command_can_be_configured(words):
    configure(words)


def test_a_command_that_lacks_something_is_noticed():
    with pytest.raises(ConfigError, match="at least 2 samples per prompt"):
        configure(["train", "--algo", "grpo", "--reward", "plugin:math", "--model", "PATH", "--data", "FILE"])
