"""Rollouts run in waves whose composition depends on counters alone; a failure fails only its own sample."""

import asyncio
import math
import random
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf.errors import RolloutError, WorkerError
from rlhf.interfaces import Env, Generator, Proof, Rollout
from rlhf.plugins import Resolved
from rlhf.requests import check_sampling
from rlhf.seeds import derive_seed
from rlhf.types import EnvStep, RewardResult, Row, Sampling, Turn
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts


class CountingGenerator(Generator):
    """Answers each request with tokens that depend on its ids and seed, and records every wave."""

    name = "counting"

    def __init__(self):
        self.waves, self.bases = [], []
        self.version = 3

    def generate(self, requests):
        self.waves.append([r.ids for r in requests])
        self.bases += [r.ids for r in requests if r.base]
        for position, request in reversed(list(enumerate(requests))):  # requests end in another order than they came
            ids = [sum(request.ids) % 7, request.seed % 5]
            yield position, Turn(ids, True, [-0.5, -0.5], ((0, 3),), "stop", text=f"{ids[0]}")

    def load(self, source, version):
        return Proof(version)


class PlainTemplate:
    end_token_ids = (0,)
    tokenizer = SimpleNamespace(convert_ids_to_tokens=str, get_added_vocab=dict)

    def encode_prompt(self, row):
        return Turn([row["id"]], False, text=str(row["id"]))

    def encode_answer(self, row):
        return [self.encode_prompt(row), Turn([1, 0], True, finish="stop", text="given", is_demonstration=True)]

    def encode_opening(self, row, text):
        return [self.encode_prompt(row), self.encode(text)]

    @property
    def observations(self):
        return self

    def encode(self, text, closed=True, images=()):
        return Turn([len(text), *([] if closed else [0])], False, text=text)


class OneForAll:
    async def score(self, group, trained_on=True):
        for t in group.trajectories:
            t.rewards["one"] = RewardResult(1.0)
            t.reward = t.score = 1.0


class Turns(Rollout):
    """As many turns as the row says, with a pause of random length before each."""

    name = "turns"

    async def run(self, row, seed, ctx):
        turns = [ctx.encode_prompt(row)]
        for n in range(row["turns"]):
            await asyncio.sleep(random.random() / 200)
            turns.append(await ctx.generate(turns, ctx.sampling, n))
            if row.get("fail") == n:
                raise ValueError("the rollout broke")
            turns.append(ctx.encode_observation("x" * n))
        return turns


def rows(*turns, **columns):
    return [Row({"id": 10 + i, "turns": n, **columns}, "test", i) for i, n in enumerate(turns)]


def settings(**changes):
    base = {"sampling": Sampling(max_new_tokens=4), "samples": 2, "purpose": "sample", "seed": 0}
    return RolloutSettings(**{**base, "max_tokens": 100, "deadline": 5.0, **changes})


def run(main, the_rows, rollout=None, open_env=None, generator=None, **changes):
    generator = generator or CountingGenerator()
    episodes = open_env and SimpleNamespace(open=open_env, limit=None, agents=())
    rollouts = Rollouts(SampleParts(rollout or Turns(), PlainTemplate(), OneForAll(), episodes), generator, main)
    return rollouts.run(the_rows, 0, settings(**changes)), generator


def test_waves_hold_every_sample_under_way_in_index_order_for_any_timing(main):
    groups, generator = run(main, rows(1, 3, 2))
    assert [len(w) for w in generator.waves] == [6, 4, 2]
    assert [w[0] for w in generator.waves[0][::2]] == [10, 11, 12]
    repeat, generator_again = run(main, rows(1, 3, 2))
    assert generator_again.waves == generator.waves
    assert [[t.turns for t in g.trajectories] for g in groups] == [[t.turns for t in g.trajectories] for g in repeat]


