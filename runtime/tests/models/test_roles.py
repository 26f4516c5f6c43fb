"""Outputs come back in the batch's order, and fillers change neither gradients nor metrics, on any number of ranks."""

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ApplyResult, Loss, ModelSpec, TrainerFacts
from rlhf.ops.loss_value import add_sums, evaluate, finish_sums
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.prefixes import sorted_by_prefix
from rlhf.ops.reduce import weigh
from rlhf.types import Annotation, LossOutput, Reduce, RoleSpec, Update
from rlhf_runtime.loop.learn import minibatches
from rlhf_runtime.models.roles import Role

from tests.support.losses import NllLoss
from tests.support.parts import RanksHere


class Bigram:
    """A trainer whose log-prob of a token is a parameter looked up by the token before it."""

    def __init__(self, shares=False, together=1):
        self.shares, self.together, self.computed = shares, together, 0
        self.table = torch.linspace(-2, 0, 50).requires_grad_()
        self.micros = 0
        self.skipped = []

    def _logprobs(self, micro):
        starts, lens = micro.starts_B.tolist(), micro.lens_B.tolist()
        _, fronts = sorted_by_prefix(micro.ids_N, starts, lens, range(len(lens)))
        self.computed += micro.tokens - sum(fronts) * self.shares
        return self.table[micro.ids_N.roll(1)] * micro.ids_N / 50

    def facts(self):
        return TrainerFacts(shares_prefixes=self.shares, ranks_per_share=self.together)

    def forward(self, micros, heads, view):
        return [{"logprobs": self._logprobs(m).detach() * m.tok["loss_mask"]} for m in micros]

    def update(self, micros, loss, coef, live):
        parts = []
        for m in micros:
            self.micros += 1
            outputs = {"logprobs": self._logprobs(m)[m.tok["loss_mask"]]}
            total, sums = evaluate(loss, m, outputs, coef, live)
            total.backward()
            parts.append(sums)
        return add_sums(parts), ApplyResult(0.0, 0.0)

    def skip_updates(self, count):
        self.skipped.append(count)


class Ranks(RanksHere):
    def __init__(self, size, shares=False, together=1):
        super().__init__([Bigram(shares, together) for _ in range(size)])


class NLL(NllLoss):
    def __call__(self, x):
        return LossOutput({"nll": -x["logprobs"]}, {"mean_logprob": ("token", x["logprobs"])})


def batch(lengths=(3, 9, 4, 6, 5)):
    draw = torch.Generator().manual_seed(0)
    units = []
    for n in lengths:
        ids = torch.randint(1, 50, (n,), generator=draw).tolist()
        units.append(UnitData([SequenceData(ids, {"loss_mask": [i % 3 != 0 for i in range(n)]})]))
    return pack(units)


def pairs(prompts=3, per_prompt=4):
    """Units of two sequences each; those of a prompt are apart from each other."""
    draw = torch.Generator().manual_seed(1)
    heads = [torch.randint(1, 50, (20,), generator=draw).tolist() for _ in range(prompts)]
    units = []
    for i in range(prompts * per_prompt):
        tails = [[2 * i + side + 1, *torch.randint(1, 50, (3 + i % 4,), generator=draw).tolist()] for side in (0, 1)]
        sides = [heads[i % prompts] + tail for tail in tails]
        units.append(UnitData([SequenceData(s, {"loss_mask": [j >= 20 for j in range(len(s))]}) for s in sides]))
    return pack(units)


def role(ranks, budget, shares=False, ranks_per_share=1):
    return Role(
        ModelSpec(RoleSpec("policy", trained=True), "m"),
        RanksHere([Bigram(shares, ranks_per_share) for _ in range(ranks)]),
        budget,
    )


