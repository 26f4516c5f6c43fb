"""Outputs at the tokens of a mask equal those of a plain implementation, which computes all logits at once."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.ops.heads import ENTROPY, LOGPROBS, SCORES, TOP1, VALUES
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Head
from rlhf_modeling import heads as head_ops
from rlhf_modeling.config import TrainingConfig, most_logits
from rlhf_modeling.stored import fp32_sums, head_product
from torch import nn

LOG_SUM = Head("log_sum", lambda logits, *_: logits.logsumexp(1))
"""Keeps the logits for its backward pass."""
AGAIN = replace(LOGPROBS, name="again")


def plain_logprobs(hidden_NH, weight, batch, temperature_N):
    logits = hidden_NH @ weight.t()
    out = torch.zeros(batch.tokens)
    for t in batch.tok["loss_mask"].nonzero()[:, 0].tolist():
        out[t] = (logits[t - 1] / temperature_N[t]).log_softmax(-1)[batch.ids_N[t]]
    return out


def setup(vocabulary=97):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=g).tolist() for n in (6, 9, 2, 4)]
    g.manual_seed(0)
    batch = pack([UnitData([SequenceData(ids, {"loss_mask": [i >= 2 for i in range(len(ids))]})]) for ids in rows])
    hidden = torch.randn(batch.tokens, 8, generator=g).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=g).requires_grad_()
    return batch, hidden, weight


def compute(batch, hidden, weight, heads, chunk=10**6, tempered=True, logits=None):
    return head_ops.compute(
        hidden, batch, heads, logits or (lambda h: h @ weight.t()), tempered=tempered, chunk=chunk, head_fp32=True
    )


@pytest.mark.parametrize("chunk", [10**6, 3, 1])
@pytest.mark.parametrize("tempered", [True, False])
def test_logprobs_and_gradients_equal_whole_logits(chunk, tempered):
    batch, hidden, weight = setup()
    temperature_N = torch.linspace(0.5, 1.5, batch.tokens) if tempered else torch.ones(batch.tokens)
    if tempered:
        batch = batch.with_column("tok", "temperature", temperature_N)
    expected = plain_logprobs(hidden, weight, batch, temperature_N)
    gradients = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    outputs = compute(batch, hidden, weight, [LOGPROBS, ENTROPY], chunk)
    assert list(outputs) == ["logprobs", "entropy"]
    assert torch.allclose(head_ops.scatter(batch, LOGPROBS, outputs["logprobs"]), expected, atol=1e-5)
    for a, b in zip(torch.autograd.grad(outputs["logprobs"].square().sum(), (hidden, weight)), gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


SETS = [[], [TOP1], [ENTROPY], [TOP1, ENTROPY], [LOG_SUM], [AGAIN]]


@pytest.mark.parametrize("chunk", [10**6, 3])
@pytest.mark.parametrize("others", SETS, ids=lambda heads: "+".join(h.name for h in heads) or "alone")
def test_logprobs_in_the_memory_of_the_logits_change_no_output_and_no_gradient(chunk, others):
    batch, hidden, weight = setup()
    heads, index = [LOGPROBS, *others], batch.index("loss_mask")
    outputs = compute(batch, hidden, weight, heads, chunk)
    logits = hidden[index - 1] @ weight.t()
    expected = {head.name: head.fn(logits, batch.ids_N[index], {}, {}) for head in heads}
    assert list(outputs) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, rtol=1e-6, atol=1e-6)
    gradients, plain = (
        torch.autograd.grad(sum(x.square().sum() for x in values.values()), (hidden, weight))
        for values in (outputs, expected)
    )
    for a, b in zip(gradients, plain, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("temperature", [None, 1.0, 0.5])
@pytest.mark.parametrize("others", SETS, ids=lambda heads: "+".join(h.name for h in heads) or "alone")
def test_which_logprobs_are_computed_in_the_memory_of_the_logits(temperature, others):
    """Those at temperature 1 beside heads that do not keep the logits. Other logits are as the head computed them."""
    batch, hidden, weight = setup()
    index = batch.index("loss_mask")
    if temperature is not None:
        temperature_N = torch.zeros(batch.tokens)  # zero: not sampled
        temperature_N[index] = temperature
        batch = batch.with_column("tok", "temperature", temperature_N)
    [plain], results = [(hidden[index - 1] @ weight.t()).detach()], []
    tempered = head_ops.is_tempered(batch)
    assert tempered == (temperature == 0.5)
    compute(batch, hidden, weight, [LOGPROBS, *others], logits=lambda h: results.append(h @ weight.t()) or results[0],
            tempered=tempered)  # fmt: skip
    overwritten = not tempered and others not in ([LOG_SUM], [AGAIN])
    assert torch.equal(results[0].detach(), plain.log_softmax(1) if overwritten else plain)


def test_the_default_number_of_logits_depends_on_their_copies():
    config = TrainingConfig()
    for backward, limit in ((True, 2**26), (False, 2**25)):
        numbers = [most_logits(config, "cpu", copies, backward=backward) for copies in (0, 1, 2, 6)]
        assert numbers == [limit, limit, limit // 2, 2**24]
        assert most_logits(config, "cuda", 4, backward=backward) == 2**27
        assert most_logits(TrainingConfig(logits_chunk=500), "cpu", 1, backward=backward) == 500


def test_no_more_logits_than_a_chunk_exist():
    batch, hidden, weight = setup()
    rows, alive = [], []

    def logits(h):
        out = h @ weight.t()
        alive.append(weakref.ref(out))
        rows.append((h.shape[0], sum(ref() is not None for ref in alive)))
        return out

    out = compute(batch, hidden, weight, [LOGPROBS], chunk=6, logits=logits)["logprobs"]
    tokens = int(batch.tok["loss_mask"].sum())
    assert [r for r, _ in rows] == [5, 5, 3]  # only the tokens under the mask
    assert not any(ref() is not None for ref in alive)  # none is kept for the backward pass
    out.sum().backward()
    assert sum(r for r, _ in rows) == 2 * tokens  # computed again
    assert max(live for _, live in rows) == 1


def test_scores_are_those_of_the_last_token_and_values_those_before_each_token():
    batch, hidden, _ = setup()
    outputs = compute(batch, hidden, hidden, [VALUES, SCORES], tempered=False, logits=lambda h: h[:, :1])
    ends = batch.lens_B.cumsum(0) - 1
    assert torch.equal(outputs["scores"], hidden[ends, 0])
    places = batch.tok["loss_mask"].nonzero()[:, 0]
    assert torch.equal(outputs["values"], hidden[places - 1, 0])


def test_temperature_is_not_for_scalar_heads():
    batch, hidden, _ = setup()
    batch = batch.with_column("tok", "temperature", torch.full((batch.tokens,), 0.5))
    outputs = compute(batch, hidden, hidden, [VALUES], tempered=False, logits=lambda h: h[:, :1])
    assert torch.equal(outputs["values"], hidden[batch.tok["loss_mask"].nonzero()[:, 0] - 1, 0])


@pytest.mark.parametrize("chunk", [100, 2])
def test_heads_of_plugins_get_columns_and_constants(chunk):
    batch, hidden, weight = setup()
    batch = batch.with_column("tok", "target", torch.arange(batch.tokens))
    head = Head(
        "seen", lambda logits, ids, columns, constants: columns["target"] * constants["k"] + ids, columns=("target",),
        constants={"k": 2},
    )  # fmt: skip
    places = batch.tok["loss_mask"].nonzero()[:, 0]
    assert torch.equal(compute(batch, hidden, weight, [head], chunk)["seen"], 2 * places + batch.ids_N[places])


def test_a_mask_over_a_first_token_is_refused():
    batch, hidden, weight = setup()
    batch = batch.with_column("tok", "all", torch.ones(batch.tokens, dtype=torch.bool), over=None)
    with pytest.raises(TrainingError, match="covers the first token"):
        compute(batch, hidden, weight, [Head("x", LOGPROBS.fn, over="all")])
    with pytest.raises(TrainingError, match="needs the token mask 'none'; the batch has"):
        compute(batch, hidden, weight, [Head("x", LOGPROBS.fn, over="none")])


def test_wrong_shapes_and_double_names_are_refused():
    batch, hidden, weight = setup()
    with pytest.raises(TrainingError, match=r"head 'bad' must return \[13, ...\], got \(\)"):
        compute(batch, hidden, weight, [Head("bad", lambda logits, *_: logits.sum())])
    with pytest.raises(TrainingError, match="share a name"):
        compute(batch, hidden, weight, [LOGPROBS, LOGPROBS])


def test_heads_compute_in_fp32_under_autocast():
    """Also their inputs from hidden states in bf16. 1 + 1/512 is not representable in bf16."""
    batch, hidden, weight = setup()
    matrix = torch.full((8, 1), 1 / 8 + 1 / 4096)

    def product(logits, ids, columns, constants):
        assert logits.dtype == torch.float32
        return torch.ones_like(logits)[:, :8] @ matrix

    heads = [Head("of_hidden", product, reads="hidden"), Head("of_logits", product)]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = compute(batch, hidden.to(torch.bfloat16), weight, heads)
    for value in outputs.values():
        assert value.dtype == torch.float32
        assert value.unique().tolist() == [1 + 1 / 512]


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_the_head_with_fp32_sums_rounds_its_factors_and_nothing_else(storage):
    """Forward and backward, by the products in float64 of factors that are rounded to bf16."""
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 40).to(storage)
    hidden, grad = torch.randn(9, 16, generator=g, requires_grad=True), torch.randn(9, 40, generator=g)
    assert head_product(head, "sums") is None or storage == torch.bfloat16, "fp32 arithmetic is not changed"
    with torch.autocast("cpu", torch.bfloat16):
        product = head_product(head, "sums")
        with torch.autocast("cpu", enabled=False):
            logits = product(hidden)
    logits.backward(grad)
    h, w, d = (x.detach().bfloat16().double() for x in (hidden, head.weight, grad))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits.double(), h @ w.T + head.bias.double(), **close)
    torch.testing.assert_close(hidden.grad.double(), d @ w, **close)
    torch.testing.assert_close(head.weight.grad, (d.T @ h).to(storage), **({} if storage == torch.bfloat16 else close))
    plain = hidden.detach() @ head.weight.detach().float().T
    assert 1e-4 < float((logits - head.bias.float() - plain).abs().max()) < 0.05, "not the product in fp32"


def test_the_product_of_a_gpu_gives_fp32_by_tensors_without_values_in_its_place():
    a, b = (torch.empty(3, 4, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert (fp32_sums(a, b.T).dtype, fp32_sums(a, b.T).shape) == (torch.float32, (3, 3))
