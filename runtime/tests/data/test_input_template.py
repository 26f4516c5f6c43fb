"""``data.input_template`` is held against the columns before the first row is used."""

from __future__ import annotations

import copy
import re

import pytest
from rlhf.errors import ConfigError, DataError
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.input_template import template_columns

ROWS = [{"question": "1+1", "response": "2"}, {"question": "2+2", "response": "4"}]


@pytest.fixture
def read(load, chars):
    return lambda template, rows=ROWS, form="demonstrations", **section: load(
        chars, form, rows, input_template=template, **section
    )


def test_columns_are_found_at_any_place_of_the_template():
    assert template_columns("{{}} {a} {b!r:>{width}} {c[0]} {d.e} {a}") == ("a", "b", "width", "c", "d")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{}",
            "has the placeholder {} without a column name. Write a name, e.g. {question}. Literal braces are written",
        ),
        ("Q: {0}", "has the placeholder {0} without a column name"),
        ("{question} {[0]}", "has the placeholder {[0]} without a column name"),
        ("{question", "is not a format string: expected '}' before end of string. Literal braces are written {{"),
        ("{question!z}", "{question!z} has an unknown conversion; allowed: !r, !s, !a."),
        ("Q:", "names no column, so every row would have the same prompt"),
        ("{{question}}", "names no column, so every row would have the same prompt"),
    ],
)
def test_an_invalid_template_is_refused_before_rows_are_read(read, template, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read(template)


@pytest.mark.parametrize("drop", ["error", "drop"])
@pytest.mark.parametrize("form", ["demonstrations", "prompts"])
def test_an_unknown_column_is_refused_for_all_rows_at_once(read, form, drop):
    problem = r"has no column 'questoin', which data.input_template = .* names; its columns: question, response.*"
    with pytest.raises(DataError, match=problem + "Did you mean 'question'") as error:
        read("Q: {questoin}", form=form, bad_rows=drop)
    assert "bad_rows" not in str(error.value), "leaving out every row is no advice"


@pytest.mark.parametrize("template", ["{question.x}", "{question:d}", "{question[x]}"])
def test_a_format_that_values_do_not_take_shows_in_the_first_row(read, template):
    with pytest.raises(DataError, match=r"as its first row shows: data.input_template = .* Correct the template"):
        read(template, bad_rows="drop")


def test_a_column_that_some_rows_lack_makes_those_rows_bad(read):
    rows = [{"question": "a", "response": "b"}, {"question": "a", "hint": "c", "response": "b"}]
    data = read("{question}{hint}", rows, bad_rows="drop")
    assert [r["hint"] for r in data.take(1)] == ["c"]
    with pytest.raises(DataError, match=r"line 1: .* the row has no column 'hint'.*Correct the row"):
        read("{question}{hint}", rows).take(1)


def test_a_chat_template_that_writes_no_message_is_refused(tmp_path, chat):
    (tmp_path / "t.jinja").write_text("{}")
    with pytest.raises(ConfigError, match=r"the chat template writes '{}' for every user message"):
        TrainData(DataSection(chat_template=str(tmp_path / "t.jinja")), copy.deepcopy(chat), "prompts", 0)
