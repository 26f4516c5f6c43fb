"""Weights of every reduction by hand, and the evaluation of losses: splits, errors, live columns, heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import Loss
from rlhf.ops.heads import BUILTIN, ENTROPY, LOGPROBS, TOP1, resolve_head
from rlhf.ops.loss_value import add_sums, evaluate, finish_sums, over_mask, required_columns
from rlhf.ops.losses import LossInput
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh, weights
from rlhf.types import Head, LossOutput, Reduce
from torch.utils._python_dispatch import TorchDispatchMode


def batch(lengths=((2,), (1, 1), (0,)), roles=None):
    """Units of sequences with these numbers of action tokens after one prompt token. By default: an answer of 2 tokens,
    an answer of two sequences of 1 token, and an empty answer."""
    units = []
    for u, unit in enumerate(lengths):
        sequences = []
        for s, n in enumerate(unit):
            role = roles[u][s] if roles else 0
            sequences.append(SequenceData([1] * (n + 1), {"loss_mask": [False] + [True] * n}, role))
        units.append(UnitData(sequences, {"bonus": float(u)}))
    return pack(units)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (Reduce("token_mean"), [0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0]),
        (Reduce("seq_mean_token_mean"), [0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0]),
        (Reduce("seq_mean_token_sum"), [0, 1 / 2, 1 / 2, 0, 1 / 2, 0, 1 / 2, 0]),
        (Reduce("seq_sum_constant", constant=8.0), [0, 1 / 16, 1 / 16, 0, 1 / 16, 0, 1 / 16, 0]),
        (Reduce("seq_mean"), [1 / 2, 1 / 2, 0, 0]),
        (Reduce("unit_mean"), [1 / 2, 1 / 2, 0]),
        (Reduce("unit_mean", coef=-3.0), [-3 / 2, -3 / 2, 0]),
    ],
)
def test_weights_by_hand(reduce, expected):
    """N = 4 tokens, S = 2 answers that are not empty (a rewritten context is one answer), U = 2."""
    assert weights(batch(), reduce).tolist() == pytest.approx(expected)


def test_token_and_sequence_means_weigh_long_and_short_answers_differently():
    b = batch(((1,), (3,)))
    assert weights(b, Reduce("token_mean")).tolist() == pytest.approx([0, 0.25, 0, 0.25, 0.25, 0.25])
    assert weights(b, Reduce("seq_mean_token_mean")).tolist() == pytest.approx([0, 1 / 2, 0, 1 / 6, 1 / 6, 1 / 6])


def test_roles_restrict_a_term_to_their_sequences():
    b = batch(((1, 2), (1, 1)), roles=((0, 1), (0, 1)))
    w = weights(b, Reduce("seq_mean_token_mean", roles=(1,)))
    assert w.tolist() == pytest.approx([0, 0, 0, 1 / 4, 1 / 4, 0, 0, 0, 1 / 2])


@pytest.mark.parametrize(
    "reduction", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean", "unit_mean"]
)
def test_where_restricts_a_term_and_its_divisor_to_units(reduction):
    """The weights are those of a batch of these units alone, and 0 at the others."""
    full, part = batch(((2,), (3, 1), (1,), (4,))), batch(((3, 1), (4,)))
    full = full.with_column("unit", "mine", torch.tensor([False, True, False, True]))
    reduce = Reduce(reduction, coef=0.5)
    result = weights(full, replace(reduce, unit_mask="mine"))
    selection = result[
        {"token": full.unit_N, "unit": torch.arange(4), "seq_mean": full.unit_B}[_level(reduction)] % 2 == 1
    ]
    assert torch.equal(selection, weights(part, reduce))
    assert float(result.abs().sum()) == float(selection.abs().sum()) > 0
    none = full.with_column("unit", "mine", torch.zeros(4, dtype=torch.bool))
    assert not weights(none, replace(reduce, unit_mask="mine")).any()


def _level(reduction):
    return "unit" if reduction == "unit_mean" else "seq_mean" if reduction == "seq_mean" else "token"


def test_the_input_of_a_loss_on_some_units_holds_what_the_loss_would_see_alone():
    full = batch(((2,), (3, 1), (1,), (4,))).with_column("unit", "a/bonus", torch.arange(4.0))
    full = full.with_column("tok", "a/old", torch.arange(float(full.tokens))).with_column(
        "unit", "b/bonus", full.unit["bonus"]
    )
    keep_U = torch.tensor([False, True, False, True])
    x = LossInput(
        full,
        {"logprobs": torch.arange(11.0), "a/seen": torch.arange(3.0), "b/seen": torch.arange(5.0)},
        (),
        "loss_mask",
        {"a/kl": 0.5, "b/kl": 1.0},
        {"a/live": "logprobs"},
        "both",
    )
    part = x.of_units(keep_U, "a/", ("old", "bonus", "live"), "own")
    assert (part.units, part.sequences, part.tokens, part.coef) == (2, 2, 8, {"kl": 0.5})
    assert part["bonus"].tolist() == [1.0, 3.0]
    assert part["logprobs"].tolist() == [2, 3, 4, 5, 7, 8, 9, 10]
    assert part["seen"].tolist() == [0, 1, 2], "of a mask of these units alone"
    assert not part.has("b/seen")
    assert torch.equal(part["live"], part["logprobs"])
    assert torch.equal(part["old"], full.tok["a/old"][full.tok["loss_mask"] & keep_U[full.unit_N]])
    assert part.sum_per_sequence(torch.ones(8)).tolist() == [4, 4]
    assert x.unit_S.tolist() == [0, 1, 2, 3]
    with pytest.raises(TrainingError, match="loss 'own' reads 'other', which it does not declare"):
        part["other"]


def test_all_weights_are_zero_if_the_mask_is_empty():
    lengths = ((3,), (2, 4))
    empty = pack([UnitData([SequenceData([1] * n, {"loss_mask": [False] * n}, role) for role, n in enumerate(unit)])
                  for unit in lengths])  # fmt: skip
    sizes = {"token_mean": 9, "seq_mean_token_mean": 9, "seq_mean": 3, "unit_mean": 2}
    for reduction, size in sizes.items():
        assert weights(empty, Reduce(reduction)).tolist() == [0.0] * size


# ------------------------------------------------------------------------------------- evaluating


class Squares(Loss):
    name = "squares"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("bonus", "target")

    def reduce(self):
        return {
            "per_token": Reduce("token_mean"),
            "per_answer": Reduce("seq_mean", coef=0.5),
            "per_unit": Reduce("unit_mean"),
        }

    def __call__(self, x):
        lp = x["logprobs"]
        per_unit = torch.zeros(x.units).index_add(0, x.unit_A, lp) * x["bonus"].float()
        return LossOutput(
            {"per_token": lp**2, "per_answer": x.mean_per_sequence(lp), "per_unit": per_unit},
            {
                "lp": ("token", lp),
                "length": ("sequence", x.sum_per_sequence(torch.ones_like(lp))),
                "large": ("token", lp, lp > 2),
                "huge": ("token", lp, lp > 9),
            },
        )


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]], [[1, 0, 2]]])
def test_evaluate_is_split_invariant(parts):
    """lp = (1, 2 | 3, 4): 30/4 + 0.5 (1.5 + 3.5)/2 + (3 * 0 + 7 * 1)/2 = 12.25, however it is split."""
    b = weigh(batch(), Squares().reduce())
    lp_N = torch.tensor([0.0, 1, 2, 0, 3, 0, 4, 0], requires_grad=True)
    total, sums = torch.zeros(()), []
    for units in parts:
        micro = b.with_column("tok", "lp", lp_N).select(units)
        value, part = evaluate(Squares(), micro, {"logprobs": micro.tok["lp"][micro.tok["loss_mask"]]}, {}, {})
        total, sums = total + value, [*sums, part]
    total.backward()
    assert total.item() == pytest.approx(12.25)
    assert lp_N.grad.tolist() == pytest.approx([0, 0.625, 1.125, 0, 2.125, 0, 2.625, 0])
    metrics = finish_sums(add_sums(sums))
    assert metrics["loss"] == pytest.approx(12.25)
    assert metrics["loss/per_answer"] == pytest.approx(1.25)
    assert metrics["lp"] == 2.5
    assert metrics["length"] == pytest.approx(4 / 3)
    assert metrics["large"] == 3.5, "the mean of those that count"
    assert "huge" not in metrics, "none counts: no number, rather than a zero"


def test_metrics_do_not_wait_for_the_device_one_by_one():
    """Each number that is read alone waits for a device. Reading one is an operation of torch on a CPU too, reading a
    list is none there."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    class Measured(Squares):
        def __call__(self, x):
            result = super().__call__(x)
            return LossOutput(result.terms, {f"lp{n}": ("token", x["logprobs"], x["logprobs"] > 1) for n in metrics})

    b, counts = weigh(batch(), Measured().reduce()), []
    for metrics in (range(0), range(5)):
        with Reads() as reads:
            _, sums = evaluate(Measured(), b, {"logprobs": torch.arange(4.0)}, {}, {})
        assert len(sums) == 4 + len(metrics)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def case(call, columns=(), terms=None, live=None, b=None):
    class Case(Squares):
        def columns(self):
            return columns

        def reduce(self):
            return terms or {"t": Reduce("token_mean")}

        def __call__(self, x):
            return call(x)

    loss = Case()
    b = weigh(b or batch(), loss.reduce())
    logprobs_A = torch.ones(int(b.tok["loss_mask"].sum()), requires_grad=True)
    return evaluate(loss, b, {"logprobs": logprobs_A}, {}, live or {})


