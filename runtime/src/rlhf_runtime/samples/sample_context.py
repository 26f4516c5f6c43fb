"""What a rollout can use of the run while it makes one sample: prompts as tokens, sampled turns, environments."""

from __future__ import annotations

import math
import numbers
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlhf.errors import EnvError, RewardError, RolloutError, boundary
from rlhf.interfaces import Env, Rollout, RolloutContext
from rlhf.requests import check_request, check_sampling
from rlhf.seeds import derive_seed
from rlhf.types import ExpertLayers, GenerationRequest, Group, Row, Sampling, Trajectory, Turn
from rlhf.types.images import joined_images

from rlhf_runtime.calls.deadlines import Clock
from rlhf_runtime.data.messages import Messages
from rlhf_runtime.data.template import Template
from rlhf_runtime.data.tokenizer import with_stop_tokens
from rlhf_runtime.observe.timeline import Slice
from rlhf_runtime.rewards.scoring import Scorer, combine
from rlhf_runtime.samples.episodes import Episode, Episodes
from rlhf_runtime.samples.requests import Requests
from rlhf_runtime.samples.rollout_settings import TRAINING, RolloutSettings, greedy_sampling


@dataclass(frozen=True)
class SampleParts:
    """What makes and scores each sample of a run."""

    rollout: Rollout
    template: Template
    scorer: Scorer
    episodes: Episodes | None = None
    """None if the run has no environment."""
    experts: ExpertLayers | None = None
    """Expert layers of the policy, if recorded experts are replayed."""
    check: Callable[[Sampling], None] = check_sampling
    """Refuses what the generator cannot sample (:meth:`Generator.check_sampling` with its options)."""
    vocabulary: int | None = None
    """Size of the policy's vocabulary in tokens; None: not known."""


