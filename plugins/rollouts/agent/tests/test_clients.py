"""Unmodified clients. Everything that goes over their wires is trained on with the log-probs of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf_testing.chat_templates import HERMES, QWEN3

FOLDER = Path(__file__).parent


def uses(name, **options):
    return {"program": f"file:{FOLDER / name.partition(':')[0]}:{name.partition(':')[2]}", **options}


def test_openai_chat(lab, wire):
    trajectory = lab.one(uses("openai_programs.py:chat", returns_reward=True), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    sampled = [t for t in trajectory.turns if t.sampled]
    assert (len(sampled), sampled[-1].reward) == (4, 0.5)
    for turn, (ids, logprobs) in zip(sampled, wire(), strict=False):
        assert (list(turn.ids), list(turn.logprobs)) == (ids, logprobs)
    assert len(wire()) == 3


def test_openai_responses(thinking, wire):
    trajectory = thinking.one(uses("openai_programs.py:responses"), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    assert sum(t.sampled for t in trajectory.turns) == 4
    assert all("Be brief." in text for text in thinking.text(trajectory))
    assert trajectory.info["rollout/sequences/rewritten"] == 0
    used = [len(t.ids) for t in trajectory.turns if t.sampled]
    assert [count for _, count in wire()] == used[:2]


@pytest.mark.parametrize("template", [HERMES, pytest.param(QWEN3, marks=pytest.mark.full)])
def test_anthropic(laboratories, wire, template):
    lab = laboratories(template)
    trajectory = lab.one(uses("anthropic_programs.py:messages", returns_reward=True), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    sampled = [t for t in trajectory.turns if t.sampled]
    assert sampled[-1].reward == 0.5
    *turns, stopped = wire()
    assert [count for *_, count in turns] == [len(t.ids) for t in sampled[:-1]]
    for (reason, calls, *_), turn in zip(turns, sampled, strict=False):
        assert reason == ("max_tokens" if turn.finish == "length" else "tool_use" if calls else "end_turn")
    assert sum(calls for _, calls, *_ in turns) == trajectory.info["rollout/calls/add"]
    texts = lab.text(trajectory)
    assert "Be brief." in texts[0]
    assert "system\nBe short." in "".join(texts)
    assert template is QWEN3 or len(texts) == 2, "one conversation, and the question with a stop sequence"
    assert any(calls for _, calls, *_ in turns)
    assert any("<tool_response>\n3\n</tool_response>" in text for text in texts) == any(c for _, c, *_ in turns[:-1])
    assert stopped[0] in ("stop_sequence", "end_turn", "max_tokens")


PACKAGES = (
    "langchain-openai==1.7.3",
    "pydantic-ai-slim[openai]==2.68.0",
    "openai-agents==0.24.0",
    "smolagents[openai]==1.26.0",
)
MINI = ("mini-swe-agent==2.4.6", "mcp")  # its litellm needs another openai, and mcp, which it does not ask for
BASH = '<tool_call>\n{"name": "bash",  "arguments": {"command": "echo 3"}}\n</tool_call>'
CODE = "Thought: I add.\n<code>\nx = 1 + 2\nprint(x)\n</code>"


def client(laboratory, python, name, **options):
    """The trajectory of an agent; its log-probs are compared with the trainer's."""
    options = uses(f"client_programs.py:{name}", returns_reward=True, python=python, **options)
    trajectory = laboratory.one(options, max_tokens=24000, deadline=60.0)
    assert trajectory.status != "failed", trajectory.error
    return trajectory, laboratory.text(trajectory)


@pytest.mark.full
@pytest.mark.parametrize("template", [HERMES, QWEN3])
def test_langchain(laboratories, python_with, template):
    """Streamed and not; arguments are written anew, reasoning is dropped."""
    trajectory, texts = client(laboratories(template), python_with("clients", *PACKAGES), "langchain")
    assert sum(t.sampled for t in trajectory.turns) == 4
    assert template is QWEN3 or len(texts) == 1


@pytest.mark.full
@pytest.mark.parametrize("template", [HERMES, QWEN3])
def test_pydantic_ai(laboratories, python_with, template):
    _, texts = client(laboratories(template), python_with("clients", *PACKAGES), "pydantic_ai")
    assert len(texts) >= 3, "three conversations; one more where it takes <think> out of the content"
    assert any("<tool_response>\n3\n</tool_response>" in text for text in texts)


@pytest.mark.full
@pytest.mark.parametrize("template", [HERMES, QWEN3])
def test_openai_agents(laboratories, python_with, template):
    _, texts = client(laboratories(template), python_with("clients", *PACKAGES), "openai_agents")
    assert sum("Subagent." in text for text in texts) == 1
    assert any("<tool_response>\n3\n</tool_response>" in text for text in texts)


@pytest.mark.full
def test_smolagents(laboratories, python_with):
    """It writes its own answers anew, so each step begins a sequence."""
    trajectory, texts = client(laboratories(HERMES, CODE), python_with("clients", *PACKAGES), "smolagents")
    assert len(texts) == sum(t.sampled for t in trajectory.turns) > 1


@pytest.mark.full
@pytest.mark.parametrize("template", [HERMES, QWEN3])
def test_mini_swe_agent(laboratories, python_with, template):
    """It leaves an answer without a call out of its conversation; the next request then begins a sequence."""
    trajectory, _ = client(laboratories(template, BASH), python_with("mini", *MINI), "mini_swe_agent")
    assert trajectory.turns[-1].reward == sum(t.sampled for t in trajectory.turns) == 3
