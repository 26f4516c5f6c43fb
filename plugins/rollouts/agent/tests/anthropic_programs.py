"""Agents that use the anthropic package as it is."""

import pytest
from anthropic import Anthropic, BadRequestError
from ask import add, note

ADD = {"name": "add", "description": "Adds two numbers.", "input_schema": add()["function"]["parameters"]}


def messages(task, base_url, api_key):
    """Four turns with tools, one of them streamed. The address and the key are in the environment."""
    client = Anthropic()
    history = [{"role": "user", "content": "1+2?"}]
    fields = {"model": "policy", "max_tokens": 12, "system": "Be brief.", "tools": [ADD]}
    call_count = 0
    for number in range(30):
        if number > 3 and call_count:
            break
        if number == 2:
            history.append({"role": "system", "content": [{"type": "text", "text": "Be short."}]})
            with client.messages.stream(messages=history, thinking={"type": "adaptive"}, **fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=history, **fields)
        call_count += len(answer.content) and answer.content[-1].type == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        note(task, answer.stop_reason, len(calls), answer.usage.input_tokens, answer.usage.output_tokens)
        history.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(3)} for call in calls]
        history.append({"role": "user", "content": results or "Go on."})
    with pytest.raises(BadRequestError, match="tool_choice is 'any'") as refused:
        client.messages.create(messages=history, tool_choice={"type": "any"}, **fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(BadRequestError, match="thinking is"):
        client.messages.create(messages=history, thinking={"type": "enabled", "budget_tokens": 1024}, **fields)
    with pytest.raises(BadRequestError, match="blocks text and tool_result"):
        client.messages.create(messages=[{"role": "user", "content": [{"type": "image"}]}], **fields)
    pictures = [{"type": "image", "source": {"type": "url", "url": "x"}}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": pictures}
    for lost in ({"role": "system", "content": pictures}, {"role": "user", "content": [result]}):
        with pytest.raises(BadRequestError, match=r"messages\[1\]\.content is .*; allowed: a string or a list"):
            client.messages.create(messages=[history[0], lost], **fields)
    for wrong in ({"type": "text"}, {"type": "tool_use", "id": "a", "name": "add", "input": None}):
        asked_wrongly = [history[0], {"role": "assistant", "content": [wrong]}, history[0]]
        with pytest.raises(BadRequestError, match=r"messages\[1\].(text|input) is None; allowed: "):
            client.messages.create(messages=asked_wrongly, **fields)
    stopped = client.messages.create(
        messages=[{"role": "user", "content": "x"}], model="policy", max_tokens=12, stop_sequences=["e", "i"]
    )
    note(task, stopped.stop_reason, stopped.stop_sequence)
    return 0.5