def test_given_answers_replace_the_samples_of_a_share_of_the_groups_and_are_not_scored(main):
    groups, generator = run(main, rows(*[1] * 40), demonstration_share=0.25)
    numbers = [g.number for g in groups if any(t.is_demonstration for t in g.trajectories)]
    assert [n for n in range(40) if settings(demonstration_share=0.25).is_demonstration(n)] == numbers
    assert 4 <= len(numbers) <= 16
    assert [len(w) for w in generator.waves] == [2 * (40 - len(numbers))]
    for g in groups:
        if g.number in numbers:
            [t] = g.trajectories
            assert (t.index, t.answer, t.reward, t.rewards, t.truncated) == ((g.number, 0), "given", None, {}, False)
        else:
            assert [t.reward for t in g.trajectories] == [1.0, 1.0]
    plain, _ = run(main, rows(*[1] * 40))
    for group, other in zip(groups, plain, strict=True):
        assert group.number in numbers or [t.turns for t in group.trajectories] == [t.turns for t in other.trajectories]


def test_rows_of_some_sources_are_demonstrations(main):
    mixture = [replace(row, source="experts") if i % 2 else row for i, row in enumerate(rows(1, 1, 1))]
    groups, generator = run(main, mixture, demonstration_sources=("experts",))
    assert [[(t.is_demonstration, t.reward) for t in g.trajectories] for g in groups] == [
        [(False, 1.0)] * 2, [(True, None)], [(False, 1.0)] * 2
    ]  # fmt: skip
    assert [len(wave) for wave in generator.waves] == [4]


def test_which_groups_have_given_answers_depends_on_seed_and_group_number_alone():
    chosen = {
        seed: [n for n in range(4000) if settings(demonstration_share=0.3, seed=seed).is_demonstration(n)]
        for seed in (0, 1)
    }
    assert chosen[0] != chosen[1]
    assert all(abs(len(c) / 4000 - 0.3) < 0.03 for c in chosen.values())
    superset = {n for n in range(4000) if settings(demonstration_share=0.6).is_demonstration(n)}
    assert superset > set(chosen[0])
    assert not any(settings().is_demonstration(n) for n in range(100))


class BySample:
    """Scores each answer with its number in the group, and the numbers in ``none`` not at all."""

    def __init__(self, none=()):
        self.none = none

    async def score(self, group, trained_on=True):
        for n, t in enumerate(group.trajectories):
            t.reward = t.score = None if n in self.none else float(n)


class Warm(Turns):
    """Asks for a temperature of its own, as an environment may."""

    async def run(self, row, seed, ctx):
        if row.get("broken") == ctx.index[1]:
            raise ValueError("the rollout broke")
        turns = [ctx.encode_prompt(row)]
        return [*turns, await ctx.generate(turns, replace(ctx.sampling, temperature=0.7, top_k=0))]


def run_greedy(main, the_rows, none=(), **changes):
    class Records(CountingGenerator):
        def generate(self, requests):
            self.temperatures = [r.sampling.temperature for r in requests]
            yield from super().generate(requests)

    generator = Records()
    rollouts = Rollouts(SampleParts(Warm(), PlainTemplate(), BySample(none)), generator, main)
    return rollouts.run(the_rows, 0, settings(greedy=True, **changes)), generator


def test_each_prompt_gets_a_greedy_answer_that_is_scored_and_not_in_the_group(main):
    groups, generator = run_greedy(main, rows(1, 1))
    assert generator.temperatures == [0.7, 0.7, 0.0] * 2
    assert [[t.reward for t in g.trajectories] for g in groups] == [[0.0, 1.0]] * 2
    assert all(t.info["rollout/greedy_reward"] == 2.0 for g in groups for t in g.trajectories)
    plain, _ = run(main, rows(1, 1), Warm())
    assert [[t.turns for t in g.trajectories] for g in groups] == [[t.turns for t in g.trajectories] for g in plain]


def test_without_the_reward_of_the_greedy_answer_its_samples_fail(main):
    with pytest.raises(RolloutError, match=r"(?s)greedy answer to the same prompt has no reward.*the rollout broke"):
        run_greedy(main, rows(1, broken=2))
    for none, row in (((2,), {}), ((), {"broken": 2})):
        [group], _ = run_greedy(main, rows(1, **row), none, abort_on_failure=False)
        assert [(t.status, t.reward) for t in group.trajectories] == [("failed", None)] * 2
    [group], _ = run_greedy(main, rows(1), (0, 1, 2))
    assert [(t.status, t.reward) for t in group.trajectories] == [("ok", None)] * 2, "the rewards are of other rows"


