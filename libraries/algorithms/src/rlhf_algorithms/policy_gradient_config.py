"""Options of the policy-gradient algorithms: KL, shaping by length, clipping, passes over the batch.

:func:`check_overrides` refuses an option that has no effect because a subclass replaces the method that applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from rlhf.errors import ConfigError
from rlhf.interfaces.component import ComponentConfig
from rlhf.ops.batch import Batch
from torch import Tensor

from rlhf_algorithms.kl import Estimator
from rlhf_algorithms.snapshots import require_every


class KLConfig(ComponentConfig):
    """KL to the reference model: in the reward, as a loss term, or off."""

    coef: float = Field(default=0.0, ge=0)
    """beta; 0 = off, and no reference model is loaded."""
    where: Literal["reward", "loss"] = "reward"
    """Subtracted from the token rewards, or added to the loss."""
    estimator: Estimator | None = None
    """k1, k2 or k3. Default: k1 in the reward, k3 in the loss. k1 in the loss is refused."""
    before_baseline: bool = False
    """In the reward only: subtract the summed KL from the trajectory's reward before the baseline is computed."""
    target: float | None = Field(default=None, gt=0)
    """Adaptive coefficient: the target mean KL per token, in nats."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Adaptive coefficient: number of trajectories over which it adapts."""
    unbiased: bool = False
    """In the loss only, with k3: multiply each token's estimate by its ratio to the policy at the start of the update,
    so that the expected gradient is that of the KL (DeepSeek-V3.2, arXiv:2512.02556, section 3.1)."""
    snapshot_every: int | None = Field(default=None, ge=1)
    """Number of steps after which the reference becomes a copy of the policy. Default: never."""
    snapshot_share: float = Field(default=1.0, gt=0, le=1)
    """With ``snapshot_every``: the policy's share in the new reference; the rest is the old reference's."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator 'k1' as a loss has zero expected gradient (the mean of the score function), so it would "
                "regularise nothing; use 'k2' or 'k3', or where = 'reward'"
            )
        if self.where == "loss" and self.before_baseline:
            raise ValueError("before_baseline applies to KL in the reward; it has no effect with where = 'loss'")
        idle = [n for n in ("where", "estimator", "before_baseline") if getattr(self, n) != _default(KLConfig, n)]
        if self.coef == 0 and idle:
            raise ValueError(f"coef = 0 turns the KL off: set coef, or remove {' and '.join(idle)}")
        if self.target is not None and self.coef == 0:
            raise ValueError(
                "target needs coef > 0 as the initial value: the adaptive coefficient is only ever multiplied"
            )
        if self.horizon != 10_000 and self.target is None:
            raise ValueError("horizon applies only to the adaptive coefficient; set target too, or remove horizon")
        if self.unbiased and (self.where != "loss" or self.chosen != "k3"):
            raise ValueError(
                f"unbiased = true applies only to k3 as a loss, got estimator {self.chosen!r} with where = "
                f"{self.where!r}; set where = 'loss' and remove estimator, or remove unbiased"
            )
        if self.snapshot_every is not None and self.coef == 0:
            raise ValueError("snapshot_every copies the policy to the reference, but coef = 0 uses no reference")
        require_every(self.snapshot_every, self.snapshot_share)
        return self

    @property
    def chosen(self) -> Estimator:
        return self.estimator or ("k1" if self.where == "reward" else "k3")


class EntropyConfig(ComponentConfig):
    """Adaptive entropy bonus (Skywork-OR1, arXiv:2505.22312): its coefficient starts at ``loss.entropy_coef``."""

    target: float | None = Field(default=None, gt=0)
    """Mean entropy of a token, in nats. If a step's entropy is at or below it, the next step has the bonus and the
    coefficient rises by ``step``. Otherwise the next step has no bonus and the coefficient falls. Default: the
    coefficient is constant."""
    step: float = Field(default=0.005, gt=0)
    """Change of the coefficient per step of the run."""
    high: float = Field(default=1.0, gt=0)
    """The largest coefficient; the smallest is 0."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is None and (self.step, self.high) != (0.005, 1.0):
            raise ValueError("step and high apply only to the adaptive coefficient; set target too, or remove them")
        return self