@pytest.mark.parametrize(
    ("call", "columns", "message"),
    [
        (lambda x: LossOutput({"t": x["bonus"]}), (), "does not declare"),
        (lambda x: LossOutput({"t": x["missing"]}), ("missing",), "must annotate it"),
        (lambda x: LossOutput({"other": x["logprobs"]}), (), r"declares the terms \['t'\].*returned \['other'\]"),
        (lambda x: LossOutput({"t": x["logprobs"].mean()}), (), r"needs \(4,\) values, got \(\)"),
        (lambda x: LossOutput({"t": x["logprobs"]}, {"m": ("unit", x["logprobs"])}), (), r"metric 'm'.*needs \[3\]"),
        (
            lambda x: LossOutput({"t": x["logprobs"]}, {"m": ("token", x["logprobs"], x["logprobs"])}),
            (),
            "the same number of bools",
        ),
        (
            lambda x: LossOutput({"t": x["logprobs"]}, {"m": ("token", x["logprobs"], x["logprobs"][:3] > 0)}),
            (),
            "the same number of bools",
        ),
        (lambda x: x["logprobs"], (), r"returned Tensor, not LossOutput.*terms \['t'\]"),
        (lambda x: LossOutput({"t": x["logprobs"].mean()}), (), "4 tokens, 3 sequences and 3 units.*not averaged"),
        (
            lambda x: LossOutput({"t": x["logprobs"]}, {"m": x["logprobs"].mean()}),
            (),
            r"'m'.*\(level, values\).*Tensor",
        ),
        (
            lambda x: LossOutput({"t": x["logprobs"]}, {"m": ("token",)}),
            (),
            r"'m'.*\(level, values\).*tuple",
        ),
        (
            lambda x: LossOutput({"t": x["logprobs"]}, {"m": ("row", x["logprobs"])}),
            (),
            "'token', 'sequence' or 'unit'",
        ),
        *(
            (lambda x, name=name: LossOutput({"t": x["logprobs"]}, {name: ("token", x["logprobs"])}), (), "Rename it")
            for name in ("loss", "loss/t", "lr")
        ),
    ],
)
def test_a_loss_that_breaks_its_declarations_is_refused(call, columns, message):
    with pytest.raises(TrainingError, match=message):
        case(call, columns)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({}, r'must return, e.g., \{"policy": Reduce\("token_mean"\)\}'),
        ({"t": "token_mean"}, r'must return, e.g., \{"policy": Reduce\("token_mean"\)\}'),
        (Reduce(), "must return"),
        ({"t": Reduce(), "u": "token_mean"}, "must return"),
        ({"t": Reduce("mean")}, "unknown reduction Reduce.'mean'.; allowed are token_mean, seq_mean_token_mean"),
    ],
)
def test_unknown_reductions_are_refused(terms, message):
    class Wrong(Squares):
        def reduce(self):
            return terms

    with pytest.raises(TrainingError, match=message):
        over_mask(Wrong())


