"""Rewards: every way to go wrong is an error that names reward and row; sums count everything once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import ComponentConfig, Reward, RewardContext, Tokens
from rlhf.plugins import Resolved
from rlhf.types import RewardResult, RoleSpec
from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.observe.sample_metrics import evaluation_metrics
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer, combine
from rlhf_runtime.samples.acceptance import passes

from tests.support.scoring import score


def active(cls: type[Reward], name: str = "", **options) -> ActiveReward:
    name = name or cls.name
    resolved = Resolved("reward", cls.name, cls, "in process", "", cls.name)
    return ActiveReward(name, resolved, cls(), **options)


def giving(make, name: str = "giving") -> type[Reward]:
    """A reward whose results are ``make(group)``."""

    async def score(self, group):
        return make(group)

    return type("Giving", (Reward,), {"name": name, "score": score})


def values(*numbers):
    return lambda group: [RewardResult(n) for n in numbers]


def test_sources_and_turn_rewards_add_up_once(make_group) -> None:
    group = make_group("a", "b", turn_rewards=(0.5, None, 0.25))
    score(
        [
            active(giving(values(1.0, 2.0)), "first", weight=2.0),
            active(giving(values(10.0, None)), "second", weight=0.5),
        ],
        group,
    )
    assert [t.reward for t in group.trajectories] == [2.0 + 5.0 + 0.75, 4.0 + 0.75]
    assert [t.score for t in group.trajectories] == [7.75, 4.75]
    assert group.trajectories[1].rewards["second"].value is None


def test_rewards_of_turns_are_summed_or_placed_never_both(make_group) -> None:
    """Where a batch places them at their tokens, ``reward`` has none of them; the filter's score always has, and in
    evaluation, where no batch is made, the reward has too."""
    source = [active(giving(values(1.0, 2.0)), weight=2.0)]

    def of(trained_on: bool, **options) -> list[tuple[float | None, float | None]]:
        group = make_group("a", "b", turn_rewards=(0.5, None, 0.25))
        score(source, group, trained_on=trained_on, **options)
        return [(t.reward, t.score) for t in group.trajectories]

    assert of(True) == [(2.75, 2.75), (4.75, 4.75)]
    assert of(True, turn_credit="step") == [(2.0, 2.75), (4.0, 4.75)]
    assert of(False, turn_credit="step") == [(2.75, 2.75), (4.75, 4.75)]


def test_the_last_score_of_the_turns_replaces_the_sum_of_their_rewards(make_group) -> None:
    trajectory = make_group("a", turn_rewards=(0.5, 0.25)).trajectories[0]
    first, last = (t for t in trajectory.turns if t.sampled)
    first.score = 0.3
    assert combine([], trajectory) == (0.75, 0.3)
    last.score = 0.0
    assert combine([], trajectory) == (0.75, 0.0)


def test_turn_rewards_that_are_placed_are_a_reward_by_themselves(make_group) -> None:
    """0 and not None: the trajectory is trained on."""
    assert combine([], make_group("a", turn_rewards=(0.5, 0.25)).trajectories[0], turns_placed=True) == (0.0, 0.75)
    assert combine([], make_group("a").trajectories[0], turns_placed=True) == (None, None)


def test_nothing_applicable_is_none_not_zero(make_group) -> None:
    group = make_group("a", "b")
    score([active(giving(values(None, 0.0)))], group)
    assert [(t.reward, t.score, t.status) for t in group.trajectories] == [(None, None, "ok"), (0.0, 0.0, "ok")]


def test_weights_that_sum_to_one_give_exactly_one(make_group) -> None:
    """0.7 + 0.2 + 0.1 added one by one is below 1: a right answer would pass no threshold of 1, and a group of them
    the filter that is to leave it out."""
    group = make_group("a", "b")
    parts = ((0.7, "right"), (0.2, "form"), (0.1, "length"))
    score([active(giving(values(1.0, 1.0)), name, weight=weight) for weight, name in parts], group)
    assert [(t.reward, t.score) for t in group.trajectories] == [(1.0, 1.0)] * 2
    assert evaluation_metrics([group])["pass@1"] == 1.0
    assert not passes(FilterSection(low=0.0, high=1.0), [t.score for t in group.trajectories])


def test_a_score_of_its_own_reaches_the_filter_only(make_group) -> None:
    group = make_group("a")
    score([active(giving(lambda g: [RewardResult(-3.0, score=1.0)]), weight=2.0)], group)
    assert (group.trajectories[0].reward, group.trajectories[0].score) == (-6.0, 2.0)


@pytest.mark.parametrize(("credit", "reward"), [("outcome", 2.0 * (1.0 + 0.75)), ("step", 2.0 * 1.0)])
def test_step_rewards_count_at_the_end_or_at_their_tokens_never_both(make_group, credit: str, reward: float) -> None:
    group = make_group("a")
    steps = ((1, 0, 0.25), (1, 2, 0.5))
    score([active(giving(lambda g: [RewardResult(1.0, steps=steps)]), weight=2.0, credit=credit)], group)
    trajectory = group.trajectories[0]
    assert trajectory.reward == reward
    assert trajectory.score == 3.5
    total = 2.0 * sum(v for _, _, v in trajectory.rewards["giving"].steps) if credit == "step" else 0.0
    assert trajectory.reward + total == 3.5  # the total does not depend on where it is placed


def test_steps_alone_are_a_reward(make_group) -> None:
    group = make_group("a")
    source = active(giving(lambda g: [RewardResult(None, steps=((1, 0, 0.25),))]))
    score([source], group)
    assert group.trajectories[0].reward == 0.25
    assert combine([source], make_group("a").trajectories[0]) == (None, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: [RewardResult(1.0)], r"returned 1 results for 2 trajectories; allowed: exactly one per trajectory"),
        (lambda g: [RewardResult(1.0)] * 3, r"returned 3 results for 2 trajectories"),
        (lambda g: None, r"returned NoneType None; allowed: a list"),
        (
            lambda g: g.row["gold"],  # the place is the plugin's line, not Row's
            r"raised KeyError: .*no column 'gold'; columns present: .* \(.*test_scoring.py:\d+\)",
        ),
        (
            lambda g: (g.trajectories.reverse(), values(1.0, 2.0)(g))[1],
            r"changed group.trajectories, .* Sort or filter a copy, such as sorted\(group.trajectories, key=...\)",
        ),
        (lambda g: 1 / 0, r"raised ZeroDivisionError: division by zero \(.*test_scoring.py:\d+\)"),
    ],
)
def test_a_wrong_answer_fails_the_whole_group(make_group, make, message: str) -> None:
    group = make_group("a", "b")
    score([active(giving(make))], group)
    for trajectory in group.trajectories:
        assert trajectory.status == "failed"
        assert (trajectory.reward, trajectory.score) == (None, None)
        assert re.search(r"RewardError: reward 'giving' \(in process\): score\(\) " + message, trajectory.error)
        assert "row 7" not in trajectory.error, "the message about a failed sample names it"


def test_a_reward_that_sorts_the_samples_changes_no_value_of_another_reward(make_group) -> None:
    async def slow(self, group):
        await asyncio.sleep(0.01)  # the other reward has its results by then
        group.trajectories.sort(key=lambda t: t.answer, reverse=True)
        return [RewardResult(1.0) for t in group.trajectories]

    sorter = type("Sorter", (Reward,), {"name": "sorter", "score": slow})
    group = make_group("a", "b")
    score([active(giving(values(1.0, 2.0)), "first"), active(sorter)], group)
    assert [t.answer for t in group.trajectories] == ["a", "b"]
    assert [t.rewards["first"].value for t in group.trajectories] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RewardResult(math.nan), "RewardResult(value=nan); allowed: a finite number"),
        (RewardResult(math.inf), "RewardResult(value=inf)"),
        (RewardResult(1.0, score=math.nan), "RewardResult(score=nan)"),
        (RewardResult(10**1000), "RewardResult(value=int 1000"),
        (RewardResult(10**9999), "RewardResult(value=int whose repr() raises ValueError); allowed: a finite number"),
        (RewardResult([1.0]), "RewardResult(value=list [1.0]); allowed: a finite number"),
        (RewardResult("1"), "RewardResult(value=str '1'); allowed: a finite number"),
        (RewardResult(True), "RewardResult(value=bool True); allowed: a finite number (write float(...))"),
        (0.5, "float 0.5; allowed: a RewardResult"),
        (None, "NoneType None; allowed: a RewardResult"),
        (RewardResult(1.0, steps=((0, 0, 1.0),)), "a step reward for turn 0; allowed: the sampled turns [1]"),
        (RewardResult(1.0, steps=((2, 0, 1.0),)), "a step reward for turn 2; allowed: the sampled turns [1]"),
        (RewardResult(1.0, steps=((-1, 0, 1.0),)), "a step reward for turn -1; allowed: the sampled turns [1]"),
        (RewardResult(1.0, steps=((1, -1, 1.0),)), "a step reward for token -1 of turn 1, which has 3 tokens"),
        (RewardResult(1.0, steps=((1, 3, 1.0),)), "a step reward for token 3 of turn 1, which has 3 tokens"),
        (RewardResult(1.0, steps=((1, 0, math.nan),)), "a step reward with value (nan)"),
        (RewardResult(1.0, steps=((1, 1.0),)), "allowed: (turn, token in turn, value)"),
        (RewardResult(1.0, steps=((1, 0.0, 1.0),)), "value), the first two as integers"),
        (RewardResult(1.0, steps=None), "RewardResult(steps=NoneType None); allowed: a tuple of step rewards"),
        (RewardResult(1.0, steps=((1, 0, 10**1000),)), "a step reward with value (int 1000"),
        (RewardResult(1.0, info=[1]), "RewardResult(info=list [1]); allowed: a dict"),
        (RewardResult(1.0, info={"x": [10**1000]}), "RewardResult(info=...) with int 1000"),
        (RewardResult(1.0, info={"x": {1, 2}}), "info.x is a set, which JSON cannot hold. Allowed: dict"),
        (RewardResult(1.0, info={3: 1.0}), "info has the key 3; keys must be text"),
    ],
)
def test_an_invalid_result_fails_its_sample_only(make_group, result, message: str) -> None:
    group = make_group("a", "b")
    score([active(giving(lambda g: [RewardResult(1.0), result]))], group)
    good, bad = group.trajectories
    assert (good.status, good.reward) == ("ok", 1.0)
    assert (bad.status, bad.reward) == ("failed", None)
    assert message in bad.error
    assert good.error == ""


def test_a_sample_that_one_source_fails_on_has_no_reward_of_the_others(make_group) -> None:
    group = make_group("a", "b", turn_rewards=(0.5, 0.25))
    score([active(giving(values(1.0, 2.0)), "sound"), active(giving(values(3.0, math.nan)), "broken")], group)
    good, bad = group.trajectories
    assert (good.reward, good.score) == (4.75, 4.75)
    assert (bad.status, bad.reward, bad.score) == ("failed", None, None)
    assert bad.rewards["sound"].value == 2.0, "what was said of it is kept for study"


def test_info_of_a_reward_may_hold_other_values_than_numbers(make_group) -> None:
    group = make_group("a")
    score([active(giving(lambda g: [RewardResult(1.0, info={"ratio": math.inf})]))], group)
    assert (group.trajectories[0].status, group.trajectories[0].reward) == ("ok", 1.0)


def test_positions_of_step_rewards_may_be_integers_of_numpy(make_group) -> None:
    group = make_group("a")
    score([active(giving(lambda g: [RewardResult(1.0, steps=((np.int64(1), np.int32(2), np.float32(0.5)),))]))], group)
    assert group.trajectories[0].rewards["giving"].steps == ((1, 2, 0.5),)
    assert all(type(position) is int for position in group.trajectories[0].rewards["giving"].steps[0][:2])


def test_a_tensor_is_refused_with_what_to_write(make_group) -> None:
    torch = pytest.importorskip("torch")
    group = make_group("a")
    score([active(giving(lambda g: [RewardResult(torch.tensor(1.0))]))], group)
    assert "(write .item())" in group.trajectories[0].error


def test_an_async_reward_that_never_returns_is_left_behind_if_it_refuses_to_be_cancelled(make_group) -> None:
    class Hanging(Reward):
        name = "hanging"

        async def score(self, group):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3)

    async def scenario() -> float:
        begin = time.monotonic()
        await Scorer([active(Hanging, deadline=0.2)]).score(group)
        return time.monotonic() - begin

    group = make_group("a")
    loop = asyncio.new_event_loop()  # asyncio.run would wait for the stubborn coroutine
    assert loop.run_until_complete(scenario()) < 2.5
    assert "score() took longer than its deadline of 0.2 s and was cancelled" in group.trajectories[0].error
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # left behind on purpose
    loop.close()


class Outcome(BaseException):
    """As of a test library: not counted among errors by Python."""


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt("here"), Outcome("here")])
@pytest.mark.parametrize("in_a_task", [False, True])
def test_a_reward_that_exits_has_failed(main, make_group, error: BaseException, in_a_task: bool) -> None:
    async def leave(group) -> list[RewardResult]:
        raise error

    class Leaves(Reward):
        name = "leaves"

        async def score(self, group):
            return await (asyncio.create_task(leave(group)) if in_a_task else leave(group))

    group = make_group("a", "b")
    main.run(Scorer([active(Leaves)]).score(group))
    line = leave.__code__.co_firstlineno + 1
    message = rf"reward 'leaves' .*score\(\) raised {type(error).__name__}: .*{re.escape(__file__)}:{line}"
    assert all(t.status == "failed" and re.search(message, t.error) for t in group.trajectories)


def test_a_failed_call_is_repeated_and_the_last_error_says_how_often(make_group) -> None:
    class Flaky(Reward):
        name = "flaky"
        asked = 0

        async def score(self, group):
            Flaky.asked += 1
            return [RewardResult(1.0 if Flaky.asked == 3 else math.nan)]

    group = make_group("a")
    score([active(Flaky, retries=2)], group)
    assert Flaky.asked == 3
    assert group.trajectories[0].reward == 1.0

    group = make_group("a")
    score([active(giving(values(math.nan)), retries=1)], group)
    assert "(attempt 2 of 2)" in group.trajectories[0].error


def test_failed_rollouts_are_not_shown_to_rewards(make_group) -> None:
    sizes: list[int] = []

    def make(group):
        sizes.append(len(group.trajectories))
        return [RewardResult(1.0) for _ in group.trajectories]

    group = make_group("a", "b")
    group.trajectories[0].status, group.trajectories[0].error = "failed", "env"
    score([active(giving(make))], group)
    assert sizes == [1]
    assert [t.reward for t in group.trajectories] == [None, 1.0]
    assert group.trajectories[0].error == "env"


def test_a_reward_without_its_role_in_a_worker_or_with_state_is_refused() -> None:
    class Model(Reward):
        name = "model_like"

        def roles(self):
            return (RoleSpec("judge", head="scalar"),)

        def score(self, group):
            return []

    class Running(Reward):
        name = "running"

        def score(self, group):
            return []

        def state_dict(self):
            return {"mean": 0.0}

    with pytest.raises(ConfigError, match=r"'model_like'.*declares roles.*write `async def score`"):
        active(Model)
    with pytest.raises(ConfigError, match=r"'running'.*keeps state.*write `async def score`"):
        active(Running)
    with pytest.raises(ConfigError, match=r"two rewards are called 'giving'"):
        Scorer([active(giving(values(1.0))), active(giving(values(1.0)))])
    with pytest.raises(ConfigError, match=r"cannot be called 'env'.*set `name`"):
        Scorer([active(giving(values(1.0)), "env")])


def test_a_role_backed_reward_gets_the_role_and_others_do_not(make_group) -> None:
    contexts = {}

    class Judge(Reward):
        name = "judge"

        def roles(self):
            return (RoleSpec("judge", head="scalar"),)

        async def setup(self, context):
            contexts["judge"] = self.context = context

        async def score(self, group):
            values = await self.context.score_with_role("judge", [t.turns[-1].ids for t in group.trajectories])
            return [RewardResult(v) for v in values]

    class Plain(Judge):
        name = "plain"

        def roles(self):
            return ()

        async def setup(self, context):
            contexts["plain"] = context

        async def score(self, group):
            return [RewardResult(0.0) for _ in group.trajectories]

    async def score_with_role(role, ids):
        return [float(len(i)) for i in ids]

    async def read_role(role, head, ids, positions):
        raise NotImplementedError

    group, tokens = make_group("a"), Tokens(lambda text: [], lambda ids: "")
    judge, plain = active(Judge), replace(active(Plain), credit="step")
    score([judge, plain], group, score_with_role=score_with_role, read_role=read_role, tokens=tokens, seed=5)
    assert group.trajectories[0].reward == 3.0
    assert contexts["judge"] == RewardContext(score_with_role, 5, read_role, tokens, "outcome")
    assert contexts["plain"] == RewardContext(None, 5, None, tokens, "step")


WORKER_REWARD = """
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import RewardResult

