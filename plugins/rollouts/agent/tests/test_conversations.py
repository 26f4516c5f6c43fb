"""What becomes of a sample's conversations: sequences whose tokens are those that were sampled, once each."""

from __future__ import annotations

import pytest
from rlhf_testing.chat_templates import HERMES

from tests.laboratory import CALL

SAYS = """
def say(messages, **fields):
    status, answer = ask(base_url, api_key, messages, **fields)
    assert status == 200, answer
    note(task, answer)
    return answer["choices"][0]["message"]

"""


def run(lab, program, wire, body, **settings):
    trajectory = lab.one(program(SAYS + body), {"wire": wire.path}, **settings)
    assert trajectory.status != "failed", trajectory.error
    texts = lab.text(trajectory)
    assert trajectory.info["rollout/sequences"] == len(texts)
    return trajectory, texts


def begun(trajectory):
    """{reason: how many sequences it begins}, as the sample reports them."""
    counts = {
        name.rpartition("/")[2]: n for name, n in trajectory.info.items() if name.startswith("rollout/sequences/")
    }
    assert sorted(counts) == ["again", "conversation", "reasoning", "rewritten", "template", "tools"]
    assert sum(counts.values()) == trajectory.info["rollout/sequences"] - 1
    return {reason: n for reason, n in counts.items() if n}


def test_a_tool_loop_is_one_sequence_of_the_tokens_that_were_sampled(lab, program, wire):
    body = """
messages = [USER]
for _ in range(4):
    message = say(messages, tools=[add()])
    for call in message.get("tool_calls") or []:  # as clients do
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    message = {"role": "assistant", "content": [{"type": "text", "text": message["content"] or ""}],
               "tool_calls": message.get("tool_calls"), "provider_specific_fields": {"x": 1}, "refusal": None}
    messages += [message, *replies(message)]
"""
    trajectory, [text] = run(lab, program, wire, body)
    assert [t.sampled for t in trajectory.turns] == [False, True] * 4
    assert '"name": "add", "arguments"' not in text
    assert '"name": "add",  "arguments"' in text
    assert text.count("<tool_response>\n3\n</tool_response>") == sum(
        len(a["choices"][0]["message"].get("tool_calls", [])) for [a] in wire()[:3]
    )
    call_count = sum(len(a["choices"][0]["message"].get("tool_calls") or []) for [a] in wire())
    assert call_count == trajectory.info["rollout/calls/add"] + trajectory.info["rollout/calls_unknown"] > 0
    assert begun(trajectory) == {}
    used = [a["usage"] for [a] in wire()]
    assert [u["prompt_tokens"] for u in used[1:]] > [u["total_tokens"] for u in used[:-1]]


def test_calls_that_cannot_be_read_are_counted(laboratories, program, wire):
    lab = laboratories(HERMES, CALL.replace("}}", "}"))
    body = """
messages = [USER]
for _ in range(4):
    message = say(messages, tools=[add()])
    messages += [message, *replies(message)]
"""
    trajectory, _ = run(lab, program, wire, body)
    messages = [answer["choices"][0]["message"] for [answer] in wire()]
    texts = [message.get("content") or message.get("reasoning_content") or "" for message in messages]
    assert trajectory.info["rollout/calls_unreadable"] == sum("<tool_call>" in text for text in texts) > 0
    assert not any(message.get("tool_calls") for message in messages)
    assert trajectory.info["rollout/calls/add"] == 0


