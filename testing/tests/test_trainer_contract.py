"""The trainer suite passes the plain trainer and names the rule that a broken one breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.interfaces import ApplyResult
from rlhf.ops.batch import Batch
from rlhf_testing.contract import Nonconformance
from rlhf_testing.plain import PlainTrainer
from rlhf_testing.trainer import TrainerContract


class TestPlainTrainer(TrainerContract):
    trainer = PlainTrainer
    registered = False


# ------------------------------------------------------------------------------- broken on purpose


class Averages(PlainTrainer):
    """Takes the mean over micro-batches."""

    def accumulate(self, micros, loss, coef, live):
        sums = super().accumulate(micros, loss, coef, live)
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad /= len(micros)
        return sums


class ForgetsTemperature(PlainTrainer):
    """Log-probs at temperature 1."""

    def outputs(self, micro, heads):
        tok = {k: v for k, v in micro.tok.items() if k != "temperature"}
        return super().outputs(Batch(micro.ids_N, micro.lens_B, micro.unit_B, micro.role_B, tok, micro.seq), heads)


class OneLongSequence(PlainTrainer):
    """Lets packed sequences see each other."""

    def outputs(self, micro, heads):
        lens_B = torch.tensor([micro.tokens])
        return super().outputs(Batch(micro.ids_N, lens_B, micro.unit_B[:1], micro.role_B[:1], micro.tok), heads)


class ReadsMasked(PlainTrainer):
    """Lets the columns at masked positions into the gradient."""

    def accumulate(self, micros, loss, coef, live):
        sums = super().accumulate(micros, loss, coef, live)
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad += 0.0 * sum(m.tok["targets"].sum() for m in micros)
        return sums


class Frozen(PlainTrainer):
    """One matrix gets no gradient."""

    def load_module(self):
        module = super().load_module()
        next(p for n, p in module.named_parameters() if "mlp" in n).requires_grad_(False)
        return module


class ForgetsOnSkip(PlainTrainer):
    """Loses the optimizer's state at a skipped step."""

    def apply(self):
        result = super().apply()
        if result.skipped:
            self.optimizer.state.clear()
        return result


class StepsAnyway(PlainTrainer):
    """Does not look at the gradient."""

    def apply(self):
        self.optimizer.step()
        self.zero_grad()
        return ApplyResult(1.0, self.config.lr)


class ReportsChange(PlainTrainer):
    """Declares that the learning rate may change, but ignores a change."""

    changeable = frozenset({"lr"})


class IgnoresChange(ReportsChange):
    def change(self, config):
        pass


class KeepsGradients(PlainTrainer):
    """apply() does not forget."""

    def apply(self):
        zero, self.zero_grad = self.zero_grad, lambda: None
        try:
            return super().apply()
        finally:
            self.zero_grad = zero


class LosesOptimizer(PlainTrainer):
    """Restores the weights only."""

    def load(self, path):
        from safetensors.torch import load_file

        self.load_weights(iter(load_file(str(path / "weights.safetensors")).items()))


class Pickles(PlainTrainer):
    """torch.save."""

    def save(self, path):
        super().save(path)
        torch.save({"a": 1}, path / "extra.pt")


class ExportsStale(PlainTrainer):
    """Exports the weights it started with."""

    def export(self, path, view="live"):
        type(self)(self.config, self.spec).export_now(path)

    def export_now(self, path):
        PlainTrainer.export(self, path)


class ForgetsOne(PlainTrainer):
    """load_weights leaves one tensor stale."""

    def load_weights(self, weights):
        super().load_weights((n, v) for n, v in weights if "q_proj" not in n)


class LiveForAll(PlainTrainer):
    """Answers every view with the live weights."""

    def forward(self, micros, outputs, view="live"):
        return super().forward(micros, outputs)


class Unmasked(PlainTrainer):
    """Gives outputs at masked positions."""

    def forward(self, micros, outputs, view="live"):
        results = super().forward(micros, outputs, view)
        for result, micro in zip(results, micros, strict=True):
            for name, values in result.items():
                if values.shape == (micro.tokens,):
                    result[name] = values + (~micro.tok["loss_mask"]).float()
        return results


class HiddenAfter(PlainTrainer):
    """Hidden states at the tokens themselves, not at the positions that predict them."""

    def hidden(self, ids_T):
        return super().hidden(ids_T).roll(-1, 0)


class BorrowsUnscaled(PlainTrainer):
    """Computes with another head than the lent one."""

    def borrow_head(self, role, head):
        super().borrow_head(role, replace(head, weight_VH=head.weight_VH / head.weight_VH.norm()))


class EvaluatesIntoGradients(PlainTrainer):
    """evaluate() steps."""

    def evaluate(self, micros, loss, coef, live):
        sums = self.accumulate(micros, loss, coef, live)
        self.apply()
        return sums


class ForgetsNothing(PlainTrainer):
    """zero_grad does nothing."""

    def zero_grad(self):
        return None


class TakesAnyHead(PlainTrainer):
    """Accepts a random head as a reward model's."""

    @classmethod
    def check_files(cls, spec):
        return None


class RandomHead(PlainTrainer):
    """Draws a new head from torch's global random state, as transformers does."""

    def load_module(self):
        module = super().load_module()
        if not self.language_model:
            torch.nn.init.normal_(module.score.weight)
        return module


def suite(cls):
    return type("Broken", (TrainerContract,), {"trainer": cls, "registered": False})()


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Averages, "test_gradients", "Sum gradients"),
        (ForgetsTemperature, "test_forward", "'logprobs' differs"),
        (OneLongSequence, "test_packing", "against packed together"),
        (OneLongSequence, "test_forward", "differs"),
        (ReadsMasked, "test_masked_positions", "NaN at masked positions changes the gradient"),
        (Frozen, "test_every_parameter_learns", "is it frozen"),
        (StepsAnyway, "test_skipped_step", "must skip the step"),
        (ForgetsOnSkip, "test_skipped_step", "the step after a skipped one: .* tensors are not bit-equal"),
        (ReportsChange, "test_change", "moves the weights as far as before"),
        (IgnoresChange, "test_change", "to half of lr, apply\\(\\) reports"),
        (KeepsGradients, "test_step", "would add to them"),
        (LosesOptimizer, "test_state", "after save"),
        (Pickles, "test_state", "writes a pickle"),
        (ExportsStale, "test_export", "exported model's log-probs differ"),
        (ForgetsOne, "test_weights", "are not bit-equal"),
        (LiveForAll, "test_views", "accepts the view"),
        (Unmasked, "test_forward", "'logprobs' differs|must be 0 where"),
        (HiddenAfter, "test_forward", "'hidden' differs"),
        (BorrowsUnscaled, "test_lent_head", "the loss is .*, but .* by the plain computation"),
        (EvaluatesIntoGradients, "test_evaluate", "changed the weight"),
        (ForgetsNothing, "test_zero_grad", "after zero_grad"),
        (TakesAnyHead, "test_frozen_head", "its head would be random"),
        (RandomHead, "test_new_head", "draw it from spec.seed"),
    ],
)
def test_broken_trainer_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()
