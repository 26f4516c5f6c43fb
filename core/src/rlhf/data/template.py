"""Rows become tokens: prompts, observations, demonstrations and pairs, through the chat template or as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.data.cells import cell, hard_label, margin, messages_of, soft_labels, texts_of
from rlhf.data.conversation import ChatTemplate, Frame, Message, Span
from rlhf.data.rows import Example
from rlhf.data.rows import Sequence as TokenSequence
from rlhf.data.steps import StepEnds, decoder_of
from rlhf.errors import ConfigError, DataError
from rlhf.runfile import DataSection
from rlhf.types import Row, Trajectory, Turn

_CACHED_PROMPTS = 4096


class Template:
    """How the rows of a run become tokens; a pure function of the row.

    Raises ConfigError where the section asks for what the tokenizer or the kind of template does not have.
    """

    def __init__(self, tokenizer: Any, section: DataSection) -> None:
        self.tokenizer, self.section = tokenizer, section
        self.chat = ChatTemplate(tokenizer, section.template_kwargs) if _uses_chat(tokenizer, section) else None
        self._bos = _begin_ids(tokenizer)
        self._frame: Frame | None = None
        self._prompts: dict[tuple[str, int], tuple[Mapping[str, Any], Turn]] = {}
        self._step_ends = StepEnds(decoder_of(tokenizer), section.step_separator)

    # ------------------------------------------------------------------------------------ rollouts

    def encode_prompt(self, row: Row) -> Turn:
        """The row's prompt, ready for the policy to answer."""
        key = (row.source, row.index)
        columns, turn = self._prompts.get(key, (None, None))
        if turn is None or columns != row.columns:  # training and evaluation data may have sources of one name
            turn = self._prompt_turn(row)
            if len(self._prompts) >= _CACHED_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = (row.columns, turn)
        return replace(turn, ids=list(turn.ids))

    def prompt_of(self, trajectory: Trajectory) -> str | list[Message] | None:
        """What a trajectory was asked: its row's prompt with ``data.system``, as text (plain) or messages (chat). None
        where its context is more than that, as an environment opened it, or none was made, as it failed."""
        row, turns = trajectory.row, trajectory.turns
        if not turns or turns[0].ids != self.encode_prompt(row).ids:
            return None
        return self._plain_prompt(row) if self.chat is None else self._prompt_messages(row)

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt with what the environment says at its start: in the same user message where the prompt
        ends with one (after a blank line), as another message else; plain text is simply continued."""
        if not text:
            return [self.encode_prompt(row)]
        if self.chat is None:
            return [self.encode_prompt(row), self.encode_observation(text)]
        messages = self._prompt_messages(row)
        if messages[-1]["role"] == "user":
            joined = f"{messages[-1]['content']}\n\n{text}" if messages[-1]["content"] else text
            messages[-1] = {**messages[-1], "content": joined}
        else:
            messages.append({"role": "user", "content": text})
        return [self._turn(self._ids(self.chat.text(messages, answer=True)))]

    def encode_observation(self, text: str, closed: bool = True) -> Turn:
        """What the environment says, as the chat template writes a user's message after an answer.

        Args:
            closed: whether the sampled turn before it ended with its end token; where it was cut, that token is put
                first here, so that the next message never runs into an open answer.

        Raises DataError: the template rewrites history (:meth:`ChatTemplate.frame`).
        """
        if self.chat is None:
            return self._turn(self._ids(text))
        frame = self._history()
        before = frame.before.partition(frame.end)[2] if closed and frame.end else frame.before
        return self._turn(self._ids(f"{before}{text}{frame.after}"))

    def check_multi_turn(self) -> None:
        """Raises DataError where observations cannot be encoded; called before a run of several turns starts."""
        if self.chat is not None:
            self._history()

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's end token and, where it is another, the chat template's."""
        ids = [self.tokenizer.eos_token_id]
        if self.chat is not None:
            text = self.chat.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], [1])
            last = self._ids(text.text[: text.answers[0][1]])[-1]
            if last in self.tokenizer.all_special_ids or last in self.tokenizer.get_added_vocab().values():
                ids.append(last)
        return tuple(dict.fromkeys(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    # --------------------------------------------------------------------------------- supervision

    def encode_demonstration(self, row: Row) -> Example:
        """The row's conversation or prompt and response, with the tokens to train on (``data.loss_on``)."""
        section = self.section
        if self.chat is None:
            prompt = self._plain_prompt(row, optional=section.loss_on == "all")
            return Example(row, [self._completed(prompt, self._string(row, section.response))])
        if section.messages is not None:
            messages = self._messages(row, section.messages)
        else:
            messages = [*self._prompt_messages(row), *self._answer(row, section.response)]
        return Example(row, [self._conversation(messages)])

    def encode_pair(self, row: Row) -> Example:
        """The row's chosen (role 0) and rejected (role 1) answer to one prompt. Where both are whole conversations
        and there is no prompt column, each is taken as it is."""
        sequences = []
        for role, column in enumerate((self.section.chosen, self.section.rejected)):
            if self.chat is None:
                sequence = self._completed(self._plain_prompt(row), self._string(row, column))
            elif self.section.prompt not in row.columns and isinstance(row.get(column), list):
                sequence = self._conversation(self._messages(row, column))
            else:
                sequence = self._conversation([*self._prompt_messages(row), *self._answer(row, column)])
            sequences.append(replace(sequence, role=role))
        values = {} if self.section.margin is None else {"margin": margin(row, self.section.margin)}
        return Example(row, sequences, values)

    def encode_label(self, row: Row) -> Example:
        """The row's prompt and answer, as a demonstration, with ``values["label"]``: whether it is desirable."""
        return Example(row, self.encode_demonstration(row).sequences, {"label": hard_label(row, self.section.label)})

    def encode_steps(self, row: Row) -> Example:
        """The row's prompt and the steps of one solution, each followed by ``data.step_separator``, with
        ``values["steps"]``: where each step ends (:class:`rlhf.data.steps.StepEnds`) and its label in 0 .. 1.

        The solution stands where the policy's answer would start and is left open: no end token follows, as nothing
        after a step tells whether it is right.
        """
        section = self.section
        texts = texts_of(row, section.steps)
        labels = soft_labels(row, section.step_labels)
        if len(texts) != len(labels):
            raise DataError(
                f"{len(texts)} steps in column {section.steps!r}, but {len(labels)} labels in column "
                f"{section.step_labels!r}; every step has one"
            )
        for number, text in enumerate(texts, 1):
            if (count := self._step_ends.count(text + section.step_separator)) != 1:
                what = "contains" if count else "has no text before"
                raise DataError(
                    f"column {section.steps!r}: step {number} {what} data.step_separator = "
                    f"{section.step_separator!r}, so where it ends could not be told from its tokens: {text[:60]!r}"
                )
        if self.chat is None:
            bos, prompt = self._bos, self._plain_prompt(row)
        else:
            bos, prompt = [], self.chat.text(self._prompt_messages(row), answer=True)
        solution = "".join(text + section.step_separator for text in texts)
        ids, mask = self._masked(prompt + solution, [(len(prompt), len(prompt) + len(solution))])
        ids, mask = [*bos, *ids], [*(False for _ in bos), *mask]
        first = mask.index(True)
        ends = [first + i for i in self._step_ends(ids[first:])]
        if len(set(ends)) != len(texts):
            raise DataError(
                f"{len(texts)} steps, but {len(set(ends))} step ends among the tokens: this tokenizer does not give "
                f"data.step_separator = {section.step_separator!r} back; choose another"
            )
        return Example(row, [TokenSequence(ids, mask)], {"steps": list(zip(ends, labels, strict=True))})

    # -------------------------------------------------------------------------------------- inside

    def _prompt_turn(self, row: Row) -> Turn:
        if self.chat is None:
            return self._turn([*self._bos, *self._ids(self._plain_prompt(row))])
        return self._turn(self._ids(self.chat.text(self._prompt_messages(row), answer=True)))

    def _plain_prompt(self, row: Row, optional: bool = False) -> str:
        section = self.section
        if section.input_template is not None:
            try:
                text = section.input_template.format_map(row.columns)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise DataError(
                    f"data.input_template = {section.input_template!r}: {type(error).__name__} {error}; columns "
                    f"present: {', '.join(row.columns)}. Literal braces are written {{{{ and }}}}."
                ) from None
        elif optional and section.prompt not in row.columns:
            text = ""
        else:
            text = self._string(row, section.prompt)
        return (section.system or "") + text

    def _prompt_messages(self, row: Row) -> list[Message]:
        column = self.section.prompt
        whole = self.section.messages
        if whole is not None and column not in row.columns:
            messages = self._messages(row, whole)  # a conversation without its last answer
            return messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages
        if isinstance(cell(row, column), list):
            messages = self._messages(row, column)
        else:
            messages = self._with_system([{"role": "user", "content": self._string(row, column)}], column)
        if messages[-1]["role"] == "assistant":
            raise DataError(f"column {column!r}: a prompt must not end with an assistant message; that is the answer")
        return messages

    def _answer(self, row: Row, column: str) -> list[Message]:
        if isinstance(cell(row, column), list):
            return messages_of(row, column)
        return [{"role": "assistant", "content": self._string(row, column)}]

    def _messages(self, row: Row, column: str) -> list[Message]:
        return self._with_system(messages_of(row, column), column)

    def _with_system(self, messages: list[Message], column: str) -> list[Message]:
        if self.section.system is None:
            return messages
        if messages[0]["role"] == "system":
            raise DataError(
                f"column {column!r}: the row has a system message of its own and data.system is set too; remove one"
            )
        return [{"role": "system", "content": self.section.system}, *messages]

    def _string(self, row: Row, column: str) -> str:
        value = cell(row, column)
        if not isinstance(value, str):
            allowed = "text" if self.chat is None else "text or a list of {role, content} messages"
            raise DataError(f"column {column!r}: must be {allowed}, got {type(value).__name__} {str(value)[:60]!r}")
        return value

    def _conversation(self, messages: Sequence[Message]) -> TokenSequence:
        assert self.chat is not None
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if self.section.loss_on == "all":
            ids = self._ids(self.chat.text(messages, answer=False))
            return TokenSequence(ids, [True] * len(ids))
        if not answers or answers[-1] != len(messages) - 1:
            raise DataError(
                f"a conversation must end with the assistant's answer, got the roles "
                f"{', '.join(m['role'] for m in messages)}"
            )
        trained = answers if self.section.loss_on == "assistant" else answers[-1:]
        render = self.chat.render(messages, trained)
        return TokenSequence(*self._masked(render.text, render.answers))

    def _completed(self, prompt: str, completion: str) -> TokenSequence:
        """Plain text: the completion's tokens are trained on, the end token included."""
        end = [self.tokenizer.eos_token_id] if self.section.add_eos else []
        ids, mask = self._masked(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
        ids, mask = [*self._bos, *ids, *end], [*(False for _ in self._bos), *mask, *(True for _ in end)]
        return TokenSequence(ids, [True] * len(ids) if self.section.loss_on == "all" else mask)

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Tokens of ``text`` and which of them lie in ``spans``.

        The text is tokenised once. Where a token would reach over the start of a span, the policy could never have
        produced it (it was given the text before, already tokenised): then the pieces are tokenised apart.
        """
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets: list[Span] = encoded["offset_mapping"]
            edges = {edge for span in spans for edge in span}
            if not any(a < edge < b for a, b in offsets for edge in edges if a < edge):
                return encoded["input_ids"], [a < b and any(s <= a and b <= e for s, e in spans) for a, b in offsets]
        ids, mask, position = list[int](), list[bool](), 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, trained in ((text[position:start], False), (text[start:end], True)):
                tokens = self._ids(piece) if piece else []
                ids += tokens
                mask += [trained] * len(tokens)
            position = end
        return ids, mask

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _turn(self, ids: list[int]) -> Turn:
        return Turn(ids, sampled=False, text=self.decode(ids))

    def _history(self) -> Frame:
        assert self.chat is not None
        if self._frame is None:
            self._frame = self.chat.frame()
        return self._frame


def _uses_chat(tokenizer: Any, section: DataSection) -> bool:
    has = bool(tokenizer.chat_template)
    if section.template == "chat" and not has:
        raise ConfigError(
            "data.template = 'chat', but the tokenizer has no chat template. Set tokenizer.chat_template and save it "
            'with the model, or use data.template = "plain".'
        )
    chat = has and section.template != "plain"
    only_chat = {"template_kwargs": bool(section.template_kwargs), "messages": section.messages is not None}
    only_plain = {"input_template": section.input_template is not None, "add_eos = false": not section.add_eos}
    for key, given in (only_plain if chat else only_chat).items():
        if given and chat:
            raise ConfigError(f"data.{key} is for plain text, but a chat template is used; set data.template = 'plain'")
        if given:
            why = "data.template = 'plain'" if section.template == "plain" else "the tokenizer has no chat template"
            raise ConfigError(f"data.{key} needs a chat template, but {why}")
    return chat


def _begin_ids(tokenizer: Any) -> list[int]:
    """The begin token where the tokenizer puts one before a text."""
    ids: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]
    return [i for i in ids[:1] if i == tokenizer.bos_token_id]
