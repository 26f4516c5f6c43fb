"""What a run shows and keeps: the run directory, metrics, progress, signals, evaluation statistics, best value."""

from rlhf.observe.best import BestTracker
from rlhf.observe.environment import environment
from rlhf.observe.evaluation import evaluation_metrics, pass_at_k
from rlhf.observe.metrics import MetricsLog, read_metrics
from rlhf.observe.progress import Progress
from rlhf.observe.redact import redact
from rlhf.observe.rundir import RunDirectory
from rlhf.observe.samples import Sample, first_samples
from rlhf.observe.signals import StopRequest

__all__ = [
    "BestTracker", "MetricsLog", "Progress", "RunDirectory", "Sample", "StopRequest", "environment",
    "evaluation_metrics", "first_samples", "pass_at_k", "read_metrics", "redact",
]  # fmt: skip
