"""Sampling in process: the samples, the amount of computation, and the endings of turns."""

import torch
from rlhf.types import GenerationRequest, Sampling
from sampling_cases import requests, sample


def same(a, b, tolerance=2e-6):
    """Equal tokens, and log-probs equal up to rounding."""
    assert [t.ids for t in a] == [t.ids for t in b]
    return (
        max(abs(x - y) for s, t in zip(a, b, strict=True) for x, y in zip(s.logprobs, t.logprobs, strict=True))
        <= tolerance
    )


@torch.no_grad()
def full_logprobs(model, request, turn, temperature):
    ids = torch.tensor([[*request.ids, *turn.ids]])
    logits = model.eval()(ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
    model.train()
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]


def test_samples_do_not_depend_on_neighbours_or_admission(build):
    batch = requests(ignore_eos=True)
    batch = [
        GenerationRequest(r.ids, r.seed, Sampling(max_new_tokens=2 + 7 * (i % 5), ignore_eos=True))
        for i, r in enumerate(batch)
    ]
    turns = sample(build(), batch)
    assert same(turns, sample(build(max_batch=3), batch))
    assert same(turns, [sample(build(), [r])[0] for r in batch])


def test_each_distinct_prompt_is_computed_once(build):
    generator = build(max_batch=3)
    batch = requests(prompts=4, samples=6)
    mixed = [batch[6 * p + s] for s in range(6) for p in range(4)]
    sample(generator, mixed)
    assert generator.work["prefill_tokens"] == sum(len(ids) for ids in {tuple(r.ids) for r in batch})


def test_prompts_are_prefilled_in_packs(build):
    single, packs = build(), build(prefill_tokens=10)
    batch = requests()
    assert same(sample(single, batch), sample(packs, batch))
    assert single.work["prefill_tokens"] == packs.work["prefill_tokens"]


def test_finished_rows_leave_the_batch(build):
    lengths = [1 + 4 * i for i in range(20)]
    batch = [
        GenerationRequest((5, 6, 7), i, Sampling(max_new_tokens=n, ignore_eos=True)) for i, n in enumerate(lengths)
    ]
    generator = build()
    turns = sample(generator, batch)
    assert [len(t.ids) for t in turns] == lengths
    assert {t.finish for t in turns} == {"length"}
    minimum = sum(n - 1 for n in lengths)  # the first token comes from prefill
    assert minimum <= generator.work["row_steps"] <= 1.15 * minimum
    assert generator.work["row_steps"] < 0.65 * len(lengths) * max(lengths)
    assert generator.work["sampled_tokens"] == sum(lengths)


def test_waiting_requests_fill_rows_as_they_free_up(build):
    lengths = [40, 4, 4, 4, 4, 4, 4, 4, 4]
    batch = [
        GenerationRequest((5, 6 + i), i, Sampling(max_new_tokens=n, ignore_eos=True)) for i, n in enumerate(lengths)
    ]
    generator = build(max_batch=2)
    order = [i for i, _ in generator.generate(batch)]
    assert sorted(order) == list(range(9))
    assert generator.work["steps"] <= 40  # one row decodes 39 steps; the others run at the same time


def test_long_samples_continue_their_stream_of_uniforms(build, model):
    batch = [GenerationRequest((9, 8), 5, Sampling(max_new_tokens=n, ignore_eos=True)) for n in (300, 150, 20)]
    turns = sample(build(), batch)
    assert turns[0].ids[:150] == turns[1].ids
    assert turns[1].ids[:20] == turns[2].ids
    assert (torch.tensor(turns[0].logprobs) - full_logprobs(model, batch[0], turns[0], 1.0)).abs().max() < 1e-5
    assert len(set(turns[0].ids[100:])) > 10


def test_no_requests_give_no_samples(build):
    assert list(build().generate([])) == []


# ------------------------------------------------------------------------------------------ endings


def test_stop_tokens_of_one_request_do_not_end_another(build):
    free = sample(build(), requests(prompts=2, ignore_eos=True))
    batch = requests(prompts=2, ignore_eos=True)
    token = free[0].ids[7]
    unused = next(i for i in range(99) if i not in free[0].ids)
    sampling = Sampling(max_new_tokens=24, ignore_eos=True, stop_token_ids=(token, unused))
    turns = sample(build(), [GenerationRequest(batch[0].ids, batch[0].seed, sampling), *batch[1:]])
    assert turns[0].ids == free[0].ids[: free[0].ids.index(token) + 1]
    assert turns[0].finish == "stop"
    assert same(free[1:], turns[1:])


def test_stop_strings_end_a_turn_and_stay_in_ids_and_text(build):
    free = sample(build(), requests(ignore_eos=True))
    stops = tuple(t.text[5:8] for t in free[::2])
    turns = sample(build(max_batch=3), requests(ignore_eos=True, stop=stops))
    stopped = 0
    for a, b in zip(free, turns, strict=True):
        ends = [a.text.index(s) + len(s) for s in stops if s in a.text]
        if ends:
            stopped += 1
            assert b.finish == "stop"
            assert b.text == a.text[: min(ends)]
            assert b.text.endswith(stops)
        else:
            assert (b.ids, b.finish) == (a.ids, "length")
        assert b.ids == a.ids[: len(b.ids)]
    assert stopped >= len(stops)
