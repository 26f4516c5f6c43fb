"""Shared prefixes are computed once, and sharing changes no result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.errors import ModelError
from rlhf.ops import prefixes as rules
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import Image
from rlhf_modeling.attention import PackedAttention
from rlhf_modeling.matmul_attention import lay_out, matmul_attention
from rlhf_modeling.shared_prefixes import Stretch, share_prefixes
from rlhf_testing.tiny import tiny_model

PROMPT, OTHER = [10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26, 27, 28]

CASES = {
    "ragged suffixes": [PROMPT + [30 + i] * n for i, n in enumerate((5, 1, 12, 3))],
    "nested": [
        [*PROMPT, 40, 41, 42, 43, 44],
        [*PROMPT, 40, 41, 42, 43, 45, 46],
        [*PROMPT, 50, 51],
        [*PROMPT[:5], 60, 61],
    ],
    "identical, and one inside another": [[*PROMPT, 30, 31], PROMPT, [*PROMPT, 30, 31], [*PROMPT, 30], [*PROMPT, 30]],
    "two prompts, not side by side": [[*PROMPT, 30], [*OTHER, 31, 32], [*PROMPT, 33, 34, 35], [*OTHER, 36]],
    "one-token prompts": [[10, 30, 31, 32], [10, 33, 34], [11, 30, 31, 32, 33], [11, 34]],
    "one token": [[10], [10], [11]],
    "long": [PROMPT * 30 + [30 + i] * n for i, n in enumerate((5, 40, 300, 40, 40))],
    "a short front of long sequences": [PROMPT + [30 + i] * n for i, n in enumerate((190, 200, 190))],
    "nothing": [[10, 30, 31], [11, 30, 31, 32, 33], OTHER],
}


@pytest.fixture(autouse=True)
def share_all(monkeypatch):
    """Share all prefixes, also short ones."""
    monkeypatch.setattr(rules, "MIN_TOKENS", 1)
    monkeypatch.setattr(rules, "GAIN", 0.0)


@pytest.fixture
def as_it_is(share_all, monkeypatch):
    monkeypatch.undo()


def batch_of(rows, loss=None, mask="all"):
    units = [UnitData([SequenceData(r, {"loss_mask": [mask == "all" or i >= 4 for i in range(len(r))]})]) for r in rows]
    batch = pack(units)
    return batch if loss is None else weigh(batch, loss.reduce())


def pairs_of(rows):
    sides = [SequenceData(r, {"loss_mask": [True] * len(r)}, i % 2) for i, r in enumerate(rows)]
    return pack([UnitData(sides[i : i + 2]) for i in range(0, len(rows), 2)])


def shared_of(rows):
    return share_prefixes(torch.tensor([i for r in rows for i in r]), [len(r) for r in rows])


def prefixes(rows):
    return {tuple(r[: i + 1]) for r in rows for i in range(len(r))}


def close(a, b, tolerance=1e-6):
    flat = [torch.cat([d[n].flatten() for n in a]) for d in (a, b)]
    assert (flat[0] - flat[1]).norm() <= tolerance * flat[1].norm()


# ------------------------------------------------------------------------------------------------- what is computed

rows_of_ids = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows_of_ids)
def test_every_distinct_prefix_is_computed_once_and_found_by_every_token(rows):
    batch = batch_of(rows)
    shared = share_prefixes(batch.ids_N, batch.lens_B.tolist())
    if shared is None:
        assert len(prefixes(rows)) == batch.tokens
        return
    assert shared.ids_M.numel() == len(prefixes(rows))
    assert torch.equal(shared.ids_M[shared.place_N], batch.ids_N)
    assert torch.equal(shared.position_M[shared.place_N], batch.position_N)
    places = [tuple(p.tolist()) for p in shared.place_N.split(batch.lens_B.tolist())]
    prefix_of = {}
    for row, place in zip(rows, places, strict=True):  # one place for equal tokens after equal prefixes
        for i in range(len(row)):
            assert prefix_of.setdefault(place[i], tuple(row[: i + 1])) == tuple(row[: i + 1])
    assert sum(s.length - s.skip for s in shared.stretches) == shared.ids_M.numel()


def test_the_example_of_the_module():
    shared = shared_of([[1, 2, 3, 4, 5], [1, 2, 3, 9, 8], [1, 2, 3, 9, 7, 6]])
    assert shared.place_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 8, 0, 1, 2, 5, 6, 7]
    assert [(s.start, s.skip, s.length, s.first) for s in shared.stretches] == [
        (0, 0, 5, 0),
        (5, 3, 6, 10),
        (8, 4, 5, 5),
    ]


def test_short_prefixes_are_not_shared(as_it_is):
    assert shared_of([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]) is None
    assert shared_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 7]]) is not None
    long = [[1, 2, 3, 4, *[n] * 300] for n in (5, 6)]
    assert shared_of(long) is None


def test_prefixes_with_other_images_are_not_shared(as_it_is):
    red, blue = Image(b"red", 1, 2, [9]), Image(b"blue", 1, 2, [9])
    ids_N = torch.tensor([1, 9, 9, 2, 3, 1, 9, 9, 2, 4, 1, 9, 9, 2, 3])
    shared = share_prefixes(ids_N, [5, 5, 5], ((red,), (red,), (blue,)))
    assert sorted(shared.ids_M.tolist()) == sorted([1, 9, 9, 2, 3, 4, 1, 9, 9, 2, 3])
    first, second, third = shared.place_N.view(3, 5).tolist()
    assert first[:4] == second[:4]
    assert not set(third) & set(first)


# ------------------------------------------------------------------------------------------------------- attention


FP32, BF16 = torch.float32, torch.bfloat16
ATTENTION = [(name, FP32, {}) for name in CASES if name != "nothing"] + [
    (name, dtype, options)
    for name in ("nested", "long")
    for dtype, options in ((FP32, {"sliding_window": 6}), (FP32, {"softcap": 5.0}), (BF16, {}))
]


@pytest.mark.parametrize(("name", "dtype", "options"), ATTENTION)
def test_attention_equals_that_of_sequences_with_keys_of_their_own(name, dtype, options):
    rows = CASES[name]
    shared, lens = shared_of(rows), [len(r) for r in rows]
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, h, len(shared.ids_M), 8, generator=g).to(dtype).requires_grad_() for h in (4, 2, 2)]
    copies = [x.detach().float().requires_grad_() for x in inputs]
    weight = torch.randn(1, sum(lens), 4, 8, generator=g)
    expected, _ = PackedAttention(lens)(None, *(x[:, :, shared.place_N] for x in copies), None, **options)
    output, _ = PackedAttention(lens, shared)(None, *inputs, None, **options)
    assert output.dtype == dtype
    output = output[:, shared.place_N].float()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert (output - expected).norm() <= tolerance * expected.norm()
    gradients = torch.autograd.grad((expected * weight).sum(), copies)
    for a, b in zip(torch.autograd.grad((output * weight).sum(), inputs), gradients, strict=True):
        assert (a.float() - b).norm() <= tolerance * b.norm()


def test_short_attention_with_a_shared_front_passes_gradcheck():
    stretches = [Stretch(0, 0, 9, 0), Stretch(9, 8, 11, 9), Stretch(12, 3, 5, 20)]
    place = torch.tensor([*range(9), *range(8), 9, 10, 11, *range(3), 12, 13])
    layout = lay_out(stretches, 14, place)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, h, 4, generator=g, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))
    assert torch.autograd.gradcheck(
        lambda q, k, v: matmul_attention(q, k, v, layout, 0.5, 6), (q, k, v), eps=1e-3, atol=2e-3, rtol=2e-3
    )


def test_a_shared_keys_gradients_are_added_without_rounding():
    """All sequences share their first token, and all scores are 0. Only second tokens have a gradient. Each of them
    contributes 1/2 x scaling to the gradient of the first token's key, and 1/2 to that of its value. A sum in bf16
    would lose the contributions of the 4 longer sequences."""
    lens = [2] * 256 + [9, 17, 25, 33]
    stretches, place = [Stretch(0, 0, 2, 0)], [0, 1]
    for n in lens[1:]:
        start = stretches[-1].start + stretches[-1].length - stretches[-1].skip
        stretches.append(Stretch(start, 1, n, len(place)))
        place += [0, *range(start, start + n - 1)]
    layout = lay_out(stretches, max(place) + 1, torch.tensor(place))
    q, k, v = (torch.full((max(place) + 1, 1, 1), x, dtype=torch.bfloat16) for x in (1.0, 0.0, -1.0))
    v[0] = 1.0
    out = matmul_attention(q, k.requires_grad_(), v.requires_grad_(), layout, 2.0, None)
    out[[s.start + 1 - s.skip for s in stretches]].sum().backward()
    assert float(k.grad[0]) == 260 / 2 * 2.0
    assert float(v.grad[0]) == 260 / 2


def test_dropout_on_shared_tokens_is_refused():
    shared = shared_of([[1, 2], [1, 3]])
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match=r"dropout = 0\.5 on shared prefixes"):
        PackedAttention([2, 2], shared)(None, q, q, q, None, dropout=0.5)


# --------------------------------------------------------------------------------------------------------- trainer


def computed(trainer):
    """Token ids that enter the embedding, one list per forward pass."""
    passes = []
    trainer.module.get_input_embeddings().register_forward_hook(lambda _, x, y: passes.append(x[0][0].tolist()))
    return passes


@pytest.mark.parametrize("name", CASES)
def test_logprobs_equal_one_sequence_at_a_time(name, make_trainer):
    trainer, batch = make_trainer(trained=False), batch_of(CASES[name])
    [outputs] = trainer.forward([batch], ["logprobs", "entropy"])
    singles = trainer.forward([batch.select([u]) for u in range(batch.units)], ["logprobs", "entropy"])
    for output, value in outputs.items():
        assert (value - torch.cat([part[output] for part in singles])).abs().max() < 3e-6, output


@pytest.mark.parametrize(
    ("name", "head", "mask"),
    [
        *((name, "lm", "answers") for name in CASES if name not in ("one token", "one-token prompts")),
        ("nested", "lm", "all"),
        ("nested", "scalar", "answers"),
        ("long", "scalar", "all"),
    ],
)
def test_gradients_are_those_without_sharing(name, head, mask, make_trainer, nll, squares):
    loss = nll if head == "lm" else squares
    batch, gradients, sums = batch_of(CASES[name], loss, mask), [], []
    for on in (True, False):
        trainer = make_trainer(head=head, shared_prefixes=on)
        sums.append(trainer.accumulate([batch], loss, {}, {})["loss"][0])
        gradients.append(trainer.gradients())
    close(*gradients)
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_gradient_checkpointing_and_logit_chunks_share_too(make_trainer, nll):
    batch, gradients = batch_of(CASES["nested"] + CASES["long"], nll), []
    for options in ({"shared_prefixes": False}, {"gradient_checkpointing": True}, {"logits_chunk": 500}):
        trainer = make_trainer(**options)
        trainer.accumulate([batch], nll, {}, {})
        gradients.append(trainer.gradients())
    close(gradients[1], gradients[0])
    close(gradients[2], gradients[0])


def test_under_bf16_gradients_equal_those_without_sharing_up_to_rounding(make_trainer, nll):
    batch, gradients = batch_of(CASES["ragged suffixes"] + CASES["long"], nll), []
    for dtype, on in (("fp32", False), ("bf16", False), ("bf16", True)):
        trainer = make_trainer(dtype=dtype, shared_prefixes=on)
        trainer.accumulate([batch], nll, {}, {})
        gradients.append(torch.cat([g.flatten() for g in trainer.gradients().values()]))
    plain, shared = ((gradients[i] - gradients[0]).norm() / gradients[0].norm() for i in (1, 2))
    assert shared < 1.25 * plain + 1e-4


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
        ("gemma3_text", {"sliding_window": 4}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_architectures(architecture, options, tmp_path, make_trainer, nll):
    path = tiny_model(tmp_path, architecture=architecture, **options)
    batch, gradients = batch_of(CASES["nested"] + CASES["long"], nll), []
    for on in (True, False):
        trainer = make_trainer(path, shared_prefixes=on)
        passes = computed(trainer)
        trainer.accumulate([batch], nll, {}, {})
        assert (len(passes[0]) < batch.tokens) == on
        gradients.append(trainer.gradients())
    close(*gradients, 3e-6)  # splitting the batch alone changes Gemma's by 8e-7


def test_scores_are_those_of_one_sequence_at_a_time(make_trainer):
    batch = batch_of(CASES["identical, and one inside another"])
    trainer = make_trainer(head="scalar")
    [output] = trainer.forward([batch], ["scores"])
    singles = trainer.forward([batch.select([u]) for u in range(batch.units)], ["scores"])
    assert (output["scores"] - torch.cat([part["scores"] for part in singles])).abs().max() < 3e-6


def test_the_prompt_of_a_group_and_of_pairs_enters_the_model_once(as_it_is, make_trainer, nll):
    prompt = list(range(10, 40))
    answers = [[40 + i, *range(50, 54 + i)] for i in range(6)]
    group = batch_of([prompt + a for a in answers], nll)
    pairs = weigh(pairs_of([prompt + a for a in answers]), nll.reduce())
    for batch in (group, pairs):
        trainer = make_trainer()
        passes = computed(trainer)
        trainer.accumulate([batch], nll, {}, {})
        trainer.forward([batch], ["logprobs"])
        assert len(passes) == 2
        for ids in passes:
            assert len(ids) == 30 + sum(map(len, answers))
            assert all(ids.count(i) == 1 for i in prompt)


def test_pairs_and_splits_change_nothing(make_trainer, nll):
    rows = CASES["ragged suffixes"] + CASES["nested"]
    batch, gradients = weigh(pairs_of(rows), nll.reduce()), []
    for on, micros in (
        (False, [[0, 1, 2, 3]]),
        (True, [[0, 1, 2, 3]]),
        (True, [[3, 0], [2, 1]]),
        (True, [[1], [0], [3], [2]]),
    ):
        trainer = make_trainer(shared_prefixes=on)
        trainer.accumulate([batch.select(m) for m in micros], nll, {}, {})
        gradients.append(trainer.gradients())
    for other in gradients[1:]:
        close(other, gradients[0])


@pytest.mark.parametrize("options", [{"attention_dropout": 0.5}, {"lora": {"rank": 2, "dropout": 0.1}}, {}])
def test_nothing_is_shared_where_there_is_dropout(options, tmp_path, make_trainer, nll):
    if "lora" in options:
        pytest.importorskip("peft")
    model = {k: v for k, v in options.items() if k != "lora"}
    trainer = make_trainer(tiny_model(tmp_path, **model), **{k: v for k, v in options.items() if k == "lora"})
    passes, batch = computed(trainer), batch_of(CASES["ragged suffixes"], nll)
    trainer.accumulate([batch], nll, {}, {})
    assert trainer.facts().shares_prefixes is (not options)
    assert (len(passes[0]) == batch.tokens) is bool(options)


def test_shared_prefixes_can_be_switched_off(make_trainer, nll):
    trainer, batch = make_trainer(shared_prefixes=False), batch_of(CASES["ragged suffixes"], nll)
    passes = computed(trainer)
    trainer.accumulate([batch], nll, {}, {})
    assert trainer.facts().shares_prefixes is False
    assert len(passes[0]) == batch.tokens


def test_a_rerun_is_bit_equal(make_trainer, nll):
    batch, gradients = batch_of(CASES["nested"] + CASES["long"], nll), []
    for _ in range(2):
        trainer = make_trainer()
        trainer.accumulate([batch], nll, {}, {})
        gradients.append(trainer.gradients())
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])
