"""A conversation with a model that trains nothing: `rlhf chat`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import Generator
from rlhf.plugins import Plugins
from rlhf.seeds import derive_seed
from rlhf.types import GenerationRequest, Sampling

from rlhf_runtime.config.load import load
from rlhf_runtime.data.prompts import Prompts
from rlhf_runtime.jobs.inference import answers
from rlhf_runtime.samples.sampling import evaluation_sampling


class Conversation:
    """What was said to one model, and its answers. The messages are rendered by the chat template, as in a run; for a
    model without one, texts follow one another."""

    def __init__(self, generator: Generator, template: Prompts, sampling: Sampling, seed: int) -> None:
        self._generator, self._template, self._sampling, self._seed = generator, template, sampling, seed
        self._count = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self._template.section.system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.prompt = ""
        """What the model was given last, as text."""

    def answer(self, text: str) -> Iterator[str]:
        """The answer to ``text``, in pieces. The exchange is remembered when the answer has ended.

        Raises ConfigError or DataError where the model cannot be given the conversation, such as one that is too long.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        chat, tokens = self._template.chat, self._template.tokens
        if chat is None:
            self.prompt = "".join(message["content"] for message in messages)
        else:
            self.prompt = chat.text(messages, answer=True)
        ids = tokens.ids(self.prompt)
        if chat is None:
            ids = [*tokens.begin(ids), *ids]
        self._require_room(len(ids))
        self._count += 1
        request = GenerationRequest(ids, derive_seed(self._seed, "chat", self._count), self._sampling)
        answer_ids: list[int] = []
        prefix = ""
        for piece in self._generator.stream(request):
            answer_ids += piece
            whole = self._template.decode(answer_ids)
            if len(whole) > len(prefix) and not whole.endswith("\ufffd"):  # the rest of a character follows
                yield whole[len(prefix) :]
                prefix = whole
        whole = self._template.decode(answer_ids)
        if len(whole) > len(prefix):
            yield whole[len(prefix) :]
        self._messages = [*messages, {"role": "assistant", "content": whole}]

    def _require_room(self, tokens: int) -> None:
        longest = self._template.section.max_tokens
        if tokens + self._sampling.max_new_tokens > longest:
            raise ConfigError(
                f"the conversation has {tokens} tokens, with which an answer of {self._sampling.max_new_tokens} does "
                f"not fit into {longest}. Begin again with /reset, or set --data.max_tokens or --max-tokens."
            )


@contextmanager
def conversation(flags: list[tuple[str, str | None]]) -> Iterator[Conversation]:
    """A conversation with the model that ``flags`` of a run file name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": "Hello"}) + "\n")  # a job of answers checks the rows that it gets
        config = load(None, [*flags, ("data.eval", str(file))], algorithm="answer")
        with answers(config, Plugins.discover()) as (prepared, sampler):
            config = prepared.config
            template, sampling = prepared.data.template, evaluation_sampling(config)
            yield Conversation(sampler.rollouts.generator, template, sampling, config.run.seed)
