"""The algorithm suite passes well-made algorithms and names the rule that a broken one breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.ops.heads import LOGPROBS
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.trajectories import assemble, compress, expand
from rlhf.types import Annotation, Head, Lent, LossOutput, Needs, Reduce, RoleSpec, Update
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.contract import Nonconformance

from tests.support.parts import Centered


class Ratio(Loss):
    """A bounded ratio times the advantage."""

    name = "ratio"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("advantages", "old_logprobs")

    def reduce(self):
        return {"policy": Reduce("token_mean")}

    def __call__(self, x):
        ratio = (x["logprobs"] - x["old_logprobs"]).clamp(-20, 20).exp()
        return LossOutput({"policy": -ratio * x["advantages"]}, {"ratio": ("token", ratio)})


class Simple(Algorithm):
    """Centred rewards and a ratio, with an optional penalty that keeps state."""

    name = "simple"
    slots = {"advantage": Slot("advantage", "centered"), "loss": Slot("loss", "ratio")}

    class Config(ComponentConfig):
        penalty: float = 0.0
        """Coefficient of the drift from the reference."""
        epochs: int = 1
        """Passes over the batch."""

    def __init__(self, config=None, parts=None, run=None):
        super().__init__(config, parts, run)
        self.beta = self.config.penalty

    def needs(self):
        reference = (RoleSpec("reference", like="policy"),) if self.config.penalty else ()
        return Needs((RoleSpec("policy", trained=True), *reference), group_min=2)

    def assemble(self, examples):
        return assemble(examples, self.run.step_sources), {}

    def annotations(self, step):
        result = []
        if self.config.epochs > 1 or self.config.penalty:
            result.append(Annotation("policy", "logprobs", "old_logprobs"))
        if self.config.penalty:
            result.append(Annotation("reference", "logprobs", "ref_logprobs"))
        return result

    def credit(self, batch):
        advantage = self.parts["advantage"]
        r_N = advantage.baseline(batch.unit["reward"], batch.unit["group"])
        token = batch.tok["last_action"].float() * r_N.float()[batch.unit_N]
        if self.config.penalty:
            token = token - self.beta * (batch.tok["old_logprobs"] - batch.tok["ref_logprobs"])
        R_NA, mask_NA = compress(batch, token)
        adv, _ = advantage.returns(R_NA, mask_NA, None, None)
        return batch.with_column("tok", "advantages", expand(batch, adv)), {"reward": float(r_N.mean())}

    def updates(self, step, batch=None):
        live = {} if self.config.epochs > 1 or self.config.penalty else {"old_logprobs": "logprobs"}
        return [Update("policy", "loss", epochs=self.config.epochs, live=live)]

    def finish(self, step, batch, metrics):
        self.beta *= 1.1
        return {"beta": self.beta}

    def state_dict(self):
        return {"beta": self.beta}

    def load_state_dict(self, state):
        self.beta = state["beta"]


PARTS = {"advantage": Centered, "loss": Ratio}


class TestSimple(AlgorithmContract):
    algorithm = Simple
    registered = False
    parts = PARTS
    configs = [Simple.Config(), Simple.Config(penalty=0.1), Simple.Config(epochs=2)]


CONTEXT = Head("context", LOGPROBS.fn, over="context_mask")


class Contrast(Loss):
    """The answer's log-probs less the reference's log-probs of the context, which are annotated over their own mask."""

    name = "contrast"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("surprise",)

    def reduce(self):
        return {"contrast": Reduce("token_mean")}

    def prepare(self, batch):
        surprise_U = torch.zeros(batch.units).index_add(0, batch.unit_N, batch.tok["ref_context"])
        return batch.with_column("unit", "surprise", surprise_U)

    def __call__(self, x):
        return LossOutput({"contrast": x["logprobs"] * x["surprise"][x.unit_A]})


class Contextual(Algorithm):
    """Rows of demonstrations with a mask of the tokens before the answer."""

    name = "contextual"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "contrast")}

    def needs(self):
        return Needs((RoleSpec("policy", trained=True), RoleSpec("reference", like="policy")))

    def assemble(self, examples):
        batch = pack(
            [UnitData([SequenceData(s.ids, {"loss_mask": s.loss_mask}) for s in e.sequences]) for e in examples]
        )
        context_N = ~batch.tok["loss_mask"] & (batch.position_N > 0)
        return batch.with_column("tok", "context_mask", context_N, over=None), {}

    def annotations(self, step):
        return [Annotation("reference", CONTEXT, "ref_context")]


class MaskedContrast(Contrast):
    """The same, reading the column under its mask only."""

    def prepare(self, batch):
        mask_N = batch.tok["context_mask"]
        values = batch.tok["ref_context"][mask_N]
        surprise_U = torch.zeros(batch.units).index_add(0, batch.unit_N[mask_N], values)
        return batch.with_column("unit", "surprise", surprise_U)


def test_masked_positions_are_those_of_the_mask_of_each_column():
    """``Contrast`` sums the annotated column over all tokens: positions outside its own mask were zeroed."""
    sum_suite, mask_suite = (suite(Contextual, parts={"loss": loss}) for loss in (Contrast, MaskedContrast))
    batch = sum_suite.step(Contextual.Config()).batch
    assert batch.tok["ref_context"][batch.tok["context_mask"]].abs().min() > 0
    with pytest.raises(Nonconformance, match="NaN at masked positions changes the gradient"):
        sum_suite.test_masked_positions()
    mask_suite.test_masked_positions()


# ------------------------------------------------------------------------------- broken on purpose


class NoReference(Simple):
    """Forgets to declare the reference for one config."""

    def needs(self):
        return Needs((RoleSpec("policy", trained=True),), group_min=2)


class LendsTheTrained(Simple):
    """Lends the head of a model that is trained."""

    def needs(self):
        return replace(super().needs(), loans=(Lent("policy", borrower="policy"),))


class WaitsForRewards(Simple):
    """Says that it needs no reward, and leaves out samples without one."""

    def needs(self):
        return replace(super().needs(), reward=False)


class NoOldLogprobs(Simple):
    """Forgets to annotate a column for several passes."""

    def annotations(self, step):
        return []

    def updates(self, step, batch=None):
        return [Update("policy", "loss", epochs=self.config.epochs)]


class ReadsGenerator(Simple):
    """Reads the generator's log-probs, undeclared."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        drift = batch.column("gen_logprobs").mean()
        return batch, {**metrics, "drift": float(drift)}


