"""How the run file says that answers are drawn: in training, and of held-out rows."""

from __future__ import annotations

from rlhf.types import Sampling

from rlhf_runtime.config.runfile import RunFile


def training_sampling(config: RunFile) -> Sampling:
    """``[sampling]``."""
    s = config.sampling
    return Sampling(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p, (), s.stop, s.ignore_eos)


def evaluation_sampling(config: RunFile) -> Sampling:
    """``[eval]``, with the stop strings and the token budget of ``[sampling]``."""
    budget = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return Sampling(budget, config.eval.temperature, stop=config.sampling.stop)
