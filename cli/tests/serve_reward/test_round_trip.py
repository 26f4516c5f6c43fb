"""The reward `http` gives a run the values that the served reward gives in the run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model
from served import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy that speaks a chat template, and a reward model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "chat_template": "default", "std": 0.3}
    tiny_model(folder / "policy", chars="0123456789+=", **sizes)
    tiny_model(folder / "rm", chars="0123456789+=", head="scalar", seed=1, **sizes)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def values(folder: Path, url: str, reward: str, *words: str) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """The samples of an evaluation, the values of the reward in the run, and those over HTTP."""
    saved = folder / "samples.jsonl"
    flags = ("--reward.http.urls", json.dumps([url]), "--eval.samples", "2", "--eval.temperature", "1")
    command = ("eval", "--model", str(folder / "policy"), "--data", str(folder / "rows.jsonl"), "--save", str(saved))
    assert (
        main([*command, "--reward", reward, "--reward", "http", *flags, "--sampling.max_new_tokens", "6", *words]) == 0
    )
    samples = [json.loads(line) for line in saved.read_text().splitlines()]
    name = reward.partition(":")[0]
    rewards = [[sample["rewards"][source]["value"] for sample in samples] for source in (name, "http")]
    return samples, rewards[0], rewards[1]


def test_math_gives_the_same_values(folder) -> None:
    with serving(("reward", "math")) as server:
        _, local, remote = values(folder, server.url, "math")
    assert local == remote
    assert len(local) == 32
    assert set(local) == {0.0, 1.0}


def test_a_reward_model_reads_the_tokens_that_were_sampled(folder) -> None:
    """Answers with and without an end token, in a chat template."""
    fp32, as_sent = ("roles.reward_model.dtype", "fp32"), ("data.add_eos", "false")
    words = ("--reward.http.special_tokens", "true", "--roles.reward_model.dtype", "fp32", "--policy.dtype", "fp32")
    with serving(("reward", f"model:{folder / 'rm'}"), fp32, as_sent) as server:
        samples, local, remote = values(folder, server.url, f"model:{folder / 'rm'}", *words)
    assert remote == pytest.approx(local, abs=1e-6)
    assert len({round(value, 4) for value in local}) > 10
    assert {sample["turns"][1]["finish"] for sample in samples} == {"stop", "length"}