class SampleOrder(Simple):
    """Credit by position in the batch."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        place = torch.arange(batch.tokens) / batch.tokens
        return batch.with_column("tok", "advantages", batch.tok["advantages"] + place), metrics


class ReadsPrompt(Simple):
    """A mean over all tokens, prompt included."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        level = batch.tok["step_reward"].mean()
        return batch.with_column("tok", "advantages", batch.tok["advantages"] + level), metrics


class KeepsTheBatch(Simple):
    """Plans updates from the batch that was assembled last, not from its argument."""

    units = 0

    def assemble(self, examples):
        batch, metrics = super().assemble(examples)
        self.units = batch.units
        return batch, metrics

    def updates(self, step, batch=None):
        return [replace(update, epochs=1 + (self.units > 0), live={}) for update in super().updates(step, batch)]

    def annotations(self, step):
        return [Annotation("policy", "logprobs", "old_logprobs")]


class MoreThanPlanned(Simple):
    """Takes more optimizer steps than the learning rate counts on."""

    def annotations(self, step):
        return [Annotation("policy", "logprobs", "old_logprobs")]

    def updates(self, step, batch=None):
        return [Update("policy", "loss", epochs=1 if batch is None else 3)]


class Forgetful(Simple):
    """Loses what it learnt."""

    def load_state_dict(self, state):
        pass


class TrainsReference(Simple):
    """Trains a role that is not trained."""

    def needs(self):
        return Needs((RoleSpec("policy"), RoleSpec("critic", head="scalar", trained=True)), group_min=2)


class LiveTwice(Simple):
    """Leaves the old log-probs out with several optimizer steps."""

    def updates(self, step, batch=None):
        return [Update("policy", "loss", epochs=2, live={"old_logprobs": "logprobs"})]


class StdOfOne(Simple):
    """Divides by a standard deviation of zero."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        adv = batch.tok["advantages"]
        return batch.with_column("tok", "advantages", adv / adv.std()), metrics


class KeepsFailed(Simple):
    """Takes every sample, failed ones included."""

    def assemble(self, examples):
        for group in examples:
            for trajectory in group.trajectories:
                trajectory.reward = trajectory.reward or 0.0
        return assemble(examples), {}


class OverAllTokens(Simple):
    """Centres credit over all tokens, those of prompts and observations included, which count as 0."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        adv = batch.tok["advantages"]
        return batch.with_column("tok", "advantages", adv - adv.mean()), metrics


class WholeLength(Simple):
    """Divides by the length of the whole sequence."""

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        share = batch.tok["advantages"] / batch.lens_B[batch.seq_N]
        return batch.with_column("tok", "advantages", share), metrics


class NoGroupMin(Simple):
    """Compares with the group, but declares that a group of one is enough."""

    def needs(self):
        return replace(super().needs(), group_min=1)


class GroupOfNone(Simple):
    """Declares that a group of no sample is enough."""

    def needs(self):
        return replace(super().needs(), group_min=0)


class LosesPenalty(Simple):
    """Loads the reference, reports the penalty, and leaves it out of the credit."""

    def credit(self, batch):
        old_config, self.config = self.config, Simple.Config()
        batch, metrics = super().credit(batch)
        self.config = old_config
        return batch, {**metrics, "penalty": self.beta}


class LosesEpochs(Simple):
    """Makes one pass, whatever ``epochs`` is."""

    def updates(self, step, batch=None):
        return [replace(update, epochs=1) for update in super().updates(step, batch)]


