"""Converts rows to tokens: prompts, demonstrations, pairs, labels and steps, with the mask of trained tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from rlhf.errors import DataError
from rlhf.steps import StepEnds
from rlhf.types import DataForm, Row, Turn
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.messages import REASONING, UNTRAINED, text_of
from rlhf_runtime.data.prompts import TEXT_OR_MESSAGES, Prompts
from rlhf_runtime.data.row_fields import Cells, Message
from rlhf_runtime.data.row_images import NO_IMAGES
from rlhf_runtime.data.template_options import reasoning_field
from rlhf_runtime.data.text_tokens import Span, edges_are_between
from rlhf_runtime.data.tokenizer import decoder_of


class Template(Prompts):
    """Encodes the rows of a run. The tokens depend on the row only."""

    def __init__(
        self,
        tokenizer: Any,
        section: DataSection,
        images: ImageTokens | str = NO_IMAGES,
        day: datetime | None = None,
    ) -> None:
        super().__init__(tokenizer, section, images, day)
        self._parting = frozenset([*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()])
        self._reasoning = "" if section.reasoning is None else reasoning_field(self.chat)
        self._step_ends = StepEnds(decoder_of(tokenizer), section.step_separator)

    def encode_answer(self, row: Row, text: str | None = None) -> list[Turn]:
        """The row's prompt and its answer, with the same tokens as :meth:`encode_demonstration` with
        ``data.loss_on = "completion"``. The answer includes its end token. Text that a chat template writes after it is
        left out.

        Args:
            text: an answer to use instead of the row's answer.
        """
        cells = self._cells(row)
        sequence = self._demonstrated(cells) if text is None else self._answered_by(cells, text, self._question(cells))
        first, last = self.answer_span(row, sequence)
        answer = sequence.ids[first:last]
        return [
            Turn(sequence.ids[:first], sampled=False, text=self.decode(sequence.ids[:first]), images=sequence.images),
            Turn(answer, sampled=True, finish="stop", text=self.decode(answer), is_demonstration=True),
        ]

    def answer_span(self, row: Row, sequence: TokenSequence) -> tuple[int, int]:
        """Start and end (exclusive) of the tokens of an answer that is used as a sample. Raises DataError: the answer
        contains an image, whose tokens no policy samples."""
        prompt = self.encode_prompt(row) if self.shows_tools else self._prompt_turn(row, shows_tools=True)
        if [image.start for image in sequence.images] != [image.start for image in prompt.images]:
            raise DataError(
                "the answer contains an image, but it is used as a sample, and sampled answers contain no images"
            )
        return sequence.loss_mask.index(True), len(sequence.ids) - sequence.loss_mask[::-1].index(True)

    def encode(self, form: DataForm, row: Row) -> Example:
        """The row as an example of an offline form."""
        encode = {
            "demonstrations": self.encode_demonstration,
            "pairs": self.encode_pair,
            "labels": self.encode_label,
            "steps": self.encode_steps,
        }[form]
        return encode(row)

    def encode_demonstration(self, row: Row) -> Example:
        """The row's conversation, or prompt and response, with the mask of trained tokens (``data.loss_on``). If the
        row has only a text, the whole text."""
        return Example(row, [self._demonstrated(self._cells(row))])

    def encode_pair(self, row: Row) -> Example:
        """The row's chosen (role 0) and rejected (role 1) answer to one prompt. If both are whole conversations and
        there is no prompt column, each conversation is encoded. They must then be equal up to the last answer, unless
        all assistant messages are trained on."""
        cells = self._cells(row)
        fields = ("chosen", "rejected")
        has_prompt = "prompt" in cells or self.section.input_template is not None
        is_whole = self.chat is not None and not has_prompt and isinstance(cells.values.get("chosen"), list)
        if is_whole:
            sequences = [self._conversation(self._messages(cells, name), cells) for name in fields]
        else:
            sequences = [self._answered(cells, name) for name in fields]
        answers = [cells.messages(n) if isinstance(cells.values[n], list) else cells.text(n) for n in fields]
        if not is_whole:
            free = [self.images.places_in(answer) for answer in answers]
            if free[0] != free[1]:  # one prompt would get the images of the column, the other none
                raise DataError(
                    f"the chosen answer has placeholders for {free[0]} images of {cells.name('images')} and the "
                    f"rejected answer for {free[1]}, so only one of their prompts would hold the column's images. Put "
                    "the placeholders into the prompt, or write each image of an answer in its part "
                    "{type: image, image: ...}"
                )
        fronts = [answer[:-1] if isinstance(answer, list) else [] for answer in answers]
        if self.section.loss_on == "completion" and fronts[0] != fronts[1]:
            raise DataError(
                f"the chosen and the rejected {'conversation' if is_whole else 'messages'} differ before their last "
                'answers, but only the last answers are trained on; set data.loss_on = "assistant" to train on all '
                "assistant messages"
            )
        if (sequences[0].ids, sequences[0].images) == (sequences[1].ids, sequences[1].images):
            raise DataError(
                "the chosen and the rejected answer have the same tokens, so there is no preference to learn"
            )
        values = {"margin": cells.margin()} if "margin" in cells.layout.columns else {}
        return Example(row, [replace(s, role=role) for role, s in enumerate(sequences)], values)

    def encode_label(self, row: Row) -> Example:
        """The row's prompt and answer, as a demonstration, with ``values["label"]``: whether it is desirable."""
        cells = self._cells(row)
        return Example(row, [self._demonstrated(cells)], {"label": cells.label()})

    def encode_steps(self, row: Row) -> Example:
        """The row's prompt and the steps of one solution, each followed by ``data.step_separator``, with
        ``values["steps"]``: the end of each labelled step (:class:`rlhf.steps.StepEnds`) and its label in 0 .. 1.

        The solution starts where the policy's answer would start. No end token follows it, because a step's label is
        read at the end of the step.
        """
        cells, separator = self._cells(row), self.section.step_separator
        texts, labels = cells.steps(), cells.step_labels()
        if len(texts) != len(labels):
            raise DataError(
                f"{len(texts)} steps in {cells.name('steps')}, but {len(labels)} labels in "
                f"{cells.name('step_labels')}; every step needs one label"
            )
        for number, text in enumerate(texts, 1):
            if (count := self._step_ends.count(text + separator)) != 1:
                advice = ". Set data.step_separator to a text that no step contains" if count else ""
                raise DataError(
                    f"{cells.name('steps')}: step {number} {'contains' if count else 'has no text before'} "
                    f"data.step_separator = {separator!r}, so its end could not be determined from the tokens: "
                    f"{text[:60]!r}{advice}"
                )
        sequence = self._continued(cells, "".join(text + separator for text in texts))
        first = sequence.loss_mask.index(True)
        ends = [first + i for i in self._step_ends(sequence.ids[first:])]
        if len(set(ends)) != len(texts):
            raise DataError(
                f"{len(texts)} steps, but {len(set(ends))} step ends among the tokens: this tokenizer does not "
                f"reproduce data.step_separator = {separator!r}; choose another separator"
            )
        labelled = [(end, label) for end, label in zip(ends, labels, strict=True) if label is not None]
        return Example(row, [sequence], {"steps": labelled})

    # ------------------------------------------------------------------- sequences and their masks

    def _demonstrated(self, cells: Cells) -> TokenSequence:
        if "text" in cells:
            return self._completed(cells, "", cells.text("text"))
        if self.chat is not None and "messages" in cells.layout.columns:
            return self._conversation(self._messages(cells, "messages"), cells)
        return self._answered(cells, "response")

    def _answered(self, cells: Cells, field: str) -> TokenSequence:
        """The row's prompt and the answer in a field."""
        question = self._question(cells)
        if isinstance(question, str) or not isinstance(cells.value(field), list):
            text = cells.text(field, "text" if self.chat is None else TEXT_OR_MESSAGES)
            return self._answered_by(cells, text, question, field)
        answer = self._reasoned(cells.messages(field), cells, field)
        messages = [m for m in question if m["role"] != "system"]
        if messages and [m for m in answer if m["role"] != "system"][: len(messages)] == messages:
            raise DataError(
                f"{cells.name(field)}: it begins with the prompt, which would then appear twice. Remove the prompt "
                "from it, or use the column as a whole conversation (--data.messages)"
            )
        return self._conversation([*question, *answer], cells)

    def _answered_by(
        self, cells: Cells, text: str, question: str | Sequence[Message], field: str = ""
    ) -> TokenSequence:
        """A prompt and an answer to it, which may be the answer in a field."""
        if not text.strip():
            label = f"{cells.name(field)}: " if field else ""
            raise DataError(f"{label}the answer is empty; there is nothing to learn from")
        if isinstance(question, str):
            return self._completed(cells, question, text)
        answer: list[Message] = [{"role": "assistant", "content": text}]
        return self._conversation([*question, *(self._reasoned(answer, cells, field) if field else answer)], cells)

    def _question(self, cells: Cells) -> str | list[Message]:
        """The row's prompt, as plain text or as messages."""
        if self.chat is not None:
            return self._prompt_messages(cells)
        return self._plain_prompt(cells, optional=self.section.loss_on == "all")

    def _reasoned(self, answer: list[Message], cells: Cells, field: str) -> list[Message]:
        """An answer with the reasoning in the row's column of reasoning."""
        if not cells.values.get("reasoning"):
            return answer
        if present := [f for f in REASONING if f in answer[-1]]:
            raise DataError(
                f"{cells.name(field)}: the answer has its own {present[0]!r}, but data.reasoning also names a "
                "column; remove one of the two"
            )
        return [*answer[:-1], {**answer[-1], self._reasoning: cells.text("reasoning")}]

    def _continued(self, cells: Cells, text: str) -> TokenSequence:
        """The row's prompt and the beginning of an answer."""
        if self.chat is None:
            prompt, images = self._plain_prompt(cells), self.images.of_row(cells)
        else:
            messages, images = self._read_prompt(cells)
            chat = self._chat_of(cells)
            chat.check(messages, cells.row.source)
            prompt = chat.text(messages, answer=True)
        ids, mask = self._masked(prompt + text, [(len(prompt), len(prompt) + len(text))])
        begin = self.tokens.begin(ids) if self.chat is None else []
        return self.images.sequence([*begin, *ids], [*(False for _ in begin), *mask], images)

    def _conversation(self, row_messages: Sequence[Message], cells: Cells) -> TokenSequence:
        chat = self._chat_of(cells)
        messages, images = self.images.of_messages(row_messages, cells)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        untrained = {i for i, m in enumerate(row_messages) if UNTRAINED in m}
        _check_weights(untrained, answers, self.section.loss_on)
        if self.section.loss_on == "all":
            chat.check(messages, cells.row.source)
            text = chat.text(messages, answer=False)
            end = self._missing_end(text.rstrip()) if messages[-1]["role"] == "assistant" else []
            ids = [*self.tokens.ids(text), *end]
            return self.images.sequence(ids, [True] * len(ids), images)
        if not answers or answers[-1] != len(messages) - 1:
            raise DataError(
                f"a conversation must end with the assistant's answer, got the roles "
                f"{', '.join(m['role'] for m in messages)}"
            )
        trained = [i for i in answers if i not in untrained] if self.section.loss_on == "assistant" else answers[-1:]
        for i in trained:
            if not text_of(messages[i].get("content")).strip() and not messages[i].get("tool_calls"):
                raise DataError(f"message {i} (assistant): the answer is empty; there is nothing to learn from")
            answer = "".join(text_of(messages[i].get(field)) for field in (*REASONING, "content"))
            _check_one_end(chat, answer, self.tokenizer.eos_token, f"message {i} (assistant)")
        render = chat.render(messages, trained)
        chat.check(messages, cells.row.source, render)
        ids, mask = self._masked(render.text, [*render.answers.values()])
        # A sample ends with the answer's end token. Text that a template writes after it is dropped: samples do not
        # have it, so it must not be trained on, and scores must not be read there. Neither do the messages after it,
        # if the weights of their answers are 0.
        last = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
        end = self._missing_end(render.text[: render.answers[trained[-1]][1]])
        context_images = images[: len(images) - self.images.placeholders(ids[last:])]
        return self.images.sequence([*ids[:last], *end], [*mask[:last], *(True for _ in end)], context_images)

    def _missing_end(self, text: str) -> list[int]:
        """The end token of the answer at the end of a render, if the template writes none. It is added because a sample
        ends with one."""
        assert self.chat is not None
        return [] if self.chat.ends.is_ended(text) else [self.tokenizer.convert_tokens_to_ids(self.chat.ends.token)]

    def _completed(self, cells: Cells, prompt: str, completion: str) -> TokenSequence:
        """Plain text: the completion's tokens are trained on, including the end token."""
        ids, mask = self._masked(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
        is_complete = not self.section.add_eos or ids[-1:] == [self.tokenizer.eos_token_id]
        begin, end = self.tokens.begin(ids), [] if is_complete else [self.tokenizer.eos_token_id]
        ids, mask = [*begin, *ids, *end], [*(False for _ in begin), *mask, *(True for _ in end)]
        mask = [True] * len(ids) if self.section.loss_on == "all" else mask
        return self.images.sequence(ids, mask, self.images.of_row(cells))

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Tokens of ``text`` and which of them are in ``spans``.

        The text is tokenised once, if the tokens match the tokens in sampling. Sampling tokenises the text before a
        span alone, so the policy can never produce a token across the start of a span. The pieces are tokenised
        separately if a token crosses or may cross the start of a span, or if the text before a span has other tokens
        when it is tokenised alone (two line breaks are one token at the end of a text, and two tokens before a word).
        """
        if self.tokenizer.is_fast:
            encoded = self.tokens.encoded(text, return_offsets_mapping=True)
            offsets: list[Span] = encoded["offset_mapping"]
            ids: list[int] = encoded["input_ids"]
            certain = edges_are_between(offsets, [edge for span in spans for edge in span])
            if certain and all(self._is_given(text[:start], ids, offsets) for start, _ in spans):
                return ids, [any(s <= a and b <= e for s, e in spans) for a, b in offsets]
        ids, mask, position = list[int](), list[bool](), 0
        for start, end in [*spans, (len(text), len(text))]:
            for first, piece, trained in ((position, text[position:start], False), (start, text[start:end], True)):
                tokens = self.tokens.ids_after(text[:first], piece) if piece else []
                ids += tokens
                mask += [trained] * len(tokens)
            position = end
        return ids, mask

    def _is_given(self, prefix: str, ids: Sequence[int], offsets: Sequence[Span]) -> bool:
        """Whether the text before a span has the same tokens when it is tokenised alone. Tokenizers split a text at
        special tokens first, so only the part after the last special token is compared."""
        end = bisect_left(offsets, len(prefix), key=lambda span: span[0])
        begin = next((i for i in range(end - 1, -1, -1) if ids[i] in self._parting), 0)
        return not end or self.tokens.ids(prefix[offsets[begin][0] if begin else 0 :]) == list(ids[begin:end])


def _check_one_end(chat: ChatTemplate, answer: str, eos_token: str, label: str) -> None:
    """Raises DataError: an answer contains an end token, where a sample would have ended."""
    text = answer.rstrip()
    if not chat.ends.of_template:  # no other end is written
        text = text.removesuffix(eos_token)
    if wrong := next((end for end in (eos_token, chat.ends.token) if end in text), None):
        raise DataError(
            f"{label}: the answer contains the end token {wrong!r}, which ends a sample, but the chat template ends "
            "answers itself. Remove the token from the text"
        )


def _check_weights(untrained: set[int], answers: Sequence[int], loss_on: str) -> None:
    """Raises DataError: an answer is trained on although its weight is 0."""
    trained = {"all": answers, "completion": answers[-1:]}.get(loss_on, ())
    if wrong := [i for i in trained if i in untrained]:
        raise DataError(
            f"message {wrong[0]} (assistant) has the weight 0, but data.loss_on = {loss_on!r} trains on it. Set "
            'data.loss_on = "assistant", which leaves such messages out, or remove the weight'
        )
    if answers and untrained.issuperset(answers):
        raise DataError("every answer has the weight 0; there is nothing to learn from")
