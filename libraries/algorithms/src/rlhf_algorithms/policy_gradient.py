"""Base class of the policy-gradient algorithms. Subclasses name parts and defaults.

A subclass has a few lines: a name, its source, ``slots`` (advantage and loss, with their defaults) and a Config if its
defaults differ. The config determines the needs: no reference without KL, no critic without values, no second forward
pass unless the loss needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rlhf.errors import ConfigError, PluginInvalid
from rlhf.interfaces.advantage import Advantage, reads, reads_turns
from rlhf.interfaces.algorithm import Algorithm, Slot
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.tokens import Tokens
from rlhf.ops.batch import Batch
from rlhf.ops.heads import VALUES
from rlhf.ops.sample_values import ENV
from rlhf.ops.trajectories import assemble
from rlhf.types import Annotation, Group, Head, Needs, OnlineShape, RoleSpec, RunOptions, Snapshot, Update
from torch import Tensor

from rlhf_algorithms import pipeline
from rlhf_algorithms.critic import ValueScale
from rlhf_algorithms.echo import WithEcho
from rlhf_algorithms.entropy import EntropyController
from rlhf_algorithms.kl import KLController, WithKL
from rlhf_algorithms.policy_gradient_config import KLConfig, PolicyGradientConfig, check_overrides, replaces
from rlhf_algorithms.snapshots import snapshots_due
from rlhf_algorithms.teacher import Teacher, with_teacher

BOOTSTRAP = Head("bootstrap", VALUES.fn, over="last_action", position="at")
"""The critic's value after the last action token."""


