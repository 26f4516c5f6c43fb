"""The key-value cache grows as needed and stays within its limit."""

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.kv_cache import SlotCache
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def sample(model, requests, **options):
    generator = TransformersGenerator(TransformersGenerator.Config(**options), GeneratorSpec((1,), lambda ids: ""))
    generator.load(model, 0)
    turns = dict(generator.generate(requests))
    return [turns[i] for i in range(len(requests))], generator.work


def forced(length, new, seed=0):
    return GenerationRequest(
        tuple(3 + (i * 7 + seed) % 80 for i in range(length)), seed, Sampling(new, ignore_eos=True)
    )


def early(length, budget, seed=0):
    """A request that may sample ``budget`` tokens but ends at once, because every token is a stop token."""
    ids = tuple(3 + (i * 7 + seed) % 80 for i in range(length))
    return GenerationRequest(ids, seed, Sampling(budget, stop_token_ids=tuple(range(99))))


def test_positions_that_are_never_sampled_are_never_allocated(model):
    _, work = sample(model, [early(6, 4000, i) for i in range(8)])
    assert work["peak_cache_tokens"] <= 8 * 128


def test_no_more_positions_are_allocated_than_rows_can_use(model):
    _, work = sample(model, [forced(10, 20, i) for i in range(8)])
    assert work["peak_cache_tokens"] == 8 * 29  # the last token is never fed


def test_a_growing_cache_keeps_the_content_of_its_rows(model):
    requests = [forced(5, 40 + 60 * i, i) for i in range(5)]
    turns, work = sample(model, requests)
    singles = [sample(model, [r])[0][0] for r in requests]
    assert [t.ids for t in turns] == [t.ids for t in singles]
    # When short rows finish, only the longest rows grow, so the cache stays far below 5 rows of the longest length.
    assert work["peak_cache_tokens"] < 0.7 * 5 * (5 + 280)


@pytest.mark.parametrize(
    ("requests", "capacities"),
    [
        ([forced(5, 10, 0), forced(5, 250, 1)], [6 + 64, 71 + 64, 136 + 64, 5 + 250 - 1]),
        ([forced(300, 10, 0), forced(300, 90, 1)], [301 + 301 // 4, 300 + 90 - 1]),
    ],
    ids=["64 positions", "a quarter"],
)
def test_the_cache_grows_in_steps_up_to_the_need_of_the_longest_row(model, monkeypatch, requests, capacities):
    """Each growth copies the cache, so the cache does not grow for every token."""
    growths, reserve = [], SlotCache.reserve

    def watch(self, like, slots, capacity, used):
        growths.append(capacity)
        return reserve(self, like, slots, capacity, used)

    monkeypatch.setattr(SlotCache, "reserve", watch)
    sample(model, requests)
    assert growths[1:] == capacities, "the first is of the comparison when the model is loaded"


def test_rows_times_positions_stay_within_the_bound(model, monkeypatch):
    sizes = []
    reserve = SlotCache.reserve

    def watch(self, like, slots, capacity, used):
        sizes.append(slots * capacity)
        return reserve(self, like, slots, capacity, used)

    monkeypatch.setattr(SlotCache, "reserve", watch)
    requests = [forced(4 + 9 * (i % 4), 10 + 30 * (i % 3), i) for i in range(24)]
    free, _ = sample(model, requests)
    assert max(sizes) > 400
    sizes.clear()
    bounded, _ = sample(model, requests, max_cache_tokens=400)
    assert max(sizes) <= 400
    assert [t.ids for t in bounded] == [t.ids for t in free]


def test_a_request_that_cannot_fit_is_refused(model):
    words = (
        r"request 1 may need 60 tokens \(prompt 20 \+ max_new_tokens 40\) but generator.max_cache_tokens is 50. Raise"
    )
    with pytest.raises(ConfigError, match=words):
        sample(model, [forced(5, 5), forced(20, 40)], max_cache_tokens=50)


def test_a_finished_row_does_not_write_into_other_rows(model):
    """The row ends at the last position of the cache, and its slot stays there as a hole among many rows."""
    requests = [forced(10, 5, 0), *[forced(2, 13, i) for i in range(1, 15)]]
    turns, work = sample(model, requests)
    assert work["peak_cache_tokens"] == 15 * 14
    assert work["row_steps"] == 15 * 12  # the hole was there to the end
    for turn, request in zip(turns, requests, strict=True):
        single = sample(model, [request])[0][0]
        assert turn.ids == single.ids
        assert turn.logprobs == pytest.approx(single.logprobs, abs=1e-5)
