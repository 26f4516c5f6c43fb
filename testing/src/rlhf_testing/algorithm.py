"""The conformance suite of algorithms.

::

    from rlhf_testing.algorithm import AlgorithmContract

    class TestMine(AlgorithmContract):
        algorithm = Mine
        configs = [Mine.Config(), Mine.Config(kl=KLConfig(coef=0.1))]

Runs whole steps on fabricated data, through the tiny models of :class:`rlhf_testing.plain.EmbeddingTrainer`: no
backend, no download.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Group, Snapshot, Update

from rlhf_testing.algorithm_samples import SampleChecks, credited_columns
from rlhf_testing.algorithm_step import Step
from rlhf_testing.compare import GRADIENT, LOSS, distance, finite, generators_left_alone, layouts, same_bits
from rlhf_testing.contract import check_state, expect
from rlhf_testing.options import check_options


class AlgorithmContract(SampleChecks):
    """Checks assemble -> annotations -> credit -> updates -> finish."""

    def test_steps(self) -> None:
        """Whole steps run with nothing but the declared needs: roles, columns, generator log-probs, group size."""
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            trains = 0
            for number in range(self.steps):
                data = self.data(algorithm, seed=number)
                with generators_left_alone(about):
                    step = self.step(config, number, algorithm=algorithm, data=data)
                trains += sum(isinstance(u, Update) for u in step.updates)
                for name, run in step.runs.items():
                    bad = finite(run.gradients)
                    expect(not bad, f"{about} step {number}: the gradient of {name!r} is not finite at {bad}")
                bad = [k for k, v in {**step.metrics, **step.finished}.items() if not abs(float(v)) < float("inf")]
                expect(not bad, f"{about} step {number}: the metrics {bad} are not finite numbers")
            expect(
                trains > 0,
                f"{about} no Update in {self.steps} steps: nothing is trained (raise `steps` if it warms up)",
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
            return steps, (needs.group_min, needs.rows_min, needs.reward, needs.given), algorithm.model_config()

        check_options(self, effect)

    def test_masked_positions(self) -> None:
        """NaN in every column at positions that the policy did not choose changes no credit and no gradient."""
        for config in self.grid():
            about = self.about(config)
            clean, poisoned = self.step(config), self.step(config, poison=True)
            for name, run in clean.runs.items():
                for parameter, gradient in run.gradients.items():
                    expect(
                        same_bits(gradient, poisoned.runs[name].gradients[parameter]),
                        f"{about} NaN at masked positions changes the gradient of {name!r} at {parameter!r}",
                    )

    def test_order_of_samples(self) -> None:
        """Permuting the groups, and the samples of each group, permutes the credit and does not change the
        gradients."""
        for config in self.grid():
            about = self.about(config)
            data = self.data(self.build(config))
            mixed = [_shuffled(d, n) if isinstance(d, Group) else d for n, d in enumerate(data)][::-1]
            a, b = self.step(config, data=data), self.step(config, data=mixed)
            units, shuffled_units = _by_unit(a.batch, a.credited), _by_unit(b.batch, b.credited)
            expect(
                units.keys() == shuffled_units.keys(), f"{about} a different order of the samples gives different units"
            )
            for key, columns in units.items():
                for name, values in columns.items():
                    apart = float((values - shuffled_units[key][name]).abs().max()) if values.numel() else 0.0
                    expect(
                        apart <= 1e-5 * max(1.0, float(values.abs().max()) if values.numel() else 0.0),
                        f"{about} the column {name!r} of a sample depends on the order of the samples (by {apart:.1e})",
                    )
            self._same_gradients(about, "in another order", a, b)

    def test_split_invariance(self) -> None:
        """The gradients of every update do not depend on micro-batches, packing order or ranks."""
        for config in self.grid():
            about, whole = self.about(config), self.step(config)
            for layout in layouts(whole.batch.units):
                self._same_gradients(about, f"split as {layout!r}", whole, self.step(config, layout=layout))

    def _same_gradients(self, about: str, how: str, a: Step, b: Step) -> None:
        for name, run in a.runs.items():
            other = b.runs[name]
            apart = distance(run.gradients, other.gradients)
            expect(apart <= GRADIENT, f"{about} the gradient of {name!r} changes by {apart:.1e} {how}")
            difference = abs(run.total - other.total)
            expect(
                difference <= LOSS * max(run.size, 1e-12),
                f"{about} the loss of {name!r} changes from {run.total:.9g} to {other.total:.9g} {how}",
            )

    def test_state(self) -> None:
        """A fresh instance that loads the state after a step has equal needs, annotations, updates and state."""
        for config in self.grid():
            about, algorithm, fresh = self.about(config), self.build(config), self.build(config)
            self.step(config, algorithm=algorithm)
            check_state(algorithm, fresh, about)
            for number in range(1, self.steps + 1):
                for method in ("annotations", "updates"):
                    a, b = getattr(algorithm, method)(number), getattr(fresh, method)(number)
                    expect(
                        a == b,
                        f"{about} after state_dict() and load_state_dict() {method}({number}) differ: {a} and {b}",
                    )

    def test_plan(self) -> None:
        """``updates(step)`` without a batch plans the learning rates. Its answer does not depend on the batch of the
        step, and no step takes more optimizer steps than planned."""
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            for number in range(self.steps):
                plan = algorithm.updates(number)
                step = self.step(config, number, algorithm=algorithm, data=self.data(algorithm, seed=number), end=False)
                again = algorithm.updates(number)
                expect(
                    plan == again,
                    f"{about} updates({number}) without a batch gives {plan} before and {again} after a batch was "
                    "assembled and credited: read the batch that updates() is given, and keep nothing between methods",
                )
                planned, actual = _optimizer_steps(plan), _optimizer_steps(step.updates)
                more = {role: count for role, count in actual.items() if count > planned[role]}
                expect(
                    not more,
                    f"{about} step {number} trains {more} optimizer steps, and updates({number}) without a batch plans "
                    f"{dict(planned)}: the learning rates would end too early",
                )

    def test_updates(self) -> None:
        """Updates train roles that are declared as trained, with a loss from the parts. Snapshots copy declared
        roles."""
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            roles = {r.name: r for r in algorithm.needs().roles}
            for number in range(self.steps):
                for update in self.step(config, number).updates:
                    if isinstance(update, Snapshot):
                        unknown = {update.role, update.source} - set(roles)
                        expect(
                            not unknown, f"{about} a Snapshot names {sorted(unknown)}, not in needs(): {sorted(roles)}"
                        )
                        continue
                    expect(roles[update.role].trained, f"{about} updates() trains {update.role!r}, declared untrained")
                    once = update.epochs * update.minibatches == 1
                    expect(
                        once or not update.live,
                        f"{about} the update of {update.role!r} has several optimizer steps, so {dict(update.live)} "
                        "must be annotated beforehand",
                    )


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
    """{tokens of a unit: the unit's values in the columns that credit() made}."""
    values_of = {}
    for u in range(batch.units):
        unit = batch.select([u])
        columns = {**unit.tok, **unit.seq, **unit.unit}
        values_of[tuple(unit.ids_N.tolist())] = {n: columns[n].double() for n in sorted(names) if n in columns}
    return values_of
