"""Both rollouts, with a scripted policy and a context that records its calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rlhf.errors import RolloutError
from rlhf.interfaces import Env, RolloutContext
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row, Sampling, Turn
from rlhf_plugin_turns import MultiTurn, SingleTurn

SAMPLING = Sampling()


class Context(RolloutContext):
    """One token per character. The policy gives ``answers`` one after another, cut at its budget."""

    def __init__(
        self, *answers: str, env: Env | None = None, max_tokens: int = 100, sampling: Sampling = SAMPLING
    ) -> None:
        self.answers, self.env = list(answers), env
        self.sampling, self.max_tokens = sampling, max_tokens
        self.asked: list[tuple[list[int], Sampling, int]] = []
        self.followed: list[str] = []
        self.reported: dict[str, float] = {}

    def report(self, name, value):
        self.reported[name] = value

    def encode_prompt(self, row):
        return self._turn(row["prompt"], sampled=False)

    def encode_observation(self, text, images=(), turn=None):
        self.followed += [] if turn is None else [turn.text]
        return self._turn(text, sampled=False)

    async def generate(self, turns, sampling, turn_number=0):
        ids = [i for t in turns for i in t.ids]
        self.asked.append((ids, sampling, turn_number))
        assert 1 <= sampling.max_new_tokens <= self.max_tokens - len(ids)
        await asyncio.sleep(0)
        answer = self.answers[turn_number]
        turn = self._turn(answer[: sampling.max_new_tokens], sampled=True)
        turn.finish = "stop" if len(answer) <= sampling.max_new_tokens else "length"
        return turn

    async def open_env(self):
        return self.env

    def _turn(self, text: str, sampled: bool) -> Turn:
        ids = [ord(c) for c in text]
        return Turn(ids, sampled, logprobs=[0.0] * len(ids) if sampled else None, text=text)


class Scripted(Env):
    name = "scripted"

    def __init__(self, opening: str | EnvStep, *steps: EnvStep) -> None:
        super().__init__()
        self.opening, self.steps, self.actions = opening, list(steps), []

    async def reset(self, row, seed):
        self.given = (row, seed)
        return self.opening

    async def step(self, action):
        self.actions.append(action)
        self.seen = [*getattr(self, "seen", []), self.sampling]
        return self.steps[len(self.actions) - 1]


ROW = Row({"prompt": "prompt:"}, "unit", 0)


def run(rollout, context):
    return asyncio.run(rollout().run(ROW, 5, context))


def test_both_are_found_by_name() -> None:
    plugins = Plugins.discover()
    assert plugins.resolve("rollout", "single_turn").cls is SingleTurn
    assert plugins.resolve("rollout", "multi_turn").cls is MultiTurn
    assert (SingleTurn.needs_env, MultiTurn.needs_env) == (False, True)


def test_single_turn() -> None:
    turns = run(SingleTurn, Context("answer"))
    assert [(t.text, t.sampled) for t in turns] == [("prompt:", False), ("answer", True)]


def test_single_turn_stays_within_max_tokens() -> None:
    context = Context("answer", max_tokens=10)
    turns = run(SingleTurn, context)
    assert (turns[1].text, turns[1].finish) == ("ans", "length")
    with pytest.raises(RolloutError, match=r"the prompt leaves no room for an answer: 1 tokens too many.*max_tokens"):
        run(SingleTurn, Context("answer", max_tokens=7))


def test_multi_turn_alternates_and_keeps_every_reward_at_its_turn() -> None:
    env = Scripted(
        "open;", EnvStep("one;", 0.25), EnvStep("two;", -0.5, score=0.5), EnvStep("never shown", 1.0, done=True)
    )
    context = Context("a", "bb", "ccc", env=env)
    turns = run(MultiTurn, context)
    assert [(t.text, t.sampled, t.reward) for t in turns] == [
        ("prompt:", False, None),
        ("open;", False, None),
        ("a", True, 0.25),
        ("one;", False, None),
        ("bb", True, -0.5),
        ("two;", False, None),
        ("ccc", True, 1.0),
    ]
    assert [t.score for t in turns] == [None, None, None, None, 0.5, None, None]
    assert env.given == (ROW, 5)
    assert env.actions == ["a", "bb", "ccc"]
    assert [number for _, _, number in context.asked] == [0, 1, 2]
    assert context.reported == {"no_room": 0.0}
    assert "".join(map(chr, context.asked[2][0])) == "prompt:open;aone;bbtwo;"  # the sampled tokens, unchanged


def test_an_empty_opening_adds_no_turn() -> None:
    turns = run(MultiTurn, Context("a", env=Scripted("", EnvStep(done=True))))
    assert [t.text for t in turns] == ["prompt:", "a"]


def test_the_budget_cuts_the_answer_and_the_environment_still_sees_it() -> None:
    env = Scripted("", EnvStep("o", 0.0), EnvStep("p", 0.5))
    turns = run(MultiTurn, Context("aa", "bbbb", env=env, max_tokens=12))
    assert [t.text for t in turns] == ["prompt:", "aa", "o", "bb"]
    assert (turns[-1].finish, turns[-1].reward) == ("length", 0.5)
    assert env.actions == ["aa", "bb"]


def test_an_observation_that_leaves_no_room_is_left_out_whole() -> None:
    env = Scripted("", EnvStep("long observation", 0.5))
    context = Context("aa", env=env, max_tokens=20)
    turns = run(MultiTurn, context)
    assert [t.text for t in turns] == ["prompt:", "aa"]
    assert context.reported == {"no_room": 1.0}
    assert (turns[-1].finish, turns[-1].reward) == ("length", 0.5)
    with pytest.raises(RolloutError, match="environment's opening leaves no room"):
        run(MultiTurn, Context("a", env=Scripted("a long opening"), max_tokens=20))


def test_each_agent_of_a_game_has_a_conversation_and_its_rewards() -> None:
    """What x gets before its first turn is on that turn."""
    env = Scripted(
        EnvStep("begin y;", agent="y"),
        EnvStep("y said a;", 0.25, agent="x", rewards={"x": 2.0}),
        EnvStep("again;", agent="x", rewards={"y": 1.0}),
        EnvStep("x said bc;", agent="y"),
        EnvStep(done=True, rewards={"x": -1.0, "y": 0.5}),
    )
    context = Context("a", "b", "c", "d", env=env)
    turns = run(MultiTurn, context)
    assert [(t.agent, t.text, t.reward) for t in turns] == [
        ("y", "prompt:", None),
        ("y", "begin y;", None),
        ("y", "a", 1.25),
        ("y", "x said bc;", None),
        ("y", "d", 0.5),
        ("x", "prompt:", None),
        ("x", "y said a;", None),
        ("x", "b", 2.0),
        ("x", "again;", None),
        ("x", "c", -1.0),
    ]
    assert ["".join(map(chr, ids)) for ids, _, _ in context.asked] == [
        "prompt:begin y;",
        "prompt:y said a;",
        "prompt:y said a;bagain;",
        "prompt:begin y;ax said bc;",
    ]
    assert [number for _, _, number in context.asked] == [0, 1, 2, 3]
    assert context.followed == ["b", "a"], "each observation follows the last answer of its agent"


def test_an_observation_without_room_ends_a_game_for_all() -> None:
    env = Scripted(EnvStep("1;", agent="x"), EnvStep("2;", 0.5, agent="y"), EnvStep("a long observation", agent="x"))
    turns = run(MultiTurn, Context("a", "b", env=env, max_tokens=20))
    assert [t.text for t in turns] == ["prompt:", "1;", "a", "prompt:", "2;", "b"]
    assert [t.finish for t in turns if t.sampled] == ["length", "length"]
    with pytest.raises(RolloutError, match="the first observation for 'x' has images"):
        run(MultiTurn, Context("a", env=Scripted(EnvStep("1;", images=(b"x",), agent="x"))))


def test_sampling_is_replaced_for_this_sample_from_its_next_turn() -> None:
    """Two samples have equal parameters, and the environment of one replaces its own. The other must not change."""
    shared = Sampling(max_new_tokens=9, temperature=0.7)
    short = replace(shared, max_new_tokens=2)
    first = Context("aaaa", "bbbb", env=Scripted("", EnvStep("o", sampling=short), EnvStep(done=True)), sampling=shared)
    second = Context("aaaa", "bbbb", env=Scripted("", EnvStep("o"), EnvStep(done=True)), sampling=shared)

    async def run_pair():
        return await asyncio.gather(MultiTurn().run(ROW, 0, first), MultiTurn().run(ROW, 1, second))

    turns_first, turns_second = asyncio.run(run_pair())
    assert [t.text for t in turns_first if t.sampled] == ["aaaa", "bb"]
    assert [t.text for t in turns_second if t.sampled] == ["aaaa", "bbbb"]
    assert [s for _, s, _ in first.asked] == [shared, short]
    assert (first.env.seen, second.env.seen) == ([shared, short], [shared, shared])
    assert [s for _, s, _ in second.asked] == [shared, shared]
