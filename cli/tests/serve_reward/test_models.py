"""Rewards that read tokens: the tokens are those of the texts, and requests share the passes of a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rlhf_testing.tiny import tiny_model
from served import serving

FP32 = ("roles.reward_model.dtype", "fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("rm"), hidden=16, heads=2, kv_heads=1, head="scalar", std=0.3)


def reference_scores(model, *texts: str) -> list[float]:
    """What transformers says of each text alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, scorer = AutoTokenizer.from_pretrained(model), AutoModelForSequenceClassification.from_pretrained(model)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [float(scorer.eval()(torch.tensor([sequence])).logits[0, 0]) for sequence in ids]


def test_requests_at_one_time_share_a_pass_and_each_gets_its_own_values(model) -> None:
    texts = [f"{n}+1={n + 1}" for n in range(8)]
    with (
        serving(("reward", f"model:{model}"), FP32, batch=8, wait=60.0) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        scores = list(pool.map(lambda text: server.ask([text]).json()["rewards"][0], texts))
        counts = server.counts()
    assert scores == pytest.approx(reference_scores(model, *(text + "<eos>" for text in texts)), abs=1e-6)
    assert counts["rlhf_reward_model_batch_count"] == 1, "a pass that is full does not wait"
    assert counts["rlhf_reward_model_batch_sum"] == 8


def test_the_end_token_is_added_once_or_never(model) -> None:
    with serving(("reward", f"model:{model}"), FP32) as server:
        answer = server.ask(["1+1=2", "1+1=2<eos>", "1+1="], ["1+1="] * 3).json()
    assert answer["rewards"] == pytest.approx(
        reference_scores(model, "1+1=2<eos>", "1+1=2<eos>", "1+1=<eos>"), abs=1e-6
    )
    with serving(("reward", f"model:{model}"), FP32, ("data.add_eos", "false")) as server:
        answer = server.ask(["1+1=2", "1+1=2<eos>"]).json()
    assert answer["rewards"] == pytest.approx(reference_scores(model, "1+1=2", "1+1=2<eos>"), abs=1e-6)


def test_texts_are_counted_in_tokens_and_shown_without_special_ones(model, tmp_path) -> None:
    (tmp_path / "plain.py").write_text(
        "async def score(prompt, completion, row):\n    assert (prompt, completion) == ('ab', 'cde')\n    return 1.0\n"
    )
    flags = (("reward", "length"), ("reward", f"file:{tmp_path / 'plain.py'}"), ("policy.model", str(model)))
    with serving(*flags, ("reward.length.low", "1"), ("data.max_tokens", "6")) as server:
        answer = server.ask(["<pad>abcde"], ["<pad>ab"])
        assert answer.status_code == 422
        assert "7 tokens are more than data.max_tokens = 6" in answer.json()["error"]
    with serving(*flags, ("reward.length.low", "1"), ("data.max_tokens", "7")) as server:
        logs = server.ask(["<pad>abcde"], ["<pad>ab"]).json()["extra_logs"]
    assert logs["length/tokens"] == [4], "the answer with its end token"
