"""Options of the generator ``vllm``: the run file's ``[generator]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig


class SpeculativeConfig(ComponentConfig):
    """Speculative decoding: tokens are proposed, and one forward pass of the model accepts or replaces them. Samples
    keep their distribution (Leviathan et al., ICML 2023, arXiv:2211.17192)."""

    method: Literal["ngram"]
    """``ngram`` proposes the tokens that followed an earlier occurrence of the newest tokens, in prompt or answer."""
    tokens: int = Field(4, ge=1, le=128)
    """Largest number of tokens proposed at once. Each costs the computation of a token, accepted or not."""
    prompt_lookup_max: int = Field(4, ge=1)
    """Largest number of newest tokens to look up."""
    prompt_lookup_min: int = Field(2, ge=1)
    """Smallest number of them that must match; otherwise nothing is proposed."""

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} is more than prompt_lookup_max = "
                f"{self.prompt_lookup_max}: lower it, or raise prompt_lookup_max"
            )
        return self


class VllmGeneratorConfig(ComponentConfig):
    """Options that the platform does not support are refused when the engine is built (``platforms.py``)."""

    tensor_parallel: int = Field(1, ge=1)
    """Number of workers that each layer is split over. On a CPU each takes an equal share of the process's cores."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of groups of workers that the layers are distributed over; GPUs only."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Fraction of each GPU's memory that the engine uses in total. Absent: 0.9, or if roles of the run are on the GPU,
    0.9 of the memory that they leave free when the engine starts. GPUs only."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """GiB of key-value cache per worker; absent: 1 on a CPU, what ``memory_share`` leaves on a GPU."""
    eager: bool | None = None
    """``true``: run the model uncompiled; ``false``: compiled, on a GPU with CUDA graphs; absent: uncompiled on a CPU,
    compiled on a GPU."""
    prefix_caching: bool = True
    """Compute keys and values of a prefix shared by prompts only once, in whole blocks (of 128 tokens on a CPU)."""
    max_sequences: int = Field(256, ge=1)
    """Number of samples generated at the same time. Further requests wait, in order."""
    max_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward pass; absent: 8192, or the longest sequence if that is longer. If prompts are not split
    (``chunked_prefill``), it must be at least the longest sequence."""
    chunked_prefill: bool | None = None
    """Split a prompt that does not fit into the rest of a forward pass over several passes, so that unfinished samples
    continue meanwhile. Absent: vLLM's choice for the model on a GPU, ``false`` on a CPU, which cannot."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of weights and arithmetic; ``auto``: the policy's."""
    sleep_level: Literal[1, 2] = 1
    """What ``sleep`` does with the weights. 1: moves them to host memory. 2: discards them until the next sync, which
    saves two copies per step. 2 requires that all tensors of the model are parameters or buffers (README). GPUs
    only."""
    quantization: Literal["fp8_per_channel"] | None = None
    """vLLM quantises the linear layers, except the head, at every load of weights. The weights are sent as usual.
    ``fp8_per_channel``: E4M3 with a scale per output, inputs with a scale per token. Samples come from another
    distribution than the policy's, so the algorithm needs an importance correction."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; absent: one token of a sample per forward pass."""

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of an unfinished sample in one forward pass."""
        return 1 if self.speculative is None else 1 + self.speculative.tokens

    @model_validator(mode="after")
    def _consistent(self) -> VllmGeneratorConfig:
        if self.memory_share is not None and self.kv_cache_gib is not None:
            raise ValueError(
                "memory_share and kv_cache_gib both set the size of the cache: give one of them (kv_cache_gib is exact)"
            )
        rows, limit = self.max_sequences * self.step_tokens, self.max_batched_tokens
        if limit is not None and limit < rows:
            added = "a token" if self.step_tokens == 1 else f"{self.step_tokens} tokens (1 + speculative.tokens)"
            raise ValueError(
                f"max_batched_tokens = {limit} must be at least {rows}, because each of max_sequences = "
                f"{self.max_sequences} samples adds {added} per step: raise it, or lower max_sequences"
            )
        return self
