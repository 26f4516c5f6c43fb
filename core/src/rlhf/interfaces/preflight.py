"""Methods of trainer and generator classes that a run and ``rlhf plan`` call before anything is loaded or started.

Every method has a default. A trainer or generator overrides those that it can answer better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.memory import (
    EngineMemory,
    ModelSize,
    PhaseMemory,
    SamplingWork,
    TrainerMemory,
    TrainerWork,
    whole_copy,
)
from rlhf.interfaces.model import LowRankAdapters, ModelSpec, Precision
from rlhf.types import ExpertLayers, Sampling


class Preflight:
    """What trainers and generators have in common."""

    memory_options: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that lower memory, those that cost the least speed first. ``rlhf plan`` tries them if a run does not
    fit."""


class TrainerPreflight(Preflight):
    """Class methods of trainers."""

    @classmethod
    def precision_on_processor(cls) -> Precision:
        """Meaning of ``dtype = "auto"`` on the CPU of this machine. A run calls this once and passes the result to
        every rank (``ModelSpec.on_processor``)."""
        return Precision(False, "fp32 on cpu: the trainer supports no other precision there")

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        """Refuse options that the constructor would refuse, with the constructor's own message, as far as this is known
        before anything starts and without loading a model.

        Args:
            spec: ``total_updates`` and ``rendezvous`` may not be known yet.
            device: ``cpu`` | ``cuda``, the kind of device of the ranks, if they run on this machine; None: the ranks'
                machines are not known.

        Raises CapabilityError or ConfigError.
        """

    @classmethod
    def experts(cls, config: Any, spec: ModelSpec) -> ExpertLayers | None:
        """The layers whose experts the trainer takes from records (:attr:`TrainerFacts.experts`), before anything is
        loaded; None: it does not. If not None, the generator has the capability ``experts``."""
        return None

    @classmethod
    def check_files(cls, spec: ModelSpec) -> None:
        """Refuse a model whose files the constructor would refuse, as far as this is known without reading weights.
        Called before a run starts anything, not by ``rlhf plan``. Raises ModelError."""

    @classmethod
    def memory(cls, config: Any, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str) -> TrainerMemory:
        """The memory that one rank of this role would need, for ``rlhf plan``. Nothing is loaded or started.

        The default is a whole fp32 copy of the model on every rank, with AdamW if the role is trained.

        Args:
            spec: ``world_size`` is the number of ranks; ``role.trained`` says whether there is an optimizer.
            size: of the role's model.
            work: what the role computes.
            device: ``cpu`` | ``cuda``, where the rank would run.
        """
        checkpointing = spec.gradient_checkpointing
        return whole_copy(size, work, trained=spec.role.trained, checkpointing=checkpointing, ranks=spec.world_size)

    @classmethod
    def adapters(cls, config: Any, spec: ModelSpec) -> LowRankAdapters | None:
        """The adapters that the role would train; None: it trains none."""
        return None


class GeneratorPreflight(Preflight):
    """Class methods of generators."""

    temperatures: ClassVar[tuple[float, float]] = (0.0, math.inf)
    """Lowest and highest temperature at which it samples exactly, besides 0 (greedy)."""

    @classmethod
    def refuses_adapters(cls, config: Any, spec: GeneratorSpec) -> str:
        """Why an engine cannot compute with its base and separate ``spec.adapters``, as far as this is known before the
        start; empty: it can."""
        return f"generator {cls.__name__} takes whole weights only"

    @classmethod
    def approximation(cls, config: Any) -> str:
        """The option, with its value, that makes the engine compute more coarsely than the precision of its weights, so
        that samples come from another distribution than the policy's; empty: none."""
        return ""

    @classmethod
    def parallel_sizes(cls, config: Any) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel): one engine has as many workers as their product."""
        return 1, 1

    @classmethod
    def memory(
        cls, config: Any, dtype: str, size: ModelSize, work: SamplingWork, device: str, device_bytes: int | None
    ) -> EngineMemory:
        """The memory that one device of an engine would need, for ``rlhf plan``. Nothing is started.

        The default samples from the trainer's own module: there is no copy of the weights, and the cache, 2 bytes per
        element, grows to hold every sample at its longest.

        Args:
            dtype: ``auto`` | ``fp32`` | ``bf16``, the policy's.
            size: of the policy's model.
            work: what one engine samples.
            device: ``cpu`` | ``cuda``, where the engine would run.
            device_bytes: memory of one device, or of the host on a CPU; None: unknown.
        """
        token = size.cache_bytes(2.0)
        cache = PhaseMemory({"cache": int(work.samples * work.longest * token)})
        return EngineMemory(
            {"rest": PhaseMemory({}), "asleep": PhaseMemory({}), "generate": cache}, copy=False, cache_token=token
        )

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        """Refuse options that the constructor or a request of the run would refuse, as far as this is known before
        anything starts and without the model. The default checks ``samplings``.

        Args:
            spec: its ``decode`` and end tokens are not known yet.
            samplings: the run's sampling parameters, of training and of evaluation.
            device: as in :meth:`TrainerPreflight.check`, for the engines.

        Raises CapabilityError, ConfigError, or PluginError if the engine is not installed.
        """
        for sampling in samplings:
            cls.check_sampling(config, sampling)

    @classmethod
    def check_sampling(cls, config: Any, sampling: Sampling) -> None:
        """Refuse sampling parameters with which the generator cannot sample exactly. A run calls this for each request
        of a rollout, so that a refused request fails only its own sample. The default checks the range of each value.

        Raises ConfigError or CapabilityError.
        """
        from rlhf.requests import check_sampling

        check_sampling(sampling, cls.temperatures)
