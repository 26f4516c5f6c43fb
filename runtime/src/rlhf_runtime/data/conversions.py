"""Conversions from common layouts of data sets to the fields that templates read: one pure function per layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhf.errors import DataError, brief

from rlhf_runtime.data.comparisons import OF_MARGIN, PREFERENCES, Values, best_and_worst, question_and_answer
from rlhf_runtime.data.messages import ROLES, read_messages, text_of
from rlhf_runtime.data.strict_json import decoded

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
CALLS = "function_call"
"""The ``from`` of a ShareGPT turn whose value is the JSON of tool calls, as Glaive's data has them."""
HELPSTEER = r"\s*<extra_id_1>(User|Assistant)\n"
"""Mark before the second and later turns of a prompt of HelpSteer2 (a pattern)."""
EXCHANGES = (("input", "output"), ("user", "assistant"), ("question", "answer"))
"""Keys of a question and its answer in lists of such pairs: Capybara; the Cauldron and FineVision; COIG."""


# ------------------------------------------------------------------------------------ conversations


def turns(values: Values, chat: bool) -> Values:
    """``{from, value}`` turns as messages. A row that already has messages keeps them."""
    if is_messages(values.get("messages")):
        return values
    return {**values, "messages": [_message(t) for t in required_list(values, "messages")]}


def exchanges(values: Values, chat: bool) -> Values:
    """Questions with their answers (:data:`EXCHANGES`) as messages."""
    messages = list[dict[str, Any]]()
    for pair in required_list(values, "messages"):
        keys = exchange_keys(pair)
        if keys is None:
            raise DataError(f"must be a question with its answer, got {brief(pair)}")
        messages += question_and_answer(*(pair[key] for key in keys))
    return {**values, "messages": messages}


def request(values: Values, chat: bool) -> Values:
    """A request of the Responses API, as in NeMo Gym's rows: instructions, input and tools. Reasoning in the input,
    which belongs to earlier answers, is left out."""
    value = values.get("prompt")
    body: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise DataError(f"must be a request with its input, got {brief(value)}")
    system = [{"role": "system", "content": text}] if (text := body.get("instructions")) else []
    tools = body.get("tools")
    return {
        **values,
        "prompt": [*system, *(_of_item(i) for i in items if i.get("type") != "reasoning")],
        "tools": [_function(t) for t in tools] if isinstance(tools, list) else tools,
    }


def answers_in_turns(values: Values, chat: bool) -> Values:
    """A conversation of ``{from, value}`` turns up to the answers, and one turn each for both answers."""
    prompt = [_message(t) for t in required_list(values, "messages")]
    answers = {k: [_message(values[k])] for k in ("chosen", "rejected") if k in values}
    return {k: v for k, v in values.items() if k != "messages"} | {"prompt": prompt} | answers


def preferred_outputs(values: Values, chat: bool) -> Values:
    """A request, ``{messages, tools}``, with a preferred and another output (OpenAI's fine-tuning API)."""
    request = values.get("prompt")
    if not isinstance(request, Mapping):
        raise DataError(f"input must be {{messages, tools}}, got {brief(request)}")
    return {**values, "prompt": request.get("messages"), "tools": request.get("tools")}


def rejected_beside(values: Values, chat: bool) -> Values:
    """A conversation, whose last answer is chosen, and another answer, which is rejected (ms-swift)."""
    *prompt, chosen = required_list(values, "messages")
    return {k: v for k, v in values.items() if k != "messages"} | {"prompt": prompt, "chosen": [chosen]}


def without_repeated_prompt(values: Values) -> Values:
    """A pair without its prompt, if both answers are whole conversations."""
    answers, prompt = [values.get(k) for k in ("chosen", "rejected")], values.get("prompt")
    is_whole_N = [is_whole(answer) for answer in answers]
    if all(is_whole_N):
        if prompt and not repeats(answers, prompt):
            raise DataError(
                "both answers are whole conversations that do not repeat the prompt; name the prompt's column "
                "(--data.prompt) to put it before them, or remove the column"
            )
        return {k: v for k, v in values.items() if k != "prompt"}
    if any(is_whole_N):
        raise DataError(
            "one answer is a whole conversation, which begins with a user or system message, and the other is not; "
            "both must have the same form"
        )
    if "prompt" not in values and any(map(is_messages, answers)):
        raise DataError("the answers begin with an assistant message, but the row has no prompt")
    return values