class PerMicroBatch(Ratio):
    """Divides by the tokens of its own micro-batch."""

    def __call__(self, x):
        return LossOutput({"policy": -x["logprobs"] / max(x.tokens, 1)})


def suite(cls, **attributes):
    return type("Broken", (AlgorithmContract,), {"algorithm": cls, "registered": False, "parts": PARTS, **attributes})()


@pytest.mark.parametrize(
    ("cls", "config", "check", "message"),
    [
        (
            NoReference,
            {"penalty": 0.1},
            "test_steps",
            r"reads the role 'reference', but needs\(\) declares \['policy'\]",
        ),
        (LendsTheTrained, {}, "test_needs", "the lender must be a language model that is not trained"),
        (WaitsForRewards, {}, "test_steps", r"assemble\(\) returned no batch for data that can be learnt from"),
        (NoOldLogprobs, {"epochs": 2}, "test_steps", "needs the column 'old_logprobs'"),
        (ReadsGenerator, {}, "test_steps", "no column 'gen_logprobs'"),
        (SampleOrder, {}, "test_order_of_samples", "'advantages' of a sample depends on the order"),
        (ReadsPrompt, {}, "test_masked_positions", "NaN at masked positions"),
        (KeepsTheBatch, {}, "test_plan", r"before and .* after a batch was assembled and credited: read the batch"),
        (MoreThanPlanned, {}, "test_plan", r"makes \{'policy': 3\} optimizer steps, .* plans \{'policy': 1\}"),
        (Forgetful, {"penalty": 0.1}, "test_state", "after load_state_dict"),
        (TrainsReference, {}, "test_updates", "declares untrained"),
        (LiveTwice, {}, "test_updates", "must be annotated beforehand"),
        (StdOfOne, {}, "test_smallest_group", "not finite"),
        (OverAllTokens, {}, "test_longer_contexts", r"longer prompts and observations change the credit .*advantages"),
        (OverAllTokens, {"penalty": 0.1}, "test_longer_contexts", "longer prompts and observations change the credit"),
        (WholeLength, {}, "test_longer_contexts", "longer prompts and observations change the credit"),
        (GroupOfNone, {}, "test_needs", "group_min is 0; it must be at least 1"),
        (NoGroupMin, {}, "test_rewards_teach", "groups of 1 samples, which .* unequal rewards give the same credit"),
        (NoGroupMin, {"penalty": 0.1}, "test_rewards_teach", "Declare a larger group_min"),
        (
            LosesPenalty,
            {"penalty": 0.1},
            "test_options",
            "penalty changes nothing: credit, gradients and what",
        ),
        (LosesPenalty, {"penalty": 0.1, "epochs": 2}, "test_options", "penalty changes nothing"),
        (LosesEpochs, {"epochs": 2}, "test_options", "epochs changes nothing"),
        (KeepsFailed, {}, "test_nothing_to_learn_from", "a failed sample or one without a reward is part"),
    ],
)
def test_broken_algorithm_fails_the_right_check(cls, config, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls, configs=[Simple.Config(**config)]), check)()


@pytest.mark.parametrize("option", ["epochs", "epochs = 2"])
def test_an_option_that_acts_elsewhere_may_be_named(option):
    configs = [Simple.Config(epochs=2)]
    suite(LosesEpochs, configs=configs, without_effect={option: "acts elsewhere"}).test_options()
    with pytest.raises(Nonconformance, match="epochs changes nothing"):
        suite(LosesEpochs, configs=configs, without_effect={"epochs = 3": "acts elsewhere"}).test_options()


def test_broken_part_shows_in_the_gradients():
    with pytest.raises(Nonconformance, match="the gradient of 'policy/loss' changes"):
        suite(Simple, parts={**PARTS, "loss": PerMicroBatch}).test_split_invariance()


def test_equal_rewards_may_hold_nothing_to_learn_from():
    class Contrast(Simple):
        """Learns from groups whose rewards differ."""

        def assemble(self, examples):
            differ = [g for g in examples if len({t.reward for t in g.trajectories}) > 1]
            return assemble(differ, self.run.step_sources), {}

    suite(Contrast).test_smallest_group()

    class BrokenContrast(Contrast, StdOfOne):
        """Fails where the rewards differ."""

        def credit(self, batch):
            return super().credit(batch.with_column("unit", "reward", batch.unit["reward"] * 0))

    with pytest.raises(Nonconformance, match="not finite"):
        suite(BrokenContrast).test_smallest_group()


def test_undeclared_coefficient_is_named():
    class ReadsCoef(Ratio):
        """Reads a coefficient that no update passes."""

        def __call__(self, x):
            return LossOutput({"policy": x["logprobs"] * x.coef["strength"]})

    with pytest.raises(Nonconformance, match="coefficient 'strength', but the update passes"):
        suite(Simple, parts={**PARTS, "loss": ReadsCoef}).test_steps()


def test_unknown_part_is_named():
    with pytest.raises(Nonconformance, match=r"slot 'loss'.*conformance = \{'parts': \{'loss': CLASS\}\}"):
        suite(Simple, parts={"advantage": Centered}).test_needs()