class TeacherModelConfig(ComponentConfig):
    """The weights of a teacher, and the text that only the teacher reads."""

    weights: Literal["role", "base", "live", "averaged"] = "role"
    """``role``: a separate model (``roles.teacher.model``). Or weights of the policy: ``base``, those before the run;
    ``live``, those of the step; ``averaged``, those before the run, moved towards the policy's after each step.
    ``base`` and ``averaged`` hold a second copy of the model, except ``base`` if the policy trains adapters."""
    share: float = Field(default=0.05, gt=0, le=1)
    """``averaged``: the policy's share in the new weights, rounded to the precision in which the role holds them."""
    context: str | None = None
    """Column whose text only the teacher reads: a solution, a demonstration, feedback (OPSD, arXiv:2601.18734; SDFT,
    2601.19897; SDPO, 2601.20802). A sample learns nothing from the teacher if its row has none, or if it is then longer
    than ``data.max_tokens``."""
    template: str = "{context}"
    """The text that presents ``context``, appended to the prompt after a blank line."""

    @model_validator(mode="after")
    def _of_one_model(self) -> Self:
        if self.weights == "live" and self.context is None:
            raise ValueError(
                "weights = 'live' needs context: without it, the teacher would be the policy itself and teach nothing. "
                "Set context to a column that only the teacher reads, or choose other weights"
            )
        if self.weights != "averaged" and self.share != _default(TeacherModelConfig, "share"):
            raise ValueError(
                f"share = {self.share:g} applies only to weights = 'averaged', got {self.weights!r}; remove share"
            )
        if self.context is None and self.template != _default(TeacherModelConfig, "template"):
            raise ValueError("template formats the context, which is not set; set context, or remove template")
        if "{context}" not in self.template:
            raise ValueError(
                f"template must contain {{context}}, the placeholder for the column's text, got {self.template!r}"
            )
        return self


class TeacherConfig(TeacherModelConfig):
    """Distillation as credit: a teacher with the policy's tokenizer scores each sampled token. It is a role of the run,
    or a reward that teaches (reward ``teacher``: a server)."""

    coef: float = Field(default=0.0, ge=0)
    """c: c (log-prob of the teacher - log-prob of the policy) is added to each token's advantage, after normalisation
    (arXiv:2601.02780). 0 = off, and no teacher is loaded."""
    task: bool = True
    """False: only the teacher gives credit, and the run needs no reward."""
    roles: Mapping[str, str] = {}
    """A role for each data source, ``{SOURCE: ROLE}`` (``roles.ROLE.model``), instead of ``teacher`` for all. Samples
    of other sources get no credit from a teacher."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.task and self.coef == 0:
            raise ValueError("task = false takes all credit from the teacher, which coef = 0 turns off; set coef")
        idle = [n for n in ("weights", "roles", "context") if getattr(self, n) != _default(TeacherConfig, n)]
        if self.coef == 0 and idle:
            raise ValueError(f"coef = 0 turns the teacher off: set coef, or remove {' and '.join(idle)}")
        if self.weights != "role" and self.roles:
            raise ValueError(f"roles are separate models, but weights = {self.weights!r} is set; remove one of the two")
        if reserved := sorted({"policy", "critic", "reference"} & set(self.roles.values())):
            raise ValueError(
                f"roles: {', '.join(reserved)} already has a task in the run; choose another name for the role"
            )
        return self


def _default(cls: type[ComponentConfig], name: str) -> Any:
    return cls.model_fields[name].default


class ShapingConfig(ComponentConfig):
    """Reward shaping by length, in the policy's own tokens, in this order."""

    overlong_buffer: int | None = Field(default=None, gt=0)
    """Number of tokens before ``overlong_max`` over which the soft overlong punishment grows."""
    overlong_factor: float = Field(default=1.0, ge=0)
    """Size of the punishment at and beyond ``overlong_max``."""
    overlong_max: int | None = Field(default=None, gt=0)
    """Largest number of tokens of an answer, as ``sampling.max_new_tokens`` allows (over all turns)."""
    stop_properly: float | None = Field(default=None, le=1)
    """Truncated samples: 0 .. 1 multiplies their reward, below 0 replaces it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.overlong_buffer is None) != (self.overlong_max is None):
            raise ValueError("overlong_buffer and overlong_max must be set together: set both or neither")
        if self.overlong_factor != 1 and self.overlong_buffer is None:
            raise ValueError("overlong_factor has no effect without overlong_buffer and overlong_max")
        if self.overlong_buffer and self.overlong_max and self.overlong_buffer > self.overlong_max:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is above overlong_max {self.overlong_max}")
        return self

    @property
    def is_set(self) -> bool:
        """Whether an option is set."""
        return self != ShapingConfig()

    def shaped(self, r_U: Tensor, batch: Batch) -> Tensor:
        """[U]: the rewards after the penalty of overlong answers and then ``stop_properly``, as far as they are set."""
        if self.overlong_buffer is not None and self.overlong_max is not None:
            own_U = batch.unit["own_tokens"]
            r_U = r_U + overlong_penalty(own_U, self.overlong_max, self.overlong_buffer, self.overlong_factor)
        if self.stop_properly is not None:
            r_U = stop_properly(r_U, batch.unit["truncated"], self.stop_properly)
        return r_U


def overlong_penalty(own_tokens_U: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), <= 0, float64 [U].

    e = min(len - (max_length - buffer), buffer);  penalty = -factor e / buffer where e > 0: a ramp over the last
    ``buffer`` tokens before ``max_length``, then constant.
    """
    excess = (own_tokens_U.double() - (max_length - buffer)).clamp(min=0, max=buffer)
    return -factor * excess / buffer