def dialogues(values: Values, chat: bool) -> Values:
    """Two dialogues with ``\\n\\nHuman:`` and ``\\n\\nAssistant:``. The prompt is their common prefix, up to the last
    ``Assistant:`` in it. The rest of each dialogue is an answer. With a chat template the prompt is a list of
    messages."""
    chosen, rejected = text_value(values, "chosen"), text_value(values, "rejected")
    ends = [m.end() for m in re.finditer(ASSISTANT, chosen) if rejected.startswith(chosen[: m.end()])]
    if not ends:
        raise DataError(f"the two dialogues have no common prefix that ends with {ASSISTANT!r}")
    start = ends[-1]
    answers = {"chosen": chosen[start:], "rejected": rejected[start:]}
    for name, answer in answers.items():
        if HUMAN in answer or ASSISTANT in answer:
            raise DataError(f"the dialogues differ before the last answer: {name} continues with {answer[:60]!r}")
    if not chat:
        return {**values, "prompt": chosen[:start], **answers}
    prompt = _spoken(chosen[: start - len(ASSISTANT)])
    return {**values, "prompt": prompt, **{k: v.strip() for k, v in answers.items()}}


def dialogue_prompt(values: Values, chat: bool) -> Values:
    """Converts a prompt that is a dialogue up to an ``Assistant:`` to messages, and strips white space around answers
    to it. Other prompts are not changed. Without a chat template no prompt is changed."""
    prompt = values.get("prompt")
    if not chat or not isinstance(prompt, str) or not is_open_dialogue(prompt):
        return values
    answers = {f: v.strip() for f in ("response", "chosen", "rejected") if isinstance(v := values.get(f), str)}
    return {**values, "prompt": _spoken("\n\n" + prompt.strip()[: -len(ASSISTANT)]), **answers}


def compared(values: Values, chat: bool, meaning: str, of_margin: bool) -> Values:
    """The best and the worst of several answers (:mod:`rlhf_runtime.data.comparisons`)."""
    return dialogue_prompt(context(best_and_worst(values, meaning, of_margin), chat), chat)


def context(values: Values, chat: bool) -> Values:
    """An instruction, followed by a blank line and its context, if it has one. The turns of its history come first."""
    rest = {k: v for k, v in values.items() if k not in ("context", "history")}
    if values.get("context") not in (None, ""):
        rest["prompt"] = f"{text_value(values, 'prompt')}\n\n{text_value(values, 'context')}"
    if history := values.get("history"):
        if not isinstance(history, list) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in history):
            raise DataError(f"history must be a list of [question, answer] pairs, got {brief(history)}")
        if not chat:
            raise DataError("the row has a history, whose turns need a chat template")
        messages = [message for pair in history for message in question_and_answer(*pair)]
        rest["prompt"] = [*messages, {"role": "user", "content": text_value(rest, "prompt")}]
    return rest


CONVERSIONS: Mapping[str, tuple[str, Callable[[Values, bool], Values]]] = {
    "turns": ("from/value turns as messages", turns),
    "exchanges": ("questions with their answers as messages", exchanges),
    "request": ("instructions, input and tools of a request", request),
    "answers_in_turns": ("from/value turns as messages", answers_in_turns),
    "preferred_outputs": (
        "a request of the chat API and the output that is preferred to another",
        preferred_outputs,
    ),
    "rejected_beside": ("the last answer of the conversation is chosen", rejected_beside),
    "dialogues": (
        f"Human/Assistant dialogues: the prompt is their common prefix up to {ASSISTANT!r}",
        dialogues,
    ),
    "dialogue_prompt": ("dialogues in the prompt as messages", dialogue_prompt),
    "context": ("the instruction, a blank line, its context; a history comes before them", context),
} | {
    meaning + end: (words + suffix, partial(compared, meaning=meaning, of_margin=bool(end)))
    for meaning, words in PREFERENCES.items()
    for end, suffix in (("", ""), (OF_MARGIN, "; the difference is the margin"))
}
"""{conversion: (words for messages, function of the values and of whether a chat template is used)}."""


# ------------------------------------------------------------------- what a value looks like


def is_messages(value: Any) -> bool:
    """``[{role, content}, ...]``."""
    return _listed_with(value, "role")


def is_turns(value: Any) -> bool:
    """``[{from, value}, ...]``."""
    return _listed_with(value, "from")


def exchange_keys(value: Any) -> tuple[str, str] | None:
    """The keys of a question and its answer in ``value``; None if it is no such pair."""
    return next((keys for keys in EXCHANGES if isinstance(value, Mapping) and value.keys() >= {*keys}), None)


def is_exchanges(value: Any) -> bool:
    """``[{input, output}, ...]`` and similar lists."""
    return isinstance(value, list) and bool(value) and exchange_keys(value[0]) is not None


