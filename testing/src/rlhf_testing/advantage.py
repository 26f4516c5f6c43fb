"""The conformance suite of advantage estimators.

::

    from rlhf_testing.advantage import AdvantageContract

    class TestMyAdvantage(AdvantageContract):
        advantage = MyAdvantage

        def statement_baseline(self, r_N, group_N, config):        # plain loops, float64
            return torch.stack([r - r_N[group_N == g].mean() for r, g in zip(r_N, group_N)])
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rlhf.interfaces.advantage import Sources, baseline_of, reads, reads_turns
from torch import Tensor

from rlhf_testing.compare import generators_left_alone, same_bits
from rlhf_testing.contract import Contract, Nonconformance, check_state, expect, missing
from rlhf_testing.options import check_options

TOLERANCE = 1e-5
"""Relative to the largest value. It allows for float32 sums of a few dozen tokens in a different order."""


@dataclass(frozen=True)
class Credit:
    """Fabricated input of one estimator: three groups of four trajectories, one of them without any token."""

    r_N: Tensor
    group_N: Tensor
    sample_N: Tensor
    """int64 [N], the number of each trajectory in its group."""
    R_NA: Tensor
    mask_NA: Tensor
    values_NA: Tensor | None
    boot_N: Tensor | None

    @property
    def own_tokens_N(self) -> Tensor:
        """int64 [N]."""
        return self.mask_NA.sum(1)

    @property
    def sources(self) -> Sources:
        """Two reward sources. The second has no value for trajectories whose value of the first is above 1."""
        second_N = torch.where(self.r_N > 1, torch.nan, self.r_N.square() - self.r_N)
        return {"first": (1.0, self.r_N), "second": (2.0, second_N)}

    @property
    def baseline_arguments(self) -> dict[str, Any]:
        """Arguments that ``baseline`` may take in addition to rewards and groups. The first two of three groups share a
        key."""
        return {
            "own_tokens_N": self.own_tokens_N,
            "sources": self.sources,
            "greedy_N": torch.cos(self.group_N.double()),
            "key_N": (self.group_N > 12).long(),
            "sample_N": self.sample_N,
        }

    def rows(self, index: Tensor) -> Credit:
        """These trajectories, in this order."""
        values = None if self.values_NA is None else self.values_NA[index]
        boot = None if self.boot_N is None else self.boot_N[index]
        r_N, group_N, sample_N = self.r_N[index], self.group_N[index], self.sample_N[index]
        return Credit(r_N, group_N, sample_N, self.R_NA[index], self.mask_NA[index], values, boot)


def fabricated(values: bool, scale: float = 1.0, samples: int = 4) -> Credit:
    """Rewards of size ``scale`` on tokens and trajectories; ``values`` adds a critic's output."""
    g = torch.Generator().manual_seed(0)
    n, width = 3 * samples, 9
    lengths_N = torch.randint(1, width + 1, (n,), generator=g)
    lengths_N[0], lengths_N[1] = 0, width
    mask_NA = torch.arange(width) < lengths_N[:, None]
    R_NA = torch.where(mask_NA, scale * torch.randn(n, width, generator=g), torch.zeros(n, width))
    values_NA = torch.where(mask_NA, scale * torch.randn(n, width, generator=g), torch.zeros(n, width))
    boot_N = torch.where(torch.arange(n) % 2 == 0, torch.zeros(n), scale * torch.randn(n, generator=g))
    r_N = scale * torch.randn(n, generator=g, dtype=torch.float64)
    group_N = torch.arange(3).repeat_interleave(samples) * 7 + 5  # not 0, 1, 2: group numbers count over the whole run
    sample_N = torch.arange(n) % samples
    return Credit(r_N, group_N, sample_N, R_NA, mask_NA, values_NA if values else None, boot_N if values else None)


