"""The generator ``vllm``: a vLLM engine in this process with its own copy of the weights, proven after every sync."""

from __future__ import annotations

import time
from array import array
from collections.abc import Generator as Steps
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from rlhf.errors import CapabilityError, ModelError, boundary
from rlhf.interfaces import GeneratorSpec
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.memory import EngineMemory, ModelSize, SamplingWork
from rlhf.types import GenerationRequest, Image, Sampling, Turn
from rlhf_engines.requests import check_fits

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.cpu_models import check_cpu_config, expert_count
from rlhf_plugin_vllm.engine.adapters import refusal
from rlhf_plugin_vllm.engine.arguments import prefill_tokens, text_config
from rlhf_plugin_vllm.engine.engine import Engine, engine_precision
from rlhf_plugin_vllm.engine.quantization import check_quantization
from rlhf_plugin_vllm.engine.speculative import check_speculative, check_speculative_sampling
from rlhf_plugin_vllm.memory import engine_memory
from rlhf_plugin_vllm.platforms import Platform, current_platform
from rlhf_plugin_vllm.platforms import check as check_platform
from rlhf_plugin_vllm.requests import (
    TEMPERATURES,
    VllmRequest,
    sampling_parameters,
    scoring_parameters,
)
from rlhf_plugin_vllm.versions import require
from rlhf_plugin_vllm.weight_loading import WeightLoading