def test_an_observation_closes_an_answer_that_was_cut(main):
    groups, _ = run(main, rows(3), samples=8)
    for t in groups[0].trajectories:
        for answer, observation in zip(t.turns[1::2], t.turns[2::2], strict=True):
            assert (observation.ids[-1] == 0 and len(observation.ids) == 2) == (answer.ids[-1] != 0)


def test_samples_of_a_prompt_have_different_seeds_and_purposes_too(main):
    groups, _ = run(main, rows(1), samples=8)
    assert len({tuple(t.turns[1].ids) for t in groups[0].trajectories}) > 1
    evaluated, _ = run(main, rows(1), samples=8, purpose="eval")
    assert [t.turns[1].ids for t in groups[0].trajectories] != [t.turns[1].ids for t in evaluated[0].trajectories]


def test_a_failed_sample_ends_the_run_or_is_returned_as_failed_as_configured(main):
    with pytest.raises(RolloutError, match=r"(?s)row 0 of 'test' failed.*the rollout broke.*drop_sample"):
        run(main, rows(2, fail=1))
    groups, _ = run(main, rows(2, fail=1), abort_on_failure=False)
    assert [t.status for t in groups[0].trajectories] == ["failed", "failed"]
    assert "ValueError: the rollout broke" in groups[0].trajectories[0].error


def test_a_rollout_that_hangs_fails_at_its_deadline_which_excludes_generation(main):
    class Hangs(Rollout):
        name = "hangs"

        async def run(self, row, seed, ctx):
            await asyncio.sleep(60)

    groups, _ = run(main, rows(1), Hangs(), deadline=0.05, abort_on_failure=False)
    assert "took over stream.rollout_deadline = 0.05 s" in groups[0].trajectories[0].error


class Breaks(CountingGenerator):
    """Raises an error that is not one of this project's, as an engine does when it is out of memory."""

    def generate(self, requests):
        yield from list(super().generate(requests))[:1]
        raise RuntimeError("out of memory")


class LeavesOut(CountingGenerator):
    def generate(self, requests):
        yield from list(super().generate(requests))[1:]


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (Breaks, r"generator 'counting' raised RuntimeError: out of memory \(.*test_waves.py:[0-9]+\)"),
        (LeavesOut, "generator 'counting' was asked for 4 turns but returned 3; it must return one for each request"),
    ],
)
def test_an_error_of_the_generator_ends_the_run_instead_of_failing_a_sample(main, generator, message):
    with pytest.raises(WorkerError, match=message):
        run(main, rows(1, 1), generator=generator(), abort_on_failure=False)


class Checks(CountingGenerator):
    """Computes nothing of a wave if it refuses one of its requests, as the real generators do."""

    def generate(self, requests):
        for request in requests:
            check_sampling(request.sampling)
        return super().generate(requests)


@pytest.mark.parametrize(
    ("changes", "ids", "observation", "message"),
    [
        ({"stop": ("",)}, [5], [], r"sampling.stop is \('',\)"),
        ({"temperature": 0.001}, [5], [], r"temperature is 0.001; it must be 0 \(greedy\) or from 0.01 to 2.0"),
        ({}, [], [], "request 0 has no tokens"),
        ({}, [5, 99], [], "has token 99; .* 0 to 98"),
        ({}, [5], [98, 99], "returned turn 2 with the token 99; allowed: 0 to 98, the tokens of the model"),
    ],
)
def test_what_the_model_or_the_generator_cannot_read_fails_only_its_own_sample(
    main, changes, ids, observation, message
):
    class Odd(Turns):
        async def run(self, row, seed, ctx):
            if not ctx.index[1]:
                return await super().run(row, seed, ctx)
            prompt = Turn(ids, False)
            answer = await ctx.generate([prompt], replace(ctx.sampling, **changes))
            return [prompt, answer, *([Turn(observation, False)] if observation else [])]

    check = partial(check_sampling, temperatures=(0.01, 2.0))
    rollouts = Rollouts(SampleParts(Odd(), PlainTemplate(), OneForAll(), check=check, vocabulary=99), Checks(), main)
    groups = rollouts.run(rows(1, 1), 0, settings(abort_on_failure=False))
    assert [[t.status for t in g.trajectories] for g in groups] == [["ok", "failed"]] * 2
    assert re.search(message, groups[0].trajectories[1].error)


