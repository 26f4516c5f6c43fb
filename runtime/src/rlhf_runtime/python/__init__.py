"""Training from Python: ``rlhf.train(...)``, with data, models and rewards that may be objects of the process."""

from rlhf_runtime.python.result import Result
from rlhf_runtime.python.training import train

__all__ = ["Result", "train"]