class Sync(Reward):
    class Config(ComponentConfig):
        scale: float = 1.0
        words: tuple[str, ...] = ()

    def score(self, group):
        mode = group.row.get("mode")
        if mode == "nan":
            return [RewardResult(float("nan")) for t in group.trajectories]
        if mode == "empty":
            group.trajectories.clear()
        if mode == "object":
            return [RewardResult(1.0, info={"x": object()}) for t in group.trajectories]
        return [RewardResult(self.config.scale * len(t.answer), steps=((1, 0, 0.5),), info={"words": self.config.words})
                for t in group.trajectories]
"""


@pytest.fixture
def sync(from_file):
    resolved = from_file("reward", WORKER_REWARD)
    config = resolved.cls.Config(scale=2.0, words=("a",))
    return ActiveReward("sync", resolved, resolved.cls(config), config, deadline=1.0)


def test_a_plain_reward_runs_in_a_worker_with_its_config(sync, make_group) -> None:
    group = make_group("a", "bcd")
    score([sync], group)
    assert [t.reward for t in group.trajectories] == [2.5, 6.5]
    assert group.trajectories[0].rewards["sync"] == RewardResult(2.0, None, ((1, 0, 0.5),), {"words": ["a"]})


def test_a_plain_reward_fails_as_clearly_as_an_async_one(sync, make_group) -> None:
    messages = {
        "nan": "RewardResult(value=nan); allowed: a finite number",
        "empty": "changed group.trajectories",
        "object": "info.x is a object, which JSON cannot hold. Allowed: dict with text keys, list, str",
    }
    groups = [make_group("a", mode=mode) for mode in messages]
    healthy = make_group("a")
    score([sync], *groups, healthy, workers=1)
    for group, message in zip(groups, messages.values(), strict=True):
        assert message in group.trajectories[0].error
        assert group.trajectories[0].error.startswith("RewardError: ")
    assert healthy.trajectories[0].reward == 2.5


BROKEN = """
from rlhf.interfaces import Reward
class Bad(Reward):
    def __init__(self, config):
        super().__init__(config)
        self.x = config.missing
    def score(self, group):
        return []
"""


def test_a_reward_that_cannot_start_stops_setup(from_file) -> None:
    resolved = from_file("reward", BROKEN)
    instance = object.__new__(resolved.cls)
    with pytest.raises(RewardError, match=r"starting raised AttributeError.*missing"):
        score([ActiveReward("bad", resolved, instance, ComponentConfig())])


def test_a_row_that_cannot_be_sent_to_a_worker_is_the_rewards_failure(sync, make_group) -> None:
    """Not an error of Python's that ends the run without a word about reward and row."""
    group = make_group("a", made_by=lambda: 0)
    score([sync], group)
    assert group.trajectories[0].status == "failed"
    assert "reward 'sync' (" in group.trajectories[0].error
    assert "asking its worker process raised" in group.trajectories[0].error
