"""Random options of the policy-gradient algorithms on made-up samples: the loss and the gradient of an optimizer batch
must be those of loops over tokens, written from the formulas, with transformers' own forward pass.

Samples have several turns, rewritten contexts, empty answers and two temperatures. The old policy, the policy that is
trained and the reference differ. Both sides compute in fp32 and sum in another order, so they agree to 2e-4 and 5e-4.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping, Sequence
from statistics import mean, pstdev, stdev
from typing import Any

import pytest
import torch
from rlhf.ops.reduce import weigh
from rlhf.types import Group, Row, Trajectory, Turn, Update
from rlhf_runtime.loop.learn import minibatches
from rlhf_runtime.setup.launch import launch_roles
from rlhf_testing.tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.runs import Workshop
from tests.same_numbers import Case, prepared

ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LEVELS, CONSTANT, BETA = ("token", "sequence_mean", "sequence_product"), 64, 0.5


def options(r: random.Random) -> dict[str, Any]:
    use = r.choice(["ppo", "reinforce", "gspo", "cispo"])
    loss: dict[str, Any] = {"use": use, "entropy_coef": r.choice([0.0, 0.1])}
    if use != "reinforce":
        loss |= {"clip_low": r.choice([0.02, 0.3]), "clip_high": r.choice([0.01, 0.28])}
    means = [{"aggregation": "seq_mean_token_mean"}, {"aggregation": "seq_mean_token_sum"}]
    token_sums = [{"aggregation": "token_mean"}, {"aggregation": "seq_sum_constant", "max_length": CONSTANT}]
    loss |= r.choice(means if use == "gspo" else means + token_sums)  # type: ignore[operator]
    if r.random() < 0.6:
        band = {"low": r.choice([0.0, 0.3]), "high": r.choice([1.5, 8.0])}
        loss["correction"] = {"level": r.choice(LEVELS), "mode": r.choice(["truncate", "mask"]), **band}
    in_reward = {"coef": BETA, "estimator": r.choice(["k1", "k2", "k3"])}
    in_loss = {"coef": BETA, "where": "loss", "estimator": r.choice(["k2", "k3"])}
    settings: dict[str, Any] = {"loss": loss, "minibatches": r.choice([1, 2]), "mask_truncated": r.random() < 0.3}
    settings |= r.choice([{}, {"kl": in_reward}, {"kl": in_loss}]) | r.choice([{}, {"reward_clip": [-0.5, 0.6]}])
    return {**settings, "epochs": 2, "advantage": {"gamma": r.choice([1.0, 0.8])}}


def tokens(r: random.Random, minimum: int, maximum: int) -> list[int]:
    return [r.randrange(3, 99) for _ in range(r.randint(minimum, maximum))]


def samples(r: random.Random) -> list[Group]:
    groups = []
    for number in range(3):
        prompt, row, equal, trajectories = tokens(r, 1, 9), Row({}, "data", number), r.random() < 0.3, []
        for sample in range(r.choice([2, 3, 4])):
            turns = [Turn(prompt, sampled=False)]
            for _ in range(r.choice([1, 2, 3])):
                ids, finish = tokens(r, 0 if sample else 1, 7), "length" if r.random() < 0.3 else "stop"
                lps, fresh = [r.uniform(-7, -3) for _ in ids], r.random() < 0.3
                turns.append(Turn(ids, True, lps, ((0, 0),), finish, r.choice([1.0, 0.7])))  # type: ignore[arg-type]
                turns.append(Turn((prompt if fresh else []) + tokens(r, 1, 3), sampled=False, fresh=fresh))
            reward = 0.5 if equal else r.uniform(-1, 1)
            trajectories.append(Trajectory(row, turns, (number, sample), reward=reward, score=reward))
        groups.append(Group(row, number, trajectories))
    return groups


class Answer:
    """A trajectory: its sequences, and the tokens that the policy sampled."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.sequences: list[list[int]] = []
        self.tokens: list[tuple[int, int, float, float]] = []  # sequence, place, temperature, log-prob at sampling
        for number, turn in enumerate(trajectory.turns):
            if turn.fresh or not number:
                self.sequences.append([])
            positions = range(len(self.sequences[-1]), len(self.sequences[-1]) + len(turn.ids))
            self.sequences[-1] += turn.ids
            sampled = zip(positions, turn.logprobs or (), strict=turn.sampled)
            self.tokens += [(len(self.sequences) - 1, n, turn.temperature, lp) for n, lp in sampled]
        self.index, self.reward = trajectory.index, float(trajectory.reward or 0)
        self.cut = [t for t in trajectory.turns if t.sampled][-1].finish == "length"
        self.advantages: list[float] = []


class Model:
    """transformers, one sequence at a time."""

    def __init__(self, path: Any, moved: float = 0.0) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        move(dict(self.module.named_parameters()), moved)

    def logprobs(self, a: Answer) -> tuple[Tensor, Tensor]:  # and entropies
        logits = [self.module(torch.tensor([ids])).logits[0] for ids in a.sequences]
        p = torch.stack([logits[k][n - 1] / temperature for k, n, temperature, _ in a.tokens]).log_softmax(-1)
        targets = torch.tensor([[a.sequences[k][n]] for k, n, _, _ in a.tokens])
        return p.gather(1, targets)[:, 0], -(p.exp() * p).sum(1)


def move(parameters: Mapping[str, Tensor], size: float) -> None:
    for name, p in parameters.items():
        p.data += size * torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def kl(d: Tensor, estimator: str) -> Tensor:
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