class VllmGenerator(WeightLoading):
    """Continuous batching by vLLM in the calling process, without a server, with or without Ray.

    Requests and samples are tokens. The run's decoder converts them to text, and a stop string ends a turn with the
    token that completes it. Samples are yielded as they finish. Prompts with a common prefix share its keys and values.
    Every sample has its own seed. Log-probs are under the sampled distribution, after temperature and truncation.
    Temperature 0 is greedy, with log-probs at temperature 1.

    Weights are loaded through vLLM's layerwise reload. Each worker fingerprints the received bytes before they are
    packed. An incomplete load is an error, and nothing is sampled until a load is complete.
    """

    name = "vllm"
    temperatures = TEMPERATURES
    source = "vLLM: Kwon et al., SOSP 2023 (arXiv:2309.06180)"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"logprobs", "seeds", "keep:keys", "top_p", "top_k", "min_p", "stop", "images", "base", "experts"}
    )
    Config = VllmGeneratorConfig
    memory_options: ClassVar[tuple[Mapping[str, Any], ...]] = ({"max_sequences": 64}, {"eager": True})

    @classmethod
    def parallel_sizes(cls, config: Any) -> tuple[int, int]:
        return config.tensor_parallel, config.pipeline_parallel

    @classmethod
    def refuses_adapters(cls, config: Any, spec: GeneratorSpec) -> str:
        return refusal(config, spec, None)

    @classmethod
    def approximation(cls, config: Any) -> str:
        return "" if config.quantization is None else f"generator.quantization = {config.quantization!r}"

    @classmethod
    def memory(
        cls, config: Any, dtype: str, size: ModelSize, work: SamplingWork, device: str, device_bytes: int | None
    ) -> EngineMemory:
        return engine_memory(config, dtype, size, work, device, device_bytes)

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        super().check(config, spec, samplings, device)
        platform = current_platform() if device is not None else None
        _check_options(config, spec, device, platform)
        if platform is not None:
            check_platform(config, platform)
            prefill_tokens(config, spec, platform)
            if platform.cpu:
                check_cpu_config(spec.path, text_config(spec))
            else:
                engine_precision(config, spec, platform)

    @classmethod
    def check_sampling(cls, config: Any, sampling: Sampling) -> None:
        super().check_sampling(config, sampling)
        check_speculative_sampling(config, sampling)

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config: VllmGeneratorConfig = self.Config() if config is None else config  # type: ignore[assignment]
        self.spec = spec
        platform = current_platform()
        check_platform(self.config, platform)
        _check_options(self.config, spec, platform.device, platform)
        self._names = count()
        super().__init__(Engine(self.config, spec, platform), frees_memory=not platform.cpu and spec.shares_devices)
        self.longest = min(spec.max_tokens, self.engine.length)
        """Tokens of the longest sequence, prompt and completion together."""
        if platform.cpu and self.config.speculative is not None:
            self._call_workers("rlhf_prepare_drafts")

    # ------------------------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """See :class:`~rlhf.interfaces.Generator`. Requests are checked when this is called. Closing the iterator early
        drops unfinished requests."""
        self._ready("sample")
        for i, request in enumerate(requests):
            self._check(i, request)
        return self._exhaust(dict(enumerate(requests)))

    def _check(self, i: int, request: GenerationRequest) -> None:
        self.check_sampling(self.config, request.sampling)
        limits = self.engine.vocabulary, self.longest, self.engine.images
        check_fits(i, request, *limits, has_base=self.spec.adapters is not None)

    def _exhaust(self, requests: dict[int, GenerationRequest]) -> Steps[tuple[int, Turn], None, None]:
        self._ready("sample", is_exclusive=True)
        self._generating, left = True, len(requests)
        try:
            while left:
                turns = self.advance(requests)
                requests, left = {}, left - len(turns)
                yield from turns
        finally:
            self._generating = False
            self._drop(list(self._live))

    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        self._ready("sample")
        unwanted = set(dropped)
        self._drop([name for name, sample in self._live.items() if sample.position in unwanted])
        for i, request in requests.items():
            self._check(i, request)
            self._add(f"{next(self._names)}", i, request)
        end, turns = time.monotonic() + seconds, list[tuple[int, Turn]]()
        while self._live:
            turns += self._finished()
            if time.monotonic() >= end:
                break
        return turns

    def _add(self, name: str, position: int, request: GenerationRequest) -> None:
        salt = f"{self._loads}" if self.spec.keys == "keep" else None
        parameters = sampling_parameters(request, self.spec.eos_token_ids)
        self.engine.add(name, request.ids, parameters, salt, request.images, f"{self._loads}", request.base)
        self._live[name] = VllmRequest(position, request, self.spec.decode, self.version, self.spec.experts)

    def unfinished_tokens(self) -> int:
        return sum(self.engine.token_counts(self._unfinished()))

    def _drop(self, names: Sequence[str]) -> None:
        if self._engine is not None:
            self.engine.abort(names)
        for name in names:
            del self._live[name]

    def _restart(self, names: Sequence[str]) -> None:
        samples = [self._live[name] for name in names]
        self._drop(names)
        for sample in samples:
            self._add(f"{next(self._names)}", sample.position, sample.request)

    def _finished(self) -> list[tuple[int, Turn]]:
        """Run one step of the engine. Returns the turns that ended in it."""
        turns = []
        outputs, self._early_outputs = self._early_outputs, []
        for output in outputs or self._step():
            sample = self._live.get(output.request_id)
            ending = sample.take(output) if sample is not None else None
            if sample is None or ending is None:
                continue
            self._count_drafts(output)
            turn, early = ending
            if early:
                self.engine.abort([output.request_id])
            del self._live[output.request_id]
            turns.append((sample.position, turn))
        return turns

    def _count_drafts(self, output: Any) -> None:
        """Count the drafts of a sample. vLLM does not report them if a stop string ends the sample."""
        counts = output.outputs[0].spec_decode_metrics if self.config.speculative is not None else None
        if counts is not None:
            accepted = sum(tokens * steps for tokens, steps in enumerate(counts.histogram))
            self._drafts = self._drafts[0] + counts.num_draft_tokens, self._drafts[1] + accepted

    def _step(self) -> list[Any]:
        if not self.engine.busy:
            raise ModelError("vLLM stopped without answering all requests")
        with boundary(ModelError, "vLLM's engine"):
            return self.engine.step()

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        self._wake_parts()
        self._ready("score", is_exclusive=True)
        logprobs: dict[str, list[float]] = {}
        names = [f"{next(self._names)}" for _ in sequences]
        try:
            for name, ids, row_images in zip(names, sequences, images or [()] * len(names), strict=True):
                if len(ids) >= self.engine.length:
                    raise ModelError(
                        f"a sequence of {len(ids)} tokens cannot be scored; at most {self.engine.length - 1} can"
                    )
                self.engine.add(name, array("i", ids), scoring_parameters(), None, row_images, f"{self._loads}")
            while len(logprobs) < len(names):
                for output in self._step():
                    if output.request_id in self._live:  # an unfinished sample that got a token in the same step
                        self._early_outputs.append(output)
                    else:
                        logprobs[output.request_id] = list(output.prompt_logprobs.logprobs)
        finally:
            self.engine.abort([name for name in names if name not in logprobs])
        return [[logprobs[name] for name in names]]

    def _ready(self, action: str, is_exclusive: bool = False) -> None:
        self.engine.check_workers()
        reason = self._broken or ("it is asleep; call wake() first" if self._asleep else self._not_ready)
        if is_exclusive and not reason and (self._generating or (action == "sample" and self._live)):
            reason = "other samples are being generated; exhaust or close that generate() first"
        if reason:
            raise ModelError(f"the generator 'vllm' cannot {action}: {reason}")

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _check_options(
    config: VllmGeneratorConfig, spec: GeneratorSpec, device: str | None, platform: Platform | None
) -> None:
    _check_kept_keys(config, spec)
    _check_adapters(config, spec, device)
    _check_records(config, spec, platform)
    _check_speculative(config, spec, platform)
    if config.quantization is not None:
        check_quantization(config, spec, platform, expert_count(text_config(spec)))


def _check_kept_keys(config: VllmGeneratorConfig, spec: GeneratorSpec) -> None:
    """Raises CapabilityError if ``Turn.versions`` would be wrong. With several stages, batches are in transit while
    weights are loaded, and their tokens would count for the new weights. Without ``keep`` vLLM drops these batches and
    samples them again."""
    if config.pipeline_parallel > 1 and spec.keys == "keep":
        raise CapabilityError(
            f"the generator 'vllm' with pipeline_parallel = {config.pipeline_parallel} cannot say which weights "
            "sampled a token if keys are kept (sync.keys = 'keep'). Set sync.keys = 'recompute', or pipeline_parallel "
            "= 1 and a larger tensor_parallel."
        )


def _check_adapters(config: VllmGeneratorConfig, spec: GeneratorSpec, device: str | None) -> None:
    reason = refusal(config, spec, device) if spec.adapters is not None else ""
    if reason:
        raise CapabilityError(
            f"the generator 'vllm' cannot serve adapters beside their base: {reason}. Set sync.adapters = 'merged'."
        )


def _check_records(config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform | None) -> None:
    """Raises CapabilityError if vLLM does not report the experts that ``spec`` requests."""
    if spec.experts is None:
        return
    options = {
        "prefix_caching = false": not config.prefix_caching,
        "pipeline_parallel > 1": config.pipeline_parallel > 1,
    }
    for option, is_set in options.items():
        if is_set:
            raise CapabilityError(
                f"the generator 'vllm' with {option} does not report the experts of tokens, which "
                "trainer.router_replay needs. Remove one of the two."
            )
    if platform is not None:
        require(
            platform.distribution, "trainer.router_replay", "may report wrong experts for tokens of a cached prefix"
        )


def _check_speculative(config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform | None) -> None:
    if config.speculative is None:
        return
    check_speculative(config, spec)
    if platform is not None:
        require(platform.distribution, "generator.speculative", "samples with it in a way that is not tested")
