"""Base of the algorithms that sample, score and follow the policy gradient: subclasses name parts and defaults.

A subclass is a few lines: a name, its source, ``slots`` (which advantage, which loss, with which defaults) and,
where its defaults differ, a Config. Whatever is needed follows from the config: no reference without KL, no critic
without values, no second forward pass that the mathematics does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from rlhf.errors import ConfigError
from rlhf.interfaces.advantage import Advantage
from rlhf.interfaces.algorithm import Algorithm, Slot
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.ops import pipeline, shaping
from rlhf.ops.batch import Batch
from rlhf.ops.heads import VALUES
from rlhf.ops.kl import Estimator, KLController
from rlhf.ops.kl_loss import WithKL
from rlhf.ops.trajectories import assemble
from rlhf.types import Annotation, Group, Head, Needs, OnlineShape, RoleSpec, Snapshot, Update

BOOTSTRAP = Head("bootstrap", VALUES.fn, over="last_action", at="at")
"""The critic's value after the last action token."""


class KLConfig(ComponentConfig):
    """KL to the reference model: in the reward, as a loss term, or off."""

    coef: float = Field(default=0.0, ge=0)
    """beta; 0 = off, and no reference model is loaded."""
    where: Literal["reward", "loss"] = "reward"
    """Subtracted from the token rewards, or added to the loss."""
    estimator: Estimator | None = None
    """k1, k2 or k3; where absent k1 in the reward and k3 in the loss. k1 in the loss is refused."""
    before_baseline: bool = False
    """In the reward only: the summed KL lowers the trajectory's reward before the baseline sees it."""
    target: float | None = Field(default=None, gt=0)
    """Adaptive coefficient: the wanted mean KL per token, in nats."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Adaptive coefficient: trajectories over which it reacts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator 'k1' as a loss has zero expected gradient (the mean of the score function), so it would "
                "regularise nothing; use 'k2' or 'k3', or where = 'reward'"
            )
        if self.where == "loss" and self.before_baseline:
            raise ValueError("before_baseline concerns KL in the reward; with where = 'loss' it would do nothing")
        if self.target is not None and self.coef == 0:
            raise ValueError("target needs coef > 0 to start from: an adaptive coefficient only multiplies")
        if self.horizon != 10_000 and self.target is None:
            raise ValueError("horizon is of the adaptive coefficient; set target too, or leave it out")
        return self

    @property
    def chosen(self) -> Estimator:
        return self.estimator or ("k1" if self.where == "reward" else "k3")


class ShapingConfig(ComponentConfig):
    """Reward shaping by length, in the policy's own tokens, in this order."""

    overlong_buffer: int | None = Field(default=None, gt=0)
    """Soft overlong punishment over the last so many tokens before ``overlong_max``."""
    overlong_factor: float = Field(default=1.0, ge=0)
    """Its size at and beyond ``overlong_max``."""
    overlong_max: int | None = Field(default=None, gt=0)
    """Longest answer: what ``sampling.max_new_tokens`` allows (over all turns)."""
    stop_properly: float | None = Field(default=None, le=1)
    """Truncated samples: 0 .. 1 multiplies their reward, below 0 replaces it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.overlong_buffer is None) != (self.overlong_max is None):
            raise ValueError("overlong_buffer and overlong_max belong together: give both or none")
        if self.overlong_factor != 1 and self.overlong_buffer is None:
            raise ValueError("overlong_factor does nothing without overlong_buffer and overlong_max")
        if self.overlong_buffer and self.overlong_max and self.overlong_buffer > self.overlong_max:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is above overlong_max {self.overlong_max}")
        return self

    def shapers(self) -> list[pipeline.Shaper]:
        shapers: list[pipeline.Shaper] = []
        if self.overlong_buffer is not None and self.overlong_max is not None:
            shapers.append(self._overlong)
        if self.stop_properly is not None:
            shapers.append(self._stop_properly)
        return shapers

    def _overlong(self, r_U: Tensor, batch: Batch) -> Tensor:
        assert self.overlong_buffer is not None
        assert self.overlong_max is not None
        own_U = batch.unit["own_tokens"]
        return r_U + shaping.overlong_penalty(own_U, self.overlong_max, self.overlong_buffer, self.overlong_factor)

    def _stop_properly(self, r_U: Tensor, batch: Batch) -> Tensor:
        assert self.stop_properly is not None
        return shaping.stop_properly(r_U, batch.unit["truncated"], self.stop_properly)


class PolicyGradientConfig(ComponentConfig):
    """Options that every policy-gradient algorithm shares; those of its parts stand in their own sections."""

    preset: Literal["openrlhf"] | None = None
    """``openrlhf``: its defaults where ours differ (reward_clip -10 .. 10; KL 0.01 in the reward by k1). Fields that
    are given explicitly win."""
    kl: KLConfig = KLConfig()
    """KL to the reference model."""
    shaping: ShapingConfig = ShapingConfig()
    """Rewards changed by the length of the answer."""
    reward_clip: tuple[float, float] | None = None
    """[low, high] for each trajectory's reward after the baseline; off where absent."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    critic_warmup: int = Field(default=0, ge=0)
    """The first N steps train the critic only: exactly N."""
    bootstrap_truncated: bool = False
    """Samples cut off by their token budget end in the critic's value instead of 0."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("preset") != "openrlhf":
            return data
        return {"reward_clip": (-10.0, 10.0), "kl": {"coef": 0.01, "estimator": "k1"}, **data}

    @field_validator("reward_clip", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # TOML has no tuples

    @field_validator("reward_clip")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError(f"reward_clip needs [low, high] with low < high, got {list(value)}")
        return value


class PolicyGradient(Algorithm):
    """Rollouts -> credit -> one policy update and, where the advantage reads values, one critic update a step.

    Parts: ``advantage`` and ``loss``; ``value_loss`` trains the critic and is not used without one. KL as a loss
    works with every loss: it is a term beside it (:class:`rlhf.ops.kl_loss.WithKL`), whose coefficient travels with
    each update. Complete example::

        class Mine(PolicyGradient):
            name = "mine"
            slots = PolicyGradient.slots | {
                "advantage": Slot("advantage", "centered"),
                "loss": Slot("loss", "clipped", {"clip_high": 0.28}),
            }
    """

    Config = PolicyGradientConfig
    slots: ClassVar[dict[str, Slot]] = {"value_loss": Slot("loss", "value")}

    def __init__(self, config: ComponentConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, parts)
        kl: KLConfig = self.config.kl
        self.kl = KLController(kl.coef, kl.target, kl.horizon)
        self.advantage: Advantage = self.parts["advantage"]
        if kl.coef > 0 and kl.where == "loss":
            self.parts["loss"] = WithKL(self.parts["loss"], kl.chosen)
        self.loss: Loss = self.parts["loss"]
        self._samples = 0
        self._measured_kl: float | None = None
        if not self.advantage.needs_values:
            for field in ("critic_warmup", "bootstrap_truncated"):
                if getattr(self.config, field):
                    raise ConfigError(
                        f"algorithm.{field} = {getattr(self.config, field)} needs a critic, which the advantage "
                        f"{self.advantage.name!r} does not use; leave it out, or choose an advantage that reads values"
                    )

    # ------------------------------------------------------------------------------------ declared

    def needs(self) -> Needs:
        roles = [RoleSpec("policy", trained=True)]
        if self._uses_kl:
            roles.append(RoleSpec("reference", like="policy"))
        if self.advantage.needs_values:
            roles.append(RoleSpec("critic", head="scalar", trained=True, like="policy"))
        corrected = self.loss.generator_logprobs
        features = ("correction",) if corrected else ()
        return Needs(tuple(roles), self.advantage.group_min, corrected, features)

    def misfits(self, shape: OnlineShape) -> list[str]:
        problems, shaping = super().misfits(shape), self.config.shaping
        if self.config.minibatches > shape.trajectories:
            problems.append(
                f"algorithm.minibatches = {self.config.minibatches}: a batch has {shape.trajectories} samples, so some "
                f"would be empty. Set --algorithm.minibatches {shape.trajectories} or less."
            )
        if shaping.overlong_max is not None and shaping.overlong_max - shaping.overlong_buffer >= shape.most_tokens:
            problems.append(
                f"algorithm.shaping: punishment begins above overlong_max - overlong_buffer = "
                f"{shaping.overlong_max - shaping.overlong_buffer} tokens, and no answer has more than "
                f"{shape.most_tokens}: it would do nothing. Set --algorithm.shaping.overlong_max {shape.most_tokens}."
            )
        return problems

    def annotations(self, step: int) -> list[Annotation]:
        wanted = []
        if self._stores_old:
            wanted.append(Annotation("policy", "logprobs", "old_logprobs"))
        if self._uses_kl:
            wanted.append(Annotation("reference", "logprobs", "ref_logprobs"))
        if self.advantage.needs_values:
            wanted.append(Annotation("critic", "values", "old_values"))
            if self.config.bootstrap_truncated:
                wanted.append(Annotation("critic", BOOTSTRAP, "bootstrap"))
        return wanted

    def updates(self, step: int) -> list[Update | Snapshot]:
        """``step`` counts from 0: with ``critic_warmup`` N the policy stands still in the steps 0 .. N-1. A batch of
        fewer samples than minibatches (filtered, or failed) has a minibatch for each."""
        minibatches = min(self.config.minibatches, self._samples or self.config.minibatches)
        passes = {"epochs": self.config.epochs, "minibatches": minibatches}
        updates: list[Update | Snapshot] = []
        if self.advantage.needs_values:
            updates.append(Update("critic", "value_loss", **passes))
        if step >= self.config.critic_warmup:
            coef = {"kl": self.kl.beta} if self._kl_in("loss") else {}
            live = {"old_logprobs": "logprobs"} if self._reads_old and not self._stores_old else {}
            updates.append(Update("policy", "loss", **passes, coef=coef, live=live))
        return updates

    # ---------------------------------------------------------------------------------------- work

    def assemble(self, examples: Sequence[Group]) -> Batch | None:  # type: ignore[override]
        return assemble(examples, self.step_sources)

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The published order; override it to reorder the stages of :mod:`rlhf.ops.pipeline`."""
        kl: KLConfig = self.config.kl
        penalty = pipeline.KLPenalty(self.kl.beta, kl.chosen, kl.before_baseline) if self._kl_in("reward") else None
        batch, metrics = pipeline.credit(
            batch,
            self.advantage,
            kl=penalty,
            shapers=self.config.shaping.shapers(),
            reward_clip=self.config.reward_clip,
        )
        self._samples, self._measured_kl = batch.units, metrics.get("kl/reference")
        return batch, metrics

    def finish(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the KL coefficient to the KL of this step and its number of trajectories."""
        samples, measured, used = self._samples, self._measured_kl, self.kl.beta
        self._samples, self._measured_kl = 0, None
        if not self._uses_kl:
            return {}
        kl = measured if self._kl_in("reward") else metrics.get("policy/kl_reference")
        # The policy's first steps may be the critic's alone: what it did not cause must not move the coefficient.
        if kl is not None and step >= self.config.critic_warmup:  # None: its only update was skipped
            self.kl.update(kl, samples)
        return {"kl/coef": used}

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict()} if self.kl.adaptive else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.kl.adaptive:
            self.kl.load_state_dict(state["kl"])
        else:
            super().load_state_dict(state)

    # ------------------------------------------------------------------------------------- derived

    @property
    def _uses_kl(self) -> bool:
        return bool(self.config.kl.coef > 0)

    def _kl_in(self, where: str) -> bool:
        return self._uses_kl and self.config.kl.where == where

    @property
    def _reads_old(self) -> bool:
        return "old_logprobs" in self.loss.columns()

    @property
    def _stores_old(self) -> bool:
        """Whether ``old_logprobs`` must be computed before the update. With exactly one optimizer step the policy at
        its start is the policy now, so the live log-probs are taken, detached."""
        one_step = self.config.epochs * self.config.minibatches == 1
        return self._kl_in("reward") or (self._reads_old and not one_step)
