"""Rows as published sets have them: what the model sees of each, from jsonl and parquet; what is asked, and noted."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import ConfigError, DataError

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM, B = {"role": "system", "content": "s"}, {**A, "content": "b"}
TALK = json.dumps([SYSTEM, Q, A])
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PROMPT, ANSWERED = "<|user|>q<eos><|assistant|>", "<|user|>q<eos><|assistant|>a<eos>"
INSTRUCTED = "<|system|>s<eos>"
ANSWERED_TWICE = f"{ANSWERED}<|user|>q2<eos><|assistant|>a2<eos>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMES = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
CALLS = (
    NAMES + "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %};{% endfor %}"
)
REQUEST = {"input": [{"role": "developer", "content": "s"}, Q], "instructions": None, "tools": None}


@pytest.fixture
def read(load):
    """The data of one row."""
    return lambda tokenizer, form, row, *kind, **section: load(tokenizer, form, [row], *kind, **section)


def text(data, form):
    """What the model sees of the first row."""
    (row,) = data.take(1)
    template = data.template
    ids = template.encode_prompt(row).ids if form == "prompts" else template.encode(form, row).sequences[0].ids
    return template.tokenizer.decode(list(ids))


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        # conversations in JSON text: orca-agentinstruct, SWE-smith-trajectories
        ("demonstrations", {"messages": TALK}, INSTRUCTED + ANSWERED),
        ("demonstrations", {"conversations": json.dumps(TURNS)}, ANSWERED),
        ("prompts", {"prompt": json.dumps([SYSTEM, Q]), "answer": "1"}, INSTRUCTED + PROMPT),
        # answers as JSON text of messages, but not an answer that is other JSON
        ("pairs", {"prompt": "q", "chosen": json.dumps([A]), "rejected": json.dumps([B])}, ANSWERED),
        ("pairs", {"prompt": "q", "chosen": json.dumps([Q, A]), "rejected": json.dumps([Q, B])}, ANSWERED),
        ("demonstrations", {"prompt": "q", "response": json.dumps([A])}, ANSWERED),
        ("demonstrations", {"prompt": "q", "response": '[{"role": 1}]'}, ANSWERED.replace("a<", '[{"role": 1}]<')),
        ("demonstrations", {"prompt": "q", "response": '[{"role": {}, "content": 1}]'},
         ANSWERED.replace("a<", '[{"role": {}, "content": 1}]<')),
        # SWE-rebench-openhands-trajectories
        ("demonstrations", {"trajectory": [SYSTEM, Q, A], "resolved": 1}, INSTRUCTED + ANSWERED),
        # Capybara, the Cauldron and FineVision, COIG
        ("demonstrations", {"conversation": [{"input": "q", "output": "a"}, {"input": "q2", "output": "a2"}]},
         ANSWERED_TWICE),
        ("demonstrations", {"texts": [{"user": "q", "assistant": "a", "source": "x"}]}, ANSWERED),
        ("demonstrations", {"instruction": "do", "conversations": [{"question": "q", "answer": "a"}]}, ANSWERED),
        # the conversation of a problem, beside its reference: OpenR1-Math-220k, NuminaMath-CoT, Magpie-Pro, KodCode
        ("demonstrations", {"problem": "q", "solution": "no", "answer": "no", "messages": [Q, A]}, ANSWERED),
        ("demonstrations", {"instruction": "q", "response": "a", "conversations": TURNS}, ANSWERED),
        ("prompts", {"problem": "q", "solution": "no", "messages": [Q, A]}, PROMPT),
        ("prompts", {"question": "q", "solution": "no", "conversations": TURNS}, PROMPT),
        # an output before a reference (OpenCodeReasoning); other names (aya, firefly, medical-o1-reasoning-SFT)
        ("demonstrations", {"input": "q", "output": "a", "solution": "no"}, ANSWERED),
        ("demonstrations", {"inputs": "q", "targets": "a"}, ANSWERED),
        ("demonstrations", {"kind": "no", "input": "q", "target": "a"}, ANSWERED),
        ("demonstrations", {"Question": "q", "Response": "a"}, ANSWERED),
        ("prompts", {"ID": "no", "Problem": "q", "Answer": 1}, PROMPT),
        # the context of a question: sql-create-context, SQuAD; OlympiadBench has null in some rows, HotpotQA a table
        ("demonstrations", {"question": "q", "context": "c", "answer": "a"}, ANSWERED.replace("q", "q\n\nc")),
        ("prompts", {"question": "q", "context": None, "answer": "1"}, PROMPT),
        ("prompts", {"question": "q", "context": {"title": ["no"]}, "answer": "1"}, PROMPT),
        # NeMo Gym and Nemotron-RL: the request, not the question that it was made of
        (
            "prompts",
            {"question": "no", "responses_create_params": REQUEST, "expected_answer": "1"},
            INSTRUCTED + PROMPT,
        ),
        ("prompts", {"system": "no", "responses_create_params": {"input": "q", "instructions": "s"}},
         INSTRUCTED + PROMPT),
    ],
)  # fmt: skip
def test_what_the_model_sees(read, chat, form, row, expected):
    for kind in ("jsonl", "parquet"):
        assert text(read(chat, form, row, kind), form) == expected, kind


def test_tools_and_calls_in_text(read, tokenizer_with):
    """Toucan and Open-SWE-Traces; NeMo Gym's requests with tools and earlier calls."""
    call = {"type": "function_call", "name": "f", "arguments": '{"x": 1}', "call_id": "c"}
    items = [Q, {"type": "reasoning", "summary": []}, call, {"type": "function_call_output", "output": "5"}, Q]
    flat = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    row = {"responses_create_params": {"input": items, "tools": [flat]}}
    assert text(read(tokenizer_with(CALLS), "prompts", row), "prompts") == "<f>user:q;assistant:f(1);tool:5;user:q;"
    for tools in (json.dumps(TOOLS), [json.dumps(TOOLS[0])]):
        data = read(tokenizer_with(CALLS), "demonstrations", {"messages": json.dumps([Q, A]), "tools": tools})
        assert text(data, "demonstrations").startswith("<f>user:q;assistant:a")


