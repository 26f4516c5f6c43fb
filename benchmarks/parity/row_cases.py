"""Rows that both sides turn into tokens, and the expected results. Standard library only: both Python environments
import it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_TOKENS = 400
"""More than any row has, unless a case says otherwise."""

# Our own templates, similar to those of published models.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A line break follows each message's end token."""
TIGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
"""Nothing follows an end token."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
"""``TIGHT`` with the marks that TRL needs to train on answers only."""
_THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{{ '<|im_start|>assistant\\n' }}MARK"
    "{% if loop.last %}{{ '<think>\\n' + (parts[0].split('<think>')[-1].strip() if parts|length > 1 else '') + "
    "'\\n</think>\\n\\n' }}{% endif %}{{ parts[-1].lstrip('\\n') + '<|im_end|>' }}END"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = _THINKING.replace("MARK", "").replace("END", "")
"""Only the last answer keeps its reasoning; an answer without reasoning gets an empty block."""
THINKING_MARKED = _THINKING.replace("MARK", "{% generation %}").replace("END", "{% endgeneration %}")
TEMPLATES: dict[str, str | None] = {
    "": None,
    "chatml": CHATML,
    "tight": TIGHT,
    "marked": MARKED,
    "thinking": THINKING,
    "thinking_marked": THINKING_MARKED,
}

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<begin>"]
MERGES = [
    *("t h", "th e", "i n", "a n", "e r", "o n", "Ġ t", "Ġ a", "Ġt h", "Ġth e", "Ġ 4", "Ġ 5", "4 2", "Ġ4 2", "Ċ Ċ"),
    *("a s", "s i", "as si", "s t", "assi st", "an t", "assist ant", "u s", "us er", ": Ġ4", "o u", "y e", "ye s"),
]
"""Merges of a byte-level tokenizer in GPT-2's alphabet (a space is Ġ, a line break Ċ): some cross word boundaries, as
in ``: 4``."""
TOKENIZERS = ("words", "merging", "beginning", "spaced")
"""``words``: byte pairs within GPT-2's words; ``merging``: byte pairs across words, so that a token can begin in a
prompt and end in an answer; ``beginning``: ``words`` with a begin token before each text; ``spaced``: writes a space
before each text, as SentencePiece does."""


@dataclass(frozen=True)
class RowCase:
    """Some rows, as each side's run would be given them."""

    name: str
    trainer: str
    """TRL's: ``sft``, ``dpo``, ``kto``, ``reward``, ``cpo``, ``orpo``."""
    form: str
    """Ours: ``demonstrations``, ``pairs``, ``labels``."""
    rows: list[dict[str, Any]]
    tokenizer: str = "words"
    template: str = ""
    trl: dict[str, Any] = field(default_factory=dict)
    """Options of its config."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Fields of ``[data]``."""
    ours_template: str | None = None
    """The template of our tokenizer if it differs from TRL's (one without marks)."""
    differs: int = 0
    """Number of the stated difference (docs/concepts/trl.md, "Rows and tokens"); 0: token by token the same."""
    max_tokens: int = MAX_TOKENS


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TEXTS = [
    ("What is 6 times 7?\n", "The answer is 42."),
    ("Is the tent on the hill?\n", "yes, an ant on it\n\nis \u00e9tonn\u00e9e \U0001f642"),
    ("\n\nHuman: the other one\n\nAssistant:", " in the end, 4 and 5"),
    ("Count:\n", "1\n2\n3\n"),
    ("the", " end<|im_end|>"),
]
"""Prompts and answers: one and two line breaks between prompt and answer, leading spaces, a character whose bytes are
in two tokens, an answer that contains its end token as text."""
WORSE = ["The answer is 5.", "no", " in a tent", "1\n3\n\n", " tent"]
PLAIN = [{"prompt": p, "completion": c} for p, c in TEXTS]
PLAIN_PAIRS = [{"prompt": p, "chosen": c, "rejected": r} for (p, c), r in zip(TEXTS, WORSE, strict=True)]
CHATS = [
    {"prompt": [_user("What is 6 times 7?")], "completion": [_says("42")]},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, _user("the tent")],
        "completion": [_says(" on the hill\n")],
    },
    {"prompt": [_user("a"), _says("assistant"), _user("user\n")], "completion": [_says("the \u00e9 end")]},
]
CHAT_PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": [_says(worse)]}
    for row, worse in zip(CHATS, ["5", "in", "assistant\n"], strict=True)
]
WHOLE_PAIRS = [
    {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in CHAT_PAIRS
]
DIALOGUES = [{"messages": row["prompt"] + row["completion"]} for row in CHATS]
THOUGHTS = [
    {"prompt": [_user("6 x 7")], "completion": [_says("<think>\nsix sevens\n</think>\n\n42")]},
    {"prompt": [_user("6 x 7")], "completion": [_says("42")]},
    {"prompt": [_user("a"), _says("<think>\nb\n</think>\n\nc"), _user("d")], "completion": [_says("e")]},
]
TURNS = [{"messages": THOUGHTS[2]["prompt"] + THOUGHTS[2]["completion"]}, {"messages": [_user("6 x 7"), _says("42")]}]
HH = [
    {"chosen": "\n\nHuman: the tent?\n\nAssistant: yes", "rejected": "\n\nHuman: the tent?\n\nAssistant: no"},
    {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: in",
     "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: 42"},
]  # fmt: skip
PARTING = [
    {
        "chosen": [_user("a"), _says("b"), _user("c"), _says("d")],
        "rejected": [_user("a"), _says("x"), _user("c"), _says("y")],
    }
]


OTHER: dict[str, list[dict[str, Any]]] = {
    "demonstrations": [],
    "pairs": [],
    "labels": [{"prompt": "in", "completion": "on", "label": False}],
}
"""Added to cases with a single row: labels of one kind only are refused."""


def _labelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "label": number % 2 == 0} for number, row in enumerate(rows)]