def fabricated_turns(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, states, trajectories) of turns. There are four trajectories; the first two and the last two are a
    group. Each visits two or three of its group's states, one of them twice. Each group has a state with one turn."""
    g = torch.Generator().manual_seed(2)
    state_M = torch.tensor([0, 1, 1, 0, 1, 2, 3, 4, 3, 4, 5, 3])
    trajectory_M = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    return scale * torch.randn(12, generator=g, dtype=torch.float64), state_M, trajectory_M


class AdvantageContract(Contract):
    """Checks ``baseline`` over trajectories, ``returns`` over own action tokens and, if the estimator has it,
    ``turn_credit`` over turns."""

    kind = "advantage"
    advantage: Any = None

    def cases(self, scale: float = 1.0) -> Iterable[tuple[str, Any, Any, Credit]]:
        for config in self.grid():
            estimator = self.build(config)
            group_min = estimator.group_min
            count = isinstance(group_min, int) and not isinstance(group_min, bool) and group_min >= 1
            expect(count, f"{self.label(config)} group_min is {group_min!r}; it must be an integer of at least 1")
            samples = max(4, group_min)
            yield self.label(config), config, estimator, fabricated(estimator.needs_values, scale, samples)

    # ------------------------------------------------------------------------------------- checks

    def test_shapes(self) -> None:
        """``baseline`` returns float64 [N], ``returns`` two [N, A]. Inputs are not changed. Equal calls agree."""
        for label, _, e, c in self.cases():
            inputs = c.rows(torch.arange(len(c.r_N)))
            with generators_left_alone(label):
                _baseline(e, c)
                adv_NA = self._returns(e, c)[0]
            for name in ("r_N", "group_N", "R_NA", "mask_NA", "values_NA", "boot_N"):
                old, new = getattr(inputs, name), getattr(c, name)
                expect(old is None or same_bits(old, new), f"{label} {name} was changed in place")
            other_NA = self._returns(e, c)[0]
            expect(
                same_bits(adv_NA, other_NA), f"{label} returns() must be pure: its second call gives different numbers"
            )

    def test_declared_needs(self) -> None:
        """``needs_values``, ``normalise`` and ``group_min`` are valid, and what they declare suffices for every
        config."""
        for label, _, e, c in self.cases():
            expect(isinstance(e.needs_values, bool), f"{label} needs_values is {e.needs_values!r}, not True or False")
            allowed = ("none", "center", "whiten")
            expect(e.normalise in allowed, f"{label} normalise is {e.normalise!r}; allowed: {allowed}")
            try:
                self._returns(e, c)
                if e.needs_values:
                    e.returns(c.R_NA, c.mask_NA, c.values_NA, None)
            except Nonconformance:
                raise
            except Exception as error:
                inputs = "values and no bootstrap" if e.needs_values else "no values, because needs_values is False"
                raise Nonconformance(
                    f"{label} returns() raised {type(error).__name__}: {error} (it received {inputs})"
                ) from error

    def test_masked_positions(self) -> None:
        """NaN in masked token rewards and values, and more padding, change nothing, bit for bit."""
        for label, _, e, c in self.cases():
            clean = self._returns(e, c)
            nan = torch.full_like(c.R_NA, float("nan"))
            values = None if c.values_NA is None else torch.where(c.mask_NA, c.values_NA, nan)
            poisoned = e.returns(torch.where(c.mask_NA, c.R_NA, nan), c.mask_NA, values, c.boot_N)
            wide = [None if t is None else torch.nn.functional.pad(t, (0, 5)) for t in (c.R_NA, c.values_NA)]
            padded = e.returns(wide[0], torch.nn.functional.pad(c.mask_NA, (0, 5)), wide[1], c.boot_N)
            for n, column in enumerate(("advantages", "returns")):
                values_T = clean[n][c.mask_NA]
                expect(
                    same_bits(values_T, poisoned[n][c.mask_NA]),
                    f"{label} NaN at masked positions changes the {column}: apply torch.where(mask_NA, x, 0) first, "
                    "or use a function of rlhf.ops.returns (NaN times a mask is NaN)",
                )
                expect(
                    same_bits(values_T, padded[n][:, : c.R_NA.shape[1]][c.mask_NA]),
                    f"{label} five more columns of padding change the {column}",
                )

    def test_order_of_samples(self) -> None:
        """Permuting the trajectories permutes the credit, and each row of ``returns`` stands alone."""
        for label, _, e, c in self.cases():
            order = torch.randperm(len(c.r_N), generator=torch.Generator().manual_seed(1))
            p = c.rows(order)
            _close(
                _baseline(e, c)[order],
                _baseline(e, p),
                f"{label} baseline() depends on the order of the trajectories: compute the statistic by group_N",
            )
            in_order, shuffled = self._returns(e, c), self._returns(e, p)
            # each row of returns() must not depend on the other rows that it is computed with
            single_rows = [self._returns(e, c.rows(torch.tensor([n]))) for n in range(len(c.r_N))]
            for n, column in enumerate(("advantages", "returns")):
                m = p.mask_NA
                _close(
                    in_order[n][order][m],
                    shuffled[n][m],
                    f"{label} the {column} depend on the order of the trajectories",
                )
                rows = torch.cat([a[n] for a in single_rows])
                _close(
                    in_order[n][c.mask_NA],
                    rows[c.mask_NA],
                    f"{label} the {column} of a trajectory depend on others in returns(): compute statistics of the "
                    "group in baseline(), and those of the batch with `normalise`",
                )

    def test_other_groups(self) -> None:
        """Rewards of other groups do not change the baseline of this group, unless ``over_batch`` says that they do.
        They may change a common scale of the batch."""
        for label, _, e, c in self.cases():
            if e.over_batch:
                continue
            first_N = c.group_N == c.group_N[0]
            rewards_N = torch.where(first_N, c.r_N, 3 * c.r_N + 10)
            baseline_N, scaled_N = (_baseline(e, replace(c, r_N=r_N))[first_N] for r_N in (c.r_N, rewards_N))
            scale = (baseline_N @ scaled_N) / (baseline_N @ baseline_N).clamp(min=1e-30)
            _close(
                scaled_N,
                scale * baseline_N,
                f"{label} baseline() of a group depends on the rewards of other groups, and so on the prompts that "
                "share a batch: compute the statistic by group_N (rlhf.ops.groups), use `normalise` for statistics of "
                "the batch's tokens, or set over_batch = True",
            )

    def test_equal_rewards(self) -> None:
        """Where the estimator has a group baseline (``group_min`` >= 2), equal rewards give no credit at all."""
        for label, _, e, c in self.cases():
            if e.group_min < 2:
                continue
            for value in (0.0, 1.0, -3.7, 1e4):
                r_N = torch.full_like(c.r_N, value)
                largest = _baseline(e, replace(c, r_N=r_N)).abs().max().item()
                expect(
                    largest <= 1e-9 * max(1.0, abs(value)),
                    f"{label} group_min is {e.group_min}, but equal rewards of {value} give a credit of {largest:.3g}",
                )

    def test_smallest_group(self) -> None:
        """In groups of ``group_min`` samples with unequal rewards, some credit is not 0."""
        for config in self.grid():
            e, label = self.build(config), self.label(config)
            r_N = torch.tensor([0.3, 1.0, -0.7, 2.0, 0.1], dtype=torch.float64)[torch.arange(3 * e.group_min) % 5]
            group_N = torch.arange(3).repeat_interleave(e.group_min)
            c = replace(fabricated(False, samples=e.group_min), r_N=r_N, group_N=group_N)
            expect(
                bool((_baseline(e, c) != 0).any()),
                f"{label} baseline() gives 0 for every sample in groups of {e.group_min} with the rewards "
                f"{[round(r, 1) for r in r_N.tolist()]}, but group_min = {e.group_min} accepts such groups: "
                f"nothing would be learnt from them. Declare group_min = {e.group_min + 1} or more",
            )

    def test_finite(self) -> None:
        """Rewards and values of 1e4, equal rewards, a group of the smallest size and empty trajectories stay finite."""
        for scale in (1e4, 0.0):
            for label, _, e, c in self.cases(scale=scale):
                size = max(1, e.group_min)
                small = c.rows(torch.arange(size))
                for part in (c, small):
                    r_N = _baseline(e, part)
                    expect(bool(torch.isfinite(r_N).all()), f"{label} baseline() is not finite: {r_N.tolist()}")
                    for values in self._returns(e, part):
                        returns_T = values[part.mask_NA]
                        expect(
                            bool(torch.isfinite(returns_T).all()),
                            f"{label} returns() is not finite for rewards of {scale}",
                        )

    def test_options(self) -> None:
        """Each option that a config sets changes what is declared, the baseline or the returns."""

        def effect(config: Any) -> Any:
            e = self.build(config)
            c = fabricated(e.needs_values, samples=max(4, e.group_min))
            declared = (e.needs_values, e.normalise, e.group_min, e.token_rewards, list(e.columns()))
            turns = e.turn_credit(*fabricated_turns()) if reads_turns(e) else None
            return declared, _baseline(e, c), [values[c.mask_NA] for values in self._returns(e, c)], turns

        check_options(self, effect)

    def test_turns(self) -> None:
        """``turn_credit`` returns finite float64 [M]. It does not depend on the order of the trajectories, the numbers
        of the states, or the turns of other groups."""
        for label, _, e, _ in self.cases():
            if not reads_turns(e):
                continue
            for scale in (1.0, 1e4, 0.0):
                turns = fabricated_turns(scale)
                credit_M = e.turn_credit(*turns)
                right = isinstance(credit_M, Tensor) and credit_M.dtype == torch.float64
                expect(
                    right and credit_M.shape == turns[0].shape and bool(credit_M.isfinite().all()),
                    f"{label} turn_credit() must give finite float64 {tuple(turns[0].shape)}, got {_text(credit_M)}",
                )
            reward_M, state_M, trajectory_M = fabricated_turns()
            credits_M = e.turn_credit(reward_M, state_M, trajectory_M)
            order = torch.tensor([9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2])
            mixed = e.turn_credit(reward_M[order], 7 - state_M[order], 3 - trajectory_M[order])
            _close(mixed, credits_M[order], f"{label} turn_credit() depends on the order of trajectories or of states")
            first = e.turn_credit(reward_M[:6], state_M[:6], trajectory_M[:6])
            _close(first, credits_M[:6], f"{label} turn_credit() of a group depends on the turns of other groups")

    def test_memory(self) -> None:
        """Where ``baseline`` takes ``key_N``, ``update_statistics`` changes it and nothing else does, and a fresh
        instance with the same state gives the same."""
        for config in self.grid():
            e, label = self.build(config), self.label(config)
            if not reads(e, "key_N"):
                continue
            c = fabricated(e.needs_values, samples=max(4, e.group_min))
            keys = (c.group_N, c.baseline_arguments["key_N"], c.sample_N)
            first = _baseline(e, c)
            expect(
                same_bits(first, _baseline(e, c)), f"{label} baseline() changes the state: do so in update_statistics()"
            )
            e.update_statistics(c.r_N, *keys)
            second, fresh = _baseline(e, c), self.build(config)
            expect(
                not same_bits(first, second),
                f"{label} update_statistics() does not change the baseline of the next step",
            )
            check_state(e, fresh, label)
            expect(same_bits(second, _baseline(fresh, c)), f"{label} the state does not restore the baseline")

    def test_statement(self) -> None:
        """The estimator equals the author's plain statements."""
        has_baseline = type(self).statement_baseline is not AdvantageContract.statement_baseline
        has_returns = type(self).statement_returns is not AdvantageContract.statement_returns
        if not has_baseline and not has_returns:
            raise missing("statement_baseline or statement_returns: the estimator written as plain loops")
        for label, config, e, c in self.cases():
            if has_baseline:
                parameters = inspect.signature(self.statement_baseline).parameters
                arguments = {name: value for name, value in c.baseline_arguments.items() if name in parameters}
                expected = self.statement_baseline(c.r_N, c.group_N, config, **arguments)
                _close(_baseline(e, c), expected, f"{label} baseline() differs from the statement")
            if reads_turns(e):
                if type(self).statement_turns is AdvantageContract.statement_turns:
                    raise missing("statement_turns: the credit of turns written as plain loops")
                expected = self.statement_turns(*fabricated_turns(), config)
                _close(
                    e.turn_credit(*fabricated_turns()), expected, f"{label} turn_credit() differs from the statement"
                )
            if has_returns:
                double = [None if t is None else t.double() for t in (c.values_NA, c.boot_N)]
                stated_pair = self.statement_returns(c.R_NA.double(), c.mask_NA, double[0], double[1], config)
                columns = ("advantages", "returns")
                for value, want, column in zip(self._returns(e, c), stated_pair, columns, strict=True):
                    _close(value[c.mask_NA], want[c.mask_NA], f"{label} the {column} differ from the statement")

    def statement_baseline(self, r_N: Tensor, group_N: Tensor, config: Any) -> Tensor:
        """float64 [N], as loops over groups. It may have further arguments of
        :meth:`rlhf.interfaces.Advantage.baseline`."""
        raise NotImplementedError

    def statement_turns(self, reward_M: Tensor, state_M: Tensor, trajectory_M: Tensor, config: Any) -> Tensor:
        """``turn_credit``, float64 [M], as loops over turns."""
        raise NotImplementedError

    def statement_returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None, config: Any
    ) -> tuple[Tensor, Tensor]:
        """(advantages, returns) in float64, as loops over trajectories and tokens."""
        raise NotImplementedError

    def _returns(self, estimator: Any, c: Credit) -> tuple[Tensor, Tensor]:
        return _pair(estimator, c, estimator.returns(c.R_NA, c.mask_NA, c.values_NA, c.boot_N))


