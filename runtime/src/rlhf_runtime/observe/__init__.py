"""What a run shows and keeps: the run directory, metrics, progress, signals, evaluation statistics, best value."""

from rlhf_runtime.observe.best_value import BestTracker
from rlhf_runtime.observe.evaluation_statistics import evaluation_metrics, pass_at_k
from rlhf_runtime.observe.machine import environment
from rlhf_runtime.observe.metrics import MetricsLog, read_metrics
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.observe.signals import StopRequest

__all__ = [
    "BestTracker", "MetricsLog", "Progress", "RunDirectory", "StopRequest", "environment",
    "evaluation_metrics", "pass_at_k", "read_metrics",
]  # fmt: skip
