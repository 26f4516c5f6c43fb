"""Unmodified clients. Everything that goes over their wires is trained on with the log-probs of the trainer."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def uses(name, **options):
    return {"program": f"file:{HERE / name.partition(':')[0]}:{name.partition(':')[2]}", **options}


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
    used = [len(t.ids) for t in trajectory.turns if t.sampled]
    assert [given for _, given in wire()] == used[:2]