@pytest.mark.parametrize(
    "row",
    [
        [{"from": "human", "value": "q"}, {"from": "assistant", "ground_truth": {"value": "1"}}],
        {"0": {"from": "human", "value": "q"}, "1": {"from": "assistant", "ground_truth": {"value": "1"}}},
    ],
)
def test_rows_that_are_lists_have_numbers_as_columns(read, chat, row):
    """Open-Reasoner-Zero, as its file is and as ``datasets`` reads it."""
    data = read(chat, "prompts", row, "json", prompt="0")
    assert text(data, "prompts") == PROMPT
    assert data.take(1)[0]["1.ground_truth.value"] == "1"


def test_values_in_the_json_text_of_a_column(read, chat):
    """INTELLECT-2-RL, SYNTHETIC-2."""
    data = read(chat, "prompts", {"prompt": "q", "verification_info": '{"ground_truth": "1"}', "metadata": "{x"})
    (row,) = data.take(1)
    assert row["verification_info.ground_truth"] == "1"
    assert row.get("metadata.x") is None
    assert data.sources["train"][0].has("verification_info.ground_truth")


@pytest.mark.parametrize(
    ("row", "first", "column"),
    [
        ({"question": "q", "solution": "no", "thinking_trajectories": ["t"], "attempt": "a"}, "attempt", "solution"),
        ({"question": "q", "solution": "no", "r1_generation": "a", "qwq_critique": "c"}, "r1_generation", "solution"),
        ({"question": "q", "answer": "no", "deepseek_reasoning": "a"}, "deepseek_reasoning", "answer"),
    ],
)
def test_a_reference_beside_what_was_generated_is_asked_for(read, chat, row, first, column):
    """s1K, OpenCodeReasoning-2: the solution is not what the policy should learn to say."""
    with pytest.raises(DataError, match=rf"in several ways: \(1\) .* response = '{first}'; \(2\) .*'{column}'"):
        read(chat, "demonstrations", row)
    assert text(read(chat, "demonstrations", row, response=first), "demonstrations") == ANSWERED
    assert text(read(chat, "prompts", row), "prompts") == PROMPT


