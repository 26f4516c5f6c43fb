"""The conformance suite of algorithms.

::

    from rlhf_testing.algorithm import AlgorithmContract

    class TestMine(AlgorithmContract):
        algorithm = Mine
        configs = [Mine.Config(), Mine.Config(kl=KLConfig(coef=0.1))]

Runs whole steps on fabricated data with the tiny models of :class:`rlhf_testing.plain.EmbeddingTrainer`, without a
backend or a download.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from pydantic import ValidationError
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.types import Group, Needs, RoleSpec, RunOptions, Snapshot, Update
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.problems import describe
from rlhf_runtime.config.sections import Choice
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import Step, assemble, model_step
from rlhf_testing.compare import GRADIENT, LOSS, distance, finite, generators_left_alone, layouts, norm, same_bits
from rlhf_testing.contract import Contract, Nonconformance, check_state, expect, knowing_columns
from rlhf_testing.options import check_options

COLUMNS = '"columns": {NAME}'
"""The entry of ``conformance`` with which an author adds a column to the rows of this suite."""


class AlgorithmContract(Contract):
    """Checks assemble -> annotations -> credit -> updates -> finish. Algorithms on pairs and demonstrations pass the
    checks of samples without a check."""

    kind = "algorithm"
    algorithm: Any = None
    parts: Mapping[str, Callable[[], Any]] = {}
    """{slot: a function that builds the part}. For other slots the suite builds the slot's default plugin, and a member
    (``Algorithm.has_members``; here ``members.NAME``) with its default options."""
    columns: Mapping[str, Any] = {}
    """Further columns of the made-up rows: those that the algorithm reads in addition to ``prompt`` and ``answer``. For
    pairs, ``margin`` is also in ``Example.values``."""
    steps: int = 2
    """Number of steps to run. Raise it for an algorithm that starts something later (a warm-up)."""

    def build(self, config: Any, run: RunOptions | None = None) -> Any:
        parts = {name: self._part(name, slot) for name, slot in self.cls.slots.items()}
        parts |= {n: make() for n, make in self.parts.items() if n not in parts}
        for name, member in config.members.items() if self.cls.has_members else ():
            if f"members.{name}" not in parts:
                parts[f"members.{name}"] = build_algorithm(self._plugins, Choice(use=member.use), run=run)
        algorithm = self.cls(config, parts, run or RunOptions())
        algorithm.use_tokens(fabricate.TOKENS)
        return algorithm

    def _part(self, name: str, slot: Any) -> Any:
        if name in self.parts:
            return self.parts[name]()
        try:
            cls = self._plugins.resolve(slot.kind, slot.use).cls
        except Exception as error:
            hint = f"For a class in the same file, set conformance = {{'parts': {{{name!r}: CLASS}}}} in the algorithm."
            raise Nonconformance(f"{self.label()} slot {name!r}: {type(error).__name__}: {error} {hint}") from error
        try:
            return cls(cls.Config.model_validate(dict(slot.defaults)))
        except ValidationError as error:
            wrong = "; ".join(describe(error, cls.Config, f"slots[{name!r}].defaults", {}))
            raise Nonconformance(f"{self.label()} {wrong}") from error

    @cached_property
    def _plugins(self) -> Plugins:
        return Plugins.discover()

    def data(self, algorithm: Any, seed: int = 0, **options: Any) -> list[Any]:
        """The input of ``assemble``: scored groups, or tokenised examples of the algorithm's data form. Sampled turns
        have log-probs only if ``needs().generator_logprobs`` is set."""
        if self.cls.data != "prompts":
            return fabricate.examples(self.cls.data, seed, columns=self.columns)
        needs = algorithm.needs()
        samples, answers = max(4, needs.group_min, needs.demonstrations_per_group + 1), needs.demonstrations_per_group
        options = {"samples": samples, "scored": needs.reward, "greedy": needs.greedy, "answers": answers, **options}
        return fabricate.groups(seed, logprobs=needs.generator_logprobs, columns=self.columns, **options)

    def step(self, config: Any, number: int = 0, **options: Any) -> Step:
        """One whole step without the optimizer, on fresh data and a fresh algorithm."""
        algorithm = options.pop("algorithm", None) or self.build(config)
        data = options.pop("data", None) or self.data(algorithm)
        try:
            with knowing_columns("it", COLUMNS):
                return model_step(algorithm, data, number, **options)
        except Nonconformance as error:
            raise Nonconformance(f"{self.label(config)} {error}") from error
        except Exception as error:
            raise Nonconformance(f"{self.label(config)} {type(error).__name__}: {error}") from error

    def assemble(self, algorithm: Any, data: list[Any]) -> Batch | None:
        with knowing_columns(self.label(), COLUMNS):
            try:
                return assemble(algorithm, data)[0]
            except Nonconformance as error:
                raise Nonconformance(f"{self.label()} {error}") from error

    # ------------------------------------------------------------------------------------- checks

    def test_needs(self) -> None:
        """``needs()`` names each role once, the role that another is ``like`` exists, and at least one role is
        trained."""
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            needs = algorithm.needs()
            expect(isinstance(needs, Needs), f"{label} needs() must return Needs, got {type(needs).__name__}")
            expect(needs == self.build(config).needs(), f"{label} needs() must be a function of config and parts")
            names = [r.name for r in needs.roles if isinstance(r, RoleSpec)]
            expect(len(names) == len(needs.roles) > 0, f"{label} needs().roles must be RoleSpecs, got {needs.roles}")
            expect(len(set(names)) == len(names), f"{label} needs() names a role twice: {names}")
            expect(needs.group_min >= 1, f"{label} group_min is {needs.group_min}; it must be at least 1")
            expect(any(r.trained for r in needs.roles), f"{label} no role is trained: {names}")
            for role in needs.roles:
                is_head = role.head in ("lm", "scalar") or role.head.removeprefix("classes:").isdigit()
                expect(is_head, f"{label} role {role.name!r} has head {role.head!r}; allowed: lm, scalar, classes:N")
                expect(
                    role.like is None or role.like in names,
                    f"{label} role {role.name!r} has like = {role.like!r}, which is not one of the roles {names}",
                )
            frozen = [r.name for r in needs.roles if r.head == "lm" and not r.trained]
            for loan in needs.loans:
                fine = loan.role in frozen and loan.borrower in names
                expect(fine, f"{label} {loan}: the lender must be a language model that is not trained: {frozen}")

    def test_smallest_group(self) -> None:
        """Groups of ``group_min`` samples with equal rewards give finite credit and gradients, or no batch. Where they
        give no batch, groups of ``group_min`` samples with unequal rewards give one."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            smallest = algorithm.needs().group_min
            data = self.data(algorithm, samples=smallest, equal_rewards=True)
            if self.assemble(algorithm, data) is None:
                data = self.data(algorithm, samples=smallest)
            step = self.step(config, algorithm=algorithm, data=data)
            for name, values in step.batch.tok.items():
                ok = not values.is_floating_point() or bool(torch.isfinite(values).all())
                expect(ok, f"{label} groups of {smallest} with equal rewards: column {name!r} is not finite")
            bad = [f"{n}: {finite(r.gradients)}" for n, r in step.runs.items() if finite(r.gradients)]
            expect(not bad, f"{label} groups of {smallest} with equal rewards: gradients are not finite, {bad}")

    def test_rewards_teach(self) -> None:
        """In groups of ``group_min`` samples, unequal rewards give different credit than equal rewards. Otherwise
        ``group_min`` is too small to learn from."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            label, needs = self.label(config), self.build(config).needs()
            data = self.data(self.build(config), samples=needs.group_min)
            equal = with_rewards(data, 1.0)
            if not needs.reward or self.assemble(self.build(config), equal) is None:
                continue
            unequal = self.step(config, data=data)
            columns = credited_columns(unequal)
            if columns:
                expect(
                    bool(column_differences(columns, credited_columns(self.step(config, data=equal)))),
                    f"{label} in groups of {needs.group_min} samples, which needs() accepts, unequal rewards give the "
                    f"same credit as equal ones ({', '.join(columns)}): nothing is learnt from them. Declare a larger "
                    "group_min",
                )
            else:
                taught = any(norm(run.gradients) > 0 for run in unequal.runs.values())
                expect(
                    taught,
                    f"{label} groups of {needs.group_min} samples, which needs() accepts, give no gradient",
                )

    def test_longer_contexts(self) -> None:
        """Longer prompts and observations do not change the credit, which belongs to the tokens that the policy
        chose."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            label, data = self.label(config), self.data(self.build(config))
            short = self.step(config, data=data)
            longer = self.step(config, data=with_longer_contexts(data), annotated_as=short.annotated)
            delta = column_differences(credited_columns(short), credited_columns(longer))
            expect(
                not delta,
                f"{label} longer prompts and observations change the credit (by {delta}): compute statistics only "
                'over the tokens under batch.tok["loss_mask"]',
            )

    def test_nothing_to_learn_from(self) -> None:
        """Failed samples are left out, and so are samples without a reward unless ``Needs.reward`` is False. If no
        sample is left, ``assemble`` returns no batch."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            groups: list[Group] = self.data(algorithm)
            scored = algorithm.needs().reward
            groups[0].trajectories[0].reward = groups[0].trajectories[0].score = None
            groups[1].trajectories[-1].status = "failed"
            groups[1].trajectories[-1].turns = []
            usable = [[t for t in g.trajectories if t.turns and (t.reward is not None or not scored)] for g in groups]
            rest = [
                replace(group, trajectories=usable_samples)
                for group, usable_samples in zip(groups, usable, strict=True)
            ]
            taught = self.step(config, algorithm=algorithm, data=groups).batch.ids_N
            expect(
                torch.equal(taught, self.step(config, data=rest).batch.ids_N),
                f"{label} a failed sample{' or one without a reward' * scored} is part of the batch",
            )
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.reward = trajectory.score = None
                    trajectory.status = trajectory.status if scored else "failed"
            batch = self.assemble(algorithm, groups)
            reason = "no sample has a reward" if scored else "every sample failed"
            expect(batch is None, f"{label} assemble() must return no batch when {reason}, got {type(batch)}")

    def test_steps(self) -> None:
        """Whole steps run with nothing but the declared needs: roles, columns, generator log-probs, group size."""
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            trains = 0
            for number in range(self.steps):
                data = self.data(algorithm, seed=number)
                with generators_left_alone(label):
                    step = self.step(config, number, algorithm=algorithm, data=data)
                trains += sum(isinstance(u, Update) for u in step.updates)
                for name, run in step.runs.items():
                    bad = finite(run.gradients)
                    expect(not bad, f"{label} step {number}: the gradient of {name!r} is not finite at {bad}")
                bad = [k for k, v in {**step.metrics, **step.finished}.items() if not abs(float(v)) < float("inf")]
                expect(not bad, f"{label} step {number}: the metrics {bad} are not finite numbers")
            expect(
                trains > 0,
                f"{label} no Update in {self.steps} steps: nothing is trained (raise `steps` if it warms up)",
            )

    def test_options(self) -> None:
        """Each option that a config sets changes the data that is needed, what is trained and how often, the credit, a
        gradient, or the content of exports. An additional role or metric is not enough."""

        def effect(config: Any) -> Any:
            algorithm, steps = self.build(config), []
            needs = algorithm.needs()
            for number in range(self.steps):
                step = self.step(config, number, algorithm=algorithm, data=self.data(algorithm, seed=number))
                gradients = {f"{n}/{k}": g for n, run in step.runs.items() for k, g in run.gradients.items() if g.any()}
                passes = [(u.role, u.loss, u.epochs, u.minibatches) for u in step.updates if isinstance(u, Update)]
                copies = [(u.role, u.source, u.share) for u in step.updates if isinstance(u, Snapshot)]
                steps.append((step.batch.ids_N, credited_columns(step), gradients, passes, copies))
            return (
                steps,
                (needs.group_min, needs.rows_min, needs.reward, needs.demonstration_share),
                algorithm.model_config(),
            )

        check_options(self, effect)

    def test_masked_positions(self) -> None:
        """NaN in every column at positions that the policy did not choose changes no credit and no gradient."""
        for config in self.grid():
            label = self.label(config)
            clean, poisoned = self.step(config), self.step(config, poison=True)
            for name, run in clean.runs.items():
                for parameter, gradient in run.gradients.items():
                    expect(
                        same_bits(gradient, poisoned.runs[name].gradients[parameter]),
                        f"{label} NaN at masked positions changes the gradient of {name!r} at {parameter!r}",
                    )

    def test_order_of_samples(self) -> None:
        """Permuting the groups, and the samples of each group, permutes the credit and does not change the
        gradients."""
        for config in self.grid():
            label = self.label(config)
            data = self.data(self.build(config))
            mixed = [_shuffled(d, n) if isinstance(d, Group) else d for n, d in enumerate(data)][::-1]
            a, b = self.step(config, data=data), self.step(config, data=mixed)
            units, shuffled_units = _by_unit(a.batch, a.credited), _by_unit(b.batch, b.credited)
            expect(
                units.keys() == shuffled_units.keys(), f"{label} a different order of the samples gives different units"
            )
            for key, columns in units.items():
                for name, values in columns.items():
                    delta = float((values - shuffled_units[key][name]).abs().max()) if values.numel() else 0.0
                    expect(
                        delta <= 1e-5 * max(1.0, float(values.abs().max()) if values.numel() else 0.0),
                        f"{label} the column {name!r} of a sample depends on the order of the samples (by {delta:.1e})",
                    )
            self._same_gradients(label, "in another order", a, b)

    def test_split_invariance(self) -> None:
        """The gradients of every update do not depend on micro-batches, packing order or ranks."""
        for config in self.grid():
            label, one_call = self.label(config), self.step(config)
            for layout in layouts(one_call.batch.units):
                self._same_gradients(label, f"split as {layout!r}", one_call, self.step(config, layout=layout))

    def _same_gradients(self, label: str, change: str, a: Step, b: Step) -> None:
        for name, run in a.runs.items():
            other = b.runs[name]
            delta = distance(run.gradients, other.gradients)
            expect(delta <= GRADIENT, f"{label} the gradient of {name!r} changes by {delta:.1e} {change}")
            difference = abs(run.total - other.total)
            expect(
                difference <= LOSS * max(run.size, 1e-12),
                f"{label} the loss of {name!r} changes from {run.total:.9g} to {other.total:.9g} {change}",
            )

    def test_state(self) -> None:
        """A fresh instance that loads the state after a step has equal needs, annotations, updates and state."""
        for config in self.grid():
            label, algorithm, fresh = self.label(config), self.build(config), self.build(config)
            self.step(config, algorithm=algorithm)
            check_state(algorithm, fresh, label)
            for number in range(1, self.steps + 1):
                for method in ("annotations", "updates"):
                    a, b = getattr(algorithm, method)(number), getattr(fresh, method)(number)
                    expect(
                        a == b,
                        f"{label} after state_dict() and load_state_dict() {method}({number}) differ: {a} and {b}",
                    )

    def test_plan(self) -> None:
        """``updates(step)`` without a batch plans the learning rates. Its answer does not depend on the batch of the
        step, and no step takes more optimizer steps than planned."""
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            for number in range(self.steps):
                plan = algorithm.updates(number)
                step = self.step(config, number, algorithm=algorithm, data=self.data(algorithm, seed=number), end=False)
                second = algorithm.updates(number)
                expect(
                    plan == second,
                    f"{label} updates({number}) without a batch gives {plan} before and {second} after a batch was "
                    "assembled and credited: read the batch that updates() receives, and keep nothing between methods",
                )
                planned, actual = _optimizer_steps(plan), _optimizer_steps(step.updates)
                excess = {role: count for role, count in actual.items() if count > planned[role]}
                expect(
                    not excess,
                    f"{label} step {number} makes {excess} optimizer steps, but updates({number}) without a batch "
                    f"plans {dict(planned)}: the learning rates would end too early",
                )

    def test_updates(self) -> None:
        """Updates train roles that are declared as trained, with a loss from the parts. Snapshots copy declared
        roles."""
        for config in self.grid():
            label, algorithm = self.label(config), self.build(config)
            roles = {r.name: r for r in algorithm.needs().roles}
            for number in range(self.steps):
                for update in self.step(config, number).updates:
                    if isinstance(update, Snapshot):
                        unknown = {update.role, update.source} - set(roles)
                        expect(not unknown, f"{label} a Snapshot names {sorted(unknown)}; needs() has {sorted(roles)}")
                        continue
                    expect(
                        roles[update.role].trained,
                        f"{label} updates() trains {update.role!r}, which needs() declares untrained",
                    )
                    single = update.epochs * update.minibatches == 1
                    expect(
                        single or not update.live,
                        f"{label} the update of {update.role!r} has several optimizer steps, so {dict(update.live)} "
                        "must be annotated beforehand",
                    )


def with_longer_contexts(groups: Sequence[Group]) -> list[Group]:
    """The same samples after longer prompts and observations; all samples of a group share the longer prompt."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for group in copies:
        for trajectory in group.trajectories:
            rng = random.Random(group.trajectories[0].index[0])
            for turn in trajectory.turns:
                if not turn.sampled:
                    extra_ids = [rng.randrange(1, fabricate.VOCABULARY) for _ in range(rng.randint(3, 9))]
                    turn.ids = array("i", extra_ids) + turn.ids
    return copies


