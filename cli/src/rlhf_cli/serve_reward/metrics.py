"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """A registry of its own, so that several servers of one process do not add up."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "rlhf_reward_requests", "Requests for rewards by HTTP status", ["status"], registry=self._registry
        )
        self.samples = Counter("rlhf_reward_samples", "Samples that got a reward", registry=self._registry)
        self.failures = Counter(
            "rlhf_reward_failed_samples", "Samples for which a reward failed", registry=self._registry
        )
        self.seconds = Histogram(
            "rlhf_reward_request_seconds", "Time of a request", buckets=SECONDS, registry=self._registry
        )
        self.under_way = Gauge("rlhf_reward_samples_under_way", "Samples under way", registry=self._registry)
        self.passes = Histogram(
            "rlhf_reward_model_batch", "Samples that a model read at once", buckets=SAMPLES, registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
