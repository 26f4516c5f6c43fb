"""Words of a command line: the command's own flags, and those of the run file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rlhf.errors import ConfigError

LIKE = 0.75
"""Smallest similarity at which an unknown flag is treated as a misspelled flag of the command. Below it, the flag is
treated as a name of the run file."""


def split_dotted(words: Sequence[str], own_flags: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """(other words, flags of the run file with their values). argparse would treat such a value as a positional one.

    Args:
        own_flags: the command's own flags; every other flag is treated as one of the run file. None: only flags with a
            dot are.

    Raises ConfigError for a flag that is very similar to one of ``own_flags``.
    """
    others: list[str] = []
    dotted: list[str] = []
    rest = list(words)
    own = [name.removeprefix("--") for name in own_flags or () if name.startswith("--")]
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        if not word.startswith("--") or flag in (own_flags or ("--",)) or (own_flags is None and "." not in flag):
            others.append(word)
            continue
        name = flag.removeprefix("--").replace("_", "-")
        matches = [] if "." in flag else difflib.get_close_matches(name, own, n=1, cutoff=LIKE)
        if matches and not _of_another_framework(flag.removeprefix("--")):  # those are reported with all other problems
            raise ConfigError(f"no flag {flag}. Did you mean --{matches[0]}?")
        dotted.append(word)
        if "=" not in word and rest and not (rest[0].startswith("--") or rest[0] in (own_flags or ())):
            dotted.append(rest.pop(0))
    return others, dotted


def _of_another_framework(name: str) -> bool:
    from rlhf_runtime.config.other_frameworks import OTHER_NAMES  # --help starts without the runtime

    return name in OTHER_NAMES
