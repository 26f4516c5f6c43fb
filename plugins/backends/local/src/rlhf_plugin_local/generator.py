"""The generator ``transformers``: samples from the trainer's own module, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import Generator, GeneratorSpec, HasViews, TakesModule
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import Proof
from rlhf.interfaces.memory import FP32, EngineMemory, ModelSize, PhaseMemory, SamplingWork
from rlhf.requests import check_request, check_sampling
from rlhf.types import GenerationRequest, Sampling, Turn
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.arithmetic import computes_bf16
from rlhf_modeling.images.memory import prompts_working
from rlhf_modeling.router_replay import Routers
from rlhf_modeling.skeleton import known_skeleton
from torch import nn

from rlhf_plugin_local.decoder import Decoder, check_model, require_agreement
from rlhf_plugin_local.sampling_loop import SamplingLoop

YIELD_STEPS = 16
"""Finished samples are yielded at least once in this many steps. The module is restored for each yield."""


class TransformersGenerator(TakesModule, Generator):
    """Continuous sampling without a copy of the weights and without a sync.

    Each distinct prompt is prefilled once, packed without padding. Its keys and values are copied to the slots of its
    samples. Finished rows leave the batch, and further requests are admitted in index order as slots become free. The
    composition of the batch depends only on counters, so a rerun is bit-equal. The other rows of a batch change
    log-probs by floating-point rounding (1e-6 in fp32).

    ``Turn.ids`` ends with the end token, or with the token that completed a stop string, and ``Turn.text`` is exactly
    ``decode(ids)``: a stop string stays in the text, with all characters of its last token. Log-probs and temperature 0
    are defined in :mod:`rlhf_plugin_local.token_sampling`. A greedy turn reports ``temperature`` 1, because its
    log-probs are computed at temperature 1. ``ignore_eos`` ignores the model's end tokens; ``stop_token_ids`` still end
    a turn.

    Requests for the policy's base (:attr:`GenerationRequest.base`) are sampled in separate batches, after all other
    requests of a call.
    """

    name = "transformers"
    source = "own; Philox uniforms: Salmon et al., SC 2011"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"logprobs", "seeds", "top_p", "top_k", "min_p", "stop", "images", "base", "experts"}
    )

    class Config(ComponentConfig):
        dtype: Literal["auto", "fp32", "bf16"] = "auto"
        """Arithmetic of sampling; ``auto``: that of the trainer. Weights are shared with it in any case."""
        max_batch: int = Field(256, ge=1)
        """Rows sampled at once. Further requests wait, in order."""
        max_cache_tokens: int | None = Field(None, ge=1)
        """Limit of rows x positions of the key-value cache. A request is admitted only if there is room for everything
        that it may sample. None: no limit except ``max_batch`` rows. The cache grows as needed in both cases."""
        prefill_tokens: int = Field(8192, ge=1)
        """Prompt tokens per prefill pass. A longer prompt has its own pass."""

    memory_options: ClassVar[tuple[Mapping[str, Any], ...]] = ({"max_batch": 64}, {"max_batch": 16})

    @classmethod
    def memory(
        cls, config: Any, dtype: str, size: ModelSize, work: SamplingWork, device: str, device_bytes: int | None
    ) -> EngineMemory:
        """The largest cache, plus the larger of two temporaries. One is the prompts' forward pass (temporaries of a
        layer, also of the vision tower, and the prompts' keys and values). The other is a decoding step (four fp32
        matrices of rows x vocabulary, or a second copy of one layer's keys)."""
        bf16 = computes_bf16(config.dtype if config.dtype != "auto" else dtype, device)
        rows = min(config.max_batch, work.samples)
        tokens = rows * work.longest
        if config.max_cache_tokens is not None:
            tokens = min(tokens, config.max_cache_tokens)
        token = size.cache_bytes(2.0 if bf16 else 4.0)
        cache = int(tokens * token)
        prompts = min(config.prefill_tokens, work.prompts * work.longest_prompt)
        prompt_pass = prompts_working(size, work, Arithmetic(prompts, work.longest, device=device, bf16=bf16))
        step = max(4 * rows * size.vocabulary * FP32, cache // (2 * len(size.layers)))
        generate = {"cache": cache, "working": max(prompt_pass + int(prompts * token), step)}
        arithmetic = {"cache": f"{rows} samples x {work.longest} tokens x {token / 1024:.4g} KiB"}
        phases = {"rest": PhaseMemory({}), "asleep": PhaseMemory({}), "generate": PhaseMemory(generate)}
        return EngineMemory(phases, copy=False, cache_token=token, arithmetic=arithmetic)

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        super().check(config, spec, samplings, device)
        if config.dtype == "fp32" and spec.storage != "fp32":
            raise ConfigError(
                f"generator.dtype is 'fp32' but the trainer's weights are {spec.storage}; allowed: 'auto' or 'bf16', "
                "or fp32 weights."
            )
        for sampling in samplings if config.max_cache_tokens is not None else ():
            if sampling.max_new_tokens >= config.max_cache_tokens:
                raise ConfigError(
                    f"a prompt and max_new_tokens = {sampling.max_new_tokens} do not fit into "
                    f"generator.max_cache_tokens = {config.max_cache_tokens}. Raise it, or lower max_new_tokens."
                )
        if not spec.path:
            return
        if (module := known_skeleton(spec.path, spec.trust_remote_code)) is None:
            return
        limit, field = check_model(module)
        for sampling in samplings:
            if limit is not None and sampling.max_new_tokens >= limit:
                raise ConfigError(
                    f"a prompt and max_new_tokens = {sampling.max_new_tokens} do not fit into the positions of "
                    f"{spec.path}, {field} = {limit}. Lower max_new_tokens."
                )

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config = self.Config() if config is None else config
        self._eos = tuple(spec.eos_token_ids)
        self._decode = spec.decode
        self._experts = spec.experts
        self._decoder: Decoder | None = None
        self._source: Any = None
        """The trainer."""
        self.work: Counter[str] = Counter()
        """Counters since the start: ``prefill_tokens``, ``steps``, ``row_steps`` (forward passes x rows),
        ``sampled_tokens``. Also ``peak_cache_tokens``, the largest allocated rows x positions."""

    def load(self, source: Any, version: int) -> Proof:
        """Keep a reference to a trainer (its ``module``) or to a causal language model. Nothing is copied."""
        module = source if isinstance(source, nn.Module) else getattr(source, "module", None)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"the generator 'transformers' samples from a module in this process, but {type(source).__name__} does "
                "not provide a module. Use a trainer that is a SharesModule (torch), or another generator."
            )
        if self._decoder is None or self._decoder.module is not module:
            self._decoder = Decoder(module)
            require_agreement(module, getattr(source, "loaded_model", None))
        self._decoder.read_images(getattr(getattr(source, "loaded_model", None), "images", None))
        self._decoder.dtype = self._autocast(source, module)
        self._decoder.routers = self._routers(source)
        self._source, self.version = source, version
        return Proof(version)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """See :class:`~rlhf.interfaces.Generator`. The module is restored whenever a sample is yielded, and after
        the end, ``close()`` or an error. Requests are checked when this is called, before anything is computed."""
        decoder = self._ready(requests)
        return self._run(dict(enumerate(requests)), decoder, self.version)

    def stream(self, request: GenerationRequest) -> Iterator[Sequence[int]]:
        """Yield token by token. The module is restored for each token."""
        decoder = self._ready([request])
        loop = SamplingLoop({0: request}, decoder, self.config, self._eos, self._decode, self.version, self.work)
        count = 0
        while not loop.done:
            with self._weights(request.base), decoder.borrowed():
                turns = loop.advance(1)
            ids = list(turns[0][1].ids) if turns else loop.rows.sampled_ids(0)
            yield ids[count:]
            count = len(ids)

    def _ready(self, requests: Sequence[GenerationRequest]) -> Decoder:
        """Check the requests, and that there are weights."""
        if self._decoder is None:
            raise ModelError("the generator has no weights yet; call load(trainer, version) before generate().")
        for i, request in enumerate(requests):
            self._check(i, request, self._decoder)
        return self._decoder

    def _run(
        self, requests: dict[int, GenerationRequest], decoder: Decoder, version: int
    ) -> Iterator[tuple[int, Turn]]:
        for base in (False, True):
            batch = {n: request for n, request in requests.items() if request.base == base}
            loop = SamplingLoop(batch, decoder, self.config, self._eos, self._decode, version, self.work)
            while not loop.done:
                if self.version != version or self._decoder is not decoder:
                    raise ModelError(
                        f"weights changed from version {version} to {self.version} while samples were being drawn; "
                        "exhaust or close generate() before load()."
                    )
                with self._weights(base), decoder.borrowed():
                    finished = loop.advance(YIELD_STEPS)
                yield from finished

    @contextmanager
    def _weights(self, base: bool) -> Iterator[None]:
        """Context in which the module computes with the policy's base, if ``base``."""
        if not base:
            yield
            return
        view = self._source.current_view
        self._source.use_view("base")
        try:
            yield
        finally:
            self._source.use_view(view)

    def _routers(self, source: Any) -> Routers | None:
        """The routers of the trainer, if experts are recorded."""
        if self._experts is None:
            return None
        routers: Routers | None = getattr(getattr(source, "loaded_model", None), "routers", None)
        layers = None if routers is None else routers.layers
        if layers != self._experts:
            raise ModelError(
                f"the generator 'transformers' must record {self._experts}, but the trainer replays {layers}. Set "
                "trainer.router_replay for the policy."
            )
        return routers

    def _autocast(self, source: Any, module: nn.Module) -> torch.dtype | None:
        weight_dtype = next(module.parameters()).dtype
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(self.config.dtype)
        if dtype is None:
            bf16 = getattr(getattr(source, "precision", None), "bf16", False)
            dtype = torch.bfloat16 if bf16 else weight_dtype
        plain = weight_dtype == torch.float32 or isinstance(source, nn.Module)  # a trainer's bf16 weights need autocast
        return None if dtype == weight_dtype and plain else dtype

    def _check(self, i: int, request: GenerationRequest, decoder: Decoder) -> None:
        check_sampling(request.sampling)
        check_request(i, request, decoder.vocabulary, isinstance(self._source, HasViews))
        if request.images:
            decoder.require_images(i)
        need = len(request.ids) + request.sampling.max_new_tokens
        positions, field = decoder.positions
        for limit, subject, cure in (
            (self.config.max_cache_tokens, "generator.max_cache_tokens is", "Raise it, or lower"),
            (positions, f"the model has {field} =", "Lower"),
        ):
            if limit is not None and need > limit:
                raise ConfigError(
                    f"request {i} may need {need} tokens (prompt {len(request.ids)} + max_new_tokens "
                    f"{request.sampling.max_new_tokens}) but {subject} {limit}. {cure} max_new_tokens or "
                    "shorten the prompt."
                )