@torch.no_grad()
def credit(o: Mapping[str, Any], algo: str, answers: Sequence[Answer], old: Model, ref: Model) -> None:
    low, high = o.get("reward_clip", (-math.inf, math.inf))
    for a in answers:
        kls = [0.0] * len(a.tokens)
        if a.tokens and "kl" in o and "where" not in o["kl"]:
            kls = kl(old.logprobs(a)[0] - ref.logprobs(a)[0], o["kl"]["estimator"]).tolist()
        group, r = [b.reward for b in answers if b.index[0] == a.index[0]], a.reward
        if algo == "rloo":
            r -= (sum(group) - r) / (len(group) - 1)
        elif algo != "reinforce_pp":
            r -= mean(group)
        if algo == "grpo":
            r = 0.0 if len(set(group)) == 1 else r / (stdev(group) + 1e-9)
        rewards = [-BETA * k for k in kls]
        rewards[-1:] = [min(max(r, low), high) + k for k in rewards[-1:]]
        for t in range(len(rewards)):
            a.advantages.append(sum(o["advantage"]["gamma"] ** n * x for n, x in enumerate(rewards[t:])))
    if algo.startswith("reinforce_pp"):
        every = [x for a in answers for x in a.advantages]
        for a in answers:
            a.advantages = [(x - mean(every)) / pstdev(every) for x in a.advantages]


def policy_loss(o: Mapping[str, Any], answers: Sequence[Answer], policy: Model, old: Model, ref: Model) -> Tensor:
    c, penalty, total = o["loss"], o.get("kl", {}), torch.zeros(())
    taught = [a for a in answers if a.tokens]
    S, N = len(taught), sum(len(a.tokens) for a in taught)
    for a in taught:
        lp, entropy = policy.logprobs(a)
        lp_old, lp_ref, A = old.logprobs(a)[0].detach(), ref.logprobs(a)[0].detach(), torch.tensor(a.advantages)
        ratio = (lp - lp_old).mean().exp() if c["use"] == "gspo" else (lp - lp_old).exp()
        clipped = ratio.clamp(1 - c.get("clip_low", 0), 1 + c.get("clip_high", 0))
        x = -torch.minimum(ratio * A, clipped * A)
        x = {"reinforce": -A * lp, "cispo": -clipped.detach() * A * lp}.get(c["use"], x)
        if way := c.get("correction"):
            d = lp_old - torch.tensor([lp for *_, lp in a.tokens])
            w = {"token": d, "sequence_mean": d.mean(), "sequence_product": d.sum()}[way["level"]].clamp(-20, 20).exp()
            cut = w.clamp(way["low"], way["high"])
            x = x * (cut if way["mode"] == "truncate" else w * (w == cut))
        x = x - c["entropy_coef"] * entropy
        if "where" in penalty:
            x = x + BETA * kl(lp - lp_ref, penalty["estimator"])
        by = {"seq_mean_token_mean": len(a.tokens) * S, "seq_mean_token_sum": S, "seq_sum_constant": S * CONSTANT}
        total = total + x.sum() / by.get(c["aggregation"], N)
    return total


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.full if n > 1 else ()) for n in range(24)])
def test_loss_and_gradient_are_those_of_loops_over_tokens(
    shop: Workshop, request: pytest.FixtureRequest, seed: int
) -> None:
    r = random.Random(seed)
    algo, o, groups = r.choice(ALGORITHMS), options(r), samples(r)
    reference = tiny_model(shop.folder / "reference", hidden=16, heads=2, kv_heads=1, seed=5)
    settings = {
        "reference": {"model": str(reference)} if "kl" in o else None,
        "policy": {"micro_tokens": r.choice([8, 99])},
    }
    run = prepared(shop, Case(algo, {"algorithm": o, **settings}), "run")
    launcher, algorithm = run.parts["launcher"].build(), run.algorithm
    request.addfinalizer(launcher.shutdown)
    roles, batch = launch_roles(run, launcher), algorithm.assemble(groups)[0]
    assert batch is not None
    for annotation in algorithm.annotations(0):
        batch = roles[annotation.role].annotate(batch, [annotation])
    batch = algorithm.credit(batch)[0]
    (update,) = algorithm.updates(0, batch)
    assert isinstance(update, Update)
    move(roles["policy"].group.worker.parameters, 0.03)
    loss, old, policy, ref = algorithm.parts["loss"], Model(shop.model), Model(shop.model, 0.03), Model(reference)
    answers = [Answer(t) for g in groups for t in g.trajectories]
    credit(o, algo, answers, old, ref)
    for minibatch in [*minibatches(batch, update, 1, 0)][: update.minibatches]:
        part = weigh(loss.prepare(minibatch), loss.reduce())
        indices = set(zip(part.unit["group"].tolist(), part.unit["sample"].tolist(), strict=True))
        plain = policy_loss(o, [a for a in answers if a.index in indices], policy, old, ref)
        result = roles["policy"].evaluate(part, loss, update)["loss"][0]
        assert result == pytest.approx(float(plain.detach()), rel=2e-4, abs=2e-4)
        policy.module.zero_grad()
        plain.backward()  # type: ignore[no-untyped-call]
        gradients = roles["policy"].gradients(part, loss, update)
        expected = {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}
        error = math.sqrt(sum(float((gradients[n] - g).square().sum()) for n, g in expected.items()))
        assert error <= 5e-4 * math.sqrt(sum(float(g.square().sum()) for g in expected.values())) + 2e-5
    assert batch.units == len([a for a in answers if not (a.cut and o["mask_truncated"])] or answers)