def stop_properly(r_U: Tensor, truncated_U: Tensor, coef: float) -> Tensor:
    """Truncated samples: r * coef for 0 <= coef <= 1; r = coef for coef < 0 (ProRL, arXiv:2505.24864).

    Note that coef in 0 .. 1 makes a *negative* reward milder; for rewards below 0 give a negative coef.
    """
    shaped_U = r_U * coef if coef >= 0 else torch.full_like(r_U, coef)
    return torch.where(truncated_U, shaped_U, r_U)


class PolicyGradientConfig(ComponentConfig):
    """Options of every policy-gradient algorithm. Options of its parts are in their own sections."""

    preset: Literal["openrlhf"] | None = None
    """``openrlhf``: OpenRLHF's defaults that differ from ours (reward_clip -10 .. 10; KL 0.01 in the reward by k1).
    Fields that are set explicitly take precedence."""
    kl: KLConfig = KLConfig()
    """KL to the reference model."""
    entropy: EntropyConfig = EntropyConfig()
    """An entropy bonus whose coefficient follows the entropy."""
    teacher: TeacherConfig = TeacherConfig()
    """A teacher whose log-probs of the sampled tokens are credit."""
    echo_coef: float | None = Field(default=None, gt=0)
    """Coefficient of the cross entropy on observations (replies of the environment or tools), which is added to the
    loss (ECHO, arXiv:2605.24517; published with 0.05, also used with 0.1). Absent: these tokens are context only."""
    shaping: ShapingConfig = ShapingConfig()
    """Rewards changed by the length of the answer."""
    reward_clip: tuple[float, float] | None = None
    """[low, high] for each trajectory's reward after the baseline. Default: off."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    critic_warmup: int = Field(default=0, ge=0)
    """Number of initial steps that train only the critic."""
    bootstrap_truncated: bool = False
    """Bootstrap samples that were cut off by their token budget with the critic's value instead of 0."""
    normalise_values: bool = False
    """Train the critic on returns minus their running mean, divided by their running standard deviation, so that its
    learning rate and its clip do not depend on the scale of rewards (Yu et al. 2022, arXiv:2103.01955)."""
    mask_truncated: bool = False
    """Samples cut off by their token budget are not trained on: overlong filtering (Yu et al. 2025, arXiv:2503.14476,
    section 3.4). Their rewards still enter their group's baseline and the metrics."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("preset") != "openrlhf":
            return data
        kl_options = data.get("kl", {})
        # k1 in the reward is the default
        kl = {"coef": 0.01, **kl_options} if isinstance(kl_options, dict) else kl_options
        return {"reward_clip": (-10.0, 10.0), **data, "kl": kl}

    @field_validator("reward_clip")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError(f"reward_clip needs [low, high] with low < high, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _without_task(self) -> Self:
        options = {
            "shaping": self.shaping.is_set,
            "reward_clip": self.reward_clip is not None,
            "kl.where = 'reward'": self.kl.coef > 0 and self.kl.where == "reward",
        }
        if not self.teacher.task and (names := [name for name, is_set in options.items() if is_set]):
            raise ValueError(
                "teacher.task = false does not use the reward; remove the options that change it: "
                f"{' and '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _truncated(self) -> Self:
        if self.mask_truncated and self.bootstrap_truncated:
            raise ValueError(
                "bootstrap_truncated applies to samples that mask_truncated excludes; remove one of the two"
            )
        return self


IS_SET: Mapping[str, Callable[[PolicyGradientConfig], bool]] = {
    "kl.coef": lambda c: c.kl.coef > 0 and c.kl.where == "reward",
    "kl.target": lambda c: c.kl.target is not None,
    "kl.snapshot_every": lambda c: c.kl.snapshot_every is not None,
    "entropy.target": lambda c: c.entropy.target is not None,
    "shaping": lambda c: c.shaping.is_set,
    "reward_clip": lambda c: c.reward_clip is not None,
    "bootstrap_truncated": lambda c: c.bootstrap_truncated,
    "normalise_values": lambda c: c.normalise_values,
    "mask_truncated": lambda c: c.mask_truncated,
    "echo_coef": lambda c: c.echo_coef is not None,
    "epochs": lambda c: c.epochs > 1,
    "minibatches": lambda c: c.minibatches > 1,
    "critic_warmup": lambda c: c.critic_warmup > 0,
    "teacher.coef": lambda c: c.teacher.coef > 0,
    "teacher.weights": lambda c: c.teacher.weights == "averaged",
}
"""{option: whether a config sets it}. KL in the loss is not listed, because it is a term of the loss."""
_STAGES = ("kl.coef", "shaping", "reward_clip", "bootstrap_truncated")
APPLIED_BY: Mapping[str, tuple[str, ...]] = {
    "credit": (*_STAGES, "normalise_values", "mask_truncated", "kl.target", "teacher.coef"),
    "stages": _STAGES,
    "updates": ("epochs", "minibatches", "critic_warmup", "kl.snapshot_every", "entropy.target", "teacher.weights"),
    "assemble": ("echo_coef",),
    "finish": ("kl.target", "entropy.target"),
}
"""{method of PolicyGradient: options that it applies}."""


def check_overrides(cls: type[Any], base: type[Any], config: PolicyGradientConfig) -> None:
    """Raise ConfigError if an option is set whose method in ``base`` is overridden, unless the override calls
    ``super()`` or its class names the option in ``applies``."""
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        if unknown := sorted(set(vars(owner).get("applies", ())) - IS_SET.keys()):
            raise ConfigError(
                f"{owner.__name__}.applies names unknown options {unknown}; allowed are {', '.join(IS_SET)}"
            )
    for method, options in APPLIED_BY.items():
        replaced = _replaced(cls, base, method)
        if replaced is None:
            continue
        owner, applied_options = replaced
        lost = [option for option in options if IS_SET[option](config) and option not in applied_options]
        if lost:
            raise ConfigError(
                f"algorithm.{', algorithm.'.join(lost)} would have no effect: {owner.__name__}.{method}() of algorithm "
                f"{cls.name!r} replaces the method that applies {'it' if len(lost) == 1 else 'them'}. Remove the "
                f"option. If the override applies it, its author writes {owner.__name__}.applies = {tuple(lost)}."
            )


def replaces(cls: type[Any], base: type[Any], method: str) -> bool:
    """Whether a class overrides the base's method without calling it."""
    return _replaced(cls, base, method) is not None


def _replaced(cls: type[Any], base: type[Any], method: str) -> tuple[type[Any], tuple[str, ...]] | None:
    """The class whose override replaces the base's method, and the options that it and its subclasses declare to apply;
    None if the method of ``base`` is used."""
    applied_options: tuple[str, ...] = ()
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        applied_options += tuple(vars(owner).get("applies", ()))
        override = vars(owner).get(method)
        if override is not None and not _calls_base(override, method):
            return owner, applied_options
    return None


def _calls_base(function: Any, method: str) -> bool:
    """Whether the code contains ``super`` and the name of the method, as in ``super().credit(batch)``."""
    names = function.__code__.co_names if isinstance(function, FunctionType) else ()
    return "super" in names and method in names