def with_rewards(groups: Sequence[Group], reward: float) -> list[Group]:
    """The same samples, all with this reward."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for trajectory in (t for group in copies for t in group.trajectories if t.reward is not None):
        trajectory.reward = trajectory.score = reward
        trajectory.rewards = {name: type(result)(reward) for name, result in trajectory.rewards.items()}
    return copies


def credited_columns(step: Step) -> dict[str, Tensor]:
    """{column that ``credit`` added: its values in float64}. For token columns only the values under the loss mask."""
    batch: Batch = step.batch
    columns = {}
    for name in sorted(step.credited):
        values = batch.column(name)
        columns[name] = (values[batch.tok["loss_mask"]] if name in batch.tok else values).double()
    return columns


def column_differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """{column: largest difference, relative to max(largest value, 1)}; infinity where the shapes differ. Only columns
    with a difference above 1e-5."""
    differences = {}
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if left is None or right is None or left.shape != right.shape:
            differences[name] = float("inf")
        elif left.numel():
            differences[name] = float((left - right).abs().max()) / max(1.0, float(left.abs().max()))
    return {name: size for name, size in differences.items() if not size <= 1e-5}


def _optimizer_steps(updates: Sequence[Update | Snapshot]) -> Counter[str]:
    """{role: optimizer steps}."""
    count: Counter[str] = Counter()
    for update in updates:
        if isinstance(update, Update):
            count[update.role] += update.epochs * update.minibatches
    return count


def _shuffled(group: Group, seed: int) -> Group:
    trajectories = list(group.trajectories)
    random.Random(seed).shuffle(trajectories)
    return replace(group, trajectories=trajectories)


def _by_unit(batch: Batch, names: set[str]) -> dict[tuple[int, ...], dict[str, torch.Tensor]]:
    """{tokens of a unit: the unit's values in the columns that credit() added}."""
    values_of = {}
    for u in range(batch.units):
        unit = batch.select([u])
        columns = {**unit.tok, **unit.seq, **unit.unit}
        values_of[tuple(unit.ids_N.tolist())] = {n: columns[n].double() for n in sorted(names) if n in columns}
    return values_of
