"""Speed and memory of a run's steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rlhf.interfaces import GENERATOR, Place
from rlhf.process_memory import peak_memory

from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.precompute import PrecomputedRole
from rlhf_runtime.models.roles import Role
from rlhf_runtime.output.metrics import TIME, step_seconds
from rlhf_runtime.samples.rollouts import Sampler

DRIVER = "driver"
PEAK_TFLOPS: Mapping[str, float] = {
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "NVIDIA A10": 125,
}
"""{name of a GPU: TFLOP/s of dense bf16 matrix products}, from NVIDIA's data sheets."""


class Throughput:
    """Measures the steps of a run.

    Args:
        places: devices of each role and of the generator.
        peak_tflops: peak TFLOP/s of one device of the policy; None: looked up if the GPU is known.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        places: Mapping[str, Place],
        sampler: Sampler | None,
        peak_tflops: float | None,
    ) -> None:
        self._policy, self._places, self._sampler = roles["policy"], places, sampler
        self._groups = {name: role.group for name, role in roles.items() if _has_processes(role)}
        facts = self._policy.facts
        self._peak = peak_tflops or (PEAK_TFLOPS.get(facts.device_name) if facts.dtype == "bf16" else None)
        self._sampled = 0
        self._paused = 0.0
        self._last_call: float | None = None
        """The clock at the last call of :meth:`of_step`, if samples continue between and during steps."""

    def of_step(self, times: Metrics) -> Metrics:
        """The speed metrics for the time since the last call.

        Args:
            times: the times in the step's line.
        """
        return {**self._rates(times), **self._memory()}

    def _rates(self, times: Metrics) -> Metrics:
        metrics, work = Metrics(), self._policy.take_work()
        seconds = step_seconds(times)
        if work.tokens:
            rate, devices = work.tokens / seconds, self._devices("policy")
            metrics |= {"throughput/trained": rate, "throughput/trained_per_device": rate / devices}
            if self._peak is not None and work.operations:
                # Only the time of the updates counts here, while the rates above are of the whole step.
                metrics["throughput/mfu"] = work.operations / work.seconds / (self._peak * 1e12 * devices)
        if self._sampler is not None:
            tokens, pause = self._sampler.rollouts.sampled_tokens, self._sampler.weights.pause_seconds
            if self._sampler.rollouts.pool is not None:  # samples continue during evaluations and between steps
                clock = time.perf_counter()
                seconds = times[f"{TIME}step"] if self._last_call is None else clock - self._last_call
                self._last_call = clock
            if tokens > self._sampled:
                rate = (tokens - self._sampled) / seconds
                metrics |= {"throughput/sampled": rate}
                metrics |= {"throughput/sampled_per_device": rate / self._devices(GENERATOR)}
            if pause > self._paused:
                metrics[f"{TIME}sync_pause"] = pause - self._paused
            self._sampled, self._paused = tokens, pause
        return metrics

    def _devices(self, name: str) -> int:
        place = self._places.get(name, Place())
        return place.ranks * place.devices

    def _memory(self) -> Metrics:
        peaks: dict[str, Sequence[Mapping[str, int]]] = {DRIVER: [peak_memory()]}
        peaks |= {name: group.peak_memory() for name, group in self._groups.items()}
        if self._sampler is not None:
            peaks[GENERATOR] = self._sampler.weights.peak_memory
        metrics = Metrics()
        for name, processes in peaks.items():
            for kind in ("process", "cuda"):
                values = [peak[kind] for peak in processes if kind in peak]
                if values:
                    metrics[f"memory/{name}/{kind}"] = max(values) / 2**30
        return metrics


def _has_processes(role: Role) -> bool:
    """Whether a model is loaded for this role. False if the role is another role's model without adapters."""
    return not isinstance(role, PrecomputedRole) and role.view == "live"