def test_reasoning_that_the_response_does_not_hold_is_noted(read, chat):
    """medical-o1-reasoning-SFT; in Llama-Nemotron-Post-Training-Dataset the column is a switch."""
    for value, notes in (("First, think of it.", 0), ("First, I think of it again.", 1)):
        data = read(chat, "demonstrations", {"Question": "q", "Complex_CoT": value, "Response": "a"})
        says = "'Complex_CoT', which is not part of the response: set data.reasoning to it"
        assert len([n for n in data.notes if says in n]) == notes


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.FIELD %}<think>{{ m.FIELD }}</think>{% endif %}{{ m.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
S1K = {"question": "q", "solution": "no", "deepseek_thinking_trajectory": "t", "deepseek_attempt": "a"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_column_of_its_own(read, tokenizer_with, field):
    """s1K-1.1, OpenThoughts-114k; null or empty where a row has none."""
    tokenizer = tokenizer_with(THINKS.replace("FIELD", field))
    columns = {"response": "deepseek_attempt", "reasoning": "deepseek_thinking_trajectory"}
    prompt, thought = "<user>q<eos><assistant>", "<think>t</think>"
    for value, thinking in (("t", thought), ("", ""), (None, "")):
        row = {**S1K, "deepseek_thinking_trajectory": value}
        data = read(tokenizer, "demonstrations", row, **columns)
        assert text(data, "demonstrations") == f"{prompt}{thinking}a<eos>"
        (sequence,) = data.template.encode("demonstrations", data.take(1)[0]).sequences
        trained = [i for i, on in zip(sequence.ids, sequence.loss_mask, strict=True) if on]
        assert data.template.tokenizer.decode(trained) == f"{thinking}a<eos>"
        assert not [n for n in data.notes if "which is not part" in n]
    row = {"instruction": "q", "input": "c", "output": [A], "deepseek_reasoning": "t", "answer": "no"}
    data = read(tokenizer, "demonstrations", row, reasoning="deepseek_reasoning", response="output")
    assert text(data, "demonstrations") == f"{prompt}{thought}a<eos>".replace("q", "q\n\nc")
    row = {"problem": "q", "deepseek_reasoning": "t", "deepseek_solution": "a", "solution": "no"}
    columns = {"response": "deepseek_solution", "reasoning": "deepseek_reasoning"}
    assert text(read(tokenizer, "demonstrations", row, **columns), "demonstrations") == f"{prompt}{thought}a<eos>"


def test_reasoning_that_would_be_lost_is_refused(read, chars, chat, tokenizer_with):
    thinks, row = (
        tokenizer_with(THINKS.replace("FIELD", "reasoning_content")),
        {"prompt": "q", "response": "a", "r": "t"},
    )
    for tokenizer, problem in ((chars, "no chat template is used"), (chat, "the chat template writes none of reas")):
        with pytest.raises(ConfigError, match=f"data.reasoning: {problem}"):
            read(tokenizer, "demonstrations", row, reasoning="r")
    for other, reasoning, problem in (
        (row, "s", r"has no column 's' for reasoning in addition to prompt, response"),
        (row, "response", r"has no column 'response' for reasoning in addition to prompt, response"),
        (
            {"messages": [Q, A], "r": "t"},
            "r",
            r"data.reasoning = 'r' has no effect, because the rows are read as messages",
        ),
    ):
        with pytest.raises(DataError, match=problem):
            read(thinks, "demonstrations", other, reasoning=reasoning)
    for other, problem in (
        ({**row, "r": ["t"]}, "column 'r': must be text, got list"),
        ({**row, "response": [{**A, "reasoning_content": "u"}]}, "its own 'reasoning_content', but data.reasoning"),
    ):
        data = read(thinks, "demonstrations", other, reasoning="r")
        assert problem in data.judge(data.sources["train"][0][0]).text


def test_naming_another_column_loses_neither_context_nor_system_message(read, chat):
    row = {"system": "s", "question": "q", "context": "c", "answer": "no", "other": "a"}
    data = read(chat, "demonstrations", row, response="other")
    assert text(data, "demonstrations") == INSTRUCTED + ANSWERED.replace("q", "q\n\nc")
    data = read(chat, "demonstrations", row, prompt="question", response="other")
    assert text(data, "demonstrations") == ANSWERED
    assert "has the column 'system', which is not read if the run file names the prompt" in data.notes[-1]


def test_what_is_refused_says_the_option(read, chat, chars):
    with pytest.raises(DataError, match=r"no column 'prompt'.* 'dialog' holds conversations: --data\.messages dialog"):
        read(chat, "demonstrations", {"dialog": [Q, A]})
    advice = (
        r"need a chat template, but none .* data\.chat_template to a file with one\. "
        r"'dialog' holds conversations: --data\.messages dialog"
    )
    with pytest.raises(DataError, match=advice):
        read(chars, "demonstrations", {"dialog": [Q, A]})
    pair = {"chosen": [Q, A], "rejected": [Q, B]}  # Skywork-Reward-Preference, trl-lib/ultrafeedback_binarized
    for form, problem in (("prompts", "no column 'prompt'"), ("demonstrations", "no column 'prompt' or 'response'")):
        with pytest.raises(DataError, match=rf"{problem}; .* 'chosen' holds conversations: --data\.messages chosen"):
            read(chat, form, pair)
        assert text(read(chat, form, pair, messages="chosen"), form) == (PROMPT if form == "prompts" else ANSWERED)
    with pytest.raises(DataError, match="These are pairs: make two rows of each"):  # ultrafeedback_binarized for KTO
        read(chat, "labels", {"prompt": "q", "chosen": [Q, A], "rejected": [Q, A], "messages": [Q, A]})
    assert text(read(chat, "demonstrations", {"dialog": [Q, A]}, messages="dialog"), "demonstrations") == ANSWERED
    with pytest.raises(DataError, match="has no column 'prompt' or 'response'"):  # a message of oasst1, not a text
        read(chat, "demonstrations", {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"})
    for row, problem in (
        ({"responses_create_params": {"tools": []}}, "must be a request with its input"),
        ({"responses_create_params": {"input": ["q"]}}, "must be a request with its input"),
        ({"responses_create_params": {"input": "q", "tools": ["f"]}}, "tool 0: must be {type, function: "),
        ({"responses_create_params": {"input": "q", "tools": 1}}, "must be a list of tools"),
    ):
        with pytest.raises(DataError, match=problem):
            read(chat, "prompts", row).take(1)


@pytest.mark.parametrize("choices", [{"options": ["x"]}, {"choices": {"text": ["x"], "label": ["A"]}}])
def test_choices_that_the_prompt_does_not_show_are_noted(read, chat, choices):
    """MMLU, ARC, MedQA; a template of input shows them."""
    note = "which is not part of the prompt: data.input_template can add it"
    assert note in read(chat, "prompts", {"question": "q", **choices}).notes[-1]
    assert not any(note in n for n in read(chat, "prompts", {"question": "q\nA) x", **choices}).notes)
    data = read(chat, "prompts", {"question": "q", "options": ["x"]}, input_template="{question} {options[0]}")
    assert text(data, "prompts") == PROMPT.replace("q", "q x")
    assert not any(note in n for n in data.notes)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("prompts", {"target": 98, "nums": [1, 2]}),  # Countdown-Tasks-3to4
        ("prompts", {"target": 98, "messages": [Q, A], "prompt": "no"}),
        ("demonstrations", {"target": 98, "response": "a", "messages": [Q, A]}),
        ("pairs", {"target": 98, "chosen": "a", "rejected": "b"}),
        ("pairs", {"target": 98, "chosen": [A], "rejected": [{**A, "content": "b"}]}),
        ("steps", {"target": 98, "steps": ["a"], "labels": [True]}),
    ],
)
def test_a_template_of_input_makes_the_users_message(read, chat, form, row):
    data = read(chat, form, {**row, "system": "s"}, input_template="To {target}.")
    assert text(data, form).startswith(INSTRUCTED + "<|user|>To 98.<eos><|assistant|>")


def test_a_template_of_input_is_not_for_whole_conversations(read, chat):
    row = {"q": "q", "chosen": [Q, A], "rejected": [Q, {**A, "content": "b"}]}
    with pytest.raises(DataError, match="no known layout of the form 'pairs'"):
        read(chat, "pairs", row, input_template="{q}")
