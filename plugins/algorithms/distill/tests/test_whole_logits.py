"""Through real trainers: the loss and its gradients are those of whole logits, and no such tensor exists."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.loss_value import required_columns
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec, Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_plugin_distill import Distill, DistillDemonstrations
from rlhf_testing.tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

PROMPT, ANSWER = 5, 7


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student with a tied head, and a wider teacher with a head of its own."""
    folder = tmp_path_factory.mktemp("models")
    student = tiny_model(folder / "student", seed=1, std=0.2)
    return student, tiny_model(folder / "teacher", seed=2, std=0.2, hidden=48, heads=4, tied=False)


def make(path, name="policy", trained=False, **options):
    trainer = Plugins.discover().resolve("trainer", "torch").cls
    config = trainer.Config(lr=1e-3, device="cpu", **options)
    return trainer(config, ModelSpec(RoleSpec(name, trained=trained), str(path), "fp32", total_updates=1))


def rows(count=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    examples = []
    for index in range(count):
        prompt, answer = PROMPT - index % 2, ANSWER + index
        ids = torch.randint(3, 90, (prompt + answer,), generator=g).tolist()
        mask = [False] * prompt + [True] * answer
        examples.append(Example(Row({}, "data", index), [TokenSequence(ids, mask)]))
    return examples


def distilled(models, loss, examples, **options):
    """(loss, gradients, sums) of one optimizer batch, through annotation and lending."""
    student, teacher = make(models[0], trained=True, **options), make(models[1], "teacher")
    algorithm = DistillDemonstrations(parts={"loss": loss})
    batch = algorithm.assemble(examples)[0]
    [annotation] = algorithm.annotations(0)
    hidden_NH = teacher.forward([batch], [annotation.output])[0]["hidden"]
    batch = weigh(batch.with_column("tok", annotation.column, hidden_NH), loss.reduce())
    student.borrow_head("teacher", *teacher.lend_head())
    heads = [o for o in loss.outputs() if not isinstance(o, str)]
    slim = batch.select_columns(required_columns(loss, heads))
    sums = student.accumulate([slim.select([u]) for u in range(batch.units)], loss, {}, {})
    return sums["loss"][0], student.gradients(), sums


def reference(models, c, examples, shift=1):
    """The same by transformers and whole logits in float64: each token is predicted ``shift`` positions before it."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(str(p)).double().eval() for p in models)
    values = []
    for example in examples:
        [sequence] = example.sequences
        ids, positions = torch.tensor([sequence.ids]), [t for t, in_loss in enumerate(sequence.loss_mask) if in_loss]
        predictors = [t - shift for t in positions]
        with torch.no_grad():
            p = (teacher(ids).logits[0][predictors] / c.temperature).softmax(1)
        logits = student(ids).logits[0]
        q, beta = (logits[predictors] / c.temperature).softmax(1), c.beta or 0.5
        m = beta * p + (1 - beta) * q
        d = {
            "forward_kl": (p * (p / q).log()).sum(1),
            "reverse_kl": (q * (q / p).log()).sum(1),
            "jsd": beta * (p * (p / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1),
        }[c.divergence]
        nll = -logits[[t - 1 for t in positions]].log_softmax(1)[range(len(positions)), ids[0, positions]]
        values.append((1 - c.alpha) * nll + c.alpha * d)
    if c.reduce == "token_mean":
        loss = torch.cat(values).mean()
    else:
        loss = torch.stack([v.mean() for v in values]).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def distance(first, second):
    assert first.keys() == second.keys()
    a, b = (torch.cat([d[n].double().flatten() for n in second]) for d in (first, second))
    return float((a - b).norm() / b.norm())


CONFIGS = (
    Distill.Config(),
    Distill.Config(divergence="reverse_kl", alpha=1.0, temperature=2.0),
    Distill.Config(divergence="jsd", beta=0.2, alpha=0.7, temperature=0.8, reduce="seq_mean_token_mean"),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.divergence)
def test_loss_and_gradients_are_those_of_whole_logits(models, config):
    examples = rows()
    want, want_gradients = reference(models, config, examples)
    for chunk in (2**24, 200):  # all tokens at once, and two tokens a chunk
        loss, gradients, _ = distilled(models, Distill(config), examples, logits_chunk=chunk)
        assert loss == pytest.approx(want, rel=1e-6)
        assert distance(gradients, want_gradients) <= 1e-6


def test_the_mask_covers_where_tokens_are_predicted(models):
    """A defect of OpenRLHF: with the mask at the tokens' own positions, the divergence omits the position that
    predicts the first token of the answer and includes the position after the last. Its loss and gradients differ."""
    config, examples = Distill.Config(alpha=1.0), rows()
    loss, gradients, _ = distilled(models, Distill(config), examples)
    shifted, unshifted = reference(models, config, examples), reference(models, config, examples, shift=0)
    assert loss == pytest.approx(shifted[0], rel=1e-6)
    assert abs(loss - unshifted[0]) > 1e-3 * abs(loss)
    assert distance(gradients, unshifted[1]) > 0.1


def test_the_last_token_of_an_answer_is_predicted_and_predicts_nothing(models):
    """Another last token changes no divergence; another last token of the prompt does."""
    config = Distill.Config(alpha=1.0)

    def loss_with(place):
        [example] = rows(count=1)
        ids = list(example.sequences[0].ids)
        if place is not None:
            ids[place] = (ids[place] + 7) % 80 + 5
        variant = Example(example.row, [TokenSequence(ids, example.sequences[0].loss_mask)])
        return distilled(models, Distill(config), [variant])[0]

    assert loss_with(-1) == loss_with(None)
    assert abs(loss_with(PROMPT - 1) - loss_with(None)) > 1e-4


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created inside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_tensor_of_tokens_by_vocabulary_exists(tmp_path):
    """A vocabulary of 20 000 over 48 tokens, four at a time: the largest tensors are the models' own."""
    vocabulary, hidden, chunk = 20_000, 8, 4
    sizes = {"hidden": hidden, "heads": 2, "kv_heads": 1, "intermediate": 16, "layers": 1, "vocab_size": vocabulary}
    paths = [tiny_model(tmp_path / str(seed), seed=seed, **sizes) for seed in (1, 2)]
    examples = rows()
    tokens = sum(sum(e.sequences[0].loss_mask) for e in examples)
    with Largest() as largest:
        distilled(paths, Distill(Distill.Config(divergence="jsd")), examples, logits_chunk=chunk * vocabulary)
    assert largest.elements == vocabulary * hidden, "a weight: nothing is larger"
    assert largest.elements < tokens * vocabulary / 2
    assert largest.elements >= chunk * vocabulary
