"""How the rows of each source are read: the layout of its columns, and columns that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Literal

from rlhf.errors import DataError, did_you_mean
from rlhf.types import DataForm

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.data import conversions as convert
from rlhf_runtime.data.comparisons import SHAPES
from rlhf_runtime.data.input_template import check_template
from rlhf_runtime.data.labelled_steps import SHAPES as STEP_SHAPES
from rlhf_runtime.data.row_fields import as_label
from rlhf_runtime.data.row_images import image_folder, with_image_files
from rlhf_runtime.data.sources import DEFAULTS, FIELDS, ONE_IMAGE, TOOLS, Source, SourceLayout, named_columns
from rlhf_runtime.data.template import Template

_ANSWERED = " The algorithm as configured learns from the answers of some rows, so training rows need an answer."
_OF_TEMPLATES = (TOOLS, "chat_template_kwargs")
"""Columns that TRL passes to the chat template, row by row."""
_CHOICES = ("options", "choices")
"""Columns with the choices of a question. A prompt of several lines may have them."""
_MEDIA = ("audio", "audios", "video", "videos")


def set_layouts(
    sources: Mapping[str, Sequence[Source]],
    form: DataForm,
    answers: Collection[str],
    section: DataSection,
    template: Template,
) -> list[str]:
    """Set the layout of every source, and its folder of images.

    Args:
        sources: ``train`` and ``eval``.
        answers: sources of ``train`` whose rows must also have an answer, read as in form ``demonstrations``.

    Returns messages on how columns were recognised, if the run file does not name them.

    Raises DataError: the columns of sources are not recognised, or the run file names columns that nothing reads.
    """
    problems, notes = [], list[str]()
    for key, source in ((key, source) for key, group in sources.items() for source in group):
        title = f"data.{key} {source.name!r} ({source.section.path})"
        answered = key == "train" and source.name in answers
        try:
            layout = _layout(source, "demonstrations" if answered else form, form == "prompts", section, template)
            source.layout = replace(layout, folder=image_folder(source))
            if template.images.limit > 0:  # it reads every row
                source.fingerprint = with_image_files(source, layout.columns)
        except DataError as error:
            problems.append(f"{title} {error}{_ANSWERED if answered else ''}")
            continue
        if not source.layout.explicit:
            notes.append(f"{title} is read as {source.layout}")
        prompt = source.read(0).get(source.layout.columns.get("prompt", ""))
        if isinstance(prompt, str) and prompt.startswith('["') and form != "pairs":
            notes.append(f"{title} has prompts that are lists written as text, which the model sees as they are")
        unread = [c for c in _OF_TEMPLATES if c in source.columns and c not in source.layout.columns.values()]
        if unread and template.chat is not None:
            notes.append(
                f"{title} has the column {' and '.join(map(repr, unread))}, which is not passed to the "
                "chat template: the template gets data.template_kwargs, the same for all rows"
            )
        notes += [f"{title} has the column {n}" for n in _unused(source.read(0), layout, section, str(prompt))]
    raise_problems("the data cannot be read", problems or _unread(sources, section), DataError)
    return notes


def _unused(row: Mapping[str, Any], layout: SourceLayout, section: DataSection, prompt: str) -> Iterator[str]:
    """Notes on columns that nothing reads, which training may need."""
    has_names = named_columns(section).keys() & _WITH_SYSTEM
    for column, value in row.items():
        if column in layout.columns.values():
            continue
        if isinstance(value, list | Mapping) and column in _MEDIA:
            yield f"{column!r}: models here read text and images only"
        if isinstance(value, list | Mapping) and column in _CHOICES and not (section.input_template or "\n" in prompt):
            yield f"{column!r}, which is not part of the prompt: data.input_template can add it"
        if isinstance(value, str) and column in SYSTEMS and has_names and section.input_template is None:
            yield f"{column!r}, which is not read if the run file names the prompt"
        if isinstance(value, str) and len(value) > 20 and GENERATED.search(column) and "response" in layout.columns:
            yield f"{column!r}, which is not part of the response: set data.reasoning to it, or join the two columns"


def _unread(sources: Mapping[str, Sequence[Source]], section: DataSection) -> list[str]:
    """Problems of columns that the run file names but no source uses."""
    layouts = [s.layout for group in sources.values() for s in group if s.layout is not None]
    fields = {field for layout in layouts for field in layout.columns}
    unread = {f: c for f, c in named_columns(section).items() if layouts and f not in fields}
    has_template = section.input_template is not None
    return [
        f"data.{field} = {column!r} has no effect, because "
        + ("data.input_template makes the prompt. " if has_template else f"the rows are read as {layouts[0]}. ")
        + "Remove it."
        for field, column in unread.items()
    ]


def _layout(source: Source, form: DataForm, answered: bool, section: DataSection, template: Template) -> SourceLayout:
    """The layout of a source. ``answered``: the policy answers its prompts."""
    chat = template.chat is not None
    takes_all = section.loss_on == "all" and not chat
    layout = recognise(
        form,
        source.columns,
        source.read(0),
        names=named_columns(section),
        chat=chat,
        prompt="made" if section.input_template is not None else "optional" if takes_all else "needed",
    )
    if section.input_template is not None:
        first, fields = source.read(0), dict[str, Any]()
        with suppress(DataError):  # of the conversion, which is reported when the row is used
            fields = layout.read(first)
        columns = [*source.columns, *layout.columns, *fields]
        check_template(section.input_template, columns, {**fields, **first})
    if "text" in layout.columns and (section.template == "chat" or section.system is not None):
        key = "system" if section.system is not None else 'template = "chat"'
        raise DataError(f"has texts to continue, which are tokenised as they are; data.{key} does not apply to them")
    if "text" in layout.columns and answered:
        raise DataError("has texts to continue, but no prompts to answer.")
    image_columns = {"images", ONE_IMAGE} & {*layout.columns, *layout.columns.values()}
    if ONE_IMAGE in source.columns and not image_columns:  # a run without images refuses rows that have one
        layout = replace(layout, columns={**layout.columns, "images": ONE_IMAGE})
    return layout


PROMPTS = (("question", "problem", "query", "instruction", "input"), ("inputs",))
REFERENCES = ("answer", "solution")  # rather than the answer to learn from
RESPONSES = (("completion", "output"), REFERENCES, ("targets", "target"))
GENERATED = re.compile(
    r"(attempt|generation|generated_\w+|trajectory|reasoning|thinking|cot|rationale)$", re.IGNORECASE
)
"""Suffixes of the names of columns with text that a model or a person wrote, beside a reference."""
CONVERSATIONS = (("messages", "conversation", "conversations"), ("texts", "trajectory"))
REQUEST = "responses_create_params"  # of NeMo Gym
LABELS = ("score", "is_correct")
CHOSEN, REJECTED = ("chosen_messages", "messages"), ("rejected_messages",)
_COMMON = {"prompt": PROMPTS, "response": RESPONSES, "label": (LABELS,)}
_COMPLETE = ("marked_steps", "prm800k", "request")
"""Conversions that take no column of system messages or tools."""
CONTEXTS = ("input", "context")
"""Columns with the context of ``instruction``. Beside other prompts only the last one is used."""
HISTORY = "history"
"""Column with the turns before ``instruction`` or ``query``."""
OUTPUTS = {"chosen": "preferred_output", "rejected": "non_preferred_output"}
SYSTEMS = ("system", "system_prompt")
_WITH_SYSTEM = {"prompt", "messages", "chosen"}
"""Fields that a system message precedes. If the run file names the column of one of them, no system column is read."""


def recognise(
    form: DataForm,
    columns: Sequence[str],
    row: Mapping[str, Any],
    *,
    names: Mapping[str, str] | None = None,
    chat: bool = False,
    prompt: Literal["needed", "optional", "made"] = "needed",
) -> SourceLayout:
    """The layout of a source, recognised from the names of its columns and the values of its first row.

    Columns that the run file names come first, then columns with default names, then columns with names that are common
    on the hub. A source with two possible layouts is refused, and the error lists both.

    Args:
        columns: columns of the source.
        row: its first row.
        names: {field: column} from the run file.
        chat: whether a chat template is used.
        prompt: whether a column with a prompt is needed; ``made``: a template produces the prompt from other columns.

    Raises DataError: no layout fits (with what is missing), several fit (with all of them), or the layout needs a chat
    template.
    """
    case = _Case(form, columns, row, dict(names or {}), chat, prompt)
    layouts = case.with_named_columns(case.without_repeats(_widest(list(case.layouts()))))
    if not layouts and case.text():
        layouts = [SourceLayout({"text": "text"}, explicit=False)]
    if len(layouts) == 1:
        return case.with_further_columns(layouts[0])
    if layouts:
        ways = "; ".join(f"({i}) {layout}" for i, layout in enumerate(layouts, 1))
        names = {f: c for f, c in layouts[0].columns.items() if f in FIELDS}
        advice = f"Name the columns to use, e.g. {' '.join(f'--data.{f} {c}' for f, c in names.items())}."
        rivals = [layout.columns for layout in layouts if names.items() <= layout.columns.items()]
        contexts = [columns["context"] for columns in rivals if "context" in columns]
        if len(contexts) > 1:  # no option names the context
            text = r"\n\n".join(f"{{{c}}}" for c in (names["prompt"], *contexts))
            advice = (
                f"Write {' and '.join(contexts)} into one column, or make the prompt of columns that have a text in "
                f'every row, e.g. data.input_template = "{text}".'
            )
        raise DataError(f"the columns can be read in several ways: {ways}; {case.present()} {advice}")
    raise DataError(case.problem())


@dataclass(frozen=True)
class _Case:
    form: DataForm
    columns: Sequence[str]
    row: Mapping[str, Any]
    user_columns: Mapping[str, str]
    chat: bool
    prompt: str

    def layouts(self) -> Iterator[SourceLayout]:
        free = self.chat and not self.user_columns and self.prompt == "needed" and "prompt" not in self.columns
        if self.form == "prompts" and free and isinstance(self.row.get(REQUEST), Mapping):
            yield from self._join([{"prompt": REQUEST}], conversion="request")
        elif self.form == "prompts":
            yield from self._join([*self._prompts()])
            if "prompt" not in self.columns:
                yield from self._conversations()
        elif self.form == "demonstrations":
            yield from self._answers()
        elif self.form == "labels":
            labels = [{"label": c} for c in self._choices("label", LABELS)]
            yield from self._answers([x for x in labels if self._is_label(x["label"])])
        elif self.form == "pairs":
            yield from self._pairs()
        else:
            yield from self._steps()

    def text(self) -> bool:
        """Whether the rows are texts to continue, without prompts; used only if no other layout fits."""
        has_prompt = self.prompt == "made" or {"prompt", "response", "messages"} & set(self.user_columns)
        in_tree = {"role", "parent_id"} <= {*self.columns}  # OpenAssistant: one message of a conversation
        return self.form == "demonstrations" and not (has_prompt or in_tree) and isinstance(self.row.get("text"), str)

    def problem(self) -> str:
        conversations = [c for c, v in self.row.items() if convert.is_messages(v) or convert.is_turns(v)]
        unnamed = ""
        if conversations and self.form in ("demonstrations", "prompts") and not self.user_columns:
            unnamed = f" {conversations[0]!r} holds conversations: --data.messages {conversations[0]}."
        is_read = not self.chat and any(True for _ in replace(self, chat=True).layouts())
        if is_read or (unnamed and not self.chat):
            return (
                f"has conversations, which need a chat template, but none is used; {self.present()} Use a tokenizer "
                f"with a chat template, or set data.chat_template to a file with one.{'' if is_read else unnamed}"
            )
        needed = {"pairs": ("chosen", "rejected"), "steps": ("steps", "step_labels"), "labels": ("response", "label")}
        fields = [*needed.get(self.form, ("response",) if self.form == "demonstrations" else ())]
        if "messages" in self.user_columns:
            fields = ["messages", *(f for f in fields if f == "label")]
        elif self.prompt == "needed" and not (self.form == "pairs" and isinstance(self.row.get("chosen"), list)):
            fields = ["prompt", *fields]
        fields += [f for f in ("margin", "preference") if f in self.user_columns]
        names = {f: self.user_columns.get(f, DEFAULTS.get(f, f)) for f in fields}
        lacking = {f: c for f, c in names.items() if c not in self.columns and not self._is_read(f)}
        if lacking:
            hints = [unnamed] if unnamed else [self._did_you_mean(f, c) for f, c in lacking.items()]
            if self.form == "labels" and {"chosen", "rejected"} <= {*self.columns}:
                hints = [" These are pairs: make two rows of each, the chosen answer with label true, the other false."]
            if conversations and self.form == "steps":
                advice = "make rows of a prompt, a list of steps and a list of labels."
                hints = [f" Labels in the turns of conversations ({conversations[0]!r}) are not read: {advice}"]
            ones, flags = "ones" if len(lacking) > 1 else "one", ", ".join(f"--data.{f}" for f in lacking)
            return (
                f"has no column {' or '.join(map(repr, lacking.values()))}; {self.present()}{''.join(hints)} "
                f"Name the right {ones} with {flags}."
            )
        types = " ".join(f"{c!r} holds {type(self.row.get(c)).__name__}." for c in names.values())
        return (
            f"has no known layout of the form {self.form!r}; {self.present()} {types} The documentation page on data "
            "lists the known layouts."
        )

    def _is_read(self, field: str) -> bool:
        """Whether a column with a common name is read as this field, so that the field is not missing."""
        if field in self.user_columns:
            return False
        if field == "label":
            return any(map(self._is_label, self._choices(field, LABELS)))
        return bool(self._choices(field, *_COMMON.get(field, ())))

    def _did_you_mean(self, field: str, column: str) -> str:
        """The column whose name is similar to the field's name or one of its common names."""
        if field in self.user_columns:
            return did_you_mean(column, self.columns)
        common_names = {*DEFAULTS.values()}.union(*chain(*_COMMON.values()))
        columns = [c for c in self.columns if c not in common_names]
        hints = (did_you_mean(name, columns) for name in (column, *chain(*_COMMON.get(field, ()))))
        return next(filter(None, hints), "")

    # ------------------------------------------------------------------------------------- forms

    def _pairs(self) -> Iterator[SourceLayout]:
        if self.chat:
            # OpenAI's fine-tuning API
            outputs = {"prompt": "input", **OUTPUTS}
            if self._may_be(outputs) and isinstance(self.row.get("input"), Mapping):
                yield from self._join([outputs], conversion="preferred_outputs")
            # ms-swift
            conversation = {"messages": "messages", "rejected": "rejected_response"}
            if self._may_be(conversation) and convert.is_messages(self.row.get("messages")):
                yield from self._join([conversation], conversion="rejected_beside")
        pair = [
            {"chosen": a, "rejected": b}
            for a, b in product(self._choices("chosen", CHOSEN), self._choices("rejected", REJECTED))
            if a != "messages" or b == "rejected_messages"
        ]
        if not pair and not self.user_columns.keys() & {"chosen", "rejected", "messages"}:
            yield from self._compared()
        margin = [{"margin": c} for c in self._choices("margin", ())] if "margin" in self.user_columns else [{}]
        for answers in self._join(pair, margin):
            values = [convert.answer(self.row.get(answers.columns[k]), self.chat) for k in ("chosen", "rejected")]
            if all(map(convert.is_turn, values)):
                fronts = [{"messages": c} for c in self.columns if convert.is_turns(self.row.get(c))]
                yield from self._join([answers.columns], fronts if self.chat else [], conversion="answers_in_turns")
            elif all(map(convert.is_whole, values)):
                prompt = self.row.get("prompt")
                if "prompt" in self.user_columns:
                    yield from self._join([*self._prompts()], [answers.columns])
                elif prompt and not convert.repeats(values, prompt):
                    raise DataError(
                        "has whole conversations to compare and a column 'prompt' that they do not repeat; name the "
                        "column (--data.prompt prompt) to put it before them, or remove it"
                    )
                elif self.chat and self.prompt != "made":
                    columns = {"prompt": "prompt"} if "prompt" in self.columns else {}
                    yield replace(answers, columns={**columns, **answers.columns}, full_conversations=True)
            elif "prompt" not in self.user_columns and not any(True for _ in self._prompts()):
                if all(map(convert.is_dialogue, values)):
                    yield from self._join([answers.columns], conversion="dialogues")
            else:
                for layout in self._join([*self._prompts()], [answers.columns]):
                    yield replace(
                        layout,
                        full_conversations=self.chat and "prompt" not in self.user_columns and self.prompt != "made",
                    )

    def _may_be(self, columns: Mapping[str, str]) -> bool:
        """Whether the source has a layout's columns, and the user named no columns, or only columns of the layout
        including the first."""
        user = self.user_columns
        is_named = not user or (next(iter(columns)) in user and user.items() <= columns.items())
        return is_named and {*columns.values()} <= {*self.columns}

    def _compared(self) -> Iterator[SourceLayout]:
        """Several answers, and which is better."""
        for shape in SHAPES:
            if shape.fits(self.row, self.columns, self.user_columns) and (self.chat or shape.prompt != ""):
                columns, conversion = shape.layout(self.user_columns.get("margin"))
                column = shape.prompt if self.prompt == "needed" and "prompt" not in self.user_columns else None
                prompts = self._prompts() if column is None else [{"prompt": column}] if column else [{}]
                yield from self._join([*prompts], [columns], conversion=conversion)

    def _steps(self) -> Iterator[SourceLayout]:
        """Solutions with labelled steps, of the first shape that fits."""
        for shape in STEP_SHAPES:
            prompts = [*self._prompts()] if shape.prompt != "" else [{}]
            if shape.prompt and shape.prompt in self.columns and "prompt" not in self.user_columns:
                prompts = [{"prompt": shape.prompt}]
            columns = [*shape.columns(self.row, self.user_columns, self._choices)]
            if columns:
                yield from self._join(prompts, columns, conversion=shape.conversion)
                return

    def _answers(self, label: Sequence[Mapping[str, str]] = ({},)) -> Iterator[SourceLayout]:
        """A prompt with an answer, or a whole conversation."""
        if "messages" not in self.user_columns:
            answers = [{"response": c} for c in self._responses()]
            yield from self._join([*self._prompts()], answers, label)
        if self.user_columns.keys() & {"prompt", "response"}:
            return
        if "messages" in self.user_columns or not {"prompt", "response"} <= {*self.columns}:
            yield from self._conversations(label)

    def _conversations(self, fronts: Sequence[Mapping[str, str]] = ({},)) -> Iterator[SourceLayout]:
        if not self.chat or self.prompt == "made":
            return
        for column in self._choices("messages", *CONVERSATIONS):
            value = convert.conversation(self.row.get(column))
            if convert.is_turns(value) or convert.is_exchanges(value):
                conversion = "turns" if convert.is_turns(value) else "exchanges"
                yield from self._join([{"messages": column}], fronts, conversion=conversion)
            elif convert.is_messages(value) or self._certain("messages", column):
                yield from self._join([{"messages": column}], fronts)

    # ----------------------------------------------------------------------- columns and layouts

    def _prompts(self) -> Iterator[Mapping[str, str]]:
        if self.prompt != "needed":
            yield {}
        if self.prompt == "made":
            return
        # 0 stands for an absent column, because null is a possible value of the context.
        context = self.row.get(CONTEXTS[-1], 0)
        has_history = HISTORY in self.columns and not self.user_columns and not isinstance(self.row.get(HISTORY), str)
        for column in self._choices("prompt", *PROMPTS):
            history = {"history": HISTORY} if column in ("instruction", "query") and has_history else {}
            yield {"prompt": column, **history}
            if column == "instruction":
                yield from ({"prompt": column, "context": c, **history} for c in CONTEXTS if c in self.columns)
            elif column in PROMPTS[0] and "prompt" not in self.user_columns and isinstance(context, str | None):
                yield {"prompt": column, "context": CONTEXTS[-1], **history}

    def _choices(self, field: str, *common_names: Sequence[str]) -> list[str]:
        """Columns that a field may mean: the named column, else the default column, else the columns with the first
        common names that exist, finally ignoring case."""
        if field in self.user_columns:
            return [self.user_columns[field]] if self.user_columns[field] in self.columns else []
        names = [[DEFAULTS[field]] if field in DEFAULTS else [], *common_names]
        same_capitals = ([c for c in group if c in self.columns] for group in names)
        other_capitals = ([c for c in self.columns if c.lower() in group] for group in names)
        return next(filter(None, chain(same_capitals, other_capitals)), [])

    def _responses(self) -> list[str]:
        """Columns that may contain the response. Beside a reference these include columns with generated text."""
        columns = self._choices("response", *RESPONSES)
        if "response" in self.user_columns or not {*columns} & {*REFERENCES}:
            return columns
        texts = (c for c in self.columns if isinstance(self.row.get(c), str) and self.row[c])
        return [*(c for c in texts if GENERATED.search(c) and c != self.user_columns.get("reasoning")), *columns]

    def without_repeats(self, layouts: list[SourceLayout]) -> list[SourceLayout]:
        """Only the conversation, if it contains the prompts of all other layouts."""
        conversations = [layout for layout in layouts if "messages" in layout.columns]
        prompts = [self.row.get(layout.columns.get("prompt", "")) for layout in layouts if layout not in conversations]
        if len(conversations) != 1 or not prompts or not all(isinstance(p, str) for p in prompts):
            return layouts
        try:
            messages = conversations[0].read(self.row).get("messages")
            is_whole = isinstance(messages, list) and all(convert.repeats([messages], prompt) for prompt in prompts)
            return conversations if is_whole else layouts
        except DataError:  # raised by the conversation, and reported if the user names its column
            return layouts

    def with_named_columns(self, layouts: list[SourceLayout]) -> list[SourceLayout]:
        """Only the layouts that have all columns that the user named and that any layout has."""
        fields = {field for layout in layouts for field in layout.columns} & self.user_columns.keys()
        columns = {field: self.user_columns[field] for field in fields}
        return [layout for layout in layouts if columns.items() <= layout.columns.items()] or layouts

    def _certain(self, field: str, column: str) -> bool:
        """Whether a column is used regardless of its values. Wrong values are reported when a row is read."""
        return column == self.user_columns.get(field, DEFAULTS.get(field, field))

    def _is_label(self, column: str) -> bool:
        return self._certain("label", column) or as_label(self.row.get(column)) is not None

    def _join(self, *parts: Sequence[Mapping[str, str]], conversion: str = "") -> Iterator[SourceLayout]:
        """A layout for every combination of one choice from each part. No column is used for two fields."""
        for chosen in product(*parts):
            columns = {f: c for part in chosen for f, c in part.items()}
            if len(set(columns.values())) != len(columns):
                continue
            name = conversion or ("context" if {"context", "history"} & set(columns) else "")
            if not name and self.chat and convert.is_open_dialogue(self.row.get(columns.get("prompt", ""))):
                name = "dialogue_prompt"
            is_default = all(self.user_columns.get(f, DEFAULTS.get(f)) == c for f, c in columns.items())
            yield SourceLayout(columns, name, self.chat, explicit=is_default and not name)

    def with_further_columns(self, layout: SourceLayout) -> SourceLayout:
        """The layout with the columns of system messages, images, reasoning and tools that the source has. Columns of
        system messages are read if the run file names no prompt, and columns of tools if a chat template may show them.

        Raises DataError: the run file names a column that the source does not have, or that another field uses.
        """
        columns, explicit, is_complete = dict(layout.columns), layout.explicit, layout.conversion in _COMPLETE
        texts = [c for c in SYSTEMS if isinstance(self.row.get(c), str)]
        systems = texts or [c for c in SYSTEMS if c in self.columns and self.row.get(c) is None]
        has_prompt = _WITH_SYSTEM & {*columns} or (self.chat and self.prompt == "made")
        if systems and has_prompt and not is_complete and not self.user_columns.keys() & _WITH_SYSTEM:
            columns, explicit = {"system": systems[0], **columns}, False
        for field in ("images", "reasoning") if "response" in columns else ("images",):
            column = self.user_columns.get(field, DEFAULTS.get(field, ""))
            if column in self.columns and column not in columns.values():
                columns[field] = column
            elif field in self.user_columns:
                layout = replace(layout, columns=columns)
                advice = f"{did_you_mean(column, self.columns)} Name the right one with --data.{field}."
                raise DataError(
                    f"has no column {column!r} for {field} in addition to {layout}; {self.present()}{advice}"
                )
        free = self.chat and TOOLS in self.columns and TOOLS not in columns.values()
        if free and "text" not in columns and not is_complete:
            columns[TOOLS] = TOOLS
        return replace(layout, columns=columns, explicit=explicit)

    def present(self) -> str:
        return f"columns present: {', '.join(c or repr(c) for c in self.columns)}."


def _widest(layouts: Sequence[SourceLayout]) -> list[SourceLayout]:
    """The layouts without duplicates, and without layouts whose columns are a subset of another layout's columns."""
    layouts = [layout for i, layout in enumerate(layouts) if layout not in layouts[:i]]
    sets = [set(layout.columns.values()) for layout in layouts]
    return [layout for layout, columns in zip(layouts, sets, strict=True) if not any(columns < other for other in sets)]