class SampleContext(RolloutContext):
    """One sample's view of the run."""

    def __init__(
        self,
        parts: SampleParts,
        index: tuple[int, int],
        settings: RolloutSettings,
        requests: Requests,
        log: TurnLog,
        slice: Slice,
    ) -> None:
        self._parts, self._template, self._settings = parts, parts.template, settings
        self._requests, self._log, self._slice = requests, log, slice
        self.gives_rewards = False
        """Whether the rollout scores answers itself."""
        self._envs: list[Env] = []
        self._reported: dict[str, float] = {}
        self._last: Turn | None = None
        """The turn that was sampled last."""
        self._generating = False
        self._numbers: set[int] = set()
        """Numbers of the turns so far."""
        self._side_turns: list[Turn] = []
        """Turns that are not returned."""
        self._answers: dict[int, tuple[int, Turn, Turn]] = {}
        """{id of a sampled turn: (its number, the turn before it, the turn itself)}"""
        self.clock = Clock(settings.deadline)
        self.index, self.sampling, self.max_tokens = index, settings.sampling_of(index[1]), settings.max_tokens
        self.training = settings.purpose == TRAINING

    @property
    def tokenizer(self) -> Any:
        return self._template.tokenizer

    def check_sampling(self, sampling: Sampling) -> None:
        self._parts.check(sampling)

    def encode_prompt(self, row: Row) -> Turn:
        return self._template.encode_prompt(row)

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        return self._template.encode_opening(row, text)

    def encode_observation(self, text: str, images: Sequence[bytes] = (), turn: Turn | None = None) -> Turn:
        """Also closes the answer before it, if that answer was cut off before its end token."""
        last = self._last if turn is None else turn
        observation = self._template.observations.encode(text, self._is_closed(last), images)
        return self._without_repeated_end(observation, last)

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        return self._template.prompt_messages(row)

    def encode_messages(self, messages: Messages, tools: Messages = ()) -> Turn:
        return self._template.messages.encode(messages, tools)

    def encode_following(
        self,
        messages: Messages,
        answer: Mapping[str, Any],
        following: Messages,
        tools: Messages = (),
        turn: Turn | None = None,
    ) -> Turn | None:
        last = self._last if turn is None else turn
        context = self._template.messages.encode_following(messages, answer, following, tools, self._is_closed(last))
        return None if context is None else self._without_repeated_end(context, last)

    def parse_answer(self, turn: Turn, tools: Messages = ()) -> dict[str, Any]:
        number, prompt, _ = self._answers.get(id(turn), (0, None, None))
        if prompt is None:
            raise RolloutError("parse_answer() takes a turn that generate() of the same sample returned")
        return self._template.messages.answers.parse(turn, prompt.ids, (*self.index, number), tools)

    def has_unread_call(self, answer: Mapping[str, Any]) -> bool:
        return self._template.messages.answers.has_unread_call(answer)

    def _is_closed(self, turn: Turn | None) -> bool:
        return turn is None or (bool(turn.ids) and turn.ids[-1] in self._template.end_token_ids)

    def _without_repeated_end(self, context: Turn, turn: Turn | None) -> Turn:
        """The context after an answer, without its first token if the answer already ended with this token. An end
        token of the model's generation config may be the first token of the next message (``<|observation|>`` of
        GLM)."""
        if turn is None or turn.finish != "stop" or turn.ids[-1:] != context.ids[:1]:
            return context
        if self.tokenizer.convert_ids_to_tokens(turn.ids[-1]) not in self.tokenizer.get_added_vocab():
            return context  # the end of a stop string
        images = tuple(replace(image, start=image.start - 1) for image in context.images)
        return replace(context, ids=context.ids[1:], images=images)

    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        [turn] = await self.generate_each([(turns, sampling)], turn_number)
        return turn

    async def generate_each(
        self,
        requests: Sequence[tuple[list[Turn], Sampling]],
        first_number: int = 0,
        training: bool = True,
        base: bool = False,
    ) -> list[Turn]:
        if self._generating:
            raise RolloutError(
                "the rollout asks for a turn while another turn of the same sample is being generated; await the first "
                "turn before asking for the next, or ask for several at once: ctx.generate_each()"
            )
        numbers = range(first_number, first_number + len(requests))
        if repeated := self._numbers.intersection(numbers):
            raise RolloutError(
                f"the rollout asks for turn {min(repeated)} of its sample a second time, and turns with one number are "
                "drawn with one seed. Give each turn another number: turn_number of ctx.generate(), first_number of "
                "ctx.generate_each()"
            )
        if base and training:
            raise RolloutError(
                "the rollout asks for turns of the base model, which are not the policy's and cannot be trained on; "
                "ask for them with training = False"
            )
        if base and not self._parts.rollout.needs_base:
            raise RolloutError(
                "the rollout asks for turns of the base model, but it declares needs_base = False; set it to True"
            )
        for _, sampling in requests:
            # Checked here so that only this sample fails, not the other samples of its wave.
            self._parts.check(sampling)
            if training and self.training and not self._settings.is_greedy(self.index[1]):
                _check_distribution(sampling, self.sampling)
        batch = {
            n: self._request(turns, sampling, n, base) for n, (turns, sampling) in enumerate(requests, first_number)
        }
        self._numbers.update(numbers)
        log = {number: self._log.find(number, request) for number, request in batch.items()}
        rest = {number: batch[number] for number, turn in log.items() if turn is None}
        if rest:
            for number, turn in zip(rest, await self._generate(rest), strict=True):
                self._log.add(number, rest[number], turn)
                log[number] = turn
        answers = [turn for turn in log.values() if turn is not None]
        for number, answer, (turns, _) in zip(batch, answers, requests, strict=True):
            self._last = answer
            # The answer itself is kept, so that no later object gets its id.
            self._answers[id(answer)] = number, turns[-1], answer
        if not training:
            self._side_turns += answers
        return answers

    def check_training(self, turns: Sequence[Turn]) -> None:
        """Raises RolloutError if the rollout returns a turn that it asked for with ``training = False``."""
        for number, turn in enumerate(turns):
            # By the array of log-probs, which copies made with replace(turn, ...) share with the turn.
            if turn.logprobs is not None and any(turn.logprobs is other.logprobs for other in self._side_turns):
                raise RolloutError(
                    f"the rollout returned turn {number}, which it asked for with training = False; omit training = "
                    "False for turns that it returns"
                )

    def _request(self, turns: list[Turn], sampling: Sampling, turn_number: int, base: bool) -> GenerationRequest:
        if self._settings.is_greedy(self.index[1]):
            sampling = greedy_sampling(sampling)  # even if an environment or a program requests another temperature
        # The model reads only what follows the last rewriting of the context.
        start = max((i for i, t in enumerate(turns) if t.fresh), default=0)
        ids = turns[start].ids if start == len(turns) - 1 else array("i", b"".join(t.ids for t in turns[start:]))
        if len(ids) >= self.max_tokens:
            raise RolloutError(
                f"{len(ids)} tokens of context leave no room to answer within data.max_tokens = {self.max_tokens}"
            )
        room = min(sampling.max_new_tokens, self.max_tokens - len(ids))
        if sampling.stop != self.sampling.stop:  # of an environment or a program; those of the run file are checked
            sampling = with_stop_tokens(sampling, self.tokenizer)
        sampling = replace(sampling, max_new_tokens=room)
        seed = derive_seed(self._settings.seed, self._settings.purpose, *self.index, turn_number)
        images = joined_images((len(t.ids), t.images) for t in turns[start:])
        if len(images) > self._settings.max_images:
            raise RolloutError(
                f"the context has {len(images)} images, over data.max_images = {self._settings.max_images}"
            )
        request = GenerationRequest(ids, seed, sampling, images, base)
        # Checked here, as sampling parameters are. Whether there is a base was checked before the start.
        check_request(turn_number, request, self._parts.vocabulary or sys.maxsize, has_base=True)
        return request

    async def _generate(self, batch: Mapping[int, GenerationRequest]) -> list[Turn]:
        self._generating = True
        try:
            number, requests = min(batch), list(batch.values())
            arguments = {"group": self.index[0], "sample": self.index[1], "turn": number}
            context = sum(len(request.ids) for request in requests)
            with self.clock.stopped(), self._slice.child("turn", context=context, **arguments) as slice:
                turns = await self._requests.generate((*self.index, number), requests)
                versions = [version for turn in turns for _, version in turn.versions]
                slice.add(tokens=sum(len(turn.ids) for turn in turns), versions=versions)
            return turns
        finally:
            self._generating = False

    async def score(self, row: Row, answers: Sequence[list[Turn]]) -> list[float]:
        scorer = self._parts.scorer
        if not scorer.rewards:
            raise RolloutError("the rollout scores answers, but the run has no [[reward]]; set --reward NAME")
        plain = [[replace(turn, reward=None, score=None) for turn in turns] for turns in answers]
        group = Group(row, self.index[0], [Trajectory(row, turns, self.index) for turns in plain])
        for trajectory in group.trajectories:
            trajectory.status = "truncated" if trajectory.truncated else "ok"
        with self.clock.stopped():  # the rewards wait for other samples, and have deadlines of their own
            await scorer.score(group, trained_on=False)
        self.gives_rewards = True
        rewards = []
        for number, trajectory in enumerate(group.trajectories):
            reward, _ = combine(scorer.rewards, trajectory, steps_placed=False)
            if trajectory.reward is None or reward is None:
                cause = trajectory.error.removeprefix("RewardError: ") or "no [[reward]] applies to it"
                raise RewardError(f"answer {number} that the rollout scores has no reward: {cause}")
            rewards.append(reward)
        return rewards

    def report(self, name: str, value: float) -> None:
        if not isinstance(name, str) or not name:
            raise RolloutError(f"the rollout reports {value!r:.60} as {name!r}; allowed: a name, as text")
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            hint = " (write .item())" if hasattr(value, "item") and not isinstance(value, numbers.Real) else ""
            raise RolloutError(f"the rollout reports {value!r:.60} as {name!r}; allowed: a finite number{hint}")
        self._reported[name] = float(value)

    def numbers(self) -> dict[str, float]:
        """Numbers that the rollout and the environments reported for the sample."""
        episodes = [env for env in self._envs if isinstance(env, Episode)]
        of_envs = {f"env/{key}": value for env in episodes for key, value in env.numbers.items()}
        of_rollout = {n if n.startswith("env/") else f"rollout/{n}": value for n, value in self._reported.items()}
        return dict(sorted({**of_envs, **of_rollout}.items()))

    async def open_env(self) -> Env:
        episodes = self._parts.episodes
        if episodes is None:
            raise RolloutError(f"rollout {self._parts.rollout.name!r} opens an environment; set [env] use = ...")
        env = episodes.open(self._slice)
        self._envs.append(env)
        return env

    async def close(self) -> None:
        """Close every environment, even if closing another one raises."""
        async with AsyncExitStack() as closing:
            for env in reversed(self._envs):
                closing.push_async_callback(_close, env)


