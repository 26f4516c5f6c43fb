"""Whole runs in which the policy plays both agents of a game: what is trained, by which credit, what is refused."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import pytest
from rlhf_runtime.report.recorded_samples import read_samples
from rlhf_testing.chat_templates import CHATML

from tests.continuous import simulated
from tests.runs import Workshop, assert_same_run, merged, read_rows

GAME = '''
from rlhf.interfaces import Env
from rlhf.types import EnvStep

NAMES = ("first", "second")


class Digits(Env):
    """Each player has two turns. What one writes has a share of digits; the player with more of them gets the
    difference, the other loses it. A first turn without a digit ends the game."""

    name = "digits"

    @classmethod
    def agents(cls, config):
        return NAMES

    async def reset(self, row, seed):
        self.shares = []
        return EnvStep("first:", agent="first")

    async def step(self, action):
        self.shares.append(sum(c in "0123456789" for c in action) / 2)
        turn = len(self.shares)
        if turn < 4 and self.shares[0]:
            return EnvStep(f"{action};{NAMES[turn % 2]}:", agent=NAMES[turn % 2])
        lead = sum(self.shares[::2]) - sum(self.shares[1::2])
        info = {"digits": sum(self.shares) / turn}
        return EnvStep(done=True, rewards={"first": lead, "second": -lead}, info=info)
'''


def game(shop: Workshop, use: str, **advantage: Any) -> dict[str, Any]:
    return {
        "rollout": {"use": "multi_turn"},
        "env": {"use": f"file:{shop.file('digits.py', GAME)}", "max_turns": 9},
        "algorithm": {"advantage": {"use": use, **advantage}},
        "sampling": {"samples_per_prompt": 4, "max_new_tokens": 2},
        "reward": None,
    }


def samples_of(run: Any) -> list[dict[str, Any]]:
    """With ``agent``, and ``advantage``, that of its tokens."""
    return [{**s, "agent": s["turns"][0]["agent"], "advantage": s["token_values"]["advantages"]} for s in run.samples()]


def test_each_agent_is_trained_on_its_own_turns_with_its_own_running_mean(shop: Workshop) -> None:
    """Text of the other agent is an observation. The means of the two agents are computed again from the record."""
    run = shop.train("grpo", "run", **game(shop, "rae", decay=0.5))
    samples, means = samples_of(run), defaultdict(float)
    assert {s["agent"] for s in samples} == {"first", "second"}
    by_game: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for s in samples:
        by_game[tuple(s["index"])][s["agent"]] = s
        means[s["agent"]] = 0.5 * means[s["agent"]] + 0.5 * s["reward"]
        assert s["advantage"] == pytest.approx([s["reward"] - means[s["agent"]]], abs=1e-6)
        texts = [turn["text"] for turn in s["turns"]]
        assert f"{s['agent']}:" in "".join(texts[:2])
        assert all(turn["agent"] == s["agent"] for turn in s["turns"])
    assert len(by_game) == 3 * 4 * 4
    assert any(len(players) == 1 for players in by_game.values()), "a game that ended before the second player's turn"
    for players in by_game.values():
        if len(players) == 2:
            first, second = players["first"], players["second"]
            assert first["reward"] == -second["reward"]
            answers = [[t["text"] for t in s["turns"] if t["sampled"]] for s in (first, second)]
            prompts = ["".join(t["text"] for t in s["turns"] if not t["sampled"]) for s in (first, second)]
            assert all(text in prompts[1] for text in answers[0])
            assert answers[1][0] in prompts[0]
    for agent in ("first", "second"):
        last = [s["score"] for s in run.samples_of("step-000003.arrow") if s["turns"][0]["agent"] == agent]
        assert run.lines()[-1][f"agent/{agent}/score"] == pytest.approx(statistics.mean(last))
    games = {tuple(s["index"]): s["info"]["env/digits"] for s in run.samples_of("step-000003.arrow")}
    assert run.lines()[-1]["env/digits"] == pytest.approx(statistics.mean(games.values())), "each game counts once"
    assert "as first" in shop.command("samples", str(run.path)).said
    assert "generator and trainer agree" in shop.command("doctor", str(run.path)).said


def test_a_group_baseline_is_of_one_agent(shop: Workshop) -> None:
    """Also where the second agent has fewer games than the first. One game alone has no credit."""
    run = shop.train("grpo", "run", **game(shop, "rloo"))
    samples = samples_of(run)
    groups = defaultdict(list)
    for s in samples:
        groups[s["group"], s["agent"]].append(s)
    for members in groups.values():
        for s in members:
            other_rewards = [t["reward"] for t in members if t is not s]
            expected = s["reward"] - statistics.mean(other_rewards) if other_rewards else 0.0
            assert s["advantage"] == pytest.approx([expected], abs=1e-6)
    assert {len(members) for members in groups.values()} > {4}
    means = {(n, a): statistics.mean(s["reward"] for s in members) for (n, a), members in groups.items()}
    records = read_samples(run.path / "rollouts" / "step-000001.arrow", 1)
    assert [s.group_mean for s in records] == pytest.approx([means[s.group, s.agent] for s in records])
    assert len({s["advantage"][0] for s in samples}) > 4


def test_both_agents_learn_what_wins(shop: Workshop) -> None:
    """The rewards of a game sum to 0, so only a credit by agent raises the share of digits of both."""
    run = shop.train("grpo", "run", **game(shop, "rae"), run={"steps": 20}, trainer={"lr": 1e-2})
    shares = [line["env/digits"] for line in run.lines()]
    assert statistics.mean(shares[-5:]) > 1.5 * statistics.mean(shares[:5])


def test_a_resumed_run_ends_with_the_same_means_and_weights(shop: Workshop) -> None:
    method = merged(game(shop, "rae"), {"run": {"steps": 4}, "checkpoint": {"every": 1}})
    baseline = shop.train("grpo", "whole", **method)
    shop.train("grpo", "part", "--run.stop_after", "2", **method)
    resumed = shop.train("grpo", "part", "--resume", **method)
    assert_same_run(baseline, resumed)


def test_a_replayed_run_learns_the_same(shop: Workshop) -> None:
    first = shop.train("grpo", "recorded", **game(shop, "rae"))
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    rerun = shop.train("grpo", "replayed", **merged(game(shop, "rae"), {"rollout": replay}))
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()


CLASSES = """
from rlhf.interfaces import Rollout


