"""A continuous stream on answers that the test holds back: what a resume keeps, and what is sampled again."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf.errors import WorkerError
from rlhf.interfaces import Rollout
from rlhf.types import GenerationRequest, Group, Row, Sampling, Turn
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.samples import continuous_stream
from rlhf_runtime.samples.continuous_stream import AT_ONCE, ContinuousCurriculum, ContinuousStream
from rlhf_runtime.samples.requests import SingleRequests
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts

TURNS = 3
SAMPLES = 2


def row(index: int) -> Row:
    return Row({"prompt": str(index)}, "unit", index)


class Numbers:
    """Rows 0, 1, 2, ..."""

    curriculum, next = None, 0

    def take(self, n: int) -> list[Row]:
        self.next += n
        return [row(index) for index in range(self.next - n, self.next)]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Template:
    """A prompt is the index of its row."""

    end_token_ids = (1,)

    def encode_prompt(self, row: Row) -> Turn:
        return Turn([row.index], False, text=str(row.index))

    @property
    def observations(self) -> Template:
        return self

    def encode(self, text: str, closed: bool = True, images: tuple[bytes, ...] = ()) -> Turn:
        return Turn([ord(c) for c in text], False, text=text)


class ThreeTurns(Rollout):
    """Three answers, with an observation between them."""

    name = "three_turns"

    def __init__(self, observation: str = "?") -> None:
        self.observation = observation

    async def run(self, row: Row, seed: int, ctx: Any) -> list[Turn]:
        turns = [ctx.encode_prompt(row)]
        for number in range(TURNS):
            turns += [ctx.encode_observation(self.observation)] if number else []
            turns.append(await ctx.generate(turns, ctx.sampling, number))
        return turns


class Counted(ThreeTurns):
    """Counts its live samples."""

    name = "counted"
    live = most = 0

    async def run(self, row: Row, seed: int, ctx: Any) -> list[Turn]:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            return await super().run(row, seed, ctx)
        finally:
            self.live -= 1


class NoRoom(Rollout):
    """The first sample ends after its first answer, whose ``finish`` it changes. The second one goes on."""

    name = "no_room"

    async def run(self, row: Row, seed: int, ctx: Any) -> list[Turn]:
        turns = [ctx.encode_prompt(row)]
        turns.append(await ctx.generate(list(turns), ctx.sampling))
        if ctx.index[1] == 0:
            ctx.report("no_room", float(turns[1].finish == "stop"))
            turns[1].finish = "length"
            return turns
        turns.append(ctx.encode_observation("?"))
        return [*turns, await ctx.generate(list(turns), ctx.sampling, 1)]


class Scorer:
    async def score(self, group: Group, trained_on: bool = True) -> None:
        for trajectory in group.trajectories:
            trajectory.reward = trajectory.score = 1.0


class Engine:
    """Every answer has one token that no answer before it has, so that sampling again is visible.

    Args:
        first: the first token.
        held: {row: the number of its turn that is never answered}.
        old: rows whose first group is answered with weights one version too old.
    """

    name = "engine"

    def __init__(self, first: int, version: int = 0, held: dict[int, int] | None = None, old: tuple[int, ...] = ()):
        self.next, self.version, self.held, self.old = first, version, held or {}, old
        self.answers: Counter[int] = Counter()
        """Answers to each row."""
        self.stopped = asyncio.Semaphore(0)
        """One for every sample that is held."""
        self.repaired_on: list[threading.Thread] = []
        """The thread of each call of :meth:`repair`, which answers what is held."""
        self.repaired = asyncio.Event()

    def repair(self) -> None:
        self.repaired_on.append(threading.current_thread())
        self.loop.call_soon_threadsafe(self.repaired.set)

    def idle(self) -> tuple[float, float]:
        return 1.0, 4.0

    def restarted(self) -> dict[str, int]:
        return {"engine": 5}

    def unfinished_tokens(self) -> int:
        return 7

    async def answer(self, request: GenerationRequest) -> Turn:
        self.loop = asyncio.get_running_loop()
        index, number = request.ids[0], len(request.ids) // 2  # prompt, then an answer and an observation a turn
        if self.held.get(index) == number:
            self.stopped.release()
            await self.repaired.wait()
        age = index in self.old and self.answers[index] < SAMPLES * TURNS
        self.answers[index] += 1
        self.next += 1
        return Turn(array("i", [self.next]), True, [-0.5], ((0, self.version - age),), "stop")

    async def until_held(self, samples: int) -> None:
        async with asyncio.timeout(60):
            for _ in range(samples):
                await self.stopped.acquire()


@pytest.fixture
def stream(main: MainThread) -> Iterator[Callable[..., ContinuousStream]]:
    streams = []

    def make(
        engine: Engine, rollout: Rollout | None = None, greedy: bool = False, limit: int | None = None, **options: Any
    ) -> ContinuousStream:
        episodes = SimpleNamespace(limit=limit, agents=())
        parts = SampleParts(rollout or ThreeTurns(), Template(), Scorer(), episodes)  # type: ignore[arg-type]
        rollouts = Rollouts(parts, engine, main, pool=engine)  # type: ignore[arg-type]
        settings = RolloutSettings(Sampling(max_new_tokens=4), SAMPLES, "sample", 0, 100, 60.0, greedy=greedy)
        options = {"batch_size": 2, "total_steps": 4, "staleness": 1, **options}
        streams.append(ContinuousStream(Numbers(), rollouts, settings, **options))
        return streams[-1]

    yield make
    for instance in streams:
        instance.close()


def sampled(group: Group) -> list[list[Turn]]:
    """The sampled turns of each sample."""
    return [[turn for turn in trajectory.turns if turn.sampled] for trajectory in group.trajectories]


@pytest.fixture
def resumed(stream, main, tmp_path) -> Callable[..., tuple[ContinuousStream, Engine, list[Group]]]:
    """A stream that goes on after the first of four steps, its engine, and the groups of the checkpoint. Group 2 has
    two turns of each sample, group 3 has one."""

    def go_on(rollout: Rollout | None = None, greedy: bool = False) -> tuple[ContinuousStream, Engine, list[Group]]:
        engine = Engine(100, held={2: 2, 3: 1})
        first = stream(engine, greedy=greedy)
        first.start(0)
        assert [group.number for group in first.take(0).groups] == [0, 1]
        main.run(engine.until_held(2 * (SAMPLES + greedy)))
        state, groups = first.snapshot()
        write_groups(tmp_path / "ready.arrow", groups)
        saved = read_groups(tmp_path / "ready.arrow", lambda source, index: row(index))
        engine = Engine(500, version=1)
        second = stream(engine, rollout, greedy)
        second.restore(json.loads(json.dumps(state)), saved)
        second.start(1)
        return second, engine, saved

    return go_on


def test_a_resume_trains_on_the_sampled_turns_of_unfinished_groups(resumed) -> None:
    second, engine, saved = resumed()
    assert [group.number for group in saved] == [2, 3]
    old_turns = [sampled(group) for group in saved]
    assert [[len(turns) for turns in group] for group in old_turns] == [[2, 2], [1, 1]]
    ready = second.take(1)
    assert [(group.number, group.row.index) for group in ready.groups] == [(2, 2), (3, 3)]
    for old_group, group in zip(old_turns, ready.groups, strict=True):
        for old, new in zip(old_group, sampled(group), strict=True):
            assert len(new) == TURNS
            assert new[: len(old)] == old, "tokens, log-probs and versions"
            assert {turn.versions for turn in old} == {((0, 0),)}
            assert {turn.versions for turn in new[len(old) :]} == {((0, 1),)}
            assert all(turn.ids[0] > 500 for turn in new[len(old) :])
    assert (engine.answers[2], engine.answers[3]) == (SAMPLES * 1, SAMPLES * 2), "only the missing turns are sampled"
    tokens = second.rollouts.sampled_tokens
    assert SAMPLES * 3 <= tokens <= engine.next - 500, "of throughput: one token for each turn that is sampled now"
    assert (ready.version, ready.counts["oldest"], ready.counts["stale"]) == (0, 1.0, 0.0)
    restarted = {cause: ready.counts[f"tokens_restarted_{cause}"] for cause in ("weights", "engine", "resume")}
    assert restarted == {"weights": 0.0, "engine": 5.0, "resume": 7.0}


def test_a_resume_continues_greedy_answers_too(resumed) -> None:
    second, engine, saved = resumed(greedy=True)
    assert [len(group.trajectories) for group in saved] == [SAMPLES + 1] * 2
    for group in second.take(1).groups:
        assert [t.info for t in group.trajectories] == [{"rollout/greedy_reward": 1.0}] * SAMPLES
    assert (engine.answers[2], engine.answers[3]) == (SAMPLES + 1, 2 * (SAMPLES + 1)), "only the missing turns"


def test_turns_after_a_changed_observation_are_sampled_again(resumed) -> None:
    second, _, saved = resumed(ThreeTurns("!"))
    old_turns = [sampled(group) for group in saved]
    for old_group, group in zip(old_turns, second.take(1).groups, strict=True):
        for old, new in zip(old_group, sampled(group), strict=True):
            assert new[0] == old[0], "the prompt is the same"
            assert all(turn.ids[0] > 500 for turn in new[1:]), "the observation before them is another"


def test_a_rollout_that_changes_its_turns_takes_the_same_course_after_a_resume(stream, main) -> None:
    """The first sample had ended when the checkpoint was saved, but its group had not."""
    engine = Engine(100, held={2: 1, 3: 1})
    first = stream(engine, NoRoom())
    first.start(0)
    first_groups = first.take(0).groups
    main.run(engine.until_held(2))
    second = stream(Engine(500, version=1), NoRoom())
    second.restore(*first.snapshot())
    second.start(1)
    for group in [*first_groups, *second.take(1).groups]:
        assert group.trajectories[0].info == {"rollout/no_room": 1.0}
        assert group.trajectories[0].turns[1].finish == "length"


def test_groups_are_numbered_on_after_a_resume(resumed) -> None:
    second, _, _ = resumed()
    batches = []
    for step in (1, 2, 3):
        second.start(step)
        batches.append([(group.number, group.row.index) for group in second.take(step).groups])
        second.rollouts.generator.version = step + 1
    assert batches == [[(2, 2), (3, 3)], [(4, 4), (5, 5)], [(6, 6), (7, 7)]]


def test_a_resumed_stream_has_the_counts_of_the_checkpoint(stream) -> None:
    state, _ = stream(Engine(100)).snapshot()
    state |= {"next_number": 9, "taken": 2, "finished": 8, "rejected": 5, "counts": state["counts"] | {"filtered": 5.0}}
    second = stream(Engine(500))
    second.restore(json.loads(json.dumps(state)), [])
    assert second.snapshot() == (state, [])


def test_a_group_that_is_too_old_is_not_in_a_short_batch(stream) -> None:
    """A rejected group is not replaced, because the run has no filter. The other group is too old."""

    class Unscored(Scorer):
        async def score(self, group: Group, trained_on: bool = True) -> None:
            if group.row.index != 0:
                await super().score(group, trained_on)

    late = stream(Engine(100, version=1, old=(1,)), staleness=0)
    late.rollouts.parts = replace(late.rollouts.parts, scorer=Unscored())
    late.batches_taken = 1
    late.start(1)
    ready = late.take(1)
    assert [(group.number, group.row.index) for group in ready.groups] == [(2, 1)]
    assert (ready.counts["stale"], ready.counts["short"], ready.counts["oldest"]) == (1.0, 1.0, 0.0)


def test_a_group_that_is_too_old_is_sampled_again_and_counted(stream) -> None:
    """An engine that was replaced may sample with older weights than the run has."""
    engine = Engine(100, version=1, old=(1,))
    late = stream(engine, staleness=0)
    late.batches_taken = 1
    late.start(1)
    ready = late.take(1)
    assert [(group.number, group.row.index) for group in ready.groups] == [(0, 0), (2, 1)]
    assert ready.counts["stale"] == 1.0
    assert ready.counts["tokens_stale"] == SAMPLES * TURNS, "each turn has one token"
    assert ready.counts["oldest"] == 0.0
    assert ready.counts["idle"] == 0.25
    assert engine.answers == {0: SAMPLES * TURNS, 1: 2 * SAMPLES * TURNS}


def test_engines_are_repaired_on_the_main_thread_while_nothing_ends(stream, monkeypatch) -> None:
    """Row 1 is answered only after a repair, as if its engine had died."""
    monkeypatch.setattr(continuous_stream, "LOOK", 0.01)
    engine = Engine(100, held={1: 0})
    source = stream(engine, total_steps=1, staleness=0)
    source.start(0)
    assert [group.row.index for group in source.take(0).groups] == [0, 1]
    assert set(engine.repaired_on) == {threading.main_thread()}


def test_an_evaluation_shares_the_places_of_live_samples(stream, main) -> None:
    """Places are those of an environment, of whose episodes each has a worker process."""
    rollout, engine = Counted(), Engine(100, held={0: 1})
    training = stream(engine, rollout, limit=SAMPLES + 1)
    training.start(0)
    main.run(engine.until_held(SAMPLES))
    evaluation = replace(training.settings, purpose="eval")
    assert len(training.rollouts.run([row(index) for index in range(10, 15)], 0, evaluation)) == 5
    assert rollout.most == SAMPLES + 1
    training.hold()
    assert rollout.live == 0, "a live sample would keep its place while it waits for the end of the evaluation"
    turns = sum(engine.answers.values())
    assert len(training.rollouts.run([row(15)], 0, evaluation)) == 1
    assert sum(engine.answers.values()) == turns + SAMPLES * TURNS, "of the evaluation only"
    training.release()
    assert [group.number for group in training.take(0).groups] == [0, 1]


@pytest.mark.slow
def test_a_checkpoint_counts_all_rows_of_a_batch_that_is_being_started(stream) -> None:
    """A curriculum chooses the rows of a batch together. The checkpoint is saved when the first of them is answered."""

    class Chosen(ContinuousCurriculum):
        def take(self, batches: int, pending: int, room: int) -> list[Row]:
            return self._rows.take(room)

        def finish(self, step: int, groups: Any) -> dict[str, float]:
            return {}

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Saves(Engine):
        state: dict[str, Any] | None = None

        async def answer(self, request: GenerationRequest) -> Turn:
            if self.state is None:
                self.state, _ = await source._snapshot(lambda: None)
            return await super().answer(request)

    engine, many = Saves(100), 3 * AT_ONCE
    source = stream(engine, batch_size=many, total_steps=1, staleness=0)
    source.curriculum = Chosen(source.rows, None, many)  # type: ignore[arg-type]
    source.start(0)
    source.take(0)
    assert engine.state is not None
    assert (len(engine.state["pending"]), engine.state["counts"]["prompts"]) == (many, many)


@pytest.mark.slow
def test_samples_go_on_while_many_groups_are_started(stream: Callable[..., ContinuousStream]) -> None:
    """The first answers come before the last group is started."""
    many = 10 * AT_ONCE
    engine = Engine(100)
    source = stream(engine, batch_size=many, total_steps=1, staleness=0)
    answered = []
    take = source.rows.take
    source.rows.take = lambda n: answered.append(engine.answers.total()) or take(n)  # type: ignore[method-assign]
    source.start(0)
    assert len(answered) == many
    assert answered[AT_ONCE - 1] == 0
    assert answered[-1] > 0
    assert [group.row.index for group in source.take(0).groups] == list(range(many))


def test_a_failed_request_cancels_the_other_requests_of_its_sample() -> None:
    open_requests = set()

    class Pool:
        name = "engines"

        async def answer(self, request: int) -> Turn:
            open_requests.add(request)
            try:
                await asyncio.sleep(0 if request == 1 else 3600)
                raise WorkerError("request 1 failed")
            finally:
                open_requests.remove(request)

    async def sample() -> None:
        with pytest.raises(WorkerError, match="request 1 failed"):
            await SingleRequests(Pool()).generate((0, 0), [0, 1, 2])  # type: ignore[arg-type,list-item]
        assert open_requests == set()

    asyncio.run(sample())
