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
    """Whether the sample is trained on; False in evaluations. Hints that only training may have depend on it."""
    sampling: Sampling
    max_tokens: int
    """Largest number of tokens in a sequence: prompt, observations and sampled tokens together."""

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, an object of transformers, for third-party code that asks for one. The methods below
        also know the template.

        Raises DataError: this context has none.
        """
        raise DataError("this context has no tokenizer")

    @abstractmethod
    def encode_prompt(self, row: Row) -> Turn:
        """The row's prompt, encoded with the template, as an unsampled turn."""

    @abstractmethod
    def encode_observation(self, text: str, images: Sequence[bytes] = (), turn: Turn | None = None) -> Turn:
        """Text from the environment as an unsampled turn that the policy can answer. It is wrapped as the chat template
        wraps a user turn; it is plain if prompts are plain.

        Args:
            images: contents of image files (:attr:`~rlhf.types.EnvStep.images`). They come before the text, unless the
                text has as many placeholders of the model.
            turn: the sampled turn that the text follows; None: the one that :meth:`generate` returned last.

        Raises DataError: there are images, and the run cannot have them or one cannot be read.
        """

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt and the environment's first observation ``text`` (none if empty), as turns that the policy
        can answer. A context with a chat template overrides this method: the prompt must not end with the header of an
        assistant turn when an observation follows."""
        return [self.encode_prompt(row), *([self.encode_observation(text)] if text else [])]

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        """The row's prompt as messages, with the system message of the row or of ``data.system``: the messages that
        :meth:`encode_prompt` encodes, in the form of the OpenAI chat API. Images are parts ``image_url`` with ``data:``
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

        Raises DataError: prompts are plain text (see :attr:`Rollout.needs_messages`), a message is not in that form,
            the chat template refuses the messages, or there are tools and it does not write their descriptions or
            writes calls that :meth:`parse_answer` does not read.
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
        """What the chat template writes after a sampled answer, as an unsampled turn that the policy can answer. The
        tokens before it stay as they are.

        Args:
            messages: all messages before the answer.
            answer: the sampled answer (:meth:`parse_answer`).
            following: the messages after it, such as tool results.
            turn: the turn of the answer; None: the one that :meth:`generate` returned last.

        Returns: None if the chat template writes ``messages`` or the answer otherwise once ``following`` follows (Qwen3
            removes the reasoning of earlier answers when a user message follows). The tokens so far are then not what
            the template shows the policy: go on with :meth:`encode_messages` and :attr:`~rlhf.types.Turn.fresh`.

        Raises DataError: as :meth:`encode_messages`.
        """
        raise DataError("this context has no chat template to encode messages with")

    def parse_answer(self, turn: Turn, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The assistant message of a turn that :meth:`generate` returned: ``role``, ``content``, and if there are any
        ``reasoning_content`` and ``tool_calls``, each with ``id``, ``type`` and ``function`` (``name``, and
        ``arguments`` as JSON text).

        The tokenizer's ``response_template`` is used if it has one. Otherwise reasoning and calls in the forms of
        docs/how-to/tools.md are read if the chat template contains their tags. A call that cannot be parsed stays in
        ``content``. The id of a call is the one that the policy wrote, if the template takes it; else it depends on
        the sample's index and the turn's number only.

        Args:
            tools: as in :meth:`encode_messages`; types of arguments are read from them where the format has none.

        Raises DataError: prompts are plain text.
        """
        raise DataError("this context has no chat template to parse answers with")

    def has_unread_call(self, answer: Mapping[str, Any]) -> bool:
        """Whether an answer of :meth:`parse_answer` has the beginning of a tool call that could not be read: in its
        content, or in its reasoning if it has neither content nor calls."""
        return False

    @abstractmethod
    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        """Sample one turn after ``turns``, which are of one agent. The seed is derived from the sample's index and
        ``turn_number``, which is another one for each turn of the sample, whichever agent's it is.

        Await each call before the next one: a second call at the same time raises RolloutError. Several turns at once
        are :meth:`generate_each`.
        """

    async def generate_each(
        self,
        requests: Sequence[tuple[list[Turn], Sampling]],
        first_number: int = 0,
        training: bool = True,
        base: bool = False,
    ) -> list[Turn]:
        """Sample one turn for each (turns, sampling), all at once, in their order: branches of a tree, or
        continuations that estimate the value of a state. Their turn numbers are ``first_number`` and those after it.

        A turn that :meth:`Rollout.run` does not return is not trained on and not saved. Its suite wants to know that it
        is left out on purpose: ``conformance = {"discards": True}`` in the class, ``discards = True`` in its suite.

        Args:
            training: False: :meth:`Rollout.run` returns none of these turns. Any sampling parameters are allowed then,
                such as temperature 0 for the verdict of a judge.
            base: sample from the model that training started from, which does not change, in place of the policy
                (:attr:`rlhf.types.GenerationRequest.base`). Only with ``training=False``, and where
                :attr:`Rollout.needs_base` says so.

        Raises RolloutError: the turns cannot be asked for like this.
        """
        if base:
            raise RolloutError("this context has no base of the policy to sample from")
        return [await self.generate(turns, sampling, n) for n, (turns, sampling) in enumerate(requests, first_number)]

    async def score(self, row: Row, answers: Sequence[list[Turn]]) -> list[float]:
        """The rewards that the run's ``[[reward]]`` sections give to these answers, as to the samples of one prompt:
        their weighted sums, with the values of steps. Each answer is all of its turns, the prompt first; rewards that
        its turns have already do not count.

        A rollout that also sets :attr:`~rlhf.types.Turn.reward` gives the sample's reward by this: the run does not
        score the sample again, and ``reward/mean`` is the mean of these sums. Where they are credit, :meth:`report`
        the score of the answer that is returned.

        Raises RolloutError: the run has no ``[[reward]]``. RewardError: a reward failed, or none applies to an answer.
        """
        raise RolloutError("this context has no rewards to score answers with")

    def report(self, name: str, value: float) -> None:
        """A number about this sample, such as how often something happened in it; reporting a name again replaces its
        number. It is stored with the sample, and the mean over the samples that report it is the metric
        ``rollout/NAME``. A count must therefore be reported where it is 0 too. A name ``env/KEY`` stays as it is: a
        number of an environment that the rollout itself plays or replays.

        Raises RolloutError: ``value`` is no finite number. A context that stores no samples ignores it.
        """
        return

    @abstractmethod
    async def open_env(self) -> Env:
        """A new environment whose calls have deadlines. The runtime closes it when the sample ends."""


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
    """True: the rollout can play an environment with several agents (:meth:`Env.agents`), and names the agent of each
    turn (:attr:`~rlhf.types.Turn.agent`). A run with such an environment is refused otherwise."""
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
    what one gives is added. Leave it False where these rewards come from :meth:`RolloutContext.score`, which needs one.
    A rollout that does so only if asked has an option ``returns_reward``, which ``rlhf init`` writes where no reward is
    named, and sets this attribute in its constructor."""
    concurrency: int | None = None
    """Largest number of samples under way at once; a further one starts when one ends. None: no limit. A rollout must
    not delay samples itself: a wave of generation starts when all samples that were started wait for tokens."""
    observes: bool = True
    """False: a sample is a prompt and one sampled turn, so it has no observations to learn from. A rollout that may say
    so only with some options sets this attribute in its constructor."""
    needs_generator: bool = True
    """False: the rollout never calls ``ctx.generate``, so the run starts no generator and sends no weights."""

    def check(self) -> None:
        """Check before the run starts for causes that would fail every :meth:`run`, such as a missing file. Raises
        ConfigError."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The descriptions that the first prompt of every sample shows, as :meth:`RolloutContext.encode_messages` takes
        them: ``rlhf plan`` counts their tokens, ``rlhf data preview`` prints them. Empty: there are none, or samples
        differ. Raises ConfigError."""
        return ()

    @abstractmethod
    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        """All turns of one sample. With several agents: of all of them, in any order among agents. The turns of one
        agent are its conversation, which begins with a prompt of its own; an agent that had no turn has none.

        Args:
            seed: for the environment. It is equal for all samples of a prompt, so that a group baseline compares
                answers to the same task. Sampling uses other seeds (:meth:`RolloutContext.generate`).
        """
