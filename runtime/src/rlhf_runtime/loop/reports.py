"""Reports of a run's steps: a line in ``metrics.jsonl``, calls of observers, output on the terminal. They include
speed, memory and values of sampled tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rlhf.errors import RlhfError, boundary
from rlhf.interfaces import GENERATOR, Observer, Place
from rlhf.ops.batch import Batch
from rlhf.process_memory import peak_memory
from rlhf.types import Annotation, RunOptions
from rlhf.types.arrays import float_array

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.checkpoint.saved_groups import TellPrompt, TokenValues, write_groups
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.precompute import PrecomputedRole
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.sample_metrics import failure_metrics, info_metrics, source_metrics
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline
from rlhf_runtime.output.metrics import TIME
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.samples.sampling import Sampler
from rlhf_runtime.samples.stream import ReadyBatch

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

    def of_step(self, times: Metrics) -> Metrics:
        """The speed metrics for the time since the last call.

        Args:
            times: the times in the step's line.
        """
        return {**self._rates(times), **self._memory()}

    def _rates(self, times: Metrics) -> Metrics:
        metrics, work = Metrics(), self._policy.take_work()
        seconds = times[f"{TIME}step"] - times.get(f"{TIME}evaluate", 0.0)
        if work.tokens:
            rate, devices = work.tokens / seconds, self._devices("policy")
            metrics |= {"throughput/trained": rate, "throughput/trained_per_device": rate / devices}
            if self._peak is not None and work.operations:
                # Only the time of the updates counts here, while the rates above are of the whole step.
                metrics["throughput/mfu"] = work.operations / work.seconds / (self._peak * 1e12 * devices)
        if self._sampler is not None:
            tokens, pause = self._sampler.rollouts.sampled_tokens, self._sampler.weights.pause_seconds
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


TOKEN_OUTPUTS = ("logprobs", "values")
"""Outputs of roles with one number per token."""
ADVANTAGES = "advantages"


def token_values(batch: Batch, annotations: Sequence[Annotation]) -> TokenValues:
    """{(number of its group in the batch, sample): {``ROLE/OUTPUT`` or ``advantages``: a value for each sampled token,
    in order}}. If all values are equal, they are stored as one value.

    Args:
        batch: the batch after credit.
        annotations: the annotations in it.

    Samples that the batch contains in a changed form are left out. If the units of the batch are not samples, all are
    left out.
    """
    columns = {f"{a.role}/{a.output}": a.column for a in annotations if a.output in TOKEN_OUTPUTS and a.view == "live"}
    columns = {name: column for name, column in {**columns, ADVANTAGES: ADVANTAGES}.items() if column in batch.tok}
    if not columns or not {"group", "sample", "own_tokens"} <= {*batch.unit}:
        return {}
    mask_N = batch.tok["loss_mask"]
    count_U = torch.zeros(batch.units, dtype=torch.int64).index_add_(0, batch.unit_N, mask_N.long())
    ends, own_tokens = count_U.cumsum(0).tolist(), batch.unit["own_tokens"].tolist()
    values = {name: batch.tok[column][mask_N].float().numpy() for name, column in columns.items()}
    result: dict[tuple[int, int], dict[str, Any]] = {}
    for unit, index in enumerate(zip(batch.unit["group"].tolist(), batch.unit["sample"].tolist(), strict=True)):
        first, last = ends[unit] - own_tokens[unit], ends[unit]
        if own_tokens[unit] and own_tokens[unit] == int(count_U[unit]):
            parts: dict[str, Any] = {name: values_A[first:last] for name, values_A in values.items()}
            result[index] = {n: float_array(v[:1] if (v == v[0]).all() else v, n) for n, v in parts.items()}
    return result


TRL_NAMES: Mapping[str, str] = {
    "step": "global_step",
    "epoch": "epoch",
    "time/step": "step_time",
    "policy/loss": "loss",
    "policy/grad_norm": "grad_norm",
    "policy/lr": "learning_rate",
    "policy/aux_loss": "aux_loss",
    "policy/entropy": "entropy",
    "policy/token_accuracy": "mean_token_accuracy",
    "policy/kl_reference": "kl",
    "policy/kl": "kl",
    "policy/clip_fraction": "clip_ratio/region_mean",
    "policy/correction_weight": "sampling/importance_sampling_ratio/mean",
    "kl/reference": "kl",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/groups_all_equal": "frac_reward_zero_std",
    "reward/SOURCE/mean": "rewards/SOURCE/mean",
    "reward/SOURCE/std": "rewards/SOURCE/std",
    "length/mean": "completions/mean_length",
    "length/max": "completions/max_length",
    "length/truncated": "completions/clipped_ratio",
    "policy/accuracy": "rewards/accuracies",
    "policy/reward_margin": "rewards/margins",
    "policy/chosen_reward": "rewards/chosen",
    "policy/rejected_reward": "rewards/rejected",
    "policy/desirable_reward": "rewards/chosen",
    "policy/undesirable_reward": "rewards/rejected",
    "policy/chosen_logprobs": "logps/chosen",
    "policy/rejected_logprobs": "logps/rejected",
    "policy/desirable_logprobs": "logps/chosen",
    "policy/undesirable_logprobs": "logps/rejected",
}
"""{name here: name in TRL 1.16, without the prefix ``train/`` or ``eval/`` that transformers' integrations add}."""
TRL_NAMES_OF_SCORES: Mapping[str, str] = {
    "policy/accuracy": "accuracy",
    "policy/margin": "margin",
    "policy/score_mean": "mean_reward",
}
"""The same for reward models, whose metrics have :data:`SCORES`."""
SCORES = "policy/score_mean"
_SOURCE = re.compile(r"reward/(?P<source>.+)/(?P<part>mean|std)")


def trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """A line of metrics with the names of TRL, for dashboards with earlier runs. A name without a counterpart in TRL is
    kept. Two names that map to the same TRL name never occur in one line."""
    scores = SCORES in metrics or SCORES.replace("policy/", "eval/") in metrics
    table = {**TRL_NAMES, **TRL_NAMES_OF_SCORES} if scores else TRL_NAMES
    return {_trl_name(name, table): value for name, value in metrics.items()}


def _trl_name(name: str, table: Mapping[str, str]) -> str:
    if name in table:
        return f"train/{table[name]}"
    if (match := _SOURCE.fullmatch(name)) is not None:
        return f"train/rewards/{match['source']}/{match['part']}"
    other = name.removeprefix("eval/")
    return f"eval/{table[f'policy/{other}']}" if other != name and f"policy/{other}" in table else name


class Reports:
    """Writes one line per step and calls the observers.

    Args:
        store: writes the error message if the disk is full.
        timeline: shows the phases of steps.
        measure: returns the throughput and memory of a step, from its times.
        trl: observers that get the metric names of TRL.
        optional: observers whose failure after the start does not end the run.
    """

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        observers: Mapping[str, Observer],
        store: CheckpointStore,
        timeline: Timeline = NO_TIMELINE,
        measure: Callable[[Metrics], Metrics] = lambda times: {},
        trl: Collection[str] = (),
        optional: Collection[str] = (),
    ) -> None:
        self._directory, self._progress, self._observers, self._store = directory, progress, dict(observers), store
        self.timeline, self._measure, self._trl, self._optional = timeline, measure, trl, optional
        self._started = time.perf_counter()
        self._times: dict[str, float] = {}
        self._covered: set[str] = set()
        self._said_equal = False
        self._token_values: TokenValues = {}

    def begin_step(self, step: int) -> None:
        """Start measuring the times of the next line."""
        self.timeline.step(step)
        self._started = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Wall time of a phase, reported as ``time/<phase>`` (seconds) in the next line."""
        start = time.perf_counter()
        try:
            with self.timeline.phase(phase), self._progress.phase(phase):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._times[phase] = self._times.get(phase, 0.0) + seconds
            self._progress.spend(phase, seconds)

    def record(self, steps_done: int, metrics: Metrics) -> None:
        """Add the measurements of the step to ``metrics`` and write its line. ``steps_done`` includes this step."""
        if self._times:
            times = {f"{TIME}{phase}": seconds for phase, seconds in self._times.items()}
            times[f"{TIME}step"] = time.perf_counter() - self._started
            metrics |= times | self._measure(times)
            self._times = {}
        with self._store.writing(self._directory.metrics.path):
            self._directory.metrics.append(steps_done, metrics)

    def tell(self, steps_done: int, metrics: Metrics) -> None:
        """Send the line that :meth:`record` wrote to observers and the terminal."""
        of_trl = trl_names({"step": steps_done, **metrics})  # dashboards of TRL plot over its step
        for name in list(self._observers):
            self._call(name, "step_finished", steps_done, of_trl if name in self._trl else metrics)
        self._progress.step(steps_done, metrics)

    def observe(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of every observer. Raises RlhfError naming the observer and the event."""
        for name in list(self._observers):
            self._call(name, event, *arguments)

    def end(self, status: str) -> None:
        """Call ``run_ended`` of every observer, even if another one raises RlhfError. The last error is raised."""
        with ExitStack() as calls:
            for name in reversed(list(self._observers)):
                calls.callback(self._call, name, "run_ended", status)

    def _call(self, name: str, event: str, *arguments: Any) -> None:
        try:
            with boundary(RlhfError, f"observer {name!r}, {event}"):
                getattr(self._observers[name], event)(*arguments)
        except RlhfError as error:
            if name not in self._optional or event == "run_started":
                raise
            del self._observers[name]
            self._progress.note(f"{error}. The run continues without this observer until it is resumed")

    def credited(self, batch: Batch, annotations: Sequence[Annotation]) -> None:
        """Keep the values computed for each token until the samples of the step are written."""
        self._token_values = token_values(batch, annotations)

    def samples(
        self,
        steps_done: int,
        ready: ReadyBatch,
        save: bool,
        show: bool,
        prompt_of: TellPrompt,
        options: RunOptions,
    ) -> Metrics:
        """Write the groups that a step trained on, show them on the terminal, and pass them to observers.

        Args:
            prompt_of: returns the prompt of a trajectory, which is written with its answer.
            options: the rewards of the run.

        Returns the counts of the step's prompts and the means of its samples.
        """
        if save:
            with self._store.writing(path := self._directory.rollouts(steps_done)):
                path.parent.mkdir(exist_ok=True)
                write_groups(path, ready.groups, prompt_of, self._token_values)
        self._token_values = {}
        self._progress.last_sample(steps_done, ready.groups)
        if show:
            self._progress.samples(steps_done, ready.groups)
        self.observe("rollouts_finished", steps_done, ready.groups)
        counts = {f"stream/{name}": value for name, value in ready.counts.items()}
        counts |= {"stream/version": float(ready.version)} | ready.curriculum_metrics
        counts |= failure_metrics(ready.groups, ready.counts.get("failed_samples", 0.0), options.step_sources)
        return counts | source_metrics(ready.groups, options.teachers) | info_metrics(ready.groups)

    def name_uncovered(self, roles: Mapping[str, Role], metrics: Metrics) -> None:
        """After a trained role's first update, report once the parameters that got no gradient or did not change. If
        all advantages are 0, no parameter can get a gradient; that is reported instead."""
        for name, role in roles.items():
            if name in self._covered:
                continue
            report: Mapping[str, Sequence[str]] = role.every("coverage")[0]
            if not report:  # not updated yet
                continue
            if metrics.get(f"{name}/grad_norm") == 0 and metrics.get("advantage/abs_max") == 0:
                if not self._said_equal:
                    self._progress.note(
                        f"{name}: every advantage of this step is 0, so the gradient is 0 and nothing is learnt. All "
                        "rewards that are compared with each other are equal."
                    )
                self._said_equal = True
                continue
            self._covered.add(name)
            for finding, every in report.items():
                parameters = [p for p in every if ".lora_A." not in p]  # multiplied by B, which is 0 at the start
                if parameters:
                    examples = ", ".join(parameters[:5]) + (", ..." if len(parameters) > 5 else "")
                    finding = finding.replace("_", " ")
                    self._progress.note(
                        f"{name}: {len(parameters)} parameters {finding} after the first update: {examples}"
                    )
