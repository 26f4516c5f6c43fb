"""Rows become tokens: prompts, observations, demonstrations and pairs, through the chat template or as plain text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.data.cells import Cells
from rlhf.data.conversation import ChatTemplate, Frame, Message, Span
from rlhf.data.layouts import DEFAULTS, Layout, named_columns
from rlhf.data.rows import Example
from rlhf.data.rows import Sequence as TokenSequence
from rlhf.data.spans import edges_are_between
from rlhf.data.steps import StepEnds, decoder_of
from rlhf.errors import ConfigError, DataError
from rlhf.runfile import DataSection
from rlhf.types import Row, Trajectory, Turn

_CACHED_PROMPTS = 4096
_TEXT_OR_MESSAGES = "text or a list of {role, content} messages"


class Template:
    """How the rows of a run become tokens; a pure function of the row.

    Raises ConfigError where the section asks for what the tokenizer or the kind of template does not have.
    """

    def __init__(self, tokenizer: Any, section: DataSection) -> None:
        self.tokenizer, self.section = tokenizer, section
        self.chat = ChatTemplate(tokenizer, section.template_kwargs) if _uses_chat(tokenizer, section) else None
        self.layout = Layout({**DEFAULTS, **named_columns(section)}, chat=self.chat is not None)
        """Of rows that have none of their own."""
        self._bos = _begin_ids(tokenizer)
        self._parting = frozenset([*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()])
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
        cells = self._cells(row)
        return self._plain_prompt(cells) if self.chat is None else self._prompt_messages(cells)

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt with what the environment says at its start: in the same user message where the prompt
        ends with one (after a blank line), as another message else; plain text is simply continued."""
        if not text:
            return [self.encode_prompt(row)]
        if self.chat is None:
            return [self.encode_prompt(row), self.encode_observation(text)]
        messages = self._prompt_messages(self._cells(row))
        if messages[-1]["role"] == "user":
            joined = f"{messages[-1]['content']}\n\n{text}" if messages[-1]["content"] else text
            messages[-1] = {**messages[-1], "content": joined}
        else:
            messages.append({"role": "user", "content": text})
        return [self._turn(self._ids(self.chat.text(messages, answer=True)))]

    def encode_answer(self, row: Row, text: str | None = None) -> list[Turn]:
        """The row's prompt and the row's own answer to it, token by token as :meth:`encode_demonstration` has them with
        ``data.loss_on = "completion"``: the end token belongs to the answer, what a chat template writes behind it is
        left out.

        Args:
            text: another answer to the row's prompt.
        """
        cells = self._cells(row)
        sequence = self._demonstrated(cells) if text is None else self._answered_by(text, cells)
        first, last = sequence.loss_mask.index(True), len(sequence.ids) - sequence.loss_mask[::-1].index(True)
        answer = sequence.ids[first:last]
        return [
            self._turn(sequence.ids[:first]),
            Turn(answer, sampled=True, finish="stop", text=self.decode(answer), given=True),
        ]

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
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
            text = self.chat.render(turns, [1], as_asked=False)
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
        """The row's conversation or prompt and response, with the tokens to train on (``data.loss_on``); or its text,
        whole, where that is all it has."""
        return Example(row, [self._demonstrated(self._cells(row))])

    def encode_pair(self, row: Row) -> Example:
        """The row's chosen (role 0) and rejected (role 1) answer to one prompt. Where both are whole conversations
        and there is no prompt column, each is taken as it is; up to the last answer they are the same, or everything
        that an assistant says is trained on."""
        cells = self._cells(row)
        fields = ("chosen", "rejected")
        whole = self.chat is not None and "prompt" not in cells and isinstance(cells.values.get("chosen"), list)
        if whole:
            sequences = [self._conversation(self._messages(cells, name)) for name in fields]
        else:
            sequences = [self._answered(cells, name) for name in fields]
        fronts = [value[:-1] if isinstance(value := cells.values[name], list) else [] for name in fields]
        if self.section.loss_on == "completion" and fronts[0] != fronts[1]:
            raise DataError(
                f"the chosen and the rejected {'conversation' if whole else 'messages'} differ before their last "
                'answers, and only those are trained on; set data.loss_on = "assistant" to train on all that the '
                "assistant says"
            )
        if sequences[0].ids == sequences[1].ids:
            raise DataError("the chosen and the rejected answer are the same, token by token: nothing can be preferred")
        values = {"margin": cells.margin()} if "margin" in cells.layout.columns else {}
        return Example(row, [replace(s, role=role) for role, s in enumerate(sequences)], values)

    def encode_label(self, row: Row) -> Example:
        """The row's prompt and answer, as a demonstration, with ``values["label"]``: whether it is desirable."""
        cells = self._cells(row)
        return Example(row, [self._demonstrated(cells)], {"label": cells.label()})

    def encode_steps(self, row: Row) -> Example:
        """The row's prompt and the steps of one solution, each followed by ``data.step_separator``, with
        ``values["steps"]``: where each step ends (:class:`rlhf.data.steps.StepEnds`) and its label in 0 .. 1.

        The solution stands where the policy's answer would start and is left open: no end token follows, as nothing
        after a step tells whether it is right.
        """
        cells, separator = self._cells(row), self.section.step_separator
        texts, labels = cells.steps(), cells.step_labels()
        if len(texts) != len(labels):
            raise DataError(
                f"{len(texts)} steps in {cells.name('steps')}, but {len(labels)} labels in "
                f"{cells.name('step_labels')}; every step has one"
            )
        for number, text in enumerate(texts, 1):
            if (count := self._step_ends.count(text + separator)) != 1:
                raise DataError(
                    f"{cells.name('steps')}: step {number} {'contains' if count else 'has no text before'} "
                    f"data.step_separator = {separator!r}, so where it ends could not be told from its tokens: "
                    f"{text[:60]!r}"
                )
        sequence = self._continued(cells, "".join(text + separator for text in texts))
        first = sequence.loss_mask.index(True)
        ends = [first + i for i in self._step_ends(sequence.ids[first:])]
        if len(set(ends)) != len(texts):
            raise DataError(
                f"{len(texts)} steps, but {len(set(ends))} step ends among the tokens: this tokenizer does not give "
                f"data.step_separator = {separator!r} back; choose another"
            )
        return Example(row, [sequence], {"steps": list(zip(ends, labels, strict=True))})

    # -------------------------------------------------------------------------------------- inside

    def _cells(self, row: Row) -> Cells:
        return Cells(row, row.layout or self.layout)

    def _prompt_turn(self, row: Row) -> Turn:
        cells = self._cells(row)
        if self.chat is None:
            ids = self._ids(self._plain_prompt(cells))
            return self._turn([*self._begin(ids), *ids])
        return self._turn(self._ids(self.chat.text(self._prompt_messages(cells), answer=True)))

    def _plain_prompt(self, cells: Cells, optional: bool = False) -> str:
        section = self.section
        if section.input_template is not None:
            columns = {**cells.values, **cells.row.columns}
            try:
                text = section.input_template.format_map(columns)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise DataError(
                    f"data.input_template = {section.input_template!r}: {type(error).__name__} {error}; columns "
                    f"present: {', '.join(columns)}. Literal braces are written {{{{ and }}}}."
                ) from None
        elif optional and "prompt" not in cells:
            text = ""
        else:
            text = cells.text("prompt")
        system = self._system(cells)
        return (section.system or "") + (f"{system}\n\n" if system else "") + text

    def _prompt_messages(self, cells: Cells) -> list[Message]:
        whole = next((f for f in ("messages", "chosen") if isinstance(cells.values.get(f), list)), None)
        if whole is not None and "prompt" not in cells:
            messages = self._messages(cells, whole)  # a conversation without its last answer
            return messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages
        if isinstance(cells.value("prompt"), list):
            messages = self._messages(cells, "prompt")
        else:
            text = cells.text("prompt", _TEXT_OR_MESSAGES)
            messages = self._with_system([{"role": "user", "content": text}], cells, "prompt")
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{cells.name('prompt')}: a prompt must not end with an assistant message; that is the answer"
            )
        return messages

    def _demonstrated(self, cells: Cells) -> TokenSequence:
        if "text" in cells:
            return self._completed("", cells.text("text"))
        if self.chat is not None and "messages" in cells.layout.columns:
            return self._conversation(self._messages(cells, "messages"))
        return self._answered(cells, "response")

    def _answered(self, cells: Cells, field: str) -> TokenSequence:
        """The row's prompt and the answer in a field."""
        if self.chat is not None and isinstance(cells.value(field), list):
            return self._conversation([*self._prompt_messages(cells), *cells.messages(field)])
        text = cells.text(field, "text" if self.chat is None else _TEXT_OR_MESSAGES)
        return self._answered_by(text, cells, f"{cells.name(field)}: ")

    def _answered_by(self, text: str, cells: Cells, where: str = "") -> TokenSequence:
        """The row's prompt and an answer to it."""
        prompt = [] if self.chat is None else self._prompt_messages(cells)
        front = "" if self.chat is not None else self._plain_prompt(cells, optional=self.section.loss_on == "all")
        if not text.strip():
            raise DataError(f"{where}the answer is empty; there is nothing to learn from")
        if self.chat is not None:
            return self._conversation([*prompt, {"role": "assistant", "content": text}])
        return self._completed(front, text)

    def _continued(self, cells: Cells, text: str) -> TokenSequence:
        """The row's prompt and the beginning of an answer."""
        if self.chat is None:
            prompt = self._plain_prompt(cells)
        else:
            prompt = self.chat.text(self._prompt_messages(cells), answer=True)
        ids, mask = self._masked(prompt + text, [(len(prompt), len(prompt) + len(text))])
        begin = self._begin(ids) if self.chat is None else []
        return TokenSequence([*begin, *ids], [*(False for _ in begin), *mask])

    def _messages(self, cells: Cells, field: str) -> list[Message]:
        return self._with_system(cells.messages(field), cells, field)

    def _with_system(self, messages: list[Message], cells: Cells, field: str) -> list[Message]:
        own = self._system(cells)
        if own is None and self.section.system is None:
            return messages
        if messages[0]["role"] == "system" or (own and self.section.system is not None):
            raise DataError(
                f"{cells.name(field)}: the row has a system message of its own and "
                f"{'a column of system messages' if self.section.system is None else 'data.system'} is set too; "
                "remove one"
            )
        return [{"role": "system", "content": own or self.section.system}, *messages]

    def _system(self, cells: Cells) -> str | None:
        """The row's system message, where its layout has a column of them and it is not empty."""
        return (cells.values.get("system") and cells.text("system")) or None

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
        for i in trained:
            if not (messages[i].get("content") or "").strip() and not messages[i].get("tool_calls"):
                raise DataError(f"message {i} (assistant): the answer is empty; there is nothing to learn from")
        render = self.chat.render(messages, trained)
        ids, mask = self._masked(render.text, render.answers)
        # A sample ends with the answer's end token. What a template writes behind it is learnt by nobody, and a score
        # read there would be of a token that no sample has.
        end = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
        return TokenSequence(ids[:end], mask[:end])

    def _completed(self, prompt: str, completion: str) -> TokenSequence:
        """Plain text: the completion's tokens are trained on, the end token included."""
        ids, mask = self._masked(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
        ended = not self.section.add_eos or ids[-1:] == [self.tokenizer.eos_token_id]
        begin, end = self._begin(ids), [] if ended else [self.tokenizer.eos_token_id]
        ids, mask = [*begin, *ids, *end], [*(False for _ in begin), *mask, *(True for _ in end)]
        return TokenSequence(ids, [True] * len(ids) if self.section.loss_on == "all" else mask)

    def _begin(self, ids: Sequence[int]) -> list[int]:
        """What the tokenizer puts before a text: nothing where the text says it itself."""
        return [] if list(ids[:1]) == self._bos else self._bos

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Tokens of ``text`` and which of them lie in ``spans``.

        The text is tokenised once. Where a token would reach over the start of a span, or could, the policy could never
        have produced it (it was given the text before, already tokenised): then the pieces are tokenised apart. So they
        are where the text before a span has other tokens alone, as sampling sees it (two line breaks are one token at
        the end of a text, and two before a word).
        """
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets: list[Span] = encoded["offset_mapping"]
            whole: list[int] = encoded["input_ids"]
            certain = edges_are_between(offsets, [edge for span in spans for edge in span])
            if certain and all(self._is_given(text[:start], whole, offsets) for start, _ in spans):
                return whole, [any(s <= a and b <= e for s, e in spans) for a, b in offsets]
        ids, mask, position = list[int](), list[bool](), 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, trained in ((text[position:start], False), (text[start:end], True)):
                tokens = self._ids(piece) if piece else []
                ids += tokens
                mask += [trained] * len(tokens)
            position = end
        return ids, mask

    def _is_given(self, before: str, ids: Sequence[int], offsets: Sequence[Span]) -> bool:
        """Whether the tokens before a span are those that its text has alone. Special tokens part a text before it is
        tokenised, so what precedes the last of them needs no second look."""
        end = bisect_left(offsets, len(before), key=lambda span: span[0])
        begin = next((i for i in range(end - 1, -1, -1) if ids[i] in self._parting), 0)
        return not end or self._ids(before[offsets[begin][0] if begin else 0 :]) == list(ids[begin:end])

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