@pytest.mark.parametrize(("ranks", "budget"), [(1, 8), (2, 1), (4, 8), (7, 1000)])
def test_split_and_ranks_change_nothing(ranks, budget):
    data, loss = batch(), NLL()
    weighted = weigh(data, loss.reduce())
    reference, split = role(1, 10_000), role(ranks, budget)
    expected, _ = reference.update(weighted, loss, Update("policy", "loss"))
    result, _ = split.update(weighted, loss, Update("policy", "loss"))
    assert len({w.micros for w in split.group.workers}) == 1
    gradient = sum(w.table.grad for w in split.group.workers)
    torch.testing.assert_close(gradient, reference.group.workers[0].table.grad, rtol=1e-5, atol=1e-7)
    assert finish_sums(result) == pytest.approx(finish_sums(expected), rel=1e-5), "fillers count for nothing"
    annotation = Annotation("policy", "logprobs", "old")
    torch.testing.assert_close(
        split.annotate(data, [annotation]).tok["old"], reference.annotate(data, [annotation]).tok["old"]
    )


@pytest.mark.parametrize(("ranks", "ranks_per_share", "budget"), [(2, 2, 8), (4, 2, 1), (6, 3, 1000)])
def test_ranks_that_divide_layers_get_one_share_that_counts_once(ranks, ranks_per_share, budget):
    data, loss = batch(), NLL()
    weighted, update = weigh(data, loss.reduce()), Update("policy", "loss")
    reference, joint = role(ranks // ranks_per_share, budget), role(ranks, budget, ranks_per_share=ranks_per_share)
    expected, _ = reference.update(weighted, loss, update)
    result, _ = joint.update(weighted, loss, update)
    assert result == expected
    for n, worker in enumerate(joint.group.workers):
        assert worker.computed == reference.group.workers[n // ranks_per_share].computed
        assert torch.equal(worker.table.grad, reference.group.workers[n // ranks_per_share].table.grad)
    annotation = Annotation("policy", "logprobs", "old")
    torch.testing.assert_close(
        joint.annotate(data, [annotation]).tok["old"], reference.annotate(data, [annotation]).tok["old"]
    )


@pytest.mark.parametrize(("ranks", "budget"), [(1, 1), (1, 1000), (2, 100), (5, 1000)])
def test_units_that_share_a_prompt_are_computed_together_with_equal_results(ranks, budget):
    data, loss = pairs(), NLL()
    weighted = weigh(data, loss.reduce())
    reference, split = role(1, 10_000), role(ranks, budget, shares=True)
    expected, _ = reference.update(weighted, loss, Update("policy", "loss"))
    result, _ = split.update(weighted, loss, Update("policy", "loss"))
    gradient = sum(w.table.grad for w in split.group.workers)
    torch.testing.assert_close(gradient, reference.group.workers[0].table.grad, rtol=1e-5, atol=1e-7)
    assert finish_sums(result) == pytest.approx(finish_sums(expected), rel=1e-5)
    annotation = Annotation("policy", "logprobs", "old")
    assert torch.equal(split.annotate(data, [annotation]).tok["old"], reference.annotate(data, [annotation]).tok["old"])


def test_each_prompt_is_computed_once_where_the_budget_allows():
    data, loss = pairs(), NLL()
    weighted = weigh(data, loss.reduce())
    for ranks, shares, computed in ((1, True, 3 * 20), (3, True, 3 * 20), (1, False, 24 * 20)):
        split = role(ranks, 1000, shares)
        split.update(weighted, loss, Update("policy", "loss"))
        answers = data.tokens - 24 * 20
        assert sum(w.computed for w in split.group.workers) == answers + computed


def test_the_schedule_skips_planned_steps_that_were_not_taken():
    policy, critic = role(2, 40), role(1, 40)
    weighed = weigh(batch(), NLL().reduce())
    for steps, missed, changes in ((4, [2], 5), (6, [2], 11), (0, [2, 6], 12)):
        for _ in range(steps):
            policy.update(weighed, NLL(), Update("policy", "loss"))
        critic.update(weighed, NLL(), Update("critic", "loss"))
        policy.catch_up(6)
        critic.catch_up(1)
        assert [w.skipped for w in policy.group.workers] == [missed, missed]  # on every rank
        assert critic.group.workers[0].skipped == []
        assert policy.changes == changes, "a schedule that went on is a change, too"
    assert critic.changes == 3


def test_minibatches_cover_every_unit_once_per_epoch_in_a_seeded_order():
    data = batch()
    update = Update("policy", "loss", epochs=2, minibatches=2)
    parts = list(minibatches(data, update, seed=1, step=3))
    lengths = [sorted(int(n) for p in parts[i : i + 2] for n in p.lens_B) for i in (0, 2)]
    assert lengths == [[3, 4, 5, 6, 9]] * 2
    repeat = list(minibatches(data, update, seed=1, step=3))
    assert all(torch.equal(a.ids_N, b.ids_N) for a, b in zip(parts, repeat, strict=True))
    other = list(minibatches(data, update, seed=2, step=3))
    assert any(not torch.equal(a.ids_N, b.ids_N) for a, b in zip(parts, other, strict=True))
    with pytest.raises(TrainingError, match="9 minibatches for 5 units"):
        list(minibatches(data, Update("policy", "loss", minibatches=9), 0, 0))


@pytest.mark.parametrize(
    ("output", "message"), [("values", "does not give 'values'"), ("rubbish", "unknown model output")]
)
def test_an_output_that_the_head_does_not_give_is_refused(output, message):
    with pytest.raises(TrainingError, match=message):
        role(1, 10).annotate(batch(), [Annotation("policy", output, "x")])


@pytest.mark.parametrize("size", [1, 3])
def test_sequences_that_no_head_reads_are_not_computed(size):
    rows = [([10, 11, 12], [False, True, True]), ([13, 14], [False, False]), ([15, 16, 17], [False, False, True])]
    sequences = [SequenceData(ids, {"loss_mask": mask}) for ids, mask in rows]
    batch = pack([UnitData(sequences[:2]), UnitData(sequences[2:])])
    group = Ranks(size)
    role = Role(ModelSpec(RoleSpec("policy"), "m"), group, budget=64)
    result = role.annotate(batch, [Annotation("policy", "logprobs", "lp")]).tok["lp"]
    expected = Bigram()._logprobs(batch).detach() * batch.tok["loss_mask"]
    assert torch.equal(result, expected)
    assert sum(w.computed for w in group.workers) == (6 if size == 1 else 3 + 3 + 3)  # the shortest unit repeated


def test_a_batch_that_no_head_reads_is_computed_whole():
    """An algorithm may ask for an output under a mask that this batch's rows do not have."""
    data = pack([UnitData([SequenceData([10, 11], {"loss_mask": [False, False]})]) for _ in range(2)])
    role_ = role(1, 64)
    assert role_.annotate(data, [Annotation("policy", "logprobs", "lp")]).tok["lp"].tolist() == [0.0] * 4
    assert role_.group.workers[0].computed == 4


def test_live_weights_of_a_role_that_is_another_ones_base_are_the_base():
    class Noting(Ranks):
        views = ()

        def call(self, method, per_rank):
            self.views += tuple(view for _, _, view in per_rank) if method == "forward" else ()
            return super().call(method, per_rank)

    group = Noting(1)
    reference = Role(ModelSpec(RoleSpec("reference"), "m"), group, 64, view="base")
    annotations = [Annotation("reference", "logprobs", "a"), Annotation("reference", "logprobs", "b", view="ema")]
    result = reference.annotate(batch(), annotations)
    assert group.views == ("base", "ema")
    assert {"a", "b"} <= set(result.tok)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 8), (3, 1), (3, 1000)])
def test_outputs_of_sequences_come_back_in_the_batchs_order(ranks, budget):
    class Last(Bigram):
        def forward(self, micros, heads, view):
            return [{"scores": m.ids_N[m.starts_B + m.lens_B - 1].float()} for m in micros]

    data, group = pairs(), Ranks(ranks)
    group.workers = [Last() for _ in range(ranks)]
    scored = Role(ModelSpec(RoleSpec("policy", head="scalar"), "m"), group, budget)
    scores = scored.annotate(data, [Annotation("policy", "scores", "score")]).seq["score"]
    assert scores.tolist() == data.ids_N[torch.cumsum(data.lens_B, 0) - 1].tolist()


class Credited(Loss):
    """Log-probs times advantages, with a mean over answers."""

    name = "credited"

    def __init__(self, signal=("advantages",)):
        super().__init__()
        self._signal = signal

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("advantages",)

    def signal(self):
        return self._signal

    def reduce(self):
        return {"policy": Reduce("seq_mean_token_mean")}

    def __call__(self, x):
        return LossOutput({"policy": -x["advantages"] * x["logprobs"]}, {"logprob": ("token", x["logprobs"])})


def credited(data, advantages):
    mask_N = data.tok["loss_mask"]
    advantages_N = torch.tensor(advantages)[data.unit_N] * mask_N
    return weigh(data.with_column("tok", "advantages", advantages_N), Credited().reduce())


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 1000), (2, 8), (3, 1), (5, 8)])
@pytest.mark.parametrize(
    "advantages",
    [(0.5, 0, 0, -1.0, 0), (0, 0, 0, 0, 2.0), (1.0, 1.0, -1.0, 2.0, 0.25), (0, 0, 0, 0, 0)],
    ids=["two units", "one unit", "all units", "no unit"],
)
def test_units_without_a_signal_are_not_computed_and_the_gradient_is_the_same(advantages, budget, ranks, shares):
    data = batch()
    weighted, update = credited(data, advantages), Update("policy", "loss")
    reference, part = role(1, 10_000), role(ranks, budget, shares)
    expected, _ = reference.update(weighted, Credited(signal=()), update)
    result, _ = part.update(weighted, Credited(), update)
    assert len({w.micros for w in part.group.workers}) == 1, "every rank computes as many micro-batches as the others"
    gradient = sum(w.table.grad for w in part.group.workers)
    torch.testing.assert_close(gradient, reference.group.workers[0].table.grad, rtol=1e-5, atol=1e-8)
    assert bool(gradient.any()) == any(advantages)
    assert result["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5, abs=1e-8)
    tokens = data.tokens_per_unit()
    computed = [n for n, advantage in zip(tokens, advantages, strict=True) if advantage] or [min(tokens)]
    assert result["tokens_left_out"] == (sum(tokens) - sum(computed), sum(tokens))
    assert "tokens_left_out" not in expected
    counts = [sum(i % 3 != 0 for i in range(n)) for n in computed]
    assert result["logprob"][1] == sum(counts), "metrics are of the computed units, each once"
    limit = part.group.workers[0].micros * ranks
    assert sum(w.computed for w in part.group.workers) <= sum(computed) + max(0, limit - len(computed)) * min(computed)


def test_the_unit_that_is_computed_where_none_has_a_signal_has_a_token_to_learn_from():
    """A metric of no token would be 0."""
    units = [UnitData([SequenceData(list(range(1, n + 1)), {"loss_mask": [n > 4 and i > 0 for i in range(n)]})])
             for n in (3, 8, 6)]  # fmt: skip
    result, _ = role(2, 100).update(credited(pack(units), (0.0, 0.0, 0.0)), Credited(), Update("policy", "loss"))
    assert result["logprob"][1] == 5  # of the unit of 6 tokens
    assert result["tokens_left_out"] == (11, 17)


def test_all_units_are_computed_for_an_auxiliary_loss_of_the_model(monkeypatch):
    facts = TrainerFacts(wants_token_share=True)
    monkeypatch.setattr(Bigram, "facts", lambda self: facts)
    weighted = credited(batch(), (1.0, 0.0, 0.0, 0.0, 0.0))
    policy = role(1, 1000)
    result, _ = policy.update(weighted, Credited(), Update("policy", "loss"))
    assert policy.group.workers[0].computed == weighted.tokens
    assert result["tokens_left_out"] == (0, weighted.tokens)


def test_a_unit_whose_signal_is_not_a_number_is_computed():
    weighted = credited(batch(), (0.0, float("nan"), 0.0, 0.0, 0.0))
    result, _ = role(1, 1000).update(weighted, Credited(), Update("policy", "loss"))
    assert result["loss"][0] != result["loss"][0]
