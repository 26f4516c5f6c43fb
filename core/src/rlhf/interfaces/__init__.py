"""One file a kind: its abstract class, its declarations, and a complete example in the docstring."""

from rlhf.interfaces.adapter import Adapter
from rlhf.interfaces.advantage import Advantage
from rlhf.interfaces.algorithm import Algorithm, Slot
from rlhf.interfaces.backend import Backend
from rlhf.interfaces.check import Check, Examination, Finding, ProbeAnswer
from rlhf.interfaces.command import Command
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.env import Env
from rlhf.interfaces.generator import Generator, GeneratorSpec, Proof
from rlhf.interfaces.launcher import GENERATOR, Launcher, Place, WorkerGroup
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.observer import Observer, RunControl, RunInfo
from rlhf.interfaces.reward import ReadRole, Reward, RewardContext, ScoreWithRole
from rlhf.interfaces.rollout import Rollout, RolloutContext
from rlhf.interfaces.tokens import Tokens
from rlhf.interfaces.trainer import ApplyResult, ModelSpec, Precision, Sums, Trainer, TrainerFacts

KINDS: dict[str, type[Component]] = {
    "algorithm": Algorithm,
    "advantage": Advantage,
    "loss": Loss,
    "rollout": Rollout,
    "reward": Reward,
    "env": Env,
    "trainer": Trainer,
    "generator": Generator,
    "launcher": Launcher,
    "observer": Observer,
    "adapter": Adapter,
    "backend": Backend,
    "command": Command,
    "check": Check,
}
"""kind K = entry-point group ``rlhf.K`` = hook ``rlhf_register_K`` = ``interfaces/K.py``."""

__all__ = [
    "GENERATOR", "KINDS", "Adapter", "Advantage", "Algorithm", "ApplyResult", "Backend", "Check", "Command",
    "Component", "ComponentConfig", "Env", "Examination", "Finding", "Generator", "GeneratorSpec", "Launcher", "Loss",
    "ModelSpec", "Observer", "Place", "Precision", "ProbeAnswer", "Proof", "ReadRole", "Reward", "RewardContext",
    "Rollout", "RolloutContext", "RunControl", "RunInfo", "ScoreWithRole", "Slot", "Sums", "Tokens", "Trainer",
    "TrainerFacts", "WorkerGroup",
]  # fmt: skip