def test_live_columns_are_the_detached_output():
    def call(x):
        assert x.has("old")
        assert not x.has("gone")
        assert x["logprobs"].requires_grad
        assert not x["old"].requires_grad
        return LossOutput({"t": x["logprobs"] - x["old"]})

    assert case(call, ("old", "gone"), live={"old": "logprobs"})[0] == 0.0


def test_a_loss_reads_the_columns_that_it_declares_at_every_level():
    b = batch().with_column("tok", "target", torch.arange(8.0)).with_column("seq", "first", torch.arange(4) * 10)

    def call(x):
        assert x["target"].tolist() == [1, 2, 4, 6], "under the mask"
        assert x["first"].tolist() == [0, 10, 20, 30]
        assert x["bonus"].tolist() == [0, 1, 2]
        assert x.has("logprobs")
        assert not x.has("undeclared")
        return LossOutput({"t": x["logprobs"]})

    b = b.with_column("unit", "undeclared", torch.zeros(3))
    assert case(call, ("target", "first", "bonus"), b=b)[0] == 1.0


def test_of_role_refuses_a_unit_without_that_role():
    pairs = batch(((1, 2), (1, 1)), roles=((0, 1), (0, 1)))
    x = LossInput(weigh(pairs, {"t": Reduce()}), {}, (), "loss_mask", {}, {}, "squares")
    values_S = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert x.of_role(values_S, 0).tolist() == [1.0, 3.0]
    assert x.of_role(values_S, 1).tolist() == [2.0, 4.0]
    with pytest.raises(TrainingError, match="0 of 2 units"):
        x.of_role(values_S, 2)


SEEN_LOGPROBS = replace(LOGPROBS, name="seen_logprobs", over="seen")


