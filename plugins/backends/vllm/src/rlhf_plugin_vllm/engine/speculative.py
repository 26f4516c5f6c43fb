"""Settings of an engine with speculative decoding, and the checks that refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.errors import CapabilityError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import Sampling

from rlhf_plugin_vllm.config import SpeculativeConfig, VllmGeneratorConfig


def check_speculative_sampling(config: VllmGeneratorConfig, sampling: Sampling) -> None:
    """Raises CapabilityError if speculative decoding would change the distribution of samples."""
    _refuse(config, {"sampling.min_p: vLLM would accept tokens that it excludes": sampling.min_p > 0})


def check_speculative(config: VllmGeneratorConfig, spec: GeneratorSpec) -> None:
    """Raises CapabilityError if no test proves that the distribution of samples stays the same."""
    refused = {
        "generator.pipeline_parallel > 1, with which the samples are not tested": config.pipeline_parallel > 1,
        "images in the rows, with which the samples are not tested": spec.max_images > 0,
        "trainer.router_replay, with which the records of experts are not tested": spec.experts is not None,
    }
    _refuse(config, refused)


def _refuse(config: VllmGeneratorConfig, refused: Mapping[str, bool]) -> None:
    for reason, applies in refused.items():
        if applies and config.speculative is not None:
            raise CapabilityError(
                f"the generator 'vllm' with generator.speculative does not support {reason}. Remove one of the two."
            )


def speculative_arguments(config: SpeculativeConfig, sequences: int) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs``.

    The schedule by the number of samples is constant here. It keeps vLLM from filling up the first step of a sample
    whose prompt is cached except for one token. Otherwise a seed would draw different tokens. On a CPU the distribution
    would also be wrong, because vLLM's kernel reads the probability of token -1.
    """
    return {
        "speculative_config": {
            "method": config.method,
            "num_speculative_tokens": config.tokens,
            "num_speculative_tokens_per_batch_size": [(1, sequences, config.tokens)],
            "prompt_lookup_max": config.prompt_lookup_max,
            "prompt_lookup_min": config.prompt_lookup_min,
        },
        "per_request_spec_decode_metrics": "summary",
    }


def start_numba() -> None:
    """Start numba's threads now. This sets the number of OpenMP's threads, which torch shares. vLLM would start them at
    the first proposal, where nothing restores the number."""
    from vllm.v1.spec_decode.ngram_proposer import get_num_threads

    get_num_threads()
