"""Tools in the column of that name: every form of rows shows them to the model as the chat template writes them."""

from __future__ import annotations

import json
import re

import pytest
from rlhf.types import Row, Trajectory
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_testing.chat_templates import CHATML, HERMES


def tool(name):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": f"It can {name}.", "parameters": parameters}}


ADD, LOOK_UP = tool("add"), tool("look_up")
ASK, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
OTHER = {"role": "assistant", "content": "3"}
ROWS = {
    "prompts": {"prompt": [ASK]},
    "demonstrations": {"prompt": [ASK], "response": "2"},
    "pairs": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    "labels": {"prompt": [ASK], "response": [ANSWER], "label": True},
    "steps": {"prompt": "1+1?", "completions": ["a", "b"], "labels": [1, 0]},
}
TEMPLATE_WITH_BLOCKS = (
    "{{ tools | tojson }}{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<eos>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokens(template, form, columns):
    """The tokens and masks of each sequence of a row."""
    row = Row(columns, "rows", 0)
    if form == "prompts":
        return [(list(template.encode_prompt(row).ids), [])]
    return [(list(s.ids), list(s.loss_mask)) for s in template.encode(form, row).sequences]


@pytest.mark.parametrize(("template", "form"), [*((HERMES, form) for form in ROWS), (TEMPLATE_WITH_BLOCKS, "pairs")])
def test_rows_with_tools_are_those_of_a_run_with_these_tools_for_all_rows(tokenizer_with, template, form):
    plain = Template(tokenizer_with(template), DataSection())
    for tools in ([LOOK_UP, ADD], [{"name": "add", "description": "Adds.", "parameters": {}}]):
        option = Template(tokenizer_with(template), DataSection(template_kwargs={"tools": tools}))
        expected = tokens(option, form, ROWS[form])
        for value in (tools, json.dumps(tools)):
            assert tokens(plain, form, {**ROWS[form], "tools": value}) == expected
    bare = tokens(plain, form, ROWS[form])
    assert bare != expected
    for none in (None, "", [], "[]"):
        assert tokens(plain, form, {**ROWS[form], "tools": none}) == bare


def test_a_demonstration_with_tools_is_one_render_of_the_tokenizer(tokenizer_with):
    tokenizer = tokenizer_with(HERMES)
    ((ids, _),) = tokens(
        Template(tokenizer, DataSection()), "demonstrations", ROWS["demonstrations"] | {"tools": [ADD]}
    )
    text = tokenizer.apply_chat_template([ASK, ANSWER], tools=[ADD], tokenize=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.rstrip()


def test_a_tokenizer_may_have_another_template_for_tools(tokenizer_with):
    tokenizer = tokenizer_with({"default": CHATML, "tool_use": HERMES})
    row = {**ROWS["prompts"], "tools": [ADD]}
    ((ids, _),) = tokens(Template(tokenizer, DataSection()), "prompts", row)
    assert "<tools>" in tokenizer.decode(ids)
    ((ids, _),) = tokens(Template(tokenizer, DataSection()), "prompts", ROWS["prompts"])
    assert "<tools>" not in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "kwargs", "value", "words"),
    [
        (CHATML, {}, [ADD], "the chat template does not read tools"),
        (f"{{% if tools %}}{{{{ tools[0].function.name }}}}{{% endif %}}{CHATML}", {}, [ADD, LOOK_UP],
         "leaves out the tool 'look_up'"),
        (f"{{% for t in tools or [] %}}{{{{ t.function.name }}}}{{% endfor %}}{CHATML}", {}, [ADD["function"]],
         r"column 'tools': the chat template refuses the tools: Undefined.* only as \{type: function, function: "),
        (HERMES, {"tools": [ADD]}, [ADD], r"data\.template_kwargs\.tools"),
        (HERMES, {}, "[{", "JSON as text"),
        (HERMES, {}, {"add": 1}, "must be a list of tools"),
        (HERMES, {}, [ADD, "look_up"], "tool 1: must be .* got str 'look_up'"),
        (HERMES, {}, [{"type": "function", "function": {}}], "tool 0: must be"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_shown_are_refused_with_the_row(refusal, tokenizer_with, template, kwargs, value, words):
    good, bad = (ROWS["demonstrations"] | {"tools": tools} for tools in ([], value))
    message = refusal(tokenizer_with(template), "demonstrations", [good], bad, template_kwargs=kwargs)
    assert re.search(words, message)


def test_rows_of_a_parquet_file_have_no_arguments_of_other_tools(read, tokenizer_with):
    text = tool("text")
    text["function"]["parameters"]["properties"] = {"b": {"type": "string"}}
    rows = [ROWS["demonstrations"] | {"tools": [tools]} for tools in (ADD, text)]
    option = Template(tokenizer_with(HERMES), DataSection(template_kwargs={"tools": [text]}))
    _, (_, example) = read(tokenizer_with(HERMES), "demonstrations", rows, "parquet")
    expected = tokens(option, "demonstrations", ROWS["demonstrations"])
    assert [list(example.sequences[0].ids)] == [ids for ids, _ in expected]


def test_pairs_of_openais_api_and_of_ms_swift_are_those_of_a_prompt_and_two_answers(read, refusal, tokenizer_with):
    tools, pairs = {"tools": [ADD]}, []
    expected = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER], **tools}
    rows = [
        {"input": {"messages": [ASK], **tools}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]},
        {"messages": [ASK, ANSWER], "rejected_response": "3", **tools},
    ]
    for row, bad in ((expected, {"rejected": 3}), (rows[0], {"input": "1+1?"}), (rows[1], {"messages": []})):
        _, (example,) = read(tokenizer_with(HERMES), "pairs", [row])
        pairs.append([(list(s.ids), list(s.loss_mask)) for s in example.sequences])
        refusal(tokenizer_with(HERMES), "pairs", [row], row | bad)
    assert pairs[0] == pairs[1] == pairs[2]


def test_a_rollout_with_tools_of_its_own_does_not_show_those_of_rows(tokenizer_with):
    template = Template(tokenizer_with(HERMES), DataSection())
    template.shows_tools = False
    row = {**ROWS["prompts"], "tools": [ADD]}
    assert tokens(template, "prompts", row) == tokens(template, "prompts", ROWS["prompts"])


def test_messages_alone_are_not_the_recorded_prompt_of_a_row_with_tools(tokenizer_with):
    """A row that an export made of them would lose the tools."""
    template = Template(tokenizer_with(HERMES), DataSection())
    for tools, prompt in (([ADD], None), ([], [ASK])):
        row = Row({**ROWS["prompts"], "tools": tools}, "rows", 0)
        assert template.prompt_of(Trajectory(row, [template.encode_prompt(row)], (0, 0))) == prompt


@pytest.mark.parametrize("form", ["demonstrations", "pairs"])
def test_answers_of_the_data_follow_the_tools_of_their_row_whatever_the_rollout_shows(tokenizer_with, form):
    """Such as demonstrations of calls, in a run that is evaluated with the rollout ``tools``."""
    template = Template(tokenizer_with(HERMES), DataSection())
    row = {**ROWS[form], "tools": [ADD]}
    expected = tokens(template, form, row)
    template.shows_tools = False
    assert tokens(template, form, row) == expected
    if form == "demonstrations":
        ((ids, mask),) = expected
        prompt, answer = template.encode_answer(Row(row, "rows", 0))
        assert [*prompt.ids, *answer.ids] == ids[: len(prompt.ids) + len(answer.ids)]
        assert len(prompt.ids) == mask.index(True)
