"""Mistakes that authors of losses make: `rlhf plugins check` names each one and the line to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import Head, LossOutput, Reduce
from rlhf_testing import conformance


@dataclass
class Selected:
    kind: str
    name: str
    cls: Any


def failures(cls: type) -> dict[str, str]:
    """{check: what is wrong} of every check that fails."""
    return {r.name: r.detail for r in conformance.run(Selected("loss", cls.name, cls)) if not r.passed}


COLUMNS = ("advantages", "is_demonstration")


def gap(logits_CV, ids_C, columns, constants):
    """The largest logit minus the second largest."""
    top_C2 = logits_CV.topk(2, dim=1).values
    return top_C2[:, 0] - top_C2[:, 1]


class Sharp(Loss):
    """Well made: likelihood, and a head of its own."""

    name = "sharp"
    fn = staticmethod(gap)

    def outputs(self):
        return ("logprobs", Head("gap", self.fn))

    def columns(self):
        return ("advantages",)

    def reduce(self):
        return {"policy": Reduce("token_mean"), "gap": Reduce("token_mean", coef=0.1)}

    def policy(self, x):
        return -x["advantages"] * x["logprobs"]

    def metrics(self, x):
        return {}

    def __call__(self, x):
        return LossOutput({"policy": self.policy(x), "gap": x["gap"]}, self.metrics(x))


def made(**members: Any) -> type:
    """``Sharp`` with other members."""
    return type("Made", (Sharp,), {"__doc__": "Made.", **members})


def with_head(fn: Any) -> str:
    """The finding of the check `heads` for the same loss with another function of its head."""
    return failures(made(fn=staticmethod(fn))).get("heads", "")


def test_the_base_of_the_wrong_losses_passes():
    assert failures(Sharp) == {}


def half_detached(self, x):
    """No gradient for answers of the data, of which the value is still a part of the loss."""
    logprobs_A = torch.where(x["is_demonstration"][x.unit_A], x["logprobs"].detach(), x["logprobs"])
    return -x["advantages"] * logprobs_A


def test_a_loss_that_detaches_some_answers_is_named():
    wrong = {"policy": half_detached, "outputs": lambda self: ("logprobs",), "columns": lambda self: COLUMNS}
    wrong |= {"reduce": lambda self: {"policy": Reduce("token_mean")}}
    wrong |= {"__call__": lambda self, x: LossOutput({"policy": self.policy(x)})}
    assert set(failures(made(**wrong))) == {"gradient_reaches"}
    assert "no gradient reaches them: is a part of the loss detached?" in failures(made(**wrong))["gradient_reaches"]


def two_arguments(logits_CV, ids_C):
    return logits_CV[:, 0]


def one_number(logits_CV, ids_C, columns, constants):
    return gap(logits_CV, ids_C, columns, constants).mean()


def of_the_chunk(logits_CV, ids_C, columns, constants):
    gap_C = gap(logits_CV, ids_C, columns, constants)
    return gap_C - gap_C.mean()


def half(logits_CV, ids_C, columns, constants):
    return gap(logits_CV, ids_C, columns, constants).half()


def infinite(logits_CV, ids_C, columns, constants):
    return torch.log(-gap(logits_CV, ids_C, columns, constants))


def in_place(logits_CV, ids_C, columns, constants):
    return gap(logits_CV.clamp_(-50, 50), ids_C, columns, constants)


def undeclared(logits_CV, ids_C, columns, constants):
    return gap(logits_CV, ids_C, columns, constants) * columns["weight"]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (two_arguments, "head 'gap' is called as fn(logits_CV, ids_C, columns, constants): too many positional"),
        (one_number, "must give [44, ...] for 44 tokens, got ()"),
        (of_the_chunk, "depends on which tokens share a chunk"),
        (half, "head 'gap' gives torch.float16: its input is float32"),
        (infinite, "head 'gap' gives 44 values that are not finite"),
        (in_place, "changes its input in place"),
        (undeclared, "head 'gap' reads the column 'weight'; it declares []: set Head(..., columns=('weight',))"),
    ],
)
def test_heads(fn, says):
    assert says in with_head(fn)


def test_heads_that_are_named_or_made_otherwise():
    clash = made(
        outputs=lambda self: (Head("logprobs", gap),),
        __call__=lambda self, x: LossOutput({"policy": self.policy(x), "gap": x["logprobs"]}),
    )
    duplicate = made(outputs=lambda self: ("logprobs", Head("gap", gap), Head("gap", half)))
    new = made(outputs=lambda self: ("logprobs", Head("gap", lambda l, i, c, k: l.logsumexp(1))))  # noqa: E741
    assert "a custom head has the name of the built-in head 'logprobs'" in failures(clash)["heads"]
    assert "outputs() names 'gap' 2 times" in failures(duplicate)["heads"]
    assert "the function of head 'gap' is a new one in each call of outputs()" in failures(new)["heads"]


def test_a_string_in_place_of_a_tuple_is_found():
    assert (
        "columns() returns 'advantages'; it must be a tuple"
        in failures(made(columns=lambda self: "advantages"))["heads"]
    )
    assert (
        "outputs() returns 'logprobs'; it must be a tuple" in failures(made(outputs=lambda self: "logprobs"))["heads"]
    )


def test_terms_that_are_something_else():
    def explain(policy):
        return failures(made(policy=lambda self, x: policy(-x["advantages"] * x["logprobs"])))["declared_needs"]

    assert "needs (44,) values, got ndarray array([" in explain(lambda v: v.detach().numpy())
    assert "needs (44,) values, got (44,) of torch.bool" in explain(lambda v: v > 0)
    assert "the term 'policy' is torch.bfloat16" in explain(lambda v: v.bfloat16())
    assert "the loss is nan on ordinary values" in explain(lambda v: v * float("nan"))


def test_metrics_that_are_no_values():
    mean = made(metrics=lambda self, x: {"mean": ("token", x["logprobs"].mean().item())})
    message = failures(mean)["declared_needs"]
    assert "metric 'mean' of loss 'sharp' per token needs [44] values" in message
    assert "got float -" in message


def test_changes_of_columns_in_place_are_found():
    clamped = made(policy=lambda self, x: -x["advantages"] * x["logprobs"].clamp_(min=-50))

    class Unit(Sharp):
        """Changes a column."""

        conformance = {"levels": {"scale": "unit"}}

        def columns(self):
            return ("advantages", "scale")

        def policy(self, x):
            scale_U = x["scale"]
            scale_U += 1
            return super().policy(x) * scale_U[x.unit_A]

    assert "the call changes ['logprobs'] in place" in failures(clamped)["declared_needs"]
    assert "the call changes ['scale'] in place" in failures(Unit)["declared_needs"]


def test_generators_of_the_whole_process():
    def seeds(self, x):
        torch.manual_seed(0)
        return -x["advantages"] * x["logprobs"]

    dropout = made(policy=lambda self, x: torch.nn.functional.dropout(-x["advantages"] * x["logprobs"], 0.1))
    for loss in (made(policy=seeds), dropout):
        assert "draws from or seeds torch's global random generator" in failures(loss)["declared_needs"]


class Weighted(Sharp):
    """Well made: with an option, and another of a section of its own."""

    class Config(ComponentConfig):
        """Its options."""

        class Tail(ComponentConfig):
            """The end of an answer."""

            scale: float = 1.0
            """Factor."""

        weight: float = 1.0
        """Factor of every token."""
        tail: Tail = Tail()
        """The end of an answer."""

    def policy(self, x):
        return self.config.weight * self.config.tail.scale * super().policy(x)


TAIL = Weighted.Config(tail=Weighted.Config.Tail(scale=2.0))


@pytest.mark.parametrize("config", [Weighted.Config(weight=2.0), TAIL])
def test_an_option_that_nothing_reads_is_noticed(config):
    class Deaf(Weighted):
        """Reads no option."""

        def policy(self, x):
            return Sharp.policy(self, x)

    assert failures(with_configs(Weighted, config)) == {}
    assert list(failures(with_configs(Deaf, config))) == ["options"]
    path = "tail.scale" if config is TAIL else "weight"
    assert f"with {path} = 2.0: {path} changes nothing" in failures(with_configs(Deaf, config))["options"]


def with_configs(cls: type, *configs: Any) -> type:
    return type(cls.__name__, (cls,), {"__doc__": "Checked.", "conformance": {"configs": configs}})