def test_parallel_calls(lab, program, wire):
    body = """
while True:
    message = say([USER], tools=[add()])
    if len(message.get("tool_calls") or []) > 1: break
results = [{"role": "tool", "tool_call_id": c["id"], "content": str(n)} for n, c in enumerate(message["tool_calls"])]
say([USER, message, *results], tools=[add()])
"""
    _, texts = run(lab, program, wire, body)
    *_, entry, _ = wire()
    ids = [c["id"] for c in entry[0]["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert "<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>" in texts[-1]


def test_the_first_call_is_given_where_parallel_calls_are_off(lab, program, wire):
    body = """
for _ in range(40):
    message = say([USER], tools=[add()], parallel_tool_calls=False)
    if message.get("tool_calls"): say([USER, message, *replies(message)], tools=[add()], parallel_tool_calls=False)
"""
    trajectory, _ = run(lab, program, wire, body)
    turns = [turn for turn in trajectory.turns if turn.sampled and turn.text.count("</tool_call>") > 1]
    assert turns, "the policy did make several calls"
    counts = [len(answer["choices"][0]["message"].get("tool_calls") or []) for [answer] in wire()]
    assert max(counts) == 1
    assert sum(counts) == trajectory.info["rollout/calls/add"]
    assert begun(trajectory) == {"again": 39}, "an answer of which the client gets one call is still continued"


def test_calls_stay_text_where_the_request_offers_no_tools(lab, program, wire):
    body = """
messages = [USER]
for _ in range(12):
    message = say(messages)
    messages += [message, *replies(message)]
"""
    trajectory, _ = run(lab, program, wire, body)
    messages = [answer["choices"][0]["message"] for [answer] in wire()]
    assert any(CALL in message["content"] for message in messages)
    assert [m["content"] for m in messages] == [turn.text for turn in trajectory.turns if turn.sampled]
    assert not any("tool_calls" in message for message in messages)
    assert trajectory.info["rollout/calls_unknown"] == 0
    assert begun(trajectory) == {}


def test_a_rewritten_answer_begins_a_sequence_and_nothing_is_trained_on_twice(lab, program, wire):
    body = """
first = say([USER])
second = say([USER, first, {"role": "user", "content": "And?"}])
edited = {"role": "assistant", "content": (second["content"] or "") + "</code>"}
say([USER, first, {"role": "user", "content": "And?"}, edited, {"role": "user", "content": "Go."}])
"""
    trajectory, texts = run(lab, program, wire, body)
    assert [t.sampled for t in trajectory.turns] == [False, True, False, True, False, True]
    assert [t.fresh for t in trajectory.turns] == [False] * 4 + [True, False]
    first = trajectory.turns[:2]
    ids = [i for t in first for i in t.ids]
    assert list(trajectory.turns[4].ids)[: len(ids)] == ids, "its tokens are context as they were sampled"
    assert begun(trajectory) == {"rewritten": 1}
    assert len(texts) == 2


def test_compaction_and_a_call_without_tools(lab, program, wire):
    body = """
message = say([USER], tools=[add()])
messages = [USER, message, *replies(message)]
say(messages + [{"role": "user", "content": "Summarise."}])
say([{"role": "user", "content": "Summary: 3."}], tools=[add()])
"""
    trajectory, texts = run(lab, program, wire, body)
    assert len(texts) == 3
    assert [t.sampled for t in trajectory.turns] == [False, True] * 3
    assert ["<tools>" in text for text in texts] == [True, False, True]
    assert begun(trajectory) == {"tools": 1, "conversation": 1}


def test_a_subagent_has_a_sequence_and_the_last_answer_comes_last(lab, program, wire):
    body = """
main, sub = [USER], [{"role": "user", "content": "Sub."}]
for _ in range(2):
    for messages in (main, sub):
        message = say(messages)
        messages += [message, {"role": "user", "content": "Go on."}]
say(main)
"""
    trajectory, texts = run(lab, program, wire, body)
    assert ["Sub." in text for text in texts] == [True, False]
    assert begun(trajectory) == {"conversation": 1}
    assert [t.sampled for t in trajectory.turns] == [False, True] * 5
    assert wire()[-1][0]["usage"]["completion_tokens"] == len(trajectory.turns[-1].ids)


def test_overlapping_requests(lab, program, wire):
    body = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    said = list(pool.map(lambda n: say([{"role": "user", "content": str(n)}]), range(4)))
say([{"role": "user", "content": "2"}, said[2], {"role": "user", "content": "x"}])
"""
    trajectory, texts = run(lab, program, wire, body)
    assert len(texts) == 4
    assert sum(t.sampled for t in trajectory.turns) == 5


def test_a_rewritten_message_of_the_user_begins_a_sequence(lab, program, wire):
    body = """
first = say([USER])
second = say([USER, first, {"role": "user", "content": "And?"}])
say([USER, first, {"role": "user", "content": "Or?"}, second, {"role": "user", "content": "Go."}])
say([{**USER, "content": "Other."}], n=2)
say([USER])
"""
    trajectory, _ = run(lab, program, wire, body)
    assert begun(trajectory) == {"again": 2, "conversation": 1, "rewritten": 1}


def test_two_continuations_of_one_answer(lab, program, wire):
    body = """
first = say([USER])
for word in "ab":
    say([USER, first, {"role": "user", "content": word}])
"""
    trajectory, texts = run(lab, program, wire, body)
    assert len(texts) == 2
    assert sum(t.sampled for t in trajectory.turns) == 3
    assert begun(trajectory) == {"rewritten": 1}


DROPS = """
while True:
    message = say([USER], tools=[add()])
    if message.get("reasoning_content") and message.get("tool_calls"): break
if DROP: del message["reasoning_content"]
after = replies(message) if TOOLS else [*replies(message), {"role": "user", "content": "Go on."}]
say([USER, message, *after], tools=[add()])
"""


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("tools", [True, False])
def test_reasoning_that_a_client_drops_is_treated_as_the_template_treats_it(thinking, program, wire, drop, tools):
    """Among results of tools the template keeps it, so its tokens stay. Once a user speaks, the template drops it."""
    trajectory, texts = run(thinking, program, wire, f"DROP, TOOLS = {drop}, {tools}\n{DROPS}")
    last = max(n for n, turn in enumerate(trajectory.turns) if turn.sampled)
    assert trajectory.turns[last - 1].fresh == (not tools)
    if not tools:
        assert begun(trajectory)["reasoning"] == 1
    prefix = texts[-1].split("<tool_response>")[0]
    assert ("<|im_start|>assistant\n<think>\nhm" in prefix) == tools


def test_reasoning_that_was_dropped_long_ago_is_not_forgotten(thinking, program, wire):
    body = """
while True:
    message = say([USER], tools=[add()])
    if message.pop("reasoning_content", "") and message.get("tool_calls"): break
messages = [USER, message, *replies(message)]
while True:
    message = say(messages, tools=[add()])
    if not message.get("reasoning_content"): break
say([*messages, message, {"role": "user", "content": "x"}], tools=[add()])
"""
    trajectory, texts = run(thinking, program, wire, body)
    assert [n for n, t in enumerate(trajectory.turns) if t.sampled][-1] == len(trajectory.turns) - 1
    assert trajectory.turns[-2].fresh
    assert "<|im_start|>assistant\n<think>\nhm" not in texts[-1].rpartition("<|im_start|>")[0]


def test_reasoning_that_a_client_changes_is_another_answer(thinking, program, wire):
    body = """
while True:
    message = say([USER], tools=[add()])
    if message.get("reasoning_content") and message.get("tool_calls"): break
message["reasoning_content"] = "other"
say([USER, message, *replies(message)], tools=[add()])
"""
    trajectory, texts = run(thinking, program, wire, body)
    assert "other" in texts[-1]
    assert begun(trajectory)["reasoning"] == 1