class Beside(Squares):
    """A term over the tokens of another mask, beside a term over the mask of the loss."""

    def outputs(self):
        return ("logprobs", SEEN_LOGPROBS)

    def reduce(self):
        return {"own": Reduce("token_mean"), "beside": Reduce("token_mean", over="seen", coef=0.5)}

    def __call__(self, x):
        terms = {"own": x["logprobs"], "beside": x["seen_logprobs"]}
        return LossOutput(terms, {"seen": ("seen", x["seen_logprobs"])})


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]], [[2], [1, 0]]])
def test_a_term_with_its_own_mask_has_its_own_count_however_the_batch_is_split(parts):
    """(1 + 2 + 3 + 4) / 4 over the mask of the loss, 0.5 (2 + 4 + 9) / 3 over the other one, which no token of the last
    unit is under: 2.5 + 2.5."""
    b = batch().with_column("tok", "seen", torch.tensor([1, 0, 0, 1, 0, 1, 0, 0]).bool(), over=None)
    lp_N = torch.tensor([2.0, 1, 2, 4, 3, 9, 4, 0], requires_grad=True)
    b = weigh(b, Beside().reduce()).with_column("tok", "lp", lp_N, over=None)
    total, sums = torch.zeros(()), []
    for units in parts:
        micro = b.select(units)
        outputs = {
            name: micro.tok["lp"][micro.tok[over]]
            for name, over in (("logprobs", "loss_mask"), (SEEN_LOGPROBS.name, "seen"))
        }
        value, part = evaluate(Beside(), micro, outputs, {}, {})
        total, sums = total + value, [*sums, part]
    total.backward()
    assert total.item() == pytest.approx(5.0)
    assert lp_N.grad.tolist() == pytest.approx([1 / 6, 1 / 4, 1 / 4, 1 / 6, 1 / 4, 1 / 6, 1 / 4, 0])
    metrics = finish_sums(add_sums(sums))
    assert (metrics["loss/own"], metrics["loss/beside"]) == pytest.approx((2.5, 2.5))
    assert metrics["seen"] == 5.0
    assert ("seen" in sums[0]) == (parts[0] != [2]), "a micro-batch without such a token reports none"


@pytest.mark.parametrize(
    ("outputs", "reduce", "message"),
    [
        (("logprobs",), Reduce(over="other"), "'b' is over 'other'.*has none of its own"),
        (("logprobs", SEEN_LOGPROBS), Reduce(over="other"), "'b' is over 'other'.*has seen"),
        (("logprobs", SEEN_LOGPROBS), Reduce("unit_mean", over="seen"), "per token, got 'unit_mean'"),
    ],
)
def test_a_term_over_tokens_that_no_head_reads_is_refused(outputs, reduce, message):
    class Two(Squares):
        def outputs(self):
            return outputs

        def reduce(self):
            return {"a": Reduce(), "b": reduce}

    with pytest.raises(TrainingError, match=message):
        over_mask(Two())


def test_every_column_that_a_rank_needs():
    assert {"loss_mask", "seen", "weight/beside", "weight/own"} <= set(
        required_columns(Beside(), [LOGPROBS, SEEN_LOGPROBS])
    )
    needed = required_columns(Squares(), [Head("h", lambda *a: None, over="steps", columns=("soft",))])
    assert {"loss_mask", "steps", "soft", "bonus", "temperature", "weight/per_token"} <= set(needed)


# ------------------------------------------------------------------------------------------ heads


def test_heads_by_hand():
    """Logits (0, ln 3): probabilities 1/4, 3/4. The trainer divides by the temperature before any head (defect 6)."""
    logits, ids = torch.tensor([[0.0, 3.0]]).log1p() * torch.tensor([[1.0, 0.7924812]]), torch.tensor([1])
    assert LOGPROBS.fn(logits, ids, {}, {}).tolist() == pytest.approx([-0.2876821], abs=1e-5)
    assert ENTROPY.fn(logits, ids, {}, {}).tolist() == pytest.approx([0.5623351], abs=1e-5)
    assert [TOP1.fn(logits, torch.tensor([i]), {}, {}).tolist() for i in (0, 1)] == [[0.0], [1.0]]
    assert not TOP1.fn(logits.requires_grad_(), ids, {}, {}).requires_grad
    assert BUILTIN["values"].fn(torch.tensor([[4.0]]), ids, {}, {}).tolist() == [4.0]


def test_entropy_of_certainty_is_zero_not_nan():
    logits = torch.tensor([[0.0, -1e4, -1e30]], requires_grad=True)
    entropy = ENTROPY.fn(logits, torch.tensor([0]), {}, {})
    entropy.sum().backward()
    assert entropy.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_resolve_head():
    assert resolve_head("logprobs", "other").over == "other"
    assert resolve_head("scores", "other").over == "last_token"
    with pytest.raises(KeyError, match="unknown model output 'logprob'"):
        resolve_head("logprob")
