"""An agent as it could stand in any project: it answers customers' questions with a tool. It knows nothing of rlhf."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "The price of an item, or the item that has replaced it.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


async def serve(question: str, catalogue: dict[str, str], client: AsyncOpenAI, turns: int = 5) -> str:
    """The agent's answer; "" if it gives none in so many turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            item = str(json.loads(call.function.arguments).get("item"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": catalogue.get(item, "not found")})
    return ""


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """What the rollout calls: 1 if the agent says the price."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    return float(await serve(task["prompt"], task["catalogue"], client) == task["price"])