class PolicyGradient(Algorithm[Group]):
    """Per step: rollouts, advantages, one policy update and, if the advantage reads values, one critic update.

    Parts: ``advantage`` and ``loss``; ``value_loss`` trains the critic and is not used without one. KL as a loss works
    with every loss: :class:`rlhf_algorithms.kl.WithKL` adds a term to it, and each update carries the term's
    coefficient. ``echo_coef`` adds a term in the same way, by :class:`rlhf_algorithms.echo.WithEcho`. A complete
    example::

        class Mine(PolicyGradient):
            name = "mine"
            slots = PolicyGradient.slots | {
                "advantage": Slot("advantage", "centered"),
                "loss": Slot("loss", "clipped", {"clip_high": 0.28}),
            }

    A subclass may replace ``stages()`` to run the stages of :mod:`rlhf_algorithms.pipeline` in another order.
    ``mask_truncated``, ``normalise_values`` and adaptive KL are applied outside of ``stages()`` and still work. If a
    subclass replaces the method that applies an option, setting the option is refused before the run, unless
    ``applies`` names it.
    """

    Config = PolicyGradientConfig
    applies: ClassVar[tuple[str, ...]] = ()
    """Options that this class applies in its overrides of ``assemble()``, ``stages()``, ``credit()``, ``updates()`` or
    ``finish()``. Allowed are ``echo_coef``, ``kl.coef``, ``kl.target``, ``kl.snapshot_every``, ``entropy.target``,
    ``shaping``, ``reward_clip``, ``bootstrap_truncated``, ``normalise_values``, ``mask_truncated``, ``epochs``,
    ``minibatches``, ``critic_warmup``, ``teacher.coef``, ``teacher.weights``. A method that calls ``super()`` needs no
    entry."""
    slots: ClassVar[dict[str, Slot]] = {"value_loss": Slot("loss", "value")}

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        self._check()
        kl: KLConfig = self.config.kl
        self.kl = KLController(kl.coef, kl.target, kl.horizon)
        self.advantage: Advantage = self.parts["advantage"]
        # The wrappers replace the part, because the run trains with parts[Update.loss].
        if kl.coef > 0 and kl.where == "loss":
            self.parts["loss"] = WithKL(self.parts["loss"], kl.chosen, kl.unbiased)
        if self.config.echo_coef is not None:
            self.parts["loss"] = WithEcho(self.parts["loss"], self.config.echo_coef)
        self.loss: Loss = self.parts["loss"]
        if reads(self.advantage, "sources"):
            self._check_sources()
        if self._remembers and kl.before_baseline:
            raise ConfigError(
                "algorithm.kl.before_baseline = true changes the rewards by the KL, which the running statistics of "
                f"the advantage {self.advantage.name!r} do not contain; remove this option"
            )
        if self._remembers and replaces(type(self), PolicyGradient, "finish"):
            raise ConfigError(
                f"{type(self).__name__}.finish() of algorithm {self.name!r} replaces the method that updates the "
                f"running statistics of the advantage {self.advantage.name!r}; choose another advantage, or call "
                "super().finish()"
            )
        if self.advantage.needs_values and not self.config.teacher.task:
            raise ConfigError(
                f"algorithm.teacher.task = false leaves out the advantage {self.advantage.name!r} and its critic; "
                "choose an advantage without values"
            )
        self.teacher = Teacher(self.config.teacher, self.run)
        self.entropy = EntropyController(self.config.entropy, self._entropy_start())
        self.scale = ValueScale() if self.config.normalise_values else None
        """The scale of the critic's targets; None: the scale of rewards."""
        if not self.advantage.needs_values:
            for field in ("critic_warmup", "bootstrap_truncated", "normalise_values"):
                if getattr(self.config, field):
                    raise ConfigError(
                        f"algorithm.{field} = {getattr(self.config, field)} needs a critic, which the advantage "
                        f"{self.advantage.name!r} does not use; remove this option, or choose an advantage that reads "
                        "values"
                    )
            self._check_value_loss()

    def _check_sources(self) -> None:
        """Raise ConfigError for options that change the sum of the rewards if the advantage does not read this sum."""
        kl = self.config.kl
        options = {"shaping": self.config.shaping.is_set, "kl.before_baseline": kl.before_baseline}
        if names := [f"algorithm.{name}" for name, is_set in options.items() if is_set]:
            raise ConfigError(
                f"the advantage {self.advantage.name!r} reads each reward separately and not their sum; remove the "
                f"options that change the sum: {' and '.join(names)}"
            )

    def _entropy_start(self) -> float:
        """The coefficient of the loss's entropy bonus. Raises ConfigError if it should adapt but the loss has no bonus,
        or one above ``entropy.high``."""
        if self.config.entropy.target is None:
            return 0.0
        start = getattr(self.loss.config, "entropy_coef", None)
        if not start or not 0 < start <= self.config.entropy.high:
            raise ConfigError(
                f"algorithm.entropy.target = {self.config.entropy.target} adapts the coefficient of the entropy bonus, "
                f"but algorithm.loss.entropy_coef is {start}: set it to the coefficient's initial value, above 0 and "
                f"at most algorithm.entropy.high = {self.config.entropy.high:g}"
            )
        return float(start)

    def _check_value_loss(self) -> None:
        """Raises ConfigError if the loss of a critic has options but there is no critic."""
        part, slot = self.parts.get("value_loss"), self.slots.get("value_loss")
        if part is None or slot is None:
            return
        # The slot's defaults apply to the plugin that it names only.
        defaults = type(part.config).model_validate(dict(slot.defaults) if part.name == slot.use else {})
        options = [n for n in type(defaults).model_fields if getattr(part.config, n) != getattr(defaults, n)]
        if options:
            raise ConfigError(
                f"algorithm.value_loss.{options[0]} = {getattr(part.config, options[0])!r} is an option of the critic, "
                f"which the advantage {self.advantage.name!r} does not use; remove it, or choose an advantage with "
                "values"
            )

    def _check(self) -> None:
        """Check that a subclass fulfils the requirements of the base. Raises PluginInvalid, or ConfigError for an
        option that the subclass would ignore."""
        if not isinstance(self.config, PolicyGradientConfig):
            raise PluginInvalid(
                f"algorithm {self.name!r}: {type(self).__name__}.Config must subclass "
                "rlhf_algorithms.policy_gradient_config.PolicyGradientConfig: its options (kl, epochs, ...) are read "
                "here"
            )
        check_overrides(type(self), PolicyGradient, self.config)
        reads_values = "advantage" in self.parts and self.parts["advantage"].needs_values
        for slot in ("advantage", "loss", *(["value_loss"] if reads_values else [])):
            if slot not in self.parts:
                raise PluginInvalid(
                    f"algorithm {self.name!r} has no slot {slot!r}; its slots are {sorted(self.slots)}. Write "
                    f'{type(self).__name__}.slots = PolicyGradient.slots | {{"advantage": Slot("advantage", NAME), '
                    '"loss": Slot("loss", NAME)}'
                )

    # ---------------------------------------------------------------------- requirements and plans

    def needs(self) -> Needs:
        roles = [RoleSpec("policy", trained=True)]
        if self._uses_kl:
            roles.append(RoleSpec("reference", like="policy"))
        if self.advantage.needs_values:
            roles.append(RoleSpec("critic", head="scalar", trained=True, like="policy"))
        roles += self.teacher.roles()
        corrected, task = self.loss.generator_logprobs, self.config.teacher.task
        features = (*(("correction",) if corrected else ()), *(("teachers",) if self.teacher.is_served else ()))
        group_min, greedy = self.advantage.group_min if task else 1, task and reads(self.advantage, "greedy_N")
        return Needs(tuple(roles), group_min, corrected, features, reward=task, greedy=greedy)

    def use_tokens(self, tokens: Tokens) -> None:
        self.teacher.opening = tokens.opening

    def columns(self, source: str) -> list[str]:
        context = self.config.teacher.context
        return [*super().columns(source), *([] if context is None else [context])]

    def conflicts(self, shape: OnlineShape) -> list[str]:
        problems, shaping = super().conflicts(shape) + self.teacher.conflicts(shape), self.config.shaping
        of_turns = {ENV: 1.0} if shape.turn_rewards and ENV not in self.run.step_sources else {}
        if reads(self.advantage, "sources") and len(rewards := {**self.run.weights, **of_turns}) < 2:
            problems.append(
                f"algorithm.advantage.use = {self.advantage.name!r} treats each reward separately and needs at least "
                f"two rewards, got {len(rewards)} ({', '.join(rewards) or 'none'}; without those with credit = "
                "'step'). Add a reward, or use the advantage group_norm."
            )
        if self.config.echo_coef is not None and not shape.observations:
            problems.append(
                f"algorithm.echo_coef = {self.config.echo_coef} trains on what an environment or a tool says after an "
                "answer, but a sample of this run is one prompt and one answer. Set an environment (--env.use, with "
                "env.max_turns above 1) or a rollout with tools, or remove algorithm.echo_coef."
            )
        if reads_turns(self.advantage) and not shape.observations:
            problems.append(
                f"algorithm.advantage.use = {self.advantage.name!r} assigns credit to individual turns, but each "
                "answer is one turn. Set --rollout.use to a rollout with several turns (multi_turn with an [env] whose "
                "max_turns is 2 or more, tools, agent), or use the advantage group_norm."
            )
        if self.config.minibatches > shape.trajectories:
            problems.append(
                f"algorithm.minibatches = {self.config.minibatches}: a batch has {shape.trajectories} samples, so some "
                f"minibatches would be empty. Set --algorithm.minibatches {shape.trajectories} or less."
            )
        if self.config.kl.target is not None and 0.2 * shape.trajectories >= self.config.kl.horizon:  # KLController
            problems.append(
                f"algorithm.kl.horizon = {self.config.kl.horizon:g}: a batch has {shape.trajectories} samples, which "
                f"could make the coefficient negative. Set --algorithm.kl.horizon above {0.2 * shape.trajectories:g}."
            )
        if shaping.overlong_max is not None and shaping.overlong_max - shaping.overlong_buffer >= shape.most_tokens:
            problems.append(
                "algorithm.shaping: the penalty begins above overlong_max - overlong_buffer = "
                f"{shaping.overlong_max - shaping.overlong_buffer} tokens, but no answer has more than "
                f"{shape.most_tokens} tokens, so it would have no effect. Set --algorithm.shaping.overlong_max "
                f"{shape.most_tokens}."
            )
        return problems

    def annotations(self, step: int) -> list[Annotation]:
        annotations = []
        if self._stores_old:
            annotations.append(Annotation("policy", "logprobs", "old_logprobs"))
        if self._uses_kl:
            annotations.append(Annotation("reference", "logprobs", "ref_logprobs"))
        annotations += self.teacher.annotations()
        if self.advantage.needs_values:
            annotations.append(Annotation("critic", "values", "old_values"))
            if self.config.bootstrap_truncated:
                annotations.append(Annotation("critic", BOOTSTRAP, "bootstrap"))
        return annotations

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        """The critic's update, the policy's, and the snapshot of the reference.

        With ``critic_warmup`` N the policy is not trained in the steps 0 .. N-1. A batch with fewer samples than
        minibatches (filtered, failed, masked) gets one minibatch per sample; a batch in which all samples are masked
        gets no update. The snapshot comes last, so the next step computes ``ref_logprobs`` with the new reference.
        """
        trained_on = self.config.minibatches if batch is None else batch.units - int(self._masked(batch).sum())
        passes = {"epochs": self.config.epochs, "minibatches": min(self.config.minibatches, trained_on)}
        updates: list[Update | Snapshot] = []
        if self.advantage.needs_values and trained_on:
            updates.append(Update("critic", "value_loss", **passes))
        if step >= self.config.critic_warmup and trained_on:
            coef = {"kl": self.kl.beta} if self._kl_in("loss") else {}
            if self.entropy.adaptive:
                coef["entropy"] = self.entropy.factor
            live = {"old_logprobs": "logprobs"} if self._reads_old and not self._stores_old else {}
            updates.append(Update("policy", "loss", **passes, coef=coef, live=live))
        kl = self.config.kl
        return [*updates, *snapshots_due(kl.snapshot_every, kl.snapshot_share, step), *self.teacher.snapshots()]

    # ------------------------------------------------------------------------- the calls of a step

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:
        batch = assemble(
            examples,
            self.run.step_sources,
            scored=self.config.teacher.task,
            rewards=self.source_weights,
            observations=self.config.echo_coef is not None,
            greedy=self.needs().greedy,
            key=self.advantage.columns() if self._remembers else None,
            turns=reads_turns(self.advantage),
        )
        return (None, {}) if batch is None else self.teacher.prepared(batch, examples)

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Run :meth:`stages`. With ``normalise_values``, values are converted to the scale of rewards before, and back
        to the scale of the critic after. Then the teacher's credit is added and masked samples are removed
        (``mask_truncated``)."""
        batch = self.teacher.read(batch)
        if not self.config.teacher.task:
            batch, metrics = with_teacher(batch, self.config.teacher.coef)
            return self._without_masked(self._without_drift(batch)), pipeline.length_metrics(batch) | metrics
        kl: KLConfig = self.config.kl
        penalty = pipeline.KLPenalty(self.kl.beta, kl.chosen, kl.before_baseline) if self._kl_in("reward") else None
        # The critic's own outputs: the clip of its loss compares with them.
        said_N = batch.tok["old_values"] if self.scale is not None else None
        batch, metrics = self.stages(batch if self.scale is None else self.scale.values(batch), penalty)
        if self.scale is not None and said_N is not None:
            batch = self.scale.targets(batch, said_N)
            metrics |= {"value/scale_mean": self.scale.mean, "value/scale_std": self.scale.std}
        if self.run.step_sources and "reward/mean" in metrics:
            # Also where all step rewards are 0: without these steps, means and minima of the curve would be too high.
            metrics = {"reward/steps": 0.0, "reward/total": metrics["reward/mean"]} | metrics
        if self.teacher.is_used:
            batch, teacher_metrics = with_teacher(batch, self.config.teacher.coef)
            metrics |= teacher_metrics
        return self._without_masked(self._without_drift(batch)), metrics

    def stages(self, batch: Batch, kl: pipeline.KLPenalty | None) -> tuple[Batch, dict[str, float]]:
        """From the column ``reward`` to ``advantages`` (and ``returns``, with values), in the published order. Override
        this method for another order.

        Args:
            batch: has the columns that :meth:`annotations` requests; values are in the units of rewards.
            kl: KL to the reference, in the reward; None without it.

        Returns: the batch with the columns, and metrics. With ``kl`` they include ``kl/reference``, the mean KL of a
        token, which an adaptive coefficient follows.
        """
        return pipeline.credit(
            batch,
            self.advantage,
            kl=kl,
            shaper=self.config.shaping.shaped,
            reward_clip=self.config.reward_clip,
            weights=self.source_weights,
        )

    def _without_drift(self, batch: Batch) -> Batch:
        """``batch`` without the log-probs of the generator if the loss could only compare them with the current policy.
        After the first of several optimizer steps that comparison measures the update, not the generator."""
        several_steps = self.config.epochs * self.config.minibatches > 1
        if self._reads_old or self.loss.generator_logprobs or not several_steps:
            return batch
        return replace(batch, tok={name: values for name, values in batch.tok.items() if name != "gen_logprobs"})

    def _masked(self, batch: Batch) -> Tensor:
        """bool [U]: samples that are not trained on (``mask_truncated``)."""
        return batch.unit["truncated"] & self.config.mask_truncated

    def _without_masked(self, batch: Batch) -> Batch:
        """``batch`` without the masked samples. If all samples are masked the batch is not changed, because no batch
        may be empty; :meth:`updates` then trains nothing."""
        masked_U = self._masked(batch)
        is_partial = bool(masked_U.any()) and not bool(masked_U.all())
        return batch.keep(~masked_U[batch.unit_B]) if is_partial else batch

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the coefficients and update the running statistics of the advantage. The KL coefficient adapts to this
        step's KL and number of trajectories, including masked ones. The entropy coefficient adapts to the entropy. The
        advantage receives the shaped rewards."""
        used: dict[str, float] = {}
        learns = step >= self.config.critic_warmup  # else the policy is not trained, so nothing is adapted
        if self._uses_kl:
            used["kl/coef"] = self.kl.beta
            # KL in the reward is measured before the updates, by credit(); KL in the loss during them.
            kl = metrics.get("kl/reference" if self._kl_in("reward") else "policy/kl_reference")
            if kl is not None and learns:  # None: the only update was skipped
                self.kl.update(kl, batch.units)
        if self.entropy.adaptive:
            used["entropy/coef"] = self.entropy.factor * self.entropy.start
            if "policy/entropy" in metrics and learns:
                self.entropy.update(metrics["policy/entropy"])
        if self._remembers:
            r_U = self.config.shaping.shaped(batch.unit["reward"], batch)
            self.advantage.update_statistics(r_U, batch.unit["group"], batch.unit["key"], batch.unit["sample"])
        return used

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kl": self.kl.state_dict()} if self.kl.adaptive else {}
        if self.entropy.adaptive:
            state["entropy"] = self.entropy.state_dict()
        return state if self.scale is None else {**state, "values": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        if self.kl.adaptive:
            self.kl.load_state_dict(rest.pop("kl"))
        if self.entropy.adaptive:
            self.entropy.load_state_dict(rest.pop("entropy"))
        if self.scale is not None:
            self.scale.load_state_dict(rest.pop("values"))
        super().load_state_dict(rest)

    # -------------------------------------------------------------------- derived from the options

    @property
    def source_weights(self) -> Mapping[str, float]:
        """{reward source: weight} if the advantage treats each source separately; else empty. Sources with ``credit =
        "step"`` are in it, because their results may also have a value for the whole answer. So is ``env`` without an
        environment, because a rollout may give rewards to turns, too."""
        if not reads(self.advantage, "sources"):
            return {}
        steps = self.run.step_sources
        turns = {} if ENV in steps else {ENV: 1.0}
        return {**turns, **self.run.weights, **{name: weight for name, weight in steps.items() if name != ENV}}

    @property
    def _remembers(self) -> bool:
        """Whether the advantage keeps running statistics of rewards."""
        return bool(self.config.teacher.task) and reads(self.advantage, "key_N")

    @property
    def _uses_kl(self) -> bool:
        return bool(self.config.kl.coef > 0)

    def _kl_in(self, place: str) -> bool:
        return self._uses_kl and self.config.kl.where == place

    @property
    def _reads_old(self) -> bool:
        return "old_logprobs" in self.loss.columns()

    @property
    def _stores_old(self) -> bool:
        """Whether ``old_logprobs`` must be computed before the update. With exactly one optimizer step, the policy at
        the start of the update is the current policy. The live log-probs are then used, detached."""
        one_step = self.config.epochs * self.config.minibatches == 1
        return self._kl_in("reward") or self.teacher.is_used or (self._reads_old and not one_step)
