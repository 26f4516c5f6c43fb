"""One of four ranks that divide the tokens of rows (:mod:`rlhf_testing.token_parts`), in stage 3."""

from __future__ import annotations

from functools import partial

from rlhf_testing.token_parts import run_cases
from zero_cases import trainer

if __name__ == "__main__":
    run_cases(partial(trainer, stage=3), ("tokens", "short rows"))