def _pairs(trainer: str) -> list[RowCase]:
    """The cases of every trainer on pairs."""
    return [
        RowCase(f"{trainer}-plain", trainer, "pairs", PLAIN_PAIRS),
        RowCase(f"{trainer}-begin", trainer, "pairs", PLAIN_PAIRS, "beginning"),
        RowCase(f"{trainer}-chat", trainer, "pairs", CHAT_PAIRS, template="tight"),
        RowCase(f"{trainer}-chatml", trainer, "pairs", CHAT_PAIRS, template="chatml",
                differs=2 if trainer in ("cpo", "orpo") else 1),
        RowCase(f"{trainer}-implicit", trainer, "pairs", WHOLE_PAIRS, template="tight"),
    ]  # fmt: skip


CASES: tuple[RowCase, ...] = (
    RowCase("sft-text", "sft", "demonstrations", [{"text": p + c} for p, c in TEXTS]),
    RowCase("sft-text-begin", "sft", "demonstrations", [{"text": p + c} for p, c in TEXTS], "beginning"),
    RowCase("sft-plain", "sft", "demonstrations", PLAIN),
    RowCase("sft-plain-begin", "sft", "demonstrations", PLAIN, "beginning"),
    RowCase("sft-plain-all", "sft", "demonstrations", PLAIN,
            trl={"completion_only_loss": False}, ours={"loss_on": "all"}),
    RowCase("sft-chat", "sft", "demonstrations", CHATS, template="tight"),
    RowCase("sft-chatml", "sft", "demonstrations", CHATS, template="chatml", differs=1),
    RowCase("sft-messages-all", "sft", "demonstrations", DIALOGUES, template="chatml", ours={"loss_on": "all"}),
    RowCase("sft-assistant", "sft", "demonstrations", DIALOGUES, template="marked",
            trl={"assistant_only_loss": True}, ours={"loss_on": "assistant"}),
    RowCase("sft-assistant-unmarked", "sft", "demonstrations", DIALOGUES, template="marked", ours_template="tight",
            trl={"assistant_only_loss": True}, ours={"loss_on": "assistant"}),
    RowCase("sft-thinking", "sft", "demonstrations", THOUGHTS, template="thinking"),
    RowCase("sft-thinking-marked", "sft", "demonstrations", THOUGHTS, template="thinking_marked",
            trl={"assistant_only_loss": True}),
    RowCase("sft-thinking-turns", "sft", "demonstrations", TURNS, template="thinking_marked",
            trl={"assistant_only_loss": True}, ours={"loss_on": "assistant"}),
    RowCase("sft-thinking-turns-unmarked", "sft", "demonstrations", TURNS[:1], template="thinking_marked",
            ours_template="thinking", trl={"assistant_only_loss": True}, ours={"loss_on": "assistant"}, differs=8),
    *_pairs("dpo"),
    RowCase("dpo-thinking", "dpo", "pairs",
            [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": [_says("<think>\nno\n</think>\n\n5")]}
             for row in THOUGHTS], template="thinking"),
    RowCase("dpo-dialogues", "dpo", "pairs", HH),
    *_pairs("cpo"),
    *_pairs("orpo"),
    *_pairs("reward"),
    RowCase("reward-margin", "reward", "pairs",
            [{**row, "margin": 0.5 * n} for n, row in enumerate(PLAIN_PAIRS)], ours={"margin": "margin"}),
    RowCase("kto-plain", "kto", "labels", _labelled(PLAIN)),
    RowCase("kto-begin", "kto", "labels", _labelled(PLAIN), "beginning"),
    RowCase("kto-chat", "kto", "labels", _labelled(CHATS), template="tight"),
    RowCase("kto-chatml", "kto", "labels", _labelled(CHATS), template="chatml", differs=1),
    # intended differences
    *(RowCase(f"{trainer}-merged", trainer, form, [row, *OTHER[form]], "merging", differs=3) for trainer, form, row in (
        ("sft", "demonstrations", {"prompt": "the sum:", "completion": " 4"}),
        ("dpo", "pairs", {"prompt": "the sum:", "chosen": " 42", "rejected": " 4"}),
        ("cpo", "pairs", {"prompt": "the sum:", "chosen": " 42", "rejected": " 4"}),
        ("reward", "pairs", {"prompt": "a\n", "chosen": "\n42", "rejected": "\n5"}),
        ("kto", "labels", {"prompt": "a\n", "completion": "\n42", "label": True}),
    )),
    RowCase("sft-spaced", "sft", "demonstrations", [{"prompt": "the sum:", "completion": " 42"},
                                                    {"prompt": "the sum:\n", "completion": "42"}], "spaced"),
    RowCase("dpo-spaced", "dpo", "pairs", [{"prompt": "the sum:", "chosen": " 42", "rejected": "5"}], "spaced"),
    RowCase("sft-space-before", "sft", "demonstrations", [{"prompt": "the sum: ", "completion": "42"}], "spaced",
            differs=3),
    RowCase("sft-long", "sft", "demonstrations", PLAIN[:1], differs=4, max_tokens=30),
    RowCase("dpo-long", "dpo", "pairs", PLAIN_PAIRS[:1], differs=4, max_tokens=30),
    RowCase("cpo-long", "cpo", "pairs", PLAIN_PAIRS[:1], differs=4, max_tokens=30),
    RowCase("kto-long", "kto", "labels", [*_labelled(PLAIN[:1]), {"prompt": "a", "completion": "b", "label": False}],
            differs=4, max_tokens=30),
    RowCase("reward-long", "reward", "pairs", [*PLAIN_PAIRS[:1], {"prompt": "a", "chosen": "b", "rejected": "c"}],
            max_tokens=30),
    RowCase("sft-prompt-fills", "sft", "demonstrations", [*PLAIN[:1], {"prompt": "a", "completion": "b"}],
            max_tokens=8),
    RowCase("dpo-prompt-fills", "dpo", "pairs", [*PLAIN_PAIRS[:1], {"prompt": "a", "chosen": "b", "rejected": "c"}],
            max_tokens=8),
    RowCase("sft-empty", "sft", "demonstrations", [{"prompt": "a", "completion": ""}], differs=5),
    RowCase("dpo-equal", "dpo", "pairs", [{"prompt": "a", "chosen": "b", "rejected": "b"}], differs=5),
    RowCase("sft-begin-said", "sft", "demonstrations", [{"prompt": "<begin>the", "completion": " end"}], "beginning",
            differs=9),
    RowCase("cpo-begin-said", "cpo", "pairs", [{"prompt": "<begin>the", "chosen": " end", "rejected": " ant"}],
            "beginning"),
    RowCase("dpo-parting", "dpo", "pairs", PARTING, template="tight", differs=6),
    RowCase("dpo-common-text", "dpo", "pairs",
            [{"chosen": "the end is in", "rejected": "the end is on"}], differs=7),
    RowCase("dpo-dialogues-begun", "dpo", "pairs",
            [{"chosen": "\n\nHuman: a\n\nAssistant: the ant", "rejected": "\n\nHuman: a\n\nAssistant: the end"}],
            differs=7),
)  # fmt: skip

if _EXTRA := os.environ.get("PARITY_ROWS"):  # a file with the fields of further cases
    CASES += tuple(RowCase(**case) for case in json.loads(Path(_EXTRA).read_text()))
