"""Rollouts: how a prompt becomes a trajectory, token in, token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError, RolloutError
from rlhf.interfaces.component import Component
from rlhf.interfaces.env import Env
from rlhf.types import Row, Sampling, Turn


class RolloutContext(ABC):
    """The services that a rollout may use. Every sample has its own context."""

    index: tuple[int, int] = (0, 0)
    """(group number in the run, sample in the group)."""
    training: bool = True
    """Whether the sample is trained on; False in evaluations. A rollout with hints for training only reads this."""
    sampling: Sampling
    max_tokens: int
    """Largest number of tokens in a sequence: prompt, observations and sampled tokens together."""

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, an object of transformers, for third-party code that needs one. Prefer the methods
        below: they also apply the chat template.

        Raises DataError: this context has none.
        """
        raise DataError("this context has no tokenizer")

    @abstractmethod
    def encode_prompt(self, row: Row) -> Turn:
        """The row's prompt, encoded with the template, as an unsampled turn."""

    @abstractmethod
    def encode_observation(self, text: str, images: Sequence[bytes] = (), turn: Turn | None = None) -> Turn:
        """Text from the environment as an unsampled turn that the policy can answer. The chat template formats it as a
        user turn. If prompts are plain text, it is plain text too.

        Args:
            images: contents of image files (:attr:`~rlhf.types.EnvStep.images`). They come before the text, unless the
                text has as many placeholders of the model.
            turn: the sampled turn that the text follows; None: the last turn that :meth:`generate` returned.

        Raises DataError: the run supports no images, or an image cannot be read.
        """

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt and the environment's first observation ``text`` (none if empty), as turns that the policy
        can answer. A context with a chat template overrides this method: the prompt must not end with the header of an
        assistant turn when an observation follows."""
        return [self.encode_prompt(row), *([self.encode_observation(text)] if text else [])]

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        """The row's prompt as messages in the form of the OpenAI chat API, with the system message of the row or of
        ``data.system``. :meth:`encode_prompt` encodes the same messages. Images are parts ``image_url`` with ``data:``
        URLs.

        Raises DataError: prompts are plain text (see :attr:`Rollout.needs_messages`).
        """
        raise DataError("this context has no chat template to encode messages with")

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        """A whole conversation that the policy can answer, as an unsampled turn.

        Args:
            messages: in the form of the OpenAI chat API: ``role``, ``content``, ``tool_calls``, ``tool_call_id``,
                ``reasoning_content``. Other fields are passed on if they hold text. Parts of content may be images as
                ``data:`` URLs.
            tools: descriptions of functions in the form of that API (JSON schema), passed to the chat template.

        Raises DataError: prompts are plain text (see :attr:`Rollout.needs_messages`), a message is not in that form, or
            the chat template refuses the messages. With tools also: the template does not write their descriptions, or
            writes calls that :meth:`parse_answer` cannot read.
        """
        raise DataError("this context has no chat template to encode messages with")

    def encode_following(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        following: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        turn: Turn | None = None,
    ) -> Turn | None:
        """The messages after a sampled answer, encoded with the chat template as an unsampled turn that the policy can
        answer. The tokens before them do not change.

        Args:
            messages: all messages before the answer.
            answer: the sampled answer (:meth:`parse_answer`).
            following: the messages after it, such as tool results.
            turn: the turn of the answer; None: the last turn that :meth:`generate` returned.

        Returns: None if ``following`` changes how the chat template writes ``messages`` or the answer (Qwen3 removes
            the reasoning of earlier answers when a user message follows). The tokens so far then differ from the
            template's text: continue with :meth:`encode_messages` and :attr:`~rlhf.types.Turn.fresh`.

        Raises DataError: as :meth:`encode_messages`.
        """
        raise DataError("this context has no chat template to encode messages with")

    def parse_answer(self, turn: Turn, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The assistant message of a turn that :meth:`generate` returned, with ``role`` and ``content``. If the answer
        has them, also ``reasoning_content`` and ``tool_calls``, each with ``id``, ``type`` and ``function`` (``name``,
        and ``arguments`` as JSON text).

        The tokenizer's ``response_template`` is used if it has one. Otherwise reasoning and calls in the forms of
        docs/how-to/tools.md are read if the chat template contains their tags. A call that cannot be parsed stays in
        ``content``. A call keeps the id that the policy wrote if the template accepts it. Otherwise the id depends on
        the sample's index and the turn's number only.

        Args:
            tools: as in :meth:`encode_messages`. Types of arguments are read from them if the format of the call has no
                types.

        Raises DataError: prompts are plain text.
        """
        raise DataError("this context has no chat template to parse answers with")

    def has_unread_call(self, answer: Mapping[str, Any]) -> bool:
        """Whether an answer of :meth:`parse_answer` has the beginning of a tool call that could not be read: in its
        content, or in its reasoning if it has neither content nor calls."""
        return False

    @abstractmethod
    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        """Sample one turn after ``turns``, which belong to one agent. The seed is derived from the sample's index and
        ``turn_number``. Each turn of the sample needs a different number, also across agents.

        Await each call before the next: concurrent calls raise RolloutError. To sample several turns at once, use
        :meth:`generate_each`.
        """

    async def generate_each(
        self,
        requests: Sequence[tuple[list[Turn], Sampling]],
        first_number: int = 0,
        training: bool = True,
        base: bool = False,
    ) -> list[Turn]:
        """Sample one turn for each (turns, sampling) concurrently, and return them in this order: branches of a tree,
        or continuations that estimate the value of a state. Turn numbers count up from ``first_number``.

        A turn that :meth:`Rollout.run` does not return is neither trained on nor saved. The conformance suite must be
        told that this is intended: set ``conformance = {"discards": True}`` in the class, or ``discards = True`` in its
        suite.

        Args:
            training: False: :meth:`Rollout.run` returns none of these turns. All sampling parameters are then allowed,
                such as temperature 0 for the verdict of a judge.
            base: sample from the model that training started from, instead of the policy
                (:attr:`rlhf.types.GenerationRequest.base`). That model does not change. Requires ``training=False`` and
                :attr:`Rollout.needs_base`.

        Raises RolloutError: the arguments are not allowed here.
        """
        if base:
            raise RolloutError("this context cannot sample from the policy's base")
        return [await self.generate(turns, sampling, n) for n, (turns, sampling) in enumerate(requests, first_number)]

    async def score(self, row: Row, answers: Sequence[list[Turn]]) -> list[float]:
        """The weighted sums of the run's ``[[reward]]`` sections for these answers, which are scored as the samples of
        one prompt. Rewards of steps are included. An answer is a list of all its turns, the prompt first. Rewards that
        its turns already have are ignored.

        If the rollout also sets :attr:`~rlhf.types.Turn.reward`, that is the sample's reward: the run does not score
        the sample again, and ``reward/mean`` is the mean of these sums. If they are credit, :meth:`report` the score of
        the returned answer.

        Raises RolloutError: the run has no ``[[reward]]``. RewardError: a reward failed, or none applies to an answer.
        """
        raise RolloutError("this context has no rewards to score answers with")

    def report(self, name: str, value: float) -> None:
        """Store a number with this sample, such as a count of events. A second call with the same name replaces the
        number. The metric ``rollout/NAME`` is the mean over the samples that report the name, so report a count of 0
        too. A name ``env/KEY`` gets no prefix. It is for numbers of an environment that the rollout itself plays or
        replays.

        Raises RolloutError: ``value`` is not a finite number. A context that stores no samples ignores the call.
        """
        return

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse sampling parameters with which the run's generator cannot sample exactly, as :meth:`generate` does.

        Raises ConfigError or CapabilityError.
        """
        from rlhf.requests import check_sampling

        check_sampling(sampling)

    @abstractmethod
    async def open_env(self) -> Env:
        """Return a new environment, whose calls have deadlines. The runtime closes it when the sample ends."""


class Rollout(Component):
    """How a prompt becomes a trajectory.

    Complete example (what ``single_turn`` does)::

        class SingleTurn(Rollout):
            name = "single_turn"

            async def run(self, row, seed, ctx):
                prompt = ctx.encode_prompt(row)
                return [prompt, await ctx.generate([prompt], ctx.sampling)]
    """

    needs_env: bool = False
    replays_env: bool = False
    """True: the rollout replays turns that contain the rewards of a recorded environment. ``[env]`` may then stay in
    the run file although no environment is opened; ``env.credit`` says how the rewards are credited."""
    plays_agents: bool = False
    """True: the rollout can play an environment with several agents (:meth:`Env.agents`), and sets the agent of each
    turn (:attr:`~rlhf.types.Turn.agent`). Otherwise a run with such an environment is refused."""
    needs_messages: bool = False
    """True: the rollout calls :meth:`RolloutContext.encode_messages`. A run without a chat template is then refused."""
    needs_tools: bool = False
    """True: the rollout calls :meth:`RolloutContext.encode_messages` with tools. A run is then refused if the chat
    template does not write their descriptions, or writes calls that :meth:`RolloutContext.parse_answer` cannot read."""
    needs_base: bool = False
    """True: the rollout calls :meth:`RolloutContext.generate_each` with ``base=True``. A run is then refused if its
    generator cannot sample from the base of the policy (docs/how-to/adapters.md)."""
    gives_rewards: bool = False
    """True: the rollout sets :attr:`~rlhf.types.Turn.reward` of sampled turns. The run then needs no ``[[reward]]``;
    rewards of such sections are added. Leave it False if these rewards come from :meth:`RolloutContext.score`, which
    needs a ``[[reward]]``. If this depends on an option, call the option ``returns_reward`` and set this attribute in
    the constructor. ``rlhf init`` writes that option if no reward is named."""
    concurrency: int | None = None
    """Largest number of concurrent samples; the next one starts when one ends. None: no limit. A rollout must not delay
    samples itself, because a wave of generation starts when all started samples wait for tokens."""
    observes: bool = True
    """False: a sample is a prompt and one sampled turn, so it has no observations to learn from. If this depends on
    options, set the attribute in the constructor."""
    needs_generator: bool = True
    """False: the rollout never calls ``ctx.generate``, so the run starts no generator and sends no weights."""

    def check(self) -> None:
        """Called before the run starts. Raises ConfigError for a problem that would fail every :meth:`run`, such as a
        missing file."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tool descriptions in the first prompt of every sample, in the form of
        :meth:`RolloutContext.encode_messages`. ``rlhf plan`` counts their tokens, and ``rlhf data preview`` prints
        them. Empty: no tools, or samples have different tools. Raises ConfigError."""
        return ()

    @abstractmethod
    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        """Play one sample and return all its turns. With several agents these are the turns of all agents, in any order
        between agents. The turns of one agent are its conversation, which begins with its own prompt. An agent that did
        not play has no turns.

        Args:
            seed: seed of the environment. It is equal for all samples of a prompt, so that a group baseline compares
                answers to the same task. Sampling uses other seeds (:meth:`RolloutContext.generate`).
        """
