"""How the rows of each source are read: the layout of its columns, and columns that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import DataError
from rlhf.types import DataForm

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.data.image_columns import image_folder, with_image_files
from rlhf_runtime.data.input_template import check_template
from rlhf_runtime.data.layouts import ONE_IMAGE, TOOLS, Layout, named_columns
from rlhf_runtime.data.recognise import recognise
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.template import Template

_ANSWERED = " The algorithm as configured learns from the answers of some rows, so training rows need an answer."
_OF_TEMPLATES = (TOOLS, "chat_template_kwargs")
"""Columns that TRL passes to the chat template, row by row."""


def set_layouts(
    sources: Mapping[str, Sequence[Source]], form: DataForm, answers: bool, section: DataSection, template: Template
) -> list[str]:
    """Set the layout of every source, and its folder of images.

    Args:
        sources: ``train`` and ``eval``.
        answers: the rows of ``train`` must also have an answer, read as in form ``demonstrations``.

    Returns messages on how columns were recognised, if the run file does not name them.

    Raises DataError: the columns of sources are not recognised, or the run file names columns that nothing reads.
    """
    problems, notes = [], list[str]()
    for key, source in ((key, source) for key, several in sources.items() for source in several):
        title, answered = f"data.{key} {source.name!r} ({source.section.path})", answers and key == "train"
        try:
            layout = _layout(source, "demonstrations" if answered else form, form == "prompts", section, template)
            source.layout = replace(layout, folder=image_folder(source))
            if template.images.limit > 0:  # it reads every row
                source.fingerprint = with_image_files(source, layout.columns)
        except DataError as error:
            problems.append(f"{title} {error}{_ANSWERED if answered else ''}")
            continue
        if not source.layout.given:
            notes.append(f"{title} is read as {source.layout}")
        unread = [c for c in _OF_TEMPLATES if c in source.columns and c not in source.layout.columns.values()]
        if unread and template.chat is not None:
            notes.append(
                f"{title} has the column {' and '.join(map(repr, unread))}, which the chat template is not given: "
                "it gets data.template_kwargs, the same for all rows"
            )
    raise_problems("the data cannot be read", problems or _unread(sources, section), DataError)
    return notes


def _unread(sources: Mapping[str, Sequence[Source]], section: DataSection) -> list[str]:
    """Problems of columns that the run file names but no source uses."""
    layouts = [s.layout for several in sources.values() for s in several if s.layout is not None]
    read = {field for layout in layouts for field in layout.columns}
    unread = {f: c for f, c in named_columns(section).items() if layouts and f not in read}
    made = section.input_template is not None
    return [
        f"data.{field} = {column!r}: nothing reads it, as "
        + ("data.input_template makes the prompt. " if made else f"the rows are read as {layouts[0]}. ")
        + "Remove it."
        for field, column in unread.items()
    ]


def _layout(source: Source, form: DataForm, answered: bool, section: DataSection, template: Template) -> Layout:
    """The layout of a source. ``answered``: the policy answers its prompts."""
    chat = template.chat is not None
    whole = section.loss_on == "all" and not chat
    layout = recognise(
        form,
        source.columns,
        source.read(0),
        named=named_columns(section),
        chat=chat,
        prompt="made" if section.input_template is not None else "optional" if whole else "needed",
    )
    if section.input_template is not None:
        columns, first = [*source.columns, *layout.columns], source.read(0)
        made = _converted(first, layout)
        check_template(section.input_template, [*columns, *made], {**made, **first})
    if "text" in layout.columns and (section.template == "chat" or section.system is not None):
        key = "system" if section.system is not None else 'template = "chat"'
        raise DataError(f"has texts to continue, which are tokenised as they are; data.{key} is not for these")
    if "text" in layout.columns and answered:
        raise DataError("has texts to continue, without prompts to answer.")
    named = {"images", ONE_IMAGE} & {*layout.columns, *layout.columns.values()}
    if ONE_IMAGE in source.columns and not named:  # a run without images refuses rows that have one
        layout = replace(layout, columns={**layout.columns, "images": ONE_IMAGE})
    return layout


def _converted(columns: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """{field: value} of a row; empty if it cannot be read, which is reported when the row is used."""
    try:
        return layout.read(columns)
    except DataError:
        return {}