class One(Rollout):
    name = "one"
    needs_env = True

    async def run(self, row, seed, ctx):
        raise AssertionError
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rollout": {"use": "file:one.py"}},
            "plays 'first' and 'second', but rollout 'file:one.py' plays only one agent",
        ),
        ({"algorithm": {"advantage": {"use": "remax"}}}, "compares samples with a greedy answer to the same prompt"),
        ({"curriculum": {"use": "pass_rate"}}, "chooses rows by the scores of a prompt's samples"),
    ],
)
def test_what_cannot_be_played_by_several_agents_is_refused(
    shop: Workshop, changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.file("one.py", CLASSES)
    monkeypatch.chdir(shop.folder)
    run = shop.run_config(merged(shop.config("grpo", "run", **game(shop, "rloo")), changes))
    assert run.code == 2
    assert says in run.said


def test_both_seats_of_a_real_game_are_played_and_trained(shop: Workshop) -> None:
    """A negotiation of four turns, in which any text is a message to the other player."""
    env = {"use": "textarena", "id": "SimpleNegotiation-v0", "opponent": "self", "kwargs": {"max_turns": 3}}
    changes = {"env": env, "data": {"max_tokens": 3000, "batch_size": 1}, "run": {"steps": 1}}
    run = shop.train_config(merged(shop.config("grpo", "run", **game(shop, "rae")), changes))
    samples = samples_of(run)
    assert [s["agent"] for s in samples] == ["player0", "player1"] * 4
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert first["index"] == second["index"]
        answers = [[t["text"] for t in s["turns"] if t["sampled"]] for s in (first, second)]
        assert [len(texts) for texts in answers] == [2, 2]
        assert answers[0][0] in second["turns"][1]["text"].rpartition("[Player 0]")[2]
        assert answers[1][0] in first["turns"][3]["text"].rpartition("[Player 1]")[2]


def test_doctor_compares_the_prompt_of_each_agent_with_its_own(shop: Workshop) -> None:
    """The second agent begins, with the row's prompt alone."""
    text = GAME.replace('EnvStep("first:", agent="first")', 'EnvStep("", agent="second")')
    text = text.replace("NAMES[turn % 2]", "NAMES[1 - turn % 2]")
    method = game(shop, "rae")
    method["env"]["use"] = f"file:{shop.file('second.py', text)}"
    data = {"chat_template": str(shop.file("chat.jinja", CHATML))}
    run = shop.train("grpo", "run", **method, data=data, trainer={"lr": 1e-2}, run={"steps": 8})
    assert {s["agent"] for s in samples_of(run)} == {"first", "second"}
    report = shop.command("doctor", str(run.path)).said
    assert "the recorded prompts equal what the template renders now" in report


def test_unfinished_games_of_a_continuous_stream_go_on_after_a_resume(shop: Workshop) -> None:
    """Each prompt gives its games once, with all turns of both agents."""
    changes = {"env": {"use": f"file:{shop.file('digits.py', GAME)}", "max_turns": 9, "speed": None, "turns": None}}
    changes["env"]["slow_share"] = None
    config = simulated(shop, "run", **changes)
    stopped = shop.train_config(config, "--run.stop_after", "3")
    pending = read_rows(stopped.last_checkpoint / "ready.arrow")
    assert {t["agent"] for s in pending for t in s["turns"]} >= {"first"}
    run = shop.train_config(config, "--resume")
    games = [(*s["index"], s["turns"][0]["agent"]) for s in run.samples()]
    assert len(games) == len({*games})
    assert len({game[:2] for game in games}) == 6 * 4 * 2