def conversation(value: Any) -> Any:
    """Converts a conversation in JSON text or with the marks of HelpSteer2 to a list, and a single message or turn to a
    list of one. Other values are returned unchanged."""
    first, *pieces = re.split(HELPSTEER, value) if isinstance(value, str) else [""]
    if pieces:
        spoken = zip(("User", *pieces[::2]), (first, *pieces[1::2]), strict=True)
        return [{"role": name.lower(), "content": text.strip()} for name, text in spoken]
    if isinstance(value, str):
        return _json_conversation(value) or value
    return [value] if is_turn(value) or is_messages([value]) else value


def answer(value: Any, chat: bool = True) -> Any:
    """Converts messages in JSON text to a list if a chat template is used. Other values are returned unchanged: other
    JSON is itself an answer."""
    messages = _json_conversation(value) if chat and isinstance(value, str) else None
    for m in messages or ():
        if not (isinstance(m, Mapping) and str(m.get("role")) in ROLES and "content" in m):
            return value
    return messages or value


def _json_conversation(text: str) -> list[Any] | None:
    """The list of messages or turns in JSON text; None if the text is something else."""
    if not (text.lstrip().startswith("[") and ('"role"' in text or '"from"' in text)):
        return None
    messages = decoded(text)
    return messages if is_messages(messages) or is_turns(messages) else None


def is_turn(value: Any) -> bool:
    """``{from, value}``."""
    return isinstance(value, Mapping) and "from" in value and "value" in value


def is_whole(value: Any) -> bool:
    """A conversation that starts with a user's or system message, so it contains the prompt."""
    return is_messages(value) and ROLES.get(str(value[0]["role"])) != "assistant"


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and ASSISTANT in value and value.lstrip().startswith("Human:")


def is_open_dialogue(value: Any) -> bool:
    """Whether a text is a dialogue that ends where the assistant answers."""
    return is_dialogue(value) and value.rstrip().endswith(ASSISTANT)


def repeats(conversations: list[Any], prompt: Any) -> bool:
    """Whether every conversation contains the prompt, which is a text (white space around it is ignored) or
    messages."""
    chats = [read_messages(c) for c in conversations]
    if isinstance(prompt, list):
        return all(c[: len(prompt)] == read_messages(prompt) for c in chats)
    return all(any(text_of(m["content"]).strip() == str(prompt).strip() for m in c) for c in chats)


# ------------------------------------------------------------------------ turns, items and calls


def _spoken(dialogue: str) -> list[dict[str, Any]]:
    """The messages of a dialogue that begins with a mark."""
    pieces = re.split(f"({HUMAN}|{ASSISTANT})", dialogue)
    if pieces[0].strip():
        raise DataError(f"the dialogue starts with neither {HUMAN!r} nor {ASSISTANT!r}, but with {pieces[0][:60]!r}")
    return [
        {"role": "user" if mark == HUMAN else "assistant", "content": text.strip()}
        for mark, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]


def _message(turn: Any) -> dict[str, Any]:
    if not is_turn(turn):
        raise DataError(f"a turn must be {{from, value}}, got {str(turn)[:60]!r}")
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in (*ROLES, CALLS):
        raise DataError(f"a turn is from {speaker!r}; allowed: {', '.join((*ROLES, CALLS))}")
    rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
    if speaker == CALLS:
        return {**rest, "role": "assistant", "content": None, "tool_calls": _calls(value)}
    return {**rest, "role": ROLES[speaker], "content": value}


def _of_item(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item of the Responses API as a message: a message, a call of a function, or its result."""
    if item.get("type") == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [{**item, "id": item.get("call_id")}]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    return item


def _function(tool: Any) -> Any:
    """A function of the Responses API in the form of the chat API. Other values are returned unchanged."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _calls(value: Any) -> list[Any]:
    calls = decoded(value) if isinstance(value, str) else value
    if not calls or not isinstance(calls, list | Mapping):
        raise DataError(
            f"a turn from {CALLS!r} must be the JSON of {{name, arguments}} or a list of them, got {brief(value)}"
        )
    return calls if isinstance(calls, list) else [calls]


def required_list(values: Values, field: str) -> list[Any]:
    value = values.get(field)
    if not isinstance(value, list) or not value:
        raise DataError(f"must be a non-empty list, got {brief(value)}")
    return value


def _listed_with(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and key in value[0]


def text_value(values: Values, field: str) -> str:
    value = values.get(field)
    if not isinstance(value, str):
        raise DataError(f"{field} must be text, got {brief(value)}")
    return value
