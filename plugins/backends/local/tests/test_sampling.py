"""One draw: log-probs, truncation, the inverse CDF and the uniforms."""

import math

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf.requests import check_sampling
from rlhf.types import Sampling
from rlhf_plugin_local.token_sampling import BLOCK, CACHED, Draw, Uniforms, draw


def rows(n, V, seed=0, scale=2.0):
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * scale


def uniforms(n, seed=1):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_of_the_distribution_that_is_drawn_from(temperature):
    logits = rows(64, 50)
    tempered = logits.double() / temperature
    for top_k in (0, 3):
        p = Draw.of([Sampling(temperature=temperature, top_k=top_k)] * 64, 50)
        tokens, logprobs = draw(logits, p, uniforms(64))
        left = tempered
        if top_k:
            left = tempered.masked_fill(tempered < tempered.topk(top_k).values[:, -1:], float("-inf"))
        want = left.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert (logprobs - want).abs().max() < 1e-6


@pytest.mark.parametrize("V", [7, BLOCK, BLOCK + 1, 5000])
def test_a_draw_is_the_inverse_of_the_cumulated_distribution(V):
    logits, u = rows(200, V), uniforms(200)
    tokens, _ = draw(logits, Draw.of([Sampling()] * 200, V), u)
    cdf = logits.double().softmax(-1).cumsum(-1)
    upper = cdf.gather(1, tokens[:, None])[:, 0]
    lower = upper - logits.double().softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (upper > u - 1e-6).all()
    assert (lower < u + 1e-6).all()
    exact = torch.searchsorted(cdf, u[:, None], right=True)[:, 0]
    assert (tokens == exact).float().mean() > 0.99  # the rest are draws within rounding of an edge


def test_rows_that_do_not_fit_into_the_cache_together_are_drawn_as_one_by_one():
    """With a vocabulary of which the cache holds two rows: five rows, of which some are truncated or greedy."""
    V = CACHED // 2
    logits, u = rows(5, V), uniforms(5)
    kinds = [Sampling(), Sampling(top_k=9), Sampling(temperature=0.0), Sampling(temperature=0.5), Sampling(min_p=0.1)]
    tokens, logprobs = draw(logits, Draw.of(kinds, V), u)
    singles = [draw(logits[i : i + 1], Draw.of(kinds[i : i + 1], V), u[i : i + 1]) for i in range(5)]
    assert tokens.tolist() == [int(token) for token, _ in singles]
    assert logprobs.tolist() == [float(logprob) for _, logprob in singles]


@pytest.mark.parametrize("V", [5, 1030])
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(V):
    logits = rows(2, V)
    logits[:, [0, -1, -2]] = -math.inf
    almost_one = 1 - 2**-53
    tokens, logprobs = draw(logits, Draw.of([Sampling()] * 2, V), torch.tensor([0.0, almost_one], dtype=torch.float64))
    assert tokens.tolist() == [1, V - 3]
    assert logprobs.isfinite().all()


def allowed(logits, sampling, n=4000):
    V = len(logits)
    tokens, _ = draw(logits.expand(n, V), Draw.of([sampling] * n, V), (torch.arange(n).double() + 0.5) / n)
    return set(tokens.tolist())


@pytest.mark.parametrize("shift", [0, 600])
def test_truncations_keep_the_right_tokens(shift):
    probs = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = torch.full((len(probs) + shift,), -math.inf)
    logits[shift:] = probs.log()

    def support(**options):
        return {t - shift for t in allowed(logits, Sampling(**options))}

    assert support(top_k=2) == {1, 2}
    assert support(top_p=0.6) == {1, 2}  # 0.4 alone does not reach it
    assert support(top_p=0.66) == {1, 2, 3}
    assert support(top_p=0.01) == {1}
    assert support(min_p=0.45) == {1, 2, 3}  # 0.2 / 0.4 reaches it, 0.1 / 0.4 does not
    assert support(min_p=1.0) == {1}
    assert support(top_k=3, top_p=0.6) == {1, 2}  # renormalised after top_k: 0.47 does not reach 0.6, 0.76 does
    assert support(top_k=2, top_p=0.6) == {1}  # 0.4 / 0.65 does
    assert support(top_k=4, min_p=0.6) == {1, 2}
    assert support(top_k=99999) == support() == {0, 1, 2, 3, 4}


def test_ties_at_the_threshold_all_stay():
    assert allowed(torch.tensor([1.0, 2.0, 1.0, 0.0]), Sampling(top_k=2)) == {0, 1, 2}


def test_rows_with_different_parameters_do_not_affect_each_other():
    kinds = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=2),
        Sampling(top_p=0.5, temperature=0.7),
        Sampling(min_p=0.2),
        Sampling(top_k=5, top_p=0.7, min_p=0.05, temperature=2.0),
    ]
    for V in (40, 900):
        logits, u = rows(len(kinds), V), uniforms(len(kinds))
        joint = draw(logits, Draw.of(kinds, V), u)
        for i, sampling in enumerate(kinds):
            single = draw(logits[i : i + 1], Draw.of([sampling], V), u[i : i + 1])
            assert torch.equal(joint[0][i], single[0][0])
            assert torch.equal(joint[1][i], single[1][0])


def test_greedy_takes_the_best_token_and_reports_temperature_one():
    logits = rows(5, 30)
    tokens, logprobs = draw(logits, Draw.of([Sampling(temperature=0, top_p=0.5)] * 5, 30), uniforms(5))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).amax(-1), atol=1e-6)


def test_uniforms_are_a_stream_of_the_whole_seed():
    a, b = Uniforms(7), Uniforms(7)
    assert torch.equal(torch.cat([a.take(3), a.take(6)]), b.take(9))
    assert not torch.equal(Uniforms(7).take(4), Uniforms(7 + 2**32).take(4))
    many = Uniforms(2**63 - 1).take(10000)
    assert many.dtype == torch.float64
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"stop": ("a", "")}, "at least one character"),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        check_sampling(Sampling(**options))


@pytest.mark.parametrize("V", [9, 1200])
def test_rows_without_a_distribution_are_marked_by_their_logprob(V):
    logits = rows(4, V)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    tokens, logprobs = draw(logits, Draw.of([Sampling()] * 4, V), uniforms(4))
    assert logprobs.isfinite().tolist() == [False, False, False, True]
    assert ((tokens >= 0) & (tokens < V)).all()
