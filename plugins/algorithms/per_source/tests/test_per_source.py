"""What members make together is the weighted sum of what each makes alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from per_source_members import LAYOUTS, SOURCES, WEIGHTS, algorithm, member, with_demonstrations, with_sources
from pydantic import ValidationError
from rlhf.errors import ConfigError, TrainingError
from rlhf.ops.loss_value import evaluate
from rlhf.ops.reduce import weigh
from rlhf.types import OnlineShape, RunOptions
from rlhf_plugin_per_source import Member, PerSource, PerSourceConfig
from rlhf_plugin_per_source.algorithm import demonstration
from rlhf_plugin_per_source.batch_parts import join, part
from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import Step, model_step

SHARE = 1e-6
"""Largest norm of a difference of gradients, relative to the norm. Sums of fp32 in another order differ by less."""


def groups(count: int = 5, layout: str = "", **options: Any) -> list[Any]:
    data = with_sources(fabricate.groups(3, count=count, samples=4, **options))
    return with_demonstrations(data) if layout == "demonstrations" else data


def gradients(step: Step) -> dict[str, torch.Tensor]:
    """Of the one update of the policy."""
    [run] = step.runs.values()
    return run.gradients


def check_sum(step: Step, steps: dict[str, Step], weights: dict[str, float] = WEIGHTS) -> None:
    """The gradient is the weighted sum of the gradients of the members alone."""
    total = gradients(step)
    for name, gradient in total.items():
        expected = sum(weights[m] * gradients(s)[name] for m, s in steps.items())
        assert float((gradient - expected).norm()) <= SHARE * float(gradient.norm())
    assert all(float(g.norm()) > 0 for s in steps.values() for g in gradients(s).values())


def steps_alone(layout: str, data: list[Any]) -> dict[str, Step]:
    """A step of each member on its own groups, as if it were the only algorithm."""
    members = {m: LAYOUTS[layout][f"members.{m}"]() for m in SOURCES}
    groups_of = {m: [group for group in data if group.row.source == m] for m in SOURCES}
    if members["chat"].data == "demonstrations":
        groups_of["chat"] = [demonstration(group) for group in groups_of["chat"]]
    return {m: model_step(members[m], groups_of[m], 0) for m in SOURCES if groups_of[m]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_the_weighted_sum_of_the_members_alone(layout: str) -> None:
    data = groups(layout=layout)
    check_sum(model_step(algorithm(layout), data, 0), steps_alone(layout, data))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_step_without_samples_of_a_source_trains_the_others(layout: str, source: str) -> None:
    data = [group for group in groups(layout=layout) if group.row.source != source]
    step = model_step(algorithm(layout), data, 0)
    check_sum(step, steps_alone(layout, data))
    assert not any(key.startswith(f"{source}/") for key in step.metrics)


def test_demonstrations_are_needed_from_their_sources_and_change_no_other_need() -> None:
    per_source = algorithm("demonstrations")
    needs = per_source.needs()
    assert (needs.demonstration_sources, needs.answered, needs.reward, needs.demonstration_share) == (
        ("chat",),
        ("chat",),
        True,
        0.0,
    )
    corrected = PerSource(
        PerSourceConfig(members={n: Member(use=u, sources=(n,)) for n, u in (("math", "grpo"), ("chat", "sft"))}),
        {
            "members.math": member("grpo", loss={"correction": {"preset": "tis"}})(),
            "members.chat": member("sft")(),
        },
    )
    assert corrected.needs().features == ("correction",), "no sample of it comes from a generator"
    assert per_source.updates(0)[0].minibatches == 2, "demonstrations take part in the passes of the others"


def test_a_demonstration_without_an_answer_ends_the_run() -> None:
    with pytest.raises(TrainingError, match="row 1 of 'chat' is a demonstration, but its group holds 4 samples"):
        algorithm("demonstrations").assemble(groups())


@pytest.mark.parametrize(
    ("layout", "number", "weight"),
    [("demonstrations", 0, 0.25), ("demonstrations", 4, 0.05), ("demonstrations", 9, 0.0), ("observations", 1, 0.2)],
)
def test_a_weight_moves_over_the_steps(layout: str, number: int, weight: float) -> None:
    """A new algorithm, as after a resume, has the weight of its step."""
    per_source, data = algorithm(layout, weight_end=0.0, weight_steps=5), groups(layout=layout)
    step = model_step(per_source, data, number)
    check_sum(step, steps_alone(layout, data), {"math": 1.0, "chat": weight})
    assert {key: value for key, value in step.finished.items() if "weight" in key} == {
        "chat/weight": pytest.approx(weight)
    }


def test_a_member_without_anything_to_train_adds_nothing() -> None:
    """All samples of one member are truncated and masked: alone it would take no step."""
    data = groups()
    for group in data:
        for trajectory in group.trajectories:
            trajectory.status = "truncated" if group.row.source == "math" else trajectory.status
    step, steps = model_step(algorithm("several passes"), data, 0), steps_alone("several passes", data)
    assert steps.pop("math").updates == []
    check_sum(step, steps)
    assert step.updates[0].coef["math/factor"] == 0.0


def test_metrics_of_a_member_are_those_of_its_algorithm_alone() -> None:
    data = groups()
    step, steps = model_step(algorithm("several passes"), data, 0), steps_alone("several passes", data)
    for name, member_step in steps.items():
        for key, value in member_step.metrics.items():
            if key in ("policy/loss",):
                continue
            start = next((s for s in ("policy/loss/", "policy/") if key.startswith(s)), "")
            weight = WEIGHTS[name] if start == "policy/loss/" else 1.0
            metric = step.metrics[f"{start}{name}/{key.removeprefix(start)}"]
            assert metric == pytest.approx(weight * value, rel=1e-5, abs=1e-7), key
        assert {k.removeprefix(f"{name}/"): v for k, v in step.finished.items() if k.startswith(f"{name}/")} == (
            pytest.approx(member_step.finished)
        )


def test_a_summary_of_a_member_is_of_its_own_means() -> None:
    loss = algorithm("pairs").parts["loss"]
    loss.losses["chat"].summary = lambda means: {"double": 2 * means["accuracy"]} if means else {}
    assert loss.summary({"math/accuracy": 0.1, "chat/accuracy": 0.4, "loss": 0.2}) == {"chat/double": 0.8}
    assert loss.summary({"math/accuracy": 0.1}) == {}


def test_a_micro_batch_without_a_member_reaches_all_outputs() -> None:
    """Stage 3 of ZeRO fails where one rank's backward pass does not reach an output that another one's reaches."""
    per_source = algorithm("clipped")
    batch, _ = per_source.assemble([group for group in groups() if group.row.source == "chat"])
    assert batch is not None
    batch, _ = per_source.credit(batch)
    loss, [update] = per_source.parts["loss"], per_source.updates(0, batch)
    tokens = int(batch.tok["loss_mask"].sum())
    outputs = {name: torch.full((tokens,), -1.0, requires_grad=True) for name in loss.outputs()}
    assert outputs.keys() == {"logprobs", "entropy"}, "only the member without samples reads entropy"
    total, _ = evaluate(loss, weigh(loss.prepare(batch), loss.reduce()), outputs, update.coef, update.live)
    total.backward()
    assert outputs["logprobs"].grad is not None
    assert outputs["logprobs"].grad.any()
    assert outputs["entropy"].grad is not None
    assert not outputs["entropy"].grad.any()


def test_state_of_each_member_is_kept() -> None:
    per_source, fresh = algorithm("several passes"), algorithm("several passes")
    model_step(per_source, groups(), 0)
    assert per_source.state_dict()["chat"]["kl"]["beta"] != 0.3
    fresh.load_state_dict(per_source.state_dict())
    assert fresh.updates(1) == per_source.updates(1)


# -------------------------------------------------------------------------------------------- refused


def refused(run: RunOptions | None = None, **members: Any) -> str:
    """The message for members ``NAME = (sources, function that builds the algorithm)``."""
    algorithms = {name: make() for name, (_, make) in members.items()}
    config = PerSourceConfig(
        members={n: Member(use=algorithms[n].name, sources=sources) for n, (sources, _) in members.items()}
    )
    with pytest.raises(ConfigError) as error:
        PerSource(config, {f"members.{name}": instance for name, instance in algorithms.items()}, run)
    return str(error.value)


GRPO, RLOO = member("grpo"), member("rloo")
REFUSED = {
    "a critic": ({"a": (("math",), member("ppo"))}, "'a': algorithm 'ppo' trains critic"),
    "pairs of rows": ({"a": (("math",), member("dpo"))}, "learns from pairs"),
    "demonstrations alone": ({"a": (("math",), member("sft"))}, "every member learns from demonstrations"),
    "a copied reference": (
        {"a": (("math",), member("grpo", kl={"coef": 0.1, "snapshot_every": 1}))},
        "copies no weights (remove kl.snapshot_every",
    ),
    "other passes": (
        {"a": (("math",), GRPO), "b": (("chat",), member("rloo", minibatches=2))},
        "'a' 1 and 1, 'b' 1 and 2",
    ),
    "samples of the data": ({"a": (("math",), member("luffy"))}, "takes samples of each group from the data"),
    "samples without a reward": ({"a": (("math",), member("distill_on_policy"))}, "learns from samples without a"),
}


@pytest.mark.parametrize(("members", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_members_that_cannot_share_a_step_are_refused(members: dict[str, Any], message: str) -> None:
    assert message in refused(**members)


def test_sources_must_be_those_of_the_run() -> None:
    run = RunOptions(sources=("math", "chat"))
    assert "no member trains on 'chat' of data.train" in refused(run, a=(("math",), GRPO))
    assert "'code' is not a source of data.train; its sources are 'math', 'chat'" in refused(
        run, a=(("math", "code"), GRPO)
    )


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "at least 1 item"),
        ({"a": {"use": "grpo", "sources": []}}, "at least 1 item"),
        ({"a": {"use": "grpo", "sources": ["x"], "weight": 0.0}}, "greater than 0"),
        (
            {"a": {"use": "grpo", "sources": ["x"], "weight_end": 0.5}},
            "weight_end and weight_steps must be set together",
        ),
        ({"policy": {"use": "grpo", "sources": ["x"]}}, "the name 'policy' is not allowed"),
        ({"a/b": {"use": "grpo", "sources": ["x"]}}, "the name 'a/b' is not allowed"),
        (
            {"a": {"use": "grpo", "sources": ["x"]}, "b": {"use": "rloo", "sources": ["x"]}},
            "the source 'x' is named by both 'a' and 'b'",
        ),
    ],
)
def test_options_that_are_refused(members: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PerSourceConfig.model_validate_json(json.dumps({"members": members}))


def test_a_row_of_a_source_without_a_member_ends_the_run() -> None:
    data = groups(2)
    data[0].row = replace(data[0].row, source="code")
    with pytest.raises(TrainingError, match="source 'code', and no member"):
        algorithm("clipped").assemble(data)


def test_advice_names_the_option_of_the_member() -> None:
    [message] = algorithm("clipped").conflicts(OnlineShape(8, 512, 2047))
    assert "--algorithm.members.chat.loss.max_length 512" in message


def test_records_of_experts_are_shared_and_absent_ones_are_not_known():
    recorded, bare = fabricate.batch(1, units=2), fabricate.batch(2, units=3)
    experts_NLK = torch.ones(recorded.tokens, 2, 2, dtype=torch.int16)
    joined = join({"math": recorded.with_column("tok", "experts", experts_NLK, over=None), "chat": bare}, SOURCES)
    assert joined.tok["experts"][:, 0, 0].tolist() == [1] * recorded.tokens + [-1] * bare.tokens
    assert not {"math/experts", "chat/experts"} & joined.tok.keys()
    assert torch.equal(part(joined, "math").tok["experts"], experts_NLK)