def _baseline(estimator: Any, c: Credit) -> Tensor:
    """Returns the result of ``baseline``. Fails if its shape or dtype is wrong."""
    r_N = baseline_of(estimator, c.r_N, c.group_N, **c.baseline_arguments)
    expect(
        isinstance(r_N, Tensor) and r_N.shape == c.r_N.shape and r_N.dtype == torch.float64,
        f"advantage {estimator.name!r}: baseline() must give float64 {tuple(c.r_N.shape)}, got {_text(r_N)}",
    )
    return r_N


def _pair(estimator: Any, c: Credit, result: Any) -> tuple[Tensor, Tensor]:
    """Returns the result of ``returns``. Fails if its form is wrong."""
    shape = tuple(c.R_NA.shape)
    rule = f"advantage {estimator.name!r}: returns() must give (advantages, returns), two tensors of shape {shape}"
    expect(isinstance(result, tuple) and len(result) == 2, f"{rule}, got {_text(result)}")
    for values in result:
        right = isinstance(values, Tensor) and tuple(values.shape) == shape and values.is_floating_point()
        expect(right, f"{rule} and a floating type, got {_text(values)}")
    return result


def _text(value: Any) -> str:
    return (
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
    )


def _close(a: Tensor, b: Tensor, message: str) -> None:
    size = max(float(b.abs().max()) if b.numel() else 0.0, 1e-12)
    delta = float((a.double() - b.double()).abs().max()) / size if a.numel() else 0.0
    expect(delta <= TOLERANCE, f"{message} (by {delta:.1e} of the largest value, allowed {TOLERANCE:.0e})")
