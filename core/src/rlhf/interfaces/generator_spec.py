"""The input of a generator besides its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.interfaces.model import LowRankAdapters
from rlhf.types import ExpertLayers


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """The policy's model and limits, resolved from the run file's ``[policy]`` and ``[data]``. The spec, including
    ``decode``, is pickled if engines run in other processes."""

    eos_token_ids: tuple[int, ...]
    """Every token that ends a text."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text, for stop strings and ``Turn.text``."""
    path: str = ""
    """Folder or hub name of the policy's model, for generators that hold a copy of it."""
    dtype: str = "auto"
    """``auto`` | ``fp32`` | ``bf16``, the policy's."""
    trust_remote_code: bool = False
    max_tokens: int = 2048
    """Longest sequence, prompt and answer together."""
    seed: int = 0
    sync_timeout: float = 600.0
    """Largest number of seconds for taking one bucket of weights."""
    in_flight: Literal["continue", "drain", "restart"] = "continue"
    """What a load of weights does to unfinished requests of ``EnginePool.answer``. ``continue``: their next tokens are
    sampled with the new weights. ``drain``: the load waits until they are finished. ``restart``: they are sampled again
    from their first token."""
    keys: Literal["recompute", "keep"] = "recompute"
    """For ``in_flight = "continue"``. ``recompute``: keys and values of the tokens so far are recomputed with the new
    weights. ``keep`` (capability ``keep:keys``): they stay as the old weights computed them. No other request reads
    them."""
    max_images: int = 0
    """Largest number of images in a request (capability ``images``)."""
    shares_devices: bool = False
    """Roles of the run use the engine's devices. They are loaded before the engine starts. The engine may be put to
    sleep while they compute (:class:`Sleeps`)."""
    adapters: LowRankAdapters | None = None
    """The engine computes with the base and these separate adapters. A load contains the tensors of the base, those of
    the adapters in PEFT's names, or both (:data:`rlhf.interfaces.model.PARTS`). A base stays until the next one
    arrives. None: loads contain whole weights."""
    experts: ExpertLayers | None = None
    """Turns must have :attr:`~rlhf.types.Turn.experts` of these layers (capability ``experts``). None: no records."""
    storage: str = "fp32"
    """``fp32`` | ``bf16``, of the policy's weights in its trainer (:attr:`ModelSpec.storage`)."""
