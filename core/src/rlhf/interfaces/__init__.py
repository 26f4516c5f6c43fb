"""One file per kind: its abstract class, its declarations, and a complete example in the docstring.

A file is imported when one of its names is first used, so a command starts without the interfaces of a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.interfaces.adapter import Adapter
    from rlhf.interfaces.advantage import Advantage
    from rlhf.interfaces.algorithm import Algorithm, Slot
    from rlhf.interfaces.backend import Backend
    from rlhf.interfaces.check import Check, Examination, Finding, ProbeAnswer
    from rlhf.interfaces.command import Command
    from rlhf.interfaces.component import Ability, Component, ComponentConfig, abilities
    from rlhf.interfaces.curriculum import Curriculum, FinishedGroup, RowSource, TrainingRows
    from rlhf.interfaces.env import Env
    from rlhf.interfaces.extension import Extension
    from rlhf.interfaces.generator import (
        AnswersRequests,
        Generator,
        Proof,
        Sleeps,
        TakesModule,
        TakesTensors,
    )
    from rlhf.interfaces.generator_spec import GeneratorSpec
    from rlhf.interfaces.launcher import GENERATOR, EnginePool, Launcher, Place, WorkerGroup
    from rlhf.interfaces.loss import Loss
    from rlhf.interfaces.model import LowRankAdapters, ModelSpec, Precision, TrainerFacts
    from rlhf.interfaces.observer import Observer, RunControl, RunInfo
    from rlhf.interfaces.reward import ReadRole, Reward, RewardContext, ScoreWithRole
    from rlhf.interfaces.rollout import Rollout, RolloutContext
    from rlhf.interfaces.tokens import Tokens
    from rlhf.interfaces.trainer import (
        ApplyResult,
        HasViews,
        LendsHead,
        Offloads,
        RestartsOptimizer,
        SendsWeights,
        SharesModule,
        Sums,
        TakesWeights,
        Trainer,
    )

    KINDS: dict[str, type[Component | Extension]]
    """kind K = entry-point group ``rlhf.K`` = hook ``rlhf_register_K`` = ``interfaces/K.py``."""

_FILES = {
    "adapter": "Adapter",
    "advantage": "Advantage",
    "algorithm": "Algorithm Slot",
    "backend": "Backend",
    "check": "Check Examination Finding ProbeAnswer",
    "command": "Command",
    "component": "Ability Component ComponentConfig abilities",
    "curriculum": "Curriculum FinishedGroup RowSource TrainingRows",
    "env": "Env",
    "extension": "Extension",
    "generator": "AnswersRequests Generator Proof Sleeps TakesModule TakesTensors",
    "generator_spec": "GeneratorSpec",
    "launcher": "GENERATOR EnginePool Launcher Place WorkerGroup",
    "loss": "Loss",
    "model": "LowRankAdapters ModelSpec Precision TrainerFacts",
    "observer": "Observer RunControl RunInfo",
    "reward": "ReadRole Reward RewardContext ScoreWithRole",
    "rollout": "Rollout RolloutContext",
    "tokens": "Tokens",
    "trainer": (
        "ApplyResult HasViews LendsHead Offloads RestartsOptimizer SendsWeights SharesModule Sums TakesWeights Trainer"
    ),
}
"""{file: its exported names}. A file is named after its kind."""
_NO_KIND = ("component", "extension", "generator_spec", "model", "tokens")
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def interface(kind: str) -> "type[Component | Extension]":
    """The abstract class of one kind, such as ``Reward`` of ``reward``; the files of other kinds are not imported."""
    cls: type[Component | Extension] = getattr(import_module(f"{__name__}.{kind}"), kind.capitalize())
    return cls


def __getattr__(name: str) -> Any:
    if name == "KINDS":
        value: Any = {file: interface(file) for file in _FILES if file not in _NO_KIND}
    elif name in _FILE_OF:
        value = getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


__all__ = [
    "GENERATOR", "KINDS", "Ability", "Adapter", "Advantage", "Algorithm", "AnswersRequests", "ApplyResult", "Backend",
    "Check", "Command", "Component", "ComponentConfig", "Curriculum", "EnginePool", "Env", "Examination", "Extension",
    "Finding", "FinishedGroup", "Generator", "GeneratorSpec", "HasViews", "Launcher", "LendsHead", "Loss",
    "LowRankAdapters", "ModelSpec", "Observer", "Offloads", "Place", "Precision", "ProbeAnswer", "Proof", "ReadRole",
    "RestartsOptimizer", "Reward", "RewardContext", "Rollout", "RolloutContext", "RowSource", "RunControl", "RunInfo",
    "ScoreWithRole", "SendsWeights", "SharesModule", "Sleeps", "Slot", "Sums", "TakesModule", "TakesTensors",
    "TakesWeights", "Tokens", "Trainer", "TrainerFacts", "TrainingRows", "WorkerGroup", "abilities", "interface",
]  # fmt: skip
