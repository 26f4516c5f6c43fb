"""Agents that use the openai package as it is."""

import json

import pytest
from ask import add, note
from openai import AsyncOpenAI, BadRequestError, OpenAI

ASK = {"role": "user", "content": "1+2?"}
FLAT = {"type": "function", **add()["function"]}


def chat(task, base_url, api_key):
    """Two turns with tools, one of them streamed, each with its log-probs."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [ASK]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[add()], logprobs=True)
        _record(task, answer.choices[0].logprobs, answer.usage)
        message = answer.choices[0].message
        messages.append(message)
        messages += _results(message) or [ASK]
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=[add()], logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    _record(task, completion.choices[0].logprobs, completion.usage)
    client.chat.completions.create(model="policy", messages=[*messages, completion.choices[0].message, ASK])
    assert [m.id for m in client.models.list()] == ["policy"]
    with pytest.raises(BadRequestError, match="n is 64"):
        client.chat.completions.create(model="policy", messages=messages, n=64)
    return 0.5


async def responses(task, base_url, api_key):
    """The other API, streamed and not."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    items = [dict(ASK)]
    for _ in range(2):
        answer = await client.responses.create(model="policy", input=items, tools=[FLAT], instructions="Be brief.")
        note(task, answer.usage.input_tokens, answer.usage.output_tokens)
        items += [item.model_dump() for item in answer.output]
        items += _outputs(answer) or [dict(ASK)]
    async with client.responses.stream(model="policy", input=items, tools=[FLAT], instructions="Be brief.") as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert sum(kind == "response.output_item.done" for kind in kinds) == len(response.output)
    items += [{"type": "item_reference", "id": item.id} for item in response.output]
    items += _outputs(response) or [dict(ASK)]
    await client.responses.create(model="policy", input=items, tools=[FLAT], instructions="Be brief.")
    with pytest.raises(BadRequestError, match=r"input\[0\]\.id is 'msg_1'; allowed: the id of an item"):
        await client.responses.create(model="policy", input=[{"type": "item_reference", "id": "msg_1"}])


def _record(task, logprobs, usage):
    ids = [int(t.token.removeprefix("token_id:")) for t in logprobs.content]
    assert usage.completion_tokens == len(ids)
    note(task, ids, [t.logprob for t in logprobs.content])


def _results(message):
    calls = message.tool_calls or []
    for call in calls:
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    return [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]


def _outputs(answer):
    calls = [item for item in answer.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
