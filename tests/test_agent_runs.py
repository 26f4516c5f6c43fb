"""Whole runs whose samples are drawn by an agent program, in waves and in a continuous stream."""

from __future__ import annotations

import json

import pytest
from rlhf_cli.main import main
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_testing.tiny import tiny_model

from tests.continuous import simulated
from tests.runs import Workshop, assert_same_run, merged

PROGRAM = """
import json
import urllib.request


def run(task, base_url, api_key):
    messages, said = [{"role": "user", "content": task["prompt"]}], ""
    for _ in range(2):
        body = {"model": "policy", "messages": messages, "max_tokens": 6}
        head = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
        request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "Go on."}]
        said += message["content"]
    return sum(c in "0123456789" for c in said) / 12
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    model = tiny_model(folder / "model", chat_template="default")
    shop = Workshop(folder, model, folder / "data.jsonl")
    shop.rows("data.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)])
    shop.file("agent.py", PROGRAM)
    return shop


def with_agent(shop, **changes):
    rollout = {"use": "agent", "program": f"file:{shop.folder / 'agent.py'}:run", "returns_reward": True}
    return merged({"rollout": rollout, "reward": None, "data": {"max_tokens": 200}}, changes)


def test_a_run_learns_from_what_an_agent_returned(shop):
    config = with_agent(shop, run={"steps": 1}, data={"batch_size": 2})
    run = shop.train("grpo", "waves", **config)
    samples = list(run.samples())
    assert len(samples) == 2 * 3
    for sample in samples:
        assert [t["sampled"] for t in sample["turns"]] == [False, True] * 2
        assert sample["turns"][-1]["reward"] == sample["reward"]
    assert_same_run(shop.train("grpo", "again", **config), run)  # samples depend on the seed, not on time


COLD = """
import json
import urllib.error
import urllib.request


def run(task, base_url, api_key):
    body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}], "max_tokens": 6}
    head = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    for temperature in (0.001, 0.7):
        data = json.dumps({**body, "temperature": temperature}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", data, head)).close()
        except urllib.error.HTTPError as error:
            assert (temperature, error.code) == (0.001, 400)
            assert "temperature is 0.001; it must be 0 (greedy) or from 0.01 to 2.0" in error.read().decode()
        else:
            assert temperature == 0.7
    return 1.0
"""


def test_a_temperature_that_the_generator_does_not_sample_at_is_an_error_of_the_api(shop, monkeypatch):
    """The generator would refuse the whole wave."""
    monkeypatch.setattr(TransformersGenerator, "temperatures", (0.01, 2.0))
    config = with_agent(shop, run={"steps": 1}, rollout={"program": f"file:{shop.file('cold.py', COLD)}:run"})
    run = shop.train("grpo", "cold", **config)
    assert [sample["status"] for sample in run.samples()].count("failed") == 0
    assert len(list(run.samples())) == 4 * 3


def test_a_continuous_stream_of_agents(shop):
    changes = with_agent(shop, run={"steps": 3}, data={"batch_size": 2, "max_tokens": 400}, checkpoint=None)
    run = shop.train_config(merged(simulated(shop, "continuous", **changes), {"env": None}))
    assert len(run.lines()) == 3
    assert len(list(run.samples())) == 3 * 2 * 2


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("stream", [{"mode": "waves"}, {"mode": "continuous", "staleness": 1}])
def test_agents_on_engines(shop, tmp_path, stream):
    """The log-probs of vLLM and of the trainer agree at every token that an agent got."""
    model = tiny_model(tmp_path / "model", chat_template="default", head_dim=32)
    config = with_agent(
        shop,
        run={"steps": 2},
        data={"batch_size": 2},
        policy={"model": str(model)},
        launcher={"use": "ray", "cpus": 2},
        generator={"use": "vllm", "kv_cache_gib": 0.25},
        placement={"generator": {"ranks": 1}},
        algorithm={"loss": {"correction": {"preset": "tis"}}},
        stream=stream,
    )
    run = shop.train("grpo", f"engines_{stream['mode']}", **config)
    assert len(list(run.samples())) == 2 * 2 * 3
    first = run.lines()[0]  # in a stream, later steps train on samples of older weights
    assert first["policy/kl_generator"] < 1e-10


def test_an_agent_needs_a_chat_template_and_a_reward(shop):
    plain = shop.run("grpo", "plain", **with_agent(shop, data={"template": "plain"}))
    assert "the rollout encodes messages, which needs a chat template, but prompts are plain text" in plain.said
    unscored = shop.run("grpo", "unscored", **with_agent(shop, rollout={"returns_reward": False}))
    assert "an online run needs a reward" in unscored.said
    missing = shop.run("grpo", "missing", **with_agent(shop, rollout={"program": "file:missing.py:run"}))
    assert "rollout.program: cannot read" in missing.said
    assert [r.code == 0 for r in (plain, unscored, missing)] == [False] * 3


def test_eval_needs_no_reward_where_the_agent_returns_it(shop, capsys):
    _, path = shop.arguments(shop.config("grpo", "unused", **with_agent(shop)))
    assert main(["eval", path, "--eval.max_rows", "3", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["prompts"] == 3
    assert 0 <= metrics["reward"] <= 1
    assert main(["eval", path, "--rollout.returns_reward", "false"]) == 2
    assert "no reward is named" in capsys.readouterr().err