async def _close(env: Env) -> None:
    with boundary(EnvError, f"close() of environment {env.name!r}"):
        closing = env.close()
        if closing is not None:
            await closing


def _check_distribution(sampling: Sampling, run: Sampling) -> None:
    """Training samples must be drawn from the distribution whose log-probs are trained on. Truncation (top_p, top_k,
    min_p) must be off or as in the run file, which the run's checks have accepted."""
    for field, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(sampling, field) not in (neutral, getattr(run, field)):
            raise RolloutError(
                f"a turn is requested with {field} = {getattr(sampling, field)}, but [sampling] has {field} = "
                f"{getattr(run, field)}. Training would treat the turn as if all tokens had been allowed. A rollout or "
                "an environment may change max_new_tokens, temperature and stop"
            )
    if not sampling.temperature > 0:
        raise RolloutError(
            f"a turn is requested at temperature {sampling.temperature}. Greedy decoding draws nothing at "
            "random, so the turn has no log-probs to train on. Use a temperature above 0"
        )


class TurnLog:
    """Sampled turns by number, each with a checksum of the context that it answers.

    A resumed sample runs its rollout from the beginning, and its environment gets the same actions. As long as the
    contexts are the same, the turns come from here. From the first different context on they are sampled again.

    A turn stays here as it was sampled, because the rollout sets rewards and ends of turns anew in the resumed sample.
    """

    def __init__(self, turns: Iterable[tuple[int, int, Turn]] = ()) -> None:
        """``turns``: (number, checksum of its context, turn)."""
        self.added_tokens = 0
        """Number of tokens of the turns that :meth:`add` got: those that this process sampled."""
        self._turns: dict[int, tuple[int, Turn, Turn]] = {}
        """{number: (checksum of the context, the turn without its experts, the rollout's object)}. The experts are the
        object's, because the run cuts repeated tokens from them when the sample has ended."""
        for number, context, turn in turns:
            self._turns[number] = context, replace(turn, experts=None), turn

    def find(self, number: int, request: GenerationRequest) -> Turn | None:
        """Turn ``number``, if it was sampled before for the same context."""
        if number not in self._turns:
            return None
        context, turn, latest = self._turns[number]
        if context != checksum(request):
            # Later turns answer contexts that contain this one.
            self._turns = {n: earlier for n, earlier in self._turns.items() if n < number}
            return None
        self._turns[number] = context, turn, replace(turn, experts=latest.experts)
        return self._turns[number][2]

    def add(self, number: int, request: GenerationRequest, turn: Turn) -> None:
        self.added_tokens += len(turn.ids)
        self._turns[number] = checksum(request), replace(turn, experts=None), turn

    def entries(self) -> list[tuple[int, int, Turn]]:
        """(number, checksum of its context, turn), in order."""
        turns = sorted(self._turns.items())
        return [(number, context, replace(turn, experts=o.experts)) for number, (context, turn, o) in turns]


def checksum(request: GenerationRequest) -> int:
    """CRC-32 of the context, its images and weights included, and the sampling parameters."""
    return zlib.crc32(repr(request.sampling).encode(), zlib.crc32(request.context_key))
