"""What rewards read off a role: the numbers of the plain model at exactly the tokens they name."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from rlhf.errors import RewardError
from rlhf.interfaces import ModelSpec
from rlhf.ops.heads import LOGPROBS, VALUES
from rlhf.types import Head, Image, RoleSpec
from rlhf_runtime.calls.deadlines import DeadlineExpired, waiting, with_deadline
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.models.roles import Role
from rlhf_runtime.rewards.reward_models import read_role, score_with_role
from rlhf_runtime.rewards.shared_passes import SharedPasses
from rlhf_testing.plain import EmbeddingTrainer

from tests.support.parts import RanksHere

IDS = [[3, 4, 5, 6], [7], [3, 4, 8, 9, 10]]


def _two_logits(logits_CV, ids_C, columns, constants):
    return logits_CV[:, list(constants["ids"])]


TWO_TOKENS = Head("both", _two_logits, over="anything", position="at", constants={"ids": (4, 2)})
SINGLE_TOKEN = Head("one", lambda logits_CV, ids_C, columns, constants: logits_CV[:, 4], over="steps", position="at")


class Model:
    def __init__(self, head: str) -> None:
        spec = ModelSpec(RoleSpec("judge", head=head), "", seed=3)
        self.role = Role(spec, RanksHere([EmbeddingTrainer(None, spec) for _ in range(2)]), budget=6)
        self.trainer = EmbeddingTrainer(None, spec)

    def ask(self, main: MainThread, what, *arguments):
        return main.run(what({"judge": self.role}, main)("judge", *arguments))

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.trainer.logits(torch.tensor(ids))


@pytest.mark.parametrize("ask", [score_with_role, read_role])
def test_waiting_for_a_model_that_is_busy_does_not_count_towards_a_rewards_deadline(main, ask) -> None:
    """A wave of generation holds the main thread for longer than a reward may take; the reward itself takes no time.
    One that takes its time by itself is stopped all the same, however long it waited before."""
    model = Model("scalar")
    arguments = (
        (IDS,) if ask is score_with_role else (Head("after", VALUES.fn, over="x", position="at"), IDS, [[0], [0], [0]])
    )

    async def reward(idles: float) -> int:
        outputs = await asyncio.gather(*(ask({"judge": model.role}, main)("judge", *arguments) for _ in range(2)))
        await asyncio.sleep(idles)
        return len(outputs)

    async def scenario(idles: float) -> int:
        wave = asyncio.ensure_future(main.call(lambda: time.sleep(0.7)))
        await asyncio.sleep(0)
        try:
            return await with_deadline(reward(idles), 0.5)
        finally:
            await wave

    assert main.run(scenario(0.0)) == 2
    with pytest.raises(DeadlineExpired):
        main.run(scenario(30.0))


@pytest.mark.parametrize("begins_in_call", [True, False])
def test_a_task_that_outlives_its_call_may_wait_for_a_model(main, begins_in_call: bool) -> None:
    async def scenario() -> str:
        end = asyncio.Event()

        async def wait() -> str:
            with waiting() if begins_in_call else nullcontext():
                await end.wait()
            with waiting():
                return "read"

        async def call() -> asyncio.Task[str]:
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            return task

        task = await with_deadline(call(), 1.0)
        end.set()
        return await task

    assert main.run(scenario()) == "read"


def test_a_head_at_given_tokens(main) -> None:
    model = Model("lm")
    places = [[1, 3], [], [0, 4]]
    expected = [
        [model.logits(ids)[p, [4, 2]].tolist() for p in positions] for ids, positions in zip(IDS, places, strict=True)
    ]
    outputs = model.ask(main, read_role, TWO_TOKENS, IDS, places)
    assert [len(v) for v in outputs] == [2, 0, 2]
    assert torch.allclose(torch.tensor(outputs[0]), torch.tensor(expected[0]))
    assert torch.allclose(torch.tensor(outputs[2]), torch.tensor(expected[2]))
    assert model.ask(main, read_role, SINGLE_TOKEN, IDS, places)[0] == pytest.approx([v[0] for v in expected[0]])


def test_outputs_that_predict_a_token_are_read_at_the_position_before_it(main) -> None:
    model = Model("lm")
    logits_TV = torch.log_softmax(model.logits(IDS[2]), 1)
    outputs = model.ask(main, read_role, LOGPROBS, IDS, [[], [], [1, 4]])
    assert outputs == [[], [], pytest.approx([float(logits_TV[0, 4]), float(logits_TV[3, 10])])]


def test_sequences_without_positions_are_not_computed(main) -> None:
    model = Model("lm")
    calls = []
    model.role.group.call = lambda method, per_rank: calls.append(method)  # type: ignore[method-assign]
    assert model.ask(main, read_role, SINGLE_TOKEN, IDS, [[], [], []]) == [[], [], []]
    assert calls == []


@pytest.mark.parametrize("positions", [[4], [-1], [2, 1], [1, 1]])
def test_positions_beyond_a_sequence_are_refused(main, positions: list[int]) -> None:
    message = r"got the positions \[.*in a sequence of 4 tokens; positions must increase .* 0 \.\. 3"
    with pytest.raises(RewardError, match=message):
        Model("lm").ask(main, read_role, SINGLE_TOKEN, IDS[:1], [positions])


def test_reading_before_a_first_token_is_refused(main) -> None:
    with pytest.raises(RewardError, match=r"1 \.\. 3"):
        Model("lm").ask(main, read_role, LOGPROBS, IDS[:1], [[0]])


def test_heads_that_need_columns_are_refused(main) -> None:
    columns = Head("needy", LOGPROBS.fn, columns=("targets",))
    with pytest.raises(RewardError, match="'needy' needs columns"):
        asyncio.run(read_role({}, MainThread())("judge", columns, IDS, [[1], [], []]))  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="got 3 sequences, but 1 lists"):
        Model("lm").ask(main, read_role, SINGLE_TOKEN, IDS, [[1]])


class Counted:
    """What reaches the model: the sequences of each pass. ``options``: of :class:`SharedPasses`."""

    def __init__(self, model: Model, main: MainThread, **options) -> None:
        self.passes: list[int] = []
        begin = model.role.begin_forward

        def count(batch, heads, view="live"):
            self.passes.append(batch.sequences)
            return begin(batch, heads, view)

        model.role.begin_forward = count  # type: ignore[method-assign]
        roles = {"judge": model.role}
        passes = SharedPasses(score_with_role(roles, main), read_role(roles, main), **options)
        self.score, self.read = passes.score, passes.read


def test_calls_made_at_once_are_one_pass_with_the_values_of_single_calls(main) -> None:
    """Each gets its own, whatever the others ask; another head, and what is asked later, is another pass."""
    model = Model("scalar")
    after = Head("after", VALUES.fn, over="steps", position="at")
    groups = [IDS[:1], IDS[1:], [IDS[2], IDS[0], IDS[1]]]
    places = [[[1, 3]], [[0], []], [[4], [0, 1, 2], []]]

    async def scenario(counter: Counted):
        scores = asyncio.gather(*(counter.score("judge", ids) for ids in groups))
        reads = asyncio.gather(*(counter.read("judge", after, i, p) for i, p in zip(groups, places, strict=True)))
        return await scores, await reads, await counter.score("judge", IDS[:1])

    counter = Counted(model, main)
    scores, reads, late = main.run(scenario(counter))
    assert counter.passes[0] == 6
    assert counter.passes[-1] == 1
    assert len(counter.passes) == 4  # of the sequences that the head reads: 6, of which 4 are computed
    for ids, outputs in zip(groups, scores, strict=True):
        assert outputs == pytest.approx([float(model.logits(sequence)[-1, 0]) for sequence in ids])
    for ids, sequence_places, outputs in zip(groups, places, reads, strict=True):
        expected = [
            [float(model.logits(sequence)[p, 0]) for p in positions]
            for sequence, positions in zip(ids, sequence_places, strict=True)
        ]
        assert [list(map(float, values)) for values in outputs] == [pytest.approx(values) for values in expected]
    assert late == pytest.approx(scores[0])


def test_calls_made_at_once_keep_their_images(main) -> None:
    """Of three calls in one pass, the second has an image, in its second sequence."""
    model, batches = Model("scalar"), []
    begin = model.role.begin_forward

    def noted(batch, heads, view="live"):
        batches.append(batch.images_B)
        return begin(batch, heads, view)

    model.role.begin_forward = noted  # type: ignore[method-assign]
    image = Image(b"file", 1, 2, [4])
    after = Head("after", VALUES.fn, over="steps", position="at")

    async def scenario():
        roles = {"judge": model.role}
        passes = SharedPasses(score_with_role(roles, main), read_role(roles, main))
        score, read_values = passes.score, passes.read
        await asyncio.gather(
            score("judge", IDS[:1]), score("judge", [IDS[1], IDS[2]], [(), (image,)]), score("judge", IDS[:2])
        )
        await asyncio.gather(
            read_values("judge", after, IDS[:1], [[0]]), read_values("judge", after, IDS[2:], [[0]], [(image,)])
        )
        await score("judge", IDS, [(image,)])

    with pytest.raises(RewardError, match="got 3 sequences, but images for 1"):
        main.run(scenario())
    assert batches == [((), (), (image,), (), ()), ((), (image,))]


def test_a_call_that_is_not_allowed_fails_alone_and_a_failing_model_all_that_asked_it(main) -> None:
    model = Model("scalar")
    after = Head("after", VALUES.fn, over="steps", position="at")

    async def scenario(counter: Counted, role: str):
        calls = (counter.read(role, after, IDS[:1], positions) for positions in ([[0]], [[7]], [[3]]))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, wrong, last = main.run(scenario(Counted(model, main), "judge"))
    unknown = main.run(scenario(Counted(model, main), "nobody"))
    logits = [float(model.logits(IDS[0])[p, 0]) for p in (0, 3)]
    assert [first, last] == [[pytest.approx(logits[:1])], [pytest.approx(logits[1:])]]
    assert isinstance(wrong, RewardError)
    assert [type(error) for error in unknown] == [KeyError, RewardError, KeyError]


def test_a_slow_model_does_not_use_up_the_deadlines_of_those_that_wait_for_it_together(main) -> None:
    model = Model("scalar")
    begin = model.role.begin_forward
    model.role.begin_forward = lambda *arguments: time.sleep(0.7) or begin(*arguments)  # type: ignore[method-assign]

    async def scenario() -> list[list[float]]:
        roles = {"judge": model.role}
        score = SharedPasses(score_with_role(roles, main), read_role(roles, main)).score
        return await asyncio.gather(*(with_deadline(score("judge", [ids]), 0.5) for ids in IDS))

    outputs = main.run(scenario())
    assert outputs == [[pytest.approx(float(model.logits(ids)[-1, 0]))] for ids in IDS]


def test_calls_gather_while_a_pass_computes_up_to_the_largest_and_cancelled_ones_are_left_out(main) -> None:
    model = Model("scalar")
    sizes: list[int] = []
    begun, go = threading.Event(), threading.Event()
    begin = model.role.begin_forward
    model.role.begin_forward = lambda *arguments: (begun.set(), go.wait(60), begin(*arguments))[-1]  # type: ignore[method-assign]

    async def scenario(counter: Counted):
        first = asyncio.create_task(counter.score("judge", IDS[:1]))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(counter.score("judge", [ids])) for ids in (*IDS, IDS[0], IDS[1])]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        go.set()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    counter = Counted(model, main, largest=3, passed=sizes.append)
    first, *rest = main.run(scenario(counter))
    assert counter.passes == sizes == [1, 2, 2], "one at once, then three less the cancelled one, then the others"
    assert isinstance(rest.pop(1), asyncio.CancelledError)
    single = [pytest.approx([float(model.logits(IDS[n])[-1, 0])]) for n in (0, 0, 2, 0, 1)]
    assert [first, *rest] == single


def test_a_pass_waits_for_more_until_it_is_full(main) -> None:
    model = Model("scalar")

    async def scenario(counter: Counted):
        calls = []
        for ids in IDS:
            calls.append(asyncio.create_task(counter.score("judge", [ids])))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*calls)

    counter = Counted(model, main, wait=60.0, largest=len(IDS))
    main.run(scenario(counter))
    assert counter.passes == [len(IDS)]
