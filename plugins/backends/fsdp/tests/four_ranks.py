"""One of four ranks that divide the tokens of rows (:mod:`rlhf_testing.token_parts`)."""

from __future__ import annotations

from fsdp_cases import trainer
from rlhf_testing.token_parts import run_cases

if __name__ == "__main__":
    run_cases(trainer)
