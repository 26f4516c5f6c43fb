"""Chat templates, a conversation, and what a sequence trains on, for the tests of templates."""

from __future__ import annotations

import pytest
from rlhf.errors import DataError
from rlhf.types import Row
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPENED = (
    GENERATION.replace("{{ '<|im_start|>' + m.role + '\\n' }}{% if", "{% if")
    .replace("{% generation %}{{ ", "{% generation %}{{ '<|im_start|>assistant\\n' + ")
    .replace("{% else %}{{ ", "{% else %}{{ '<|im_start|>' + m.role + '\\n' + ")
)
"""As TRL's for Qwen2.5 and gpt-oss: the generation prompt stands in the block."""
UNNAMED = GENERATION.replace("'<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "'<eos>\\n' }}{% endgeneration %}")
"""As TRL's for Gemma: a line break in the block, after an end token that is special without a name in the settings."""
PARTS = (
    UNNAMED.replace("m.content + '<eos>", "m.content }}{% endgeneration %}{% generation %}{{ '<eos>")
    + "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)
"""As TRL's for DiffusionGemma, a block for each part; and for Phi-3, one for the tokenizer's end token at the end."""
TWO_ENDS = CHATML.replace("<|im_end|>", "<eos><|im_end|>")
"""As Cohere's: the tokenizer's end token follows another one after every answer."""
LAST_END = CHATML.replace("<|im_end|>\\n", "<eos>").replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""As Phi-4-mini's: it follows another one at the end of the conversation only."""
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% else %}{% set r = '' %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.last %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ c + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
"""As Qwen3's: only the last answer keeps its reasoning, and an empty block stands where it has none."""


def talk(*texts):
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


TURNS = talk("user", "s", "im_start", "assistant\n")  # texts that also stand in the template's own words


def row(**columns) -> Row:
    return Row(columns, "data", 0)


def section(**fields) -> DataSection:
    return DataSection(**fields)


def encoded(tokenizer, messages, **fields):
    """A conversation as a row to learn from."""
    template = Template(tokenizer, section(messages="m", **fields))
    return template.encode_demonstration(row(m=messages)).sequences[0]


def trained(tokenizer, sequence) -> str:
    """Text of the tokens under the mask."""
    ids = [i for i, on in zip(sequence.ids, sequence.loss_mask, strict=True) if on]
    return tokenizer.decode(ids, skip_special_tokens=False)


def runs(tokenizer, sequence) -> list[str]:
    """Texts of the stretches under the mask."""
    texts, current = [], []
    for token, on in [*zip(sequence.ids, sequence.loss_mask, strict=True), (0, False)]:
        if on:
            current.append(token)
        elif current:
            texts.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return texts


def refused(call, error=DataError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)