def test_a_sample_that_asks_for_two_turns_at_once_is_refused(main):
    """The composition of waves would depend on timing: on whether the other samples had already asked."""

    class Branches(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            if ctx.index[0]:
                return [prompt, await ctx.generate([prompt], ctx.sampling)]
            return [prompt, *await asyncio.gather(*(ctx.generate([prompt], ctx.sampling, n) for n in (0, 1)))]

    groups, _ = run(main, rows(1, 1), Branches(), abort_on_failure=False)
    assert [[t.status for t in g.trajectories] for g in groups] == [["failed"] * 2, ["ok"] * 2]
    assert (
        "await the first turn before asking for the next, or ask for several at once: ctx.generate_each()"
        in groups[0].trajectories[0].error
    )


@pytest.mark.parametrize(("number", "repeated"), [(3, 3), (6, 6), (7, None)])
def test_two_turns_of_a_sample_have_different_numbers(main, number, repeated):
    """Their seeds would be equal, and with equal contexts the turns too."""

    class Again(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            await ctx.generate_each([([prompt], ctx.sampling)] * 4, 3)
            return [prompt, await ctx.generate([prompt], ctx.sampling, number)]

    groups, _ = run(main, rows(1, 1), Again(), abort_on_failure=False)
    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    message = "" if repeated is None else f"asks for turn {repeated} of its sample a second time"
    assert all(message in error and bool(error) == bool(message) for error in errors)


def test_turns_asked_for_at_once_are_in_one_wave_and_equal_to_turns_one_by_one(main):
    class Branches(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            await asyncio.sleep(random.random() / 200)
            branches = [([prompt], ctx.sampling), ([prompt, prompt], ctx.sampling)]
            if ctx.index[1]:
                return [prompt, *await ctx.generate_each(branches, 5)]
            return [prompt, *[await ctx.generate(*branch, n) for n, branch in enumerate(branches, 5)]]

    [group, _], generator = run(main, rows(1, 1), Branches(), samples=3)
    assert [len(wave) for wave in generator.waves] == [2 + 4 * 2, 2]
    assert [list(ids) for ids in generator.waves[0][:5]] == [[10], [10], [10, 10], [10], [10, 10]]
    one_by_one, *at_once = [[turn.ids[0] for turn in t.turns] for t in group.trajectories]
    assert one_by_one == at_once[0] == at_once[1] == [10, 3, 6]
    seeds = [[turn.ids[1] for turn in t.turns[1:]] for t in group.trajectories]
    expected = [[derive_seed(0, "sample", 0, sample, n) % 5 for n in (5, 6)] for sample in range(3)]
    assert seeds == expected


def test_turns_that_a_rollout_drops_count_as_sampled(main):
    class First(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            first, _, _ = await ctx.generate_each([([prompt], ctx.sampling)] * 3)
            return [prompt, first]

    rollouts = Rollouts(SampleParts(First(), PlainTemplate(), OneForAll()), CountingGenerator(), main)
    rollouts.run(rows(1, 1), 0, settings(samples=2, demonstration_sources=("other",)))
    rollouts.run(rows(1, 1), 0, settings(purpose="eval"))
    assert rollouts.sampled_tokens == 2 * 2 * 3 * 2


@pytest.mark.parametrize(
    ("training", "number", "message"),
    [
        (False, 0, ""),
        (False, 1, "returned turn 1, which it asked for with training = False"),
        (True, 0, "a turn is requested at temperature 0.0"),
    ],
)
def test_turns_that_are_not_returned_may_be_greedy(main, training, number, message):
    class Judged(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            answer = await ctx.generate([prompt], ctx.sampling)
            greedy = replace(ctx.sampling, temperature=0.0)
            [verdict] = await ctx.generate_each([([prompt, answer], greedy)], 1, training=training)
            return [prompt, replace((answer, verdict)[number], reward=float(verdict.text))]

    [group], _ = run(main, rows(1), Judged(), samples=1, abort_on_failure=False)
    assert message in group.trajectories[0].error
    assert (group.trajectories[0].status == "failed") == bool(message)


@pytest.mark.parametrize(
    ("needs_base", "training", "message"),
    [
        (True, False, ""),
        (True, True, "turns of the base model, which are not the policy's and cannot be trained on"),
        (False, False, "it declares needs_base = False; set it to True"),
    ],
)
def test_turns_of_the_base_are_for_rollouts_that_say_so_and_never_trained_on(main, needs_base, training, message):
    class Against(Turns):
        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            answer = await ctx.generate([prompt], ctx.sampling)
            await ctx.generate_each([([prompt, answer], ctx.sampling)], 1, training=training, base=True)
            return [prompt, answer]

    Against.needs_base = needs_base
    [group], generator = run(main, rows(1), Against(), samples=1, abort_on_failure=False)
    assert message in group.trajectories[0].error
    assert (group.trajectories[0].status == "failed") == bool(message)
    assert [len(ids) for ids in generator.bases] == ([] if message else [3])


class Recording(Env):
    name = "recording"
    closed = 0

    async def reset(self, row, seed):
        return "hello"

    async def step(self, action):
        raise RuntimeError("step broke")

    async def close(self):
        Recording.closed += 1


def test_the_environments_of_a_prompts_samples_get_the_same_seed(main):
    seeds = []

    class Keeps(Turns):
        async def run(self, row, seed, ctx):
            seeds.append((row["id"], seed))
            return await super().run(row, seed, ctx)

    run(main, rows(1, 1), Keeps(), samples=4)
    assert len(seeds) == 8
    assert len(set(seeds)) == 2


def test_environments_are_closed_once_even_after_an_error(main):
    class Opens(Rollout):
        name = "opens"

        async def run(self, row, seed, ctx):
            env = await ctx.open_env()
            await env.reset(row, seed)
            assert isinstance(await env.step("a"), EnvStep)

    Recording.closed = 0
    groups, _ = run(main, rows(1), Opens(), Recording, samples=3, abort_on_failure=False)
    assert Recording.closed == 3
    assert all("step broke" in t.error for t in groups[0].trajectories)


def test_an_environment_is_closed_even_if_closing_another_raises(main):
    closed = []

    class Numbered(Recording):
        async def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise RuntimeError("the first does not close")

    class OpensTwo(Turns):
        async def run(self, row, seed, ctx):
            await ctx.open_env()
            await ctx.open_env()
            return await super().run(row, seed, ctx)

    groups, _ = run(main, rows(1), OpensTwo(), Numbered, samples=1, abort_on_failure=False)
    assert len(set(closed)) == 2
    assert "the first does not close" in groups[0].trajectories[0].error


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "start with a prompt"),
        ([Turn([1], False)], "no sampled turn"),
        ([Turn([1], False), Turn([1, 2], True, [-1.0])], "2 tokens and 1 log-probs"),
        ([Turn([1], False), Turn([1], True, [-1.0]), Turn([2], False, reward=1.0)], r"turn 2 \(sampled = False\) with"),
        (
            [Turn([1], False), Turn([1], True, [-1.0], reward=float("nan"))],
            r"with the reward \(nan\); allowed: a finite",
        ),
        ([Turn([1], False), Turn([1], True, [-1.0], reward=10**1000)], r"turn 1 with the reward \(int 1000"),
        ([Turn([1], False), Turn([1], True, [-1.0], reward="1")], r"turn 1 with the reward \(str '1'\)"),
        (None, "returned NoneType None; allowed: a list of turns"),
        ([[1], [2]], r"returned list \[1\] as turn 0; allowed: a Turn"),
        (
            [Turn([1], False), Turn([1], True, is_demonstration=True)],
            r"turn 1 marked as a demonstration.*Needs\.demonstrations_per_group",
        ),
        ([Turn([-1], False)], r"turn 0 with the token -1; allowed: integers >= 0"),
        ([Turn([1], False, agent="a")], r"turn 0 of the agent str 'a'; Env.agents\(\) names no agents"),
    ],
)
def test_malformed_turns_are_refused(main, turns, message):
    class Malformed(Rollout):
        name = "malformed"

        async def run(self, row, seed, ctx):
            return turns

    with pytest.raises(RolloutError, match=message):
        run(main, rows(1), Malformed())


def test_a_context_without_room_to_answer_is_an_error(main):
    with pytest.raises(RolloutError, match=r"data.max_tokens = 1"):
        run(main, rows(1), max_tokens=1)


def test_a_limit_admits_the_next_sample_when_one_ends(main):
    generator = CountingGenerator()
    episodes = SimpleNamespace(limit=3, agents=())
    rollouts, counts = Rollouts(SampleParts(Turns(), PlainTemplate(), OneForAll(), episodes), generator, main), []
    groups = rollouts.run(rows(1, 2, 1), 0, settings(), lambda *count: counts.append(count))
    assert counts == [(number, 6) for number in range(1, 7)]
    assert all(t.status == "ok" for g in groups for t in g.trajectories)
    assert max(len(w) for w in generator.waves) == 3
    first, generator.waves = generator.waves, []
    rollouts.run(rows(1, 2, 1), 0, settings())
    assert generator.waves == first


class Steps(Env):
    name = "steps"

    async def reset(self, row, seed):
        self.steps = 0
        return ""

    async def step(self, action):
        self.steps += 1
        info = {"steps": self.steps, "first": self.steps == 1, "text": "a", "list": [1], "nan": math.nan}
        return EnvStep(done=action == "done", info=info)


def test_numbers_about_a_sample_are_kept_with_it(main):
    class Plays(Turns):
        async def run(self, row, seed, ctx):
            env = await ctx.open_env()
            await env.reset(row, seed)
            for action in ("a", "b", "done") if ctx.index[1] else ("a", "b"):
                await env.step(action)
            ctx.report("calls", 5)
            ctx.report("calls", 2)
            return await super().run(row, seed, ctx)

    episodes = Episodes(Resolved("env", "steps", Steps, "here", "", "steps"), None, EnvSection(use="x", max_turns=3))
    [group], _ = run(main, rows(1), Plays(), episodes.open, samples=2)
    assert [t.info for t in group.trajectories] == [
        {"env/first": 0.0, "env/steps": 2.0, "rollout/calls": 2.0},
        {"env/first": 0.0, "env/max_turns": 0.0, "env/steps": 3.0, "rollout/calls": 2.0},
    ]


@pytest.mark.parametrize("purpose", ["sample", "eval"])
def test_a_rollout_knows_whether_its_sample_is_trained_on(main, purpose):
    class Reports(Turns):
        async def run(self, row, seed, ctx):
            ctx.report("training", int(ctx.training))
            return await super().run(row, seed, ctx)

    [group], _ = run(main, rows(1), Reports(), samples=1, purpose=purpose)
    assert group.trajectories[0].info == {"rollout/training": float(purpose == "sample")}


@pytest.mark.parametrize("value", [math.nan, True, "2"])
def test_a_rollout_reports_finite_numbers_only(main, value):
    class Reports(Turns):
        async def run(self, row, seed, ctx):
            ctx.report("calls", value)
            return await super().run(row, seed, ctx)

    [group], _ = run(main, rows(1), Reports(), samples=1, abort_on_failure=False)
    assert "allowed: a finite number" in group.trajectories[0].error


def test_a_rollout_may_report_numbers_of_numpy_and_names_them_by_text(main):
    class Reports(Turns):
        def __init__(self, name):
            super().__init__()
            self.reported = name

        async def run(self, row, seed, ctx):
            ctx.report(self.reported, np.float32(0.5))
            return await super().run(row, seed, ctx)

    [group], _ = run(main, rows(1), Reports("share"), samples=1)
    assert group.trajectories[0].info == {"rollout/share": 0.5}
    for name in (3, ""):
        [group], _ = run(main, rows(1), Reports(name), samples=1, abort_on_failure=False)
        assert f"reports np.float32(0.5) as {name!r}; allowed: a name, as text" in group.trajectories[0].error
